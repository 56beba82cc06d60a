"""Mixtures in the native families: shared experts, dense layers, what bf16 changes, older versions of transformers."""

import json
from pathlib import Path

import pytest
import torch
from cache import offline
from fresh_process import FreshProcess
from gated_folders import NATIVE, YARN, logits, ours, weights
from safetensors.torch import load_file, save_file
from tiny import tokens
from transformers import AutoModelForCausalLM, Qwen3_5MoeForCausalLM, Qwen3NextForCausalLM
from ungated import EXPERTS
from versions import INSTALLED, VERSIONS, VersionUnavailable, environment

from gated_qwen import GatedQwenMoeForCausalLM
from gated_qwen.conversion.checkpoint import CheckpointError
from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.inspection import inspect_checkpoint
from gated_qwen.conversion.native import SHARED_WIDTH

# A mixture with one dense layer, as Qwen3-Next can hold it and Qwen3.5 cannot.
WITH_DENSE = {**EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1]}


def edit_weights(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("identity_layer", [False, True], ids=["", "identity layer"])
def test_dense_layers_go_to_qwen3_next_and_back(identity_layer, tmp_path):
    model = ours(tmp_path / "ours", **WITH_DENSE, router_aux_loss_coef=0.02)
    convert(tmp_path / "ours", tmp_path / "native", to="qwen3_next", identity_layer=identity_layer)
    native = Qwen3NextForCausalLM.from_pretrained(tmp_path / "native")
    assert native.config.mlp_only_layers == ([1, 3] if identity_layer else [1])
    assert native.config.router_aux_loss_coef == 0.02
    assert (logits(native) - logits(model)).abs().max() < 1e-5
    convert(tmp_path / "native", tmp_path / "back")
    back = GatedQwenMoeForCausalLM.from_pretrained(tmp_path / "back")
    for name in (*EXPERTS, "mlp_only_layers", "router_aux_loss_coef", "intermediate_size", "num_hidden_layers"):
        assert getattr(back.config, name) == getattr(model.config, name), name
    assert (logits(back) - logits(model)).abs().max() < 1e-5


@torch.no_grad()
def routed(model, prompt):
    """Log-probabilities in float64, and the experts that each sparse layer chose for each token, sorted."""
    chosen = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2].sort(-1)[0]))
        for layer in model.model.layers
    ]
    log_probabilities = model(prompt, use_cache=False).logits.double().log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return log_probabilities, chosen


def divergence(one, other):
    return float((one.exp() * (one - other)).sum(-1).mean())


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
@pytest.mark.parametrize("target", NATIVE)
def test_bf16_rounding_seldom_chooses_another_expert(target, granularity, tmp_path):
    """The native class rounds elsewhere than ours. Run with -s to see the figures that docs/conversion.md quotes."""
    fields = {**EXPERTS, "num_experts": 16, "num_experts_per_tok": 4, "gate_granularity": granularity}
    prompt = tokens(8, 64)
    figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        model = ours(folder, dtype, **fields)
        convert(folder, tmp_path / f"{dtype}-native", to=target)
        native = AutoModelForCausalLM.from_pretrained(tmp_path / f"{dtype}-native", dtype=dtype)
        (before, chosen), (after, chosen_there) = routed(model, prompt), routed(native, prompt)
        other = [float((a != b).any(-1).float().mean()) for a, b in zip(chosen, chosen_there, strict=True)]
        figures[dtype] = (max(other), divergence(before, after))
        exact, _ = routed(model.float(), prompt)
    own = divergence(exact, before)
    changed, rounded = figures[torch.bfloat16]
    print(
        f"\n{target}, {granularity}: other experts for {changed:.1%} of tokens, KL {rounded:.1e}, our own {own:.1e}",
        end="",
    )
    assert figures[torch.float32][0] == 0
    assert 0 < changed < 0.2 and rounded < 10 * own


@pytest.mark.parametrize("target", NATIVE)
def test_the_shared_expert_is_zero_and_stays_zero(target, tmp_path):
    """Its output is exactly zero, and so is its gradient: a native model that is trained on does not grow one."""
    ours(tmp_path / "ours", **EXPERTS)
    result = convert(tmp_path / "ours", tmp_path / "native", to=target)
    assert any("shared expert of width 32 whose weights are zero" in note for note in result.notes)
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    block = native.model.layers[0].mlp
    assert block.shared_expert.up_proj.weight.shape == (SHARED_WIDTH, 32)
    hidden = torch.randn(5, 32)
    assert not block.shared_expert(hidden).any()
    native(tokens(2, 12), labels=tokens(2, 12)).loss.backward()
    shared = [p for name, p in block.named_parameters() if "shared" in name]
    assert len(shared) == 4 and not any(parameter.grad.any() for parameter in shared)
    assert block.gate.weight.grad.any(), "the router learns"


@pytest.mark.parametrize("target", NATIVE)
def test_a_shared_expert_that_adds_something_is_refused(target, tmp_path):
    ours(tmp_path / "ours", **EXPERTS)
    convert(tmp_path / "ours", tmp_path / "native", to=target)
    name = "model.layers.1.mlp.shared_expert.down_proj.weight"
    edit_weights(tmp_path / "native", lambda tensors: tensors[name].view(-1)[7].fill_(1e-3))
    with pytest.raises(CheckpointError, match=f"{name} is not zero: the model has a shared expert"):
        convert(tmp_path / "native", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("save_original_format", [True, False], ids=["per expert", "fused"])
@pytest.mark.parametrize("native_class", [Qwen3NextForCausalLM, Qwen3_5MoeForCausalLM])
def test_a_native_folder_saved_by_transformers_comes_back(native_class, save_original_format, tmp_path):
    """Whichever way the native class saves its experts."""
    target = "qwen3_next" if native_class is Qwen3NextForCausalLM else "qwen3_5"
    model = ours(tmp_path / "ours", **EXPERTS)
    convert(tmp_path / "ours", tmp_path / "native", to=target)
    native = native_class.from_pretrained(tmp_path / "native")
    native.save_pretrained(tmp_path / "again", save_original_format=save_original_format)
    convert(tmp_path / "again", tmp_path / "back")
    assert (logits(GatedQwenMoeForCausalLM.from_pretrained(tmp_path / "back")) - logits(model)).abs().max() < 1e-5


def test_the_text_part_of_a_nested_folder_is_read(tmp_path):
    """Qwen3.5's own folders have text_config and names under model.language_model."""
    model = ours(tmp_path / "ours", **EXPERTS)
    convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5")
    text = json.loads((tmp_path / "native" / "config.json").read_text())
    (tmp_path / "native" / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    tensors = load_file(tmp_path / "native" / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(nested, tmp_path / "native" / "model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "native", tmp_path / "back")
    assert (logits(GatedQwenMoeForCausalLM.from_pretrained(tmp_path / "back")) - logits(model)).abs().max() < 1e-5
    assert inspect_checkpoint(tmp_path / "native").experts["sparse_layers"] == 2


def test_the_experts_lie_as_each_family_releases_them(tmp_path):
    """Qwen3-Next one tensor for each expert, Qwen3.5 two for a layer."""
    ours(tmp_path / "ours", **EXPERTS)
    for target in NATIVE:
        convert(tmp_path / "ours", tmp_path / target, to=target)
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in weights(tmp_path / "qwen3_next")
    fused = {name: t.shape for name, t in weights(tmp_path / "qwen3_5").items() if ".0.mlp.experts." in name}
    assert fused == {
        "model.layers.0.mlp.experts.gate_up_proj": (6, 48, 32),
        "model.layers.0.mlp.experts.down_proj": (6, 32, 24),
    }


def test_the_loss_for_training_alone_is_left_out_with_a_note(tmp_path):
    ours(tmp_path / "ours", **EXPERTS, output_router_logits=True, router_z_loss_coef=0.01)
    result = convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5")
    assert any("router_z_loss_coef=0.01 is left out" in note for note in result.notes)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"num_hidden_layers": 3, "mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ],
)
def test_qwen3_5_needs_experts_in_every_layer_and_normalised_weights(fields, refused, tmp_path):
    ours(tmp_path / "ours", **{**EXPERTS, **fields})
    with pytest.raises(CheckpointError, match=f"{refused} cannot be held by qwen3_5"):
        convert(tmp_path / "ours", tmp_path / "out", to="qwen3_5")
    assert not (tmp_path / "out").exists()
    model = GatedQwenMoeForCausalLM.from_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "next", to="qwen3_next")
    assert (logits(Qwen3NextForCausalLM.from_pretrained(tmp_path / "next")) - logits(model)).abs().max() < 1e-5


def test_every_other_layer_sparse_goes_to_qwen3_next_and_back(tmp_path):
    fields = {**EXPERTS, "decoder_sparse_step": 2, "num_hidden_layers": 4}
    model = ours(tmp_path / "ours", **fields)
    convert(tmp_path / "ours", tmp_path / "native", to="qwen3_next", identity_layer=True)
    convert(tmp_path / "native", tmp_path / "back")
    back = GatedQwenMoeForCausalLM.from_pretrained(tmp_path / "back")
    assert back.config.sparse_layers == model.config.sparse_layers == [1, 3]
    assert (logits(back) - logits(model)).abs().max() < 1e-5


# The first version that knows the class.
SINCE = {"qwen3_next": (4, 57), "qwen3_5": (5, 2)}


def native_answers(folders, prompt):
    import torch
    from transformers import AutoModelForCausalLM

    found = {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        ids = torch.tensor(prompt)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits.tolist()
        found[folder] = [logits, model.generate(ids[:1], max_new_tokens=8, do_sample=False).tolist()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", [version for version in VERSIONS if version != INSTALLED])
def test_an_export_with_the_identity_layer_runs_on(version, tmp_path):
    try:
        path = environment(version)
    except VersionUnavailable as error:
        (pytest.skip if offline() else pytest.fail)(str(error))
    number = tuple(int(part) for part in version.split(".")[:2])
    ids = tokens(2, 12)
    expected = {}
    for rope in ({"rope_type": "default", "rope_theta": 1e6}, YARN):
        model = ours(tmp_path / rope["rope_type"], rope_parameters=rope, **EXPERTS)
        written = model.generate(ids[:1], max_new_tokens=8, do_sample=False).tolist()
        for target in (target for target, since in SINCE.items() if number >= since):
            folder = tmp_path / f"{rope['rope_type']}-{target}"
            convert(tmp_path / rope["rope_type"], folder, to=target, identity_layer=True)
            expected[str(folder)] = (logits(model), written)
    with FreshProcess(tmp_path / "process", python_path=path) as process:
        found = process.call(native_answers, list(expected), ids.tolist())
    for folder, (expected_logits, written) in expected.items():
        assert (torch.tensor(found[folder][0]) - expected_logits).abs().max() < 1e-5, folder
        assert found[folder][1] == written, folder
