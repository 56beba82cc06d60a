"""An ungated model and its gated conversion are the same function, and a broken source changes nothing on disk."""

import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import tokens
from transformers import AutoModelForCausalLM
from ungated import SOURCES, ungated_folder, ungated_model

from gated_qwen import GatedQwenForCausalLM, GatedQwenMoeForCausalLM
from gated_qwen.conversion.checkpoint import CheckpointError, open_checkpoint
from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.folder import atomic_folder
from gated_qwen.conversion.inspection import inspect_checkpoint
from gated_qwen.conversion.plan import PlannedTensor
from gated_qwen.conversion.retrofit import double
from gated_qwen.conversion.writer import parse_size, write_weights

GATES = ("headwise", "elementwise")


@pytest.fixture
def source(tmp_path):
    return ungated_folder(tmp_path / "source", "llama")


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# The exact retrofit


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_gated_model_has_the_sources_logits_to_the_bit(name, gate, dtype, tmp_path):
    folder = ungated_folder(tmp_path / "source", name, dtype)
    result = convert(folder, tmp_path / "gated", gate=gate)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    after = AutoModelForCausalLM.from_pretrained(result.target, dtype=dtype)
    assert type(after) is (GatedQwenMoeForCausalLM if "moe" in name else GatedQwenForCausalLM)
    with torch.no_grad():
        for attention in ("eager", "sdpa"):
            before.set_attn_implementation(attention)
            after.set_attn_implementation(attention)
            assert torch.equal(before(tokens(2, 12)).logits, after(tokens(2, 12)).logits)


@pytest.mark.parametrize("gate", GATES)
def test_only_o_proj_and_the_gate_differ_from_the_source(gate, source, tmp_path):
    convert(source, tmp_path / "gated", gate=gate)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "gated" / "model.safetensors")
    gates = {name for name in after if name.endswith("g_proj.weight")}
    assert set(after) == set(before) | gates and len(gates) == 2
    for name, tensor in after.items():
        if name in gates:
            assert tensor.shape == (4 if gate == "headwise" else 32, 32) and not tensor.any()
        elif name.endswith("o_proj.weight"):
            assert torch.equal(tensor, 2 * before[name])
        else:
            assert torch.equal(tensor, before[name]), name


def test_the_gate_can_learn_from_its_start(source, tmp_path):
    convert(source, tmp_path / "gated")
    model = GatedQwenForCausalLM.from_pretrained(tmp_path / "gated")
    model(tokens(1, 12), labels=tokens(1, 12)).loss.backward()
    assert all(layer.self_attn.g_proj.weight.grad.abs().max() > 0 for layer in model.model.layers)


def test_dtypes_are_kept_tensor_by_tensor(tmp_path):
    folder = ungated_folder(tmp_path / "source", "qwen3", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = convert(folder, tmp_path / "gated")
    after = load_file(tmp_path / "gated" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in after.items() if name in tensors} == {
        name: tensor.dtype for name, tensor in tensors.items()
    }
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in after.items() if "g_proj" in name)
    assert result.dtype == "bfloat16"


def test_fp16_is_converted_with_a_warning(tmp_path):
    result = convert(ungated_folder(tmp_path / "source", "llama", torch.float16), tmp_path / "gated")
    assert any("fp16" in warning for warning in result.warnings)


def test_doubling_refuses_to_overflow():
    assert torch.equal(double(torch.tensor([1.5, -3.0])), torch.tensor([3.0, -6.0]))
    with pytest.raises(OverflowError, match="float16"):
        double(torch.tensor([60000.0], dtype=torch.float16))


# The folder that is written


def test_the_folder_is_complete_and_says_how_it_was_made(source, tmp_path):
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "tokenizer_config.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (source / "LICENSE").write_text("terms")
    (source / "modeling_other.py").write_text("raise SystemExit")
    result = convert(source, tmp_path / "gated")
    assert files_below(result.target) == {
        "LICENSE",
        "chat_template.jinja",
        "config.json",
        "configuration_gated_qwen.py",
        "generation_config.json",
        "model.safetensors",
        "modeling_gated_qwen.py",
        "provenance.json",
        "rope_parameters.py",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        assert (result.target / name).read_bytes() == (source / name).read_bytes()
    recipe = json.loads((result.target / "provenance.json").read_text())
    assert recipe["source"] == {"name": "source", "family": "llama"}
    assert recipe["gate"] == {
        "positions": ["attn_output"],
        "granularity": "headwise",
        "activation": "sigmoid",
        "start": "identity",
    }
    assert str(tmp_path) not in (result.target / "provenance.json").read_text()
    with safe_open(result.target / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_source_without_a_tokenizer_warns(source, tmp_path):
    assert any("tokenizer" in warning for warning in convert(source, tmp_path / "gated").warnings)


def test_code_and_backups_beside_a_tokenizer_stay_behind(source, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text("{}")
    left = {"tokenizer_evil.py", "tokenizer_config.json.bak", "adapter_model.safetensors"}
    for name in left:
        (source / name).write_text("")
    assert not files_below(convert(source, tmp_path / "gated").target) & left


def test_the_record_of_how_a_model_was_made_grows_with_every_step(source, tmp_path):
    convert(source, tmp_path / "gated", gate="elementwise")
    convert(tmp_path / "gated", tmp_path / "official", to="official")
    record = json.loads((tmp_path / "official" / "provenance.json").read_text())
    earlier = record["source"]["provenance"]
    assert (record["to"], record["source"]["name"]) == ("official", "gated")
    assert earlier["source"] == {"name": "source", "family": "llama"} and earlier["gate"]["start"] == "identity"


def test_the_licence_of_the_source_goes_into_the_record(source, tmp_path):
    (source / "README.md").write_text("---\nlicense: mit\ntags: [other]\n---\n# Not about the result\n")
    convert(source, tmp_path / "gated")
    record = json.loads((tmp_path / "gated" / "provenance.json").read_text())
    assert record["source"]["card"] == {"license": "mit"}
    assert not (tmp_path / "gated" / "README.md").exists()


def test_a_broken_card_is_warned_of_and_the_weights_are_converted(source, tmp_path):
    (source / "README.md").write_text("---\nlicense: [mit\n---\n")
    result = convert(source, tmp_path / "gated")
    assert any("README.md: the front matter is not valid YAML" in warning for warning in result.warnings)
    assert (result.target / "config.json").exists()


def test_verification_runs_no_code_of_the_source(source, tmp_path):
    (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}))
    (source / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('')\nclass Evil: pass\n")
    command = [sys.executable, "-m", "gated_qwen.cli", "convert", str(source), str(tmp_path / "out"), "--verify"]
    run = subprocess.run(command, input="y\n" * 5, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_weights_beyond_a_dtype_are_refused(source, tmp_path):
    edit_weights(source, lambda t: t["lm_head.weight"].fill_(1e6))
    with pytest.raises(CheckpointError, match="lm_head.weight: a weight exceeds the range of float16"):
        convert(source, tmp_path / "gated", dtype="float16")
    assert not (tmp_path / "gated").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "gguf", "dtype": "float16"}, "gguf-type instead of --dtype"),
        ({"to": "gguf", "identity_layer": True}, "always has the identity layer"),
        ({"to": "official", "gguf_type": "q8_0"}, "--gguf-type is for GGUF files"),
        ({"to": "official", "identity_layer": True}, "identity layer is for qwen3_next and qwen3_5"),
        ({"dtype": "float64"}, "choose one of float32, bfloat16, float16"),
    ],
)
def test_an_option_that_does_not_belong_is_refused(options, message, source, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_folder_loads_without_the_package(source, tmp_path):
    result = convert(source, tmp_path / "gated")
    code = """
import sys
sys.modules["gated_qwen"] = None
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__.split(".")[0], type(model).__name__)
"""
    run = subprocess.run([sys.executable, "-c", code, str(result.target)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["transformers_modules", "GatedQwenForCausalLM"]


def test_shards_carry_an_index_that_adds_up(source, tmp_path):
    result = convert(source, tmp_path / "gated", max_shard_size="20KB")
    index = json.loads((result.target / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in result.target.glob("*.safetensors"))
    count = len(shards)
    assert count > 2 and shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    tensors = {name: tensor for shard in shards for name, tensor in load_file(result.target / shard).items()}
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    one_file = load_file(convert(source, tmp_path / "one").target / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in one_file.items())


def test_a_sharded_source_gives_the_same_result(tmp_path):
    whole = ungated_folder(tmp_path / "whole", "qwen3")
    shards = ungated_folder(tmp_path / "shards", "qwen3", max_shard_size="10KB")
    assert (shards / "model.safetensors.index.json").exists()
    results = [convert(folder, tmp_path / f"to-{folder.name}").target for folder in (whole, shards)]
    one, other = (load_file(folder / "model.safetensors") for folder in results)
    assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_a_tied_head_is_written_once(tmp_path):
    folder = ungated_folder(tmp_path / "source", "llama biased, tied, llama3 RoPE")
    assert "lm_head.weight" not in load_file(convert(folder, tmp_path / "gated").target / "model.safetensors")


def test_overwriting_leaves_no_stale_shard(source, tmp_path):
    convert(source, tmp_path / "gated", max_shard_size="20KB")
    convert(source, tmp_path / "gated", overwrite=True)
    assert {p.name for p in (tmp_path / "gated").glob("model*.safetensors*")} == {"model.safetensors"}


def test_progress_counts_every_byte(source, tmp_path):
    totals, done = [], []
    convert(source, tmp_path / "gated", begin=totals.append, progress=done.append)
    tensors = load_file(tmp_path / "gated" / "model.safetensors").values()
    assert totals == [sum(done)] == [sum(t.numel() * t.element_size() for t in tensors)]


# Nothing is half-written


@pytest.mark.parametrize("step", ["write_weights", "write_description"])
def test_a_failure_while_writing_leaves_the_target_as_it_was(step, source, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    convert(source, tmp_path / "gated")
    before = files_below(tmp_path)
    monkeypatch.setattr(f"gated_qwen.conversion.convert.{step}", fail)
    for target, overwrite in (("fresh", False), ("gated", True)):
        with pytest.raises(OSError, match="no space"):
            convert(source, tmp_path / target, overwrite=overwrite)
        assert files_below(tmp_path) == before


def test_a_non_empty_target_is_refused_without_overwrite(source, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        convert(source, tmp_path / "notes")
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("target", [".", "inside", ".."])
def test_source_and_target_must_be_apart(target, source):
    before = files_below(source.parent)
    with pytest.raises(ValueError, match="lie in each other"):
        convert(source, source / target, overwrite=True)
    assert files_below(source.parent) == before


def test_overwrite_replaces_models_and_nothing_else(source, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "notes")
    (tmp_path / "file").write_text("mine")
    before = files_below(tmp_path)
    for target, message in (("notes", "holds no model"), ("link", "is a link"), ("file/below", "is a file")):
        with pytest.raises(FileExistsError, match=message):
            convert(source, tmp_path / target, overwrite=True)
    assert files_below(tmp_path) == before


def test_a_failing_tensor_stops_the_shard(tmp_path):
    made = []

    def make(number):
        made.append(number)
        if number == 0:
            raise RuntimeError("broken")
        time.sleep(0.05)
        return torch.zeros(1)

    tensors = [PlannedTensor(f"t{i:02}", "F32", (1,), "test", partial(make, i)) for i in range(40)]
    with pytest.raises(RuntimeError, match="broken"):
        write_weights(tmp_path, tensors, 10**9)
    assert len(made) < 10


def test_atomic_folder_replaces_a_folder_whole(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("old")
    with atomic_folder(tmp_path / "model", overwrite=True) as folder:
        (folder / "new").write_text("")
    assert files_below(tmp_path) == {"model", "model/new"}


# Broken and foreign sources are refused, with the file and the mend


def shards_of(folder: Path) -> tuple[Path, dict]:
    shutil.rmtree(folder)
    ungated_folder(folder, "llama", max_shard_size="10KB")
    path = folder / "model.safetensors.index.json"
    return path, json.loads(path.read_text())


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_weights(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickle_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def missing_shard(folder):
    shards_of(folder)
    next(folder.glob("model-00002*")).unlink()


def index_leads_out(folder, name="../outside.safetensors"):
    path, index = shards_of(folder)
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))


def index_disagrees(folder):
    path, index = shards_of(folder)
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))


def duplicate_tensor(folder):
    path, index = shards_of(folder)
    shard = folder / index["weight_map"]["model.norm.weight"]
    tensors = load_file(shard)
    tensors["model.embed_tokens.weight"] = torch.zeros(64, 32)
    save_file(tensors, shard, metadata={"format": "pt"})


BROKEN = {
    "no config.json": (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    "an adapter": (
        lambda f: (f / "config.json").rename(f / "adapter_config.json"),
        "an adapter and not a model; put it into its base with gated-qwen merge",
    ),
    "config.json is not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: not readable as JSON"),
    "config.json is a list": (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object"),
    "config without weights": (lambda f: (f / "model.safetensors").unlink(), "without weights"),
    "pickled weights": (pickle_only, "pickled weights are not read.*weights_only"),
    "truncated file": (truncate, "model.safetensors: truncated"),
    "missing shard": (missing_shard, "model-00002.*is missing"),
    "index leads out of the folder": (index_leads_out, "not a safetensors file of the folder"),
    "index names an absolute path": (
        lambda f: index_leads_out(f, "/etc/model.safetensors"),
        "not a safetensors file of the folder",
    ),
    "index disagrees with the shards": (index_disagrees, "disagree"),
    "a tensor in two shards": (duplicate_tensor, "also lies in"),
    "empty index": (lambda f: shards_of(f)[0].write_text("{}"), "weight_map is missing"),
    "an index beside a single file": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "both model.safetensors and .*remove the stale one",
    ),
    "a tied head that differs": (lambda f: edit_config(f, tie_word_embeddings=True), "differs from the embedding"),
    "more layers than the weights": (lambda f: edit_config(f, num_hidden_layers=10**8), "the weights have 2 layers"),
    "missing tensor": (
        lambda f: edit_weights(f, lambda t: t.pop("model.norm.weight")),
        "model.norm.weight is missing",
    ),
    "unknown tensor": (
        lambda f: edit_weights(f, lambda t: t.update({"score.weight": torch.ones(2, 32)})),
        "score.weight has no place",
    ),
    "wrong shape": (
        lambda f: edit_weights(f, lambda t: t.update({"model.norm.weight": torch.ones(31)})),
        r"model.norm.weight has shape \(31,\), config.json asks for \(32,\)",
    ),
    "integer weights": (
        lambda f: edit_weights(f, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
        "model.norm.weight is I8; dequantise",
    ),
    "overflow of o_proj": (
        lambda f: edit_weights(f, lambda t: t["model.layers.0.self_attn.o_proj.weight"].fill_(3e38)),
        "o_proj.weight: doubling exceeds",
    ),
    "unknown family": (
        lambda f: edit_config(f, model_type="gpt2"),
        "'gpt2' is not understood.*llama, qwen2, qwen3",
    ),
    "no family": (lambda f: edit_config(f, model_type=None), "None is not understood"),
    "a gate that is not there": (lambda f: edit_config(f, model_type="gated_qwen"), "g_proj.weight is missing"),
    "official layout": (lambda f: edit_config(f, headwise_attn_output_gate=True), "headwise_attn_output_gate marks"),
    "Llama with MLP biases": (lambda f: edit_config(f, mlp_bias=True), "mlp_bias=True has no counterpart"),
    "quantised": (lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}), "quantization_config"),
    "heads that do not divide": (lambda f: edit_config(f, num_key_value_heads=3), "num_key_value_heads"),
    "wrong type in the config": (
        lambda f: edit_config(f, hidden_size="wide"),
        "config.json: not a valid llama config",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_source_is_refused_and_nothing_is_written(case, source, tmp_path):
    breaking, message = BROKEN[case]
    breaking(source)
    before = files_below(tmp_path)
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "gated")
    assert files_below(tmp_path) == before


def test_a_missing_source_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        convert(tmp_path / "nowhere", tmp_path / "gated")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        (tmp_path / "model.gguf").write_bytes(b"PK" * 100)
        convert(tmp_path / "model.gguf", tmp_path / "gated")
    with pytest.raises(CheckpointError, match="nobody/nothing: no such folder, and the Hub"):
        convert("nobody/nothing", tmp_path / "gated")


def test_an_unknown_gate_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match="choose one of elementwise, headwise"):
        convert(source, tmp_path / "gated", gate="per-head")


@pytest.mark.parametrize("size", ["", "five", "0GB", "-1", "5 parsecs"])
def test_a_size_that_is_not_understood_is_refused(size):
    with pytest.raises(ValueError, match="size"):
        parse_size(size)


# Inspection


def test_inspection_reads_config_and_headers_alone(source, tmp_path):
    convert(source, tmp_path / "gated", gate="elementwise")
    before, after = inspect_checkpoint(source), inspect_checkpoint(tmp_path / "gated")
    assert (before.model_type, before.gate, before.gate_parameters) == ("llama", None, 0)
    assert before.parameters == sum(p.numel() for p in ungated_model("llama").parameters())
    assert (after.model_type, after.gate["granularity"], after.gate_parameters) == (
        "gated_qwen",
        "elementwise",
        2 * 32 * 32,
    )
    assert after.parameters == before.parameters + after.gate_parameters
    assert after.dtypes == {"F32": after.parameters}
    assert after.rope["rope_theta"] == 10000.0 and after.rope["max_position_embeddings"] == 512


@pytest.mark.parametrize(("flag", "rows"), [("headwise", 4), ("elementwise", 32)])
def test_inspection_knows_the_official_layout(flag, rows, tmp_path):
    folder = ungated_folder(tmp_path / "source", "qwen3")
    edit_config(folder, **{f"{flag}_attn_output_gate": True})

    def fuse(tensors):
        for name in [name for name in tensors if name.endswith("q_proj.weight")]:
            tensors[name] = torch.cat([tensors[name], torch.zeros(rows, 32)])

    edit_weights(folder, fuse)
    summary = inspect_checkpoint(folder)
    assert summary.gate == {"positions": ["attn_output"], "granularity": flag}
    assert "official release" in summary.layout and summary.gate_parameters == 2 * rows * 32
    edit_config(folder, headwise_attn_output_gate=True, elementwise_attn_output_gate=True)
    with pytest.raises(CheckpointError, match="both"):
        inspect_checkpoint(folder)


def test_opening_reads_no_weights(source):
    """Tensor data full of NaN, and longer than memory could hold, would not be noticed: only headers are read."""
    checkpoint = open_checkpoint(source)
    assert checkpoint.tensors["model.norm.weight"].shape == (32,)
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model.norm.weight cannot be read"):
        checkpoint.load("model.norm.weight")
