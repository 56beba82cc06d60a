"""What is particular to mixtures of experts: where their weights lie, what is refused.

That a mixture goes to every target and back with the same logits stands with the dense models, in test_conversion.py
and test_targets.py.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from fresh_process import FreshProcess
from gated_folders import NATIVE, assert_same_weights, logits, ours, weights
from safetensors.torch import load_file, save_file
from test_interruption import MEASURE, contents, run_until
from tiny import tokens
from ungated import EXPERTS, ungated_folder, ungated_model

from gated_qwen import GatedQwenMoeConfig, GatedQwenMoeForCausalLM
from gated_qwen.configuration.accounting import count_parameters
from gated_qwen.conversion.checkpoint import CheckpointError, open_checkpoint
from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.create import create
from gated_qwen.conversion.experts import separated
from gated_qwen.conversion.extend import extend
from gated_qwen.conversion.inspection import inspect_checkpoint
from gated_qwen.conversion.layout_check import check_layouts

QWEN3_MOE = "qwen3_moe"


@pytest.fixture
def source(tmp_path) -> Path:
    return ungated_folder(tmp_path / "source", QWEN3_MOE)


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_weights(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# Experts are found wherever they lie, and never drawn at random


def test_the_experts_of_a_converted_folder_are_those_of_the_source(source, tmp_path):
    convert(source, tmp_path / "gated")
    before, after = weights(source), weights(tmp_path / "gated")
    experts = [name for name in before if ".mlp." in name]
    assert len(experts) == 2 * (1 + 3 * EXPERTS["num_experts"]), "a router and three matrices an expert, in two layers"
    assert all(torch.equal(after[name], before[name]) for name in experts)


@pytest.mark.parametrize("how", ["converted", "loaded as it is"])
def test_no_expert_of_a_loaded_model_is_random(how, source, tmp_path):
    """An original folder read by the gated class, and a converted one, give the live model the source's experts."""
    folder = convert(source, tmp_path / "gated").target if how == "converted" else source
    model, report = GatedQwenMoeForCausalLM.from_pretrained(folder, output_loading_info=True)
    missing = [name for name in report["missing_keys"] if ".g_proj." not in name]
    assert not missing and not report["unexpected_keys"] and not report["mismatched_keys"]
    live, expected = model.state_dict(), ungated_model(QWEN3_MOE).state_dict()
    for name in [name for name in expected if ".mlp." in name]:
        assert torch.equal(live[name], expected[name]), name


def test_a_source_of_fused_experts_gives_the_same_folder(source, tmp_path):
    """transformers 5 can save the experts of a layer as they lie in memory, in two tensors."""
    ungated_model(QWEN3_MOE).save_pretrained(tmp_path / "fused", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in weights(tmp_path / "fused"), "the case that is tested"
    for folder in (source, tmp_path / "fused"):
        convert(folder, tmp_path / f"{folder.name}-gated", verify=True)
    assert_same_weights(tmp_path / "source-gated", tmp_path / "fused-gated")


def test_experts_are_read_from_fused_tensors_where_they_lie(tmp_path):
    """Regions of the file, and no tensor of a whole layer."""
    model = ungated_model(QWEN3_MOE)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    checkpoint = separated(open_checkpoint(tmp_path / "fused"))
    gate_up = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    rows = EXPERTS["moe_intermediate_size"]
    for expert in range(EXPERTS["num_experts"]):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        assert torch.equal(checkpoint.load(f"{prefix}.gate_proj.weight"), gate_up[expert, :rows])
        assert torch.equal(checkpoint.load(f"{prefix}.up_proj.weight"), gate_up[expert, rows:])


def test_a_config_of_either_name_for_the_number_of_experts_is_read(source, tmp_path):
    """transformers 5.24 writes num_local_experts, 4.57 and the Hub's folders num_experts."""
    config = json.loads((source / "config.json").read_text())
    for name, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        config.pop(other, None)
        (source / "config.json").write_text(json.dumps({**config, name: EXPERTS["num_experts"]}))
        config.pop(name, None)
        written = convert(source, tmp_path / name).target / "config.json"
        assert json.loads(written.read_text())["num_experts"] == EXPERTS["num_experts"]


def test_a_config_as_the_hubs_folders_have_it_is_read(source, tmp_path):
    """The keys of Qwen3-30B-A3B's config.json, from before transformers 5."""
    kept = json.loads((source / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = {
        **{name: kept[name] for name in (*names, "num_key_value_heads", "head_dim")},
        **EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
    }
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "gated")
    model = GatedQwenMoeForCausalLM.from_pretrained(tmp_path / "gated")
    assert torch.equal(logits(model), logits(ungated_model(QWEN3_MOE)))
    assert (model.config.max_position_embeddings, model.config.eos_token_id) == (40960, 2)


# The folder that is written


def test_the_folder_carries_the_code_of_both_models(source, tmp_path):
    result = convert(source, tmp_path / "gated")
    assert {path.name for path in result.target.glob("*.py")} == {
        "configuration_gated_qwen.py",
        "configuration_gated_qwen_moe.py",
        "modeling_gated_qwen.py",
        "modeling_gated_qwen_moe.py",
        "rope_parameters.py",
    }
    for path in result.target.glob("configuration_*.py"):
        assert "from gated_qwen" not in path.read_text(), "the class, and not the re-export beside the model"
    config = json.loads((result.target / "config.json").read_text())
    assert config["architectures"] == ["GatedQwenMoeForCausalLM"]
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_gated_qwen_moe.GatedQwenMoeForCausalLM"


def remote_logits(folder, prompt):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        return [type(model).__module__.split(".")[0], model(torch.tensor(prompt)).logits.tolist()]


def test_the_folder_loads_without_the_package(source, tmp_path):
    convert(source, tmp_path / "gated")
    with FreshProcess(tmp_path / "process") as process:
        module, found = process.call(remote_logits, str(tmp_path / "gated"), tokens(2, 12).tolist())
    assert module == "transformers_modules"
    assert torch.equal(torch.tensor(found), logits(ungated_model(QWEN3_MOE)))


@pytest.mark.parametrize("target", NATIVE)
def test_shards_carry_an_index_that_adds_up(target, tmp_path):
    """Also where a tensor is written in parts: the fused experts of Qwen3.5."""
    ours(tmp_path / "ours", **EXPERTS)
    convert(tmp_path / "ours", tmp_path / "one", to=target)
    convert(tmp_path / "ours", tmp_path / "many", to=target, max_shard_size="20KB")
    assert_same_weights(tmp_path / "one", tmp_path / "many")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = {path.name: load_file(path) for path in (tmp_path / "many").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in shards.values() for t in tensors.values())


@pytest.mark.parametrize("target", ["gated_qwen", *NATIVE])
def test_progress_counts_every_byte(target, tmp_path):
    ours(tmp_path / "ours", **EXPERTS)
    totals, done = [], []
    convert(tmp_path / "ours", tmp_path / "out", to=target, begin=totals.append, progress=done.append)
    assert totals == [sum(done)] == [sum(tensor.nbytes for tensor in weights(tmp_path / "out").values())]


def test_dtypes_are_kept_and_converted_in_fused_tensors_too(tmp_path):
    ours(tmp_path / "ours", torch.bfloat16, **EXPERTS)
    edit_weights(tmp_path / "ours", lambda t: t.update({n: w.float() for n, w in t.items() if ".experts.3.up" in n}))
    convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5")
    found = weights(tmp_path / "native")
    assert found["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.float32, "nothing is rounded unasked"
    assert found["model.layers.0.mlp.experts.down_proj"].dtype == torch.bfloat16
    convert(tmp_path / "ours", tmp_path / "rounded", to="qwen3_5", dtype="bfloat16")
    rounded = weights(tmp_path / "rounded")
    assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in found.items())


def test_nan_in_one_expert_is_warned_of_under_the_name_that_is_written(tmp_path):
    ours(tmp_path / "ours", **EXPERTS)
    edit_weights(tmp_path / "ours", lambda t: t["model.layers.1.mlp.experts.4.up_proj.weight"].fill_(float("nan")))
    result = convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5")
    said = [warning for warning in result.warnings if "NaN" in warning]
    assert said == ["tensor model.layers.1.mlp.experts.gate_up_proj holds NaN"]


def test_a_dry_run_plans_every_expert_and_writes_nothing(tmp_path):
    ours(tmp_path / "ours", **EXPERTS)
    result = convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5", dry_run=True)
    assert not (tmp_path / "native").exists()
    plan = {tensor.name: tensor for tensor in result.plan}
    fused = plan["model.layers.0.mlp.experts.gate_up_proj"]
    assert fused.shape == (6, 48, 32) and "of each expert gate_proj and up_proj" in fused.rule
    assert {f"model.layers.0.mlp.experts.{e}.{p}_proj.weight" for e in range(6) for p in ("gate", "up")} == set(
        fused.sources
    )


# GGUF; that llama.cpp computes the same is tested in tests/llamacpp


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
def test_a_gguf_file_holds_the_experts_of_a_layer_in_three_tensors(dtype, tmp_path):
    model = ours(tmp_path / "ours", **{**EXPERTS, "moe_intermediate_size": 64})
    totals, done = [], []
    convert(
        tmp_path / "ours", tmp_path / "out.gguf", to="gguf", gguf_type=dtype, begin=totals.append, progress=done.append
    )
    assert totals == [sum(done)]
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.architecture"] == "qwen35moe"
    described = {name: keys[f"qwen35moe.{name}"] for name in ("expert_count", "expert_used_count", "block_count")}
    assert described == {"expert_count": 6, "expert_used_count": 2, "block_count": 3}
    found = {
        t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).astype("float32")) for t in reader.tensors
    }
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    state = model.state_dict()
    for layer in range(2):
        live, file = f"model.layers.{layer}.mlp.", f"blk.{layer}.ffn_"
        assert torch.equal(found[f"{file}gate_inp.weight"], state[f"{live}gate.weight"]), "a router is not rounded"
        for part, expected in (
            ("gate", state[f"{live}experts.gate_up_proj"][:, :64]),
            ("up", state[f"{live}experts.gate_up_proj"][:, 64:]),
            ("down", state[f"{live}experts.down_proj"]),
        ):
            name = f"{file}{part}_exps.weight"
            assert types[name] == dtype.upper()
            assert (found[name] - expected).abs().max() <= {"f32": 0, "bf16": 0.02, "q8_0": 0.03}[dtype], name
    added = [t for name, t in found.items() if name.startswith("blk.2.") or "shexp" in name]
    assert len(added) == 11 + 8 + 2 * 4 and not any(tensor.any() for tensor in added)


def test_a_gguf_file_of_a_mixture_is_no_source(tmp_path):
    """The library's reader takes every expert to be 768 wide, and an export has lost its shared expert's meaning."""
    ours(tmp_path / "ours", **EXPERTS)
    convert(tmp_path / "ours", tmp_path / "out.gguf", to="gguf")
    with pytest.raises(CheckpointError, match="'qwen35moe' is an export"):
        convert(tmp_path / "out.gguf", tmp_path / "back")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "qwen3moe")
    for add in (writer.add_block_count, writer.add_expert_count, writer.add_embedding_length, writer.add_head_count):
        add(4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="a mixture of experts; convert the folder"):
        convert(tmp_path / "other.gguf", tmp_path / "back")


# What cannot be held


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"num_hidden_layers": 3, "mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ({"gate_activation": "silu"}, "gate_activation='silu'"),
    ],
)
def test_gguf_needs_experts_in_every_layer_and_normalised_weights(fields, refused, tmp_path):
    ours(tmp_path / "ours", **{**EXPERTS, **fields})
    with pytest.raises(ValueError, match=f"GGUF cannot hold this model: {refused}"):
        convert(tmp_path / "ours", tmp_path / "out.gguf", to="gguf")
    assert not (tmp_path / "out.gguf").exists()


def last_expert_gone(tensors):
    for name in [name for name in tensors if ".experts.5." in name]:
        del tensors[name]


BROKEN = {
    "more experts than the weights": (
        lambda f: edit_config(f, num_local_experts=10**8),
        "num_experts=100000000, but the weights have 6 experts",
    ),
    "fewer experts than the weights": (
        lambda f: edit_config(f, num_local_experts=5),
        r"experts.5.down_proj.weight has no place|gate.weight has shape",
    ),
    "a missing expert": (lambda f: edit_weights(f, last_expert_gone), "num_experts=6, but the weights have 5 experts"),
    "a missing matrix": (
        lambda f: edit_weights(f, lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight")),
        "experts.2.up_proj.weight is missing",
    ),
    "a missing router": (
        lambda f: edit_weights(f, lambda t: t.pop("model.layers.1.mlp.gate.weight")),
        "model.layers.1.mlp.gate.weight is missing",
    ),
    "an expert of another width": (
        lambda f: edit_weights(
            f, lambda t: t.update({"model.layers.1.mlp.experts.2.up_proj.weight": torch.ones(8, 32)})
        ),
        r"experts.2.up_proj.weight has shape \(8, 32\), config.json asks for \(24, 32\)",
    ),
    "more chosen than there are": (lambda f: edit_config(f, num_experts_per_tok=7), "num_experts_per_tok=7"),
    "Mixtral": (lambda f: edit_config(f, model_type="mixtral"), "model_type 'mixtral' is not understood.*qwen3_moe"),
    "Qwen2-MoE": (lambda f: edit_config(f, model_type="qwen2_moe"), "model_type 'qwen2_moe' is not understood"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_or_foreign_mixture_is_refused_and_nothing_is_written(case, source, tmp_path):
    breaking, message = BROKEN[case]
    breaking(source)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "gated")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((6, 48), torch.float32, "experts of one layer are"),
        ((6, 47, 32), torch.float32, "experts of one layer are"),
        ((6, 48, 32), torch.int8, "gate_up_proj is I8; dequantise"),
        ((6, 32, 48), torch.float32, r"has shape \(16, 48\), config.json asks for \(24, 32\)"),
    ],
    ids=["two dimensions", "odd rows", "integers", "transposed"],
)
def test_fused_experts_of_another_kind_are_refused(shape, dtype, message, tmp_path):
    ungated_model(QWEN3_MOE).save_pretrained(tmp_path / "fused", save_original_format=False)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    edit_weights(tmp_path / "fused", lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)}))
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "fused", tmp_path / "gated")


# The other verbs


def test_a_fresh_mixture_is_counted_with_its_active_parameters(tmp_path):
    folder = create("tiny-moe-headwise", tmp_path / "fresh")
    summary = inspect_checkpoint(folder)
    model = GatedQwenMoeForCausalLM.from_pretrained(folder)
    config = model.config
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    idle = config.num_experts - config.num_experts_per_tok
    one = 3 * config.hidden_size * config.moe_intermediate_size
    assert summary.active_parameters == count_parameters(config).active
    assert summary.active_parameters == summary.parameters - len(config.sparse_layers) * idle * one
    assert summary.experts == {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "sparse_layers": len(config.sparse_layers),
        "shared_expert": False,
    }


@pytest.mark.parametrize("target", ["official", "qwen3", *NATIVE])
def test_inspection_counts_the_same_in_every_layout(target, tmp_path):
    """But for what a native family adds: elementwise gates, shared experts, routers are counted as active."""
    if target == "qwen3":
        ungated_folder(tmp_path / "out", QWEN3_MOE)
    else:
        ours(tmp_path / "ours", **EXPERTS)
        convert(tmp_path / "ours", tmp_path / "out", to=target)
    summary = inspect_checkpoint(tmp_path / "out")
    assert (summary.experts["num_experts"], summary.experts["sparse_layers"]) == (6, 2)
    assert summary.parameters - summary.active_parameters == 2 * 4 * 3 * 32 * 24
    assert summary.experts["shared_expert"] == (target in NATIVE)


def test_the_command_shows_experts_and_active_parameters(run_command, source, tmp_path):
    code, _, _ = run_command("convert", source, tmp_path / "gated", "--verify")
    assert code == 0
    _, shown, _ = run_command("inspect", tmp_path / "gated")
    assert "2 of 6, width 24, in 2 layers" in shown and "active for a token" in shown
    _, printed, _ = run_command("inspect", tmp_path / "gated", "--json")
    assert json.loads(printed)["experts"]["num_experts"] == 6


def test_extension_with_yarn_keeps_every_expert(source, tmp_path):
    convert(source, tmp_path / "gated")
    extend(tmp_path / "gated", tmp_path / "long", factor=4.0)
    model = GatedQwenMoeForCausalLM.from_pretrained(tmp_path / "long")
    assert model.config.rope_parameters["rope_type"] == "yarn" and model.config.max_position_embeddings == 2048
    assert_same_weights(tmp_path / "gated", tmp_path / "long")
    expected = ungated_model(QWEN3_MOE)
    expected.config.rope_parameters = dict(model.config.rope_parameters)
    again = type(expected)(expected.config).eval()
    again.load_state_dict(expected.state_dict())
    assert torch.equal(logits(model), logits(again))


def test_the_layout_check_reads_a_mixture(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    ours(tmp_path / "ours", **EXPERTS)
    convert(tmp_path / "ours", tmp_path / "official", to="official")
    vocabulary = {chr(ord("0") + i): i for i in range(64)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "official")
    text = "0123456789" * 4
    losses = {(entry.layout, entry.norms): entry.loss for entry in check_layouts(tmp_path / "official", text)}
    model = GatedQwenMoeForCausalLM.from_pretrained(tmp_path / "ours")
    ids = torch.tensor([[vocabulary[character] for character in text]])
    with torch.no_grad():
        assert losses["official", "weight"] == pytest.approx(float(model(ids, labels=ids).loss), abs=1e-4)


# Interruption and memory


@pytest.mark.slow
def test_killed_at_any_step_the_target_is_absent_or_complete(tmp_path, monkeypatch):
    """Also inside a tensor that is written in parts."""
    native = lambda source, target, **options: convert(source, target, **{**options, "to": "qwen3_5"})  # noqa: E731
    monkeypatch.setattr("test_interruption.convert", native)
    work, source = tmp_path / "work", tmp_path / "ours"
    work.mkdir()
    ours(source, num_hidden_layers=1, **{**EXPERTS, "num_experts": 4})
    before = contents(source)
    finished, steps = run_until(None, "kill", source, work / "reference", False)
    assert finished and steps > 40, "every matrix of a fused tensor is a step"
    complete = contents(work / "reference")
    absent = 0
    for step in range(1, steps + 1):
        run_until(step, "kill", source, work / "target", False)
        state = contents(work / "target") if (work / "target").exists() else None
        assert state in (None, complete), step
        assert all(path.name.startswith(".") for path in work.iterdir() if path.name not in ("target", "reference"))
        absent += state is None
        shutil.rmtree(work / "target", ignore_errors=True)
    assert absent > 0.8 * steps and contents(source) == before  # the last steps follow the renaming


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux counts it")
def test_the_experts_of_a_layer_are_never_in_memory_together(source, tmp_path):
    """128 experts a layer, 400 MB of them in two fused tensors, are written with less than a third of one of these."""
    import gated_qwen
    from gated_qwen.conversion.experts import separated_shapes
    from gated_qwen.conversion.plan import filled
    from gated_qwen.conversion.writer import write_weights

    config = GatedQwenMoeConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        architectures=["GatedQwenMoeForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        live = {n: tuple(t.shape) for n, t in gated_qwen.GatedQwenMoeForCausalLM(config).state_dict().items()}
    # A norm weight of 0.1 is folded into what reads it, so every expert is computed and not copied.
    tensors = [
        filled(name, "BF16", shape, 0.1 if "post_attention" in name else 0.5)
        for name, shape in separated_shapes(live).items()
    ]
    (tmp_path / "big").mkdir()
    config.save_pretrained(tmp_path / "big")
    write_weights(tmp_path / "big", tensors, 100 * 2**20)
    convert(source, tmp_path / "small")
    code = MEASURE.replace('to="official"', 'to="qwen3_5"')
    folders = [str(tmp_path / name) for name in ("small", "big", "warm", "out")]
    run = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=True)
    growth, largest = int(run.stdout), live["model.layers.0.mlp.experts.gate_up_proj"]
    whole = 2 * largest[0] * largest[1] * largest[2]
    assert growth < whole / 3, f"{growth / 2**20:.0f} MiB for a fused tensor of {whole / 2**20:.0f} MiB"
    found = weights(tmp_path / "out")["model.layers.1.mlp.experts.gate_up_proj"]
    assert found.shape == largest and bool((found == 0.5 * 2**-4).all())
