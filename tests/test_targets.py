"""Every source and target pair computes the same function, and what a target cannot hold is refused by name."""

import json
import re
from pathlib import Path

import pytest
import reference
import torch
from gated_folders import NATIVE, YARN, assert_same_weights, logits, ours, weights
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer
from ungated import EXPERTS

from gated_qwen import GatedQwenForCausalLM
from gated_qwen.conversion.checkpoint import CheckpointError
from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.layout_check import check_layouts

# Variants that the official layout and the native families hold.
HELD = {
    "elementwise": {},
    "headwise": {"gate_granularity": "headwise"},
    "elementwise, 8 heads": {"num_attention_heads": 8},
    "headwise, 8 heads": {"num_attention_heads": 8, "gate_granularity": "headwise"},
    "biases": {"attention_bias": True, "gate_bias": True},
    "gate bias alone": {"gate_bias": True, "gate_granularity": "headwise"},
    "tied, YaRN": {"tie_word_embeddings": True, "rope_parameters": YARN},
    "mixture": EXPERTS,
    "mixture, headwise, 8 heads": {**EXPERTS, "num_attention_heads": 8, "gate_granularity": "headwise"},
    "mixture, biases, tied": {**EXPERTS, "attention_bias": True, "gate_bias": True, "tie_word_embeddings": True},
}


# The official layout


def official_forward(folder: Path, config) -> torch.Tensor:
    """Logits of an official folder, with the fused rows read as the rule says, through the float64 reference."""
    tensors = weights(folder)
    H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    G = H // K
    split = {}
    for name, tensor in tensors.items():
        if ".q_proj." not in name:
            split[name] = tensor
            continue
        query, gate = [], []
        for group in tensor.view(K, -1, *tensor.shape[1:]):  # one KV head at a time
            query.append(group[: G * D])
            gate.append(group[G * D :])
        split[name] = torch.cat(query)
        split[name.replace(".q_proj.", ".g_proj.")] = torch.cat(gate)
    return torch.stack([reference.logits(row, split, config) for row in tokens(2, 12)])


@pytest.mark.parametrize("variant", [name for name in HELD if "YaRN" not in name and "mixture" not in name])
def test_the_official_layout_computes_the_same_and_the_way_back_is_bit_identical(variant, tmp_path):
    model = ours(tmp_path / "ours", **HELD[variant])
    result = convert(tmp_path / "ours", tmp_path / "official", to="official", verify=True)
    assert result.verification.method == "tensors"
    expected = official_forward(tmp_path / "official", model.config)
    assert (logits(model) - expected).abs().max() < 1e-5 * expected.abs().max()
    convert(tmp_path / "official", tmp_path / "back")
    if variant != "gate bias alone":  # there the one flag for all biases adds zeros
        assert_same_weights(tmp_path / "ours", tmp_path / "back")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "back")), logits(model))
    convert(tmp_path / "back", tmp_path / "official-again", to="official")
    assert_same_weights(tmp_path / "official", tmp_path / "official-again")


def test_the_official_config_says_what_the_official_code_reads(tmp_path):
    ours(tmp_path / "ours", gate_granularity="headwise", rope_parameters=YARN)
    convert(tmp_path / "ours", tmp_path / "official", to="official")
    config = json.loads((tmp_path / "official" / "config.json").read_text())
    assert (config["model_type"], config["headwise_attn_output_gate"], config["elementwise_attn_output_gate"]) == (
        "qwen3",
        True,
        False,
    )
    assert (config["qkv_bias"], config["use_qk_norm"], config["rope_theta"]) == (False, True, 1e6)
    assert config["rope_scaling"] == {name: value for name, value in YARN.items() if name != "rope_theta"}
    assert not list((tmp_path / "official").glob("*.py")) and "auto_map" not in config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"headwise_attn_output_gate": True}, "both headwise.* and elementwise"),
        ({"qkv_bias": None}, "qkv_bias is None"),
        ({"use_qk_norm": None}, "use_qk_norm is None"),
        ({"use_qk_norm": False}, "k_norm.weight has no place"),
        ({"qkv_bias": True}, "bias is missing"),
        ({"model_type": "qwen2"}, "say which it is with --from"),
    ],
)
def test_official_flags_are_read_and_never_assumed(change, message, tmp_path):
    ours(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "official", to="official")
    path = tmp_path / "official" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "official", tmp_path / "back")
    assert not (tmp_path / "back").exists()


# The native families


@pytest.mark.parametrize("variant", HELD)
@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("identity_layer", [False, True], ids=["", "identity layer"])
def test_the_native_class_gives_our_logits_and_tokens(variant, target, identity_layer, tmp_path):
    model = ours(tmp_path / "ours", **HELD[variant])
    convert(tmp_path / "ours", tmp_path / "native", to=target, identity_layer=identity_layer)
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    assert type(native).__name__ == NATIVE[target]["mixture" in variant]
    assert (logits(native) - logits(model)).abs().max() < 1e-5
    prompt = tokens(1, 9)
    ours_wrote, native_wrote = (m.generate(prompt, max_new_tokens=12, do_sample=False) for m in (model, native))
    assert torch.equal(ours_wrote, native_wrote)
    back = convert(tmp_path / "native", tmp_path / "back")
    assert back.family == target
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is type(model)
    assert again.config.num_hidden_layers == model.config.num_hidden_layers, "the identity layer is left behind"
    assert (logits(again) - logits(model)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_fold_leaves_nothing_to_round_in_the_norms(dtype, tmp_path):
    """What the native class adds to 1 is the norm of our model, but for powers of two that the projections took."""
    model = ours(tmp_path / "ours", dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.copy_((parameter.abs() + 0.5) * parameter.sign())
    model.save_pretrained(tmp_path / "ours")
    result = convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5")
    assert "every norm weight is stored exactly" in result.notes[0]
    convert(tmp_path / "native", tmp_path / "back")
    folded = GatedQwenForCausalLM.from_pretrained(tmp_path / "back", dtype=dtype)
    assert torch.equal(logits(folded), logits(model)), "folding changes no bit of the function"
    before, after = weights(tmp_path / "ours"), weights(tmp_path / "back")
    for name in before:
        if name.endswith("layernorm.weight") or name == "model.norm.weight":
            ratio = (before[name].double() / after[name].double()).abs()
            assert torch.equal(torch.frexp(ratio)[0], torch.full_like(ratio, 0.5)), name


@pytest.mark.parametrize(
    ("fields", "which"),
    [({}, "self_attn.[qk]_norm"), ({"tie_word_embeddings": True}, "model.norm")],
    ids=["q, k", "tied"],
)
def test_what_cannot_be_folded_is_said(fields, which, tmp_path):
    """Small weights in q_norm and k_norm alike, or in a final norm whose reader is the embedding, are rounded."""
    model = ours(tmp_path / "ours", torch.bfloat16, **fields)
    result = convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5")
    said = re.search(r"(\d+) of (\d+) norm weights are rounded, by at most ([\d.e-]+)% .*: (.*)", result.notes[0])
    assert int(said[1]) > 0 and int(said[2]) == sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert 0 < float(said[3]) < 20 and re.search(which, said[4])


def test_bf16_norms_without_the_fold_would_be_rounded(tmp_path):
    """The reason for the fold: in bf16 a weight of 0.1 stored as weight - 1 comes back changed."""
    from gated_qwen.conversion.norms import shift, unshift

    weight = torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)
    assert not torch.equal(unshift(shift(weight)), weight)


def test_the_native_config_carries_what_every_consumer_reads(tmp_path):
    ours(tmp_path / "ours", rope_parameters=YARN)
    for target, model_type in (("qwen3_5", "qwen3_5_text"), ("qwen3_next", "qwen3_next")):
        convert(tmp_path / "ours", tmp_path / target, to=target)
        config = json.loads((tmp_path / target / "config.json").read_text())
        assert config["model_type"] == model_type and config["layer_types"] == ["full_attention"] * 2
        assert config["full_attention_interval"] == 1
        assert config["partial_rotary_factor"] == config["rope_parameters"]["partial_rotary_factor"] == 1.0
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
        assert config["rope_parameters"]["original_max_position_embeddings"] == 128


# Plain Qwen3


CONSTANT = {
    "constant elementwise": {"gate_input": "constant"},
    "constant headwise": {"gate_input": "constant", "gate_granularity": "headwise"},
    "constant everywhere": {
        "gate_input": "constant",
        "gate_positions": ["query", "key", "value", "attn_output", "dense_output"],
        "attention_bias": True,
    },
    "constant softplus on values": {
        "gate_input": "constant",
        "gate_positions": ["value"],
        "gate_activation": "softplus",
    },
}


@pytest.mark.parametrize("variant", CONSTANT)
def test_constant_gates_are_multiplied_into_plain_qwen3(variant, tmp_path):
    model = ours(tmp_path / "ours", **CONSTANT[variant])
    convert(tmp_path / "ours", tmp_path / "plain", to="qwen3")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(plain).__name__ == "Qwen3ForCausalLM"
    assert (logits(plain) - logits(model)).abs().max() < 1e-5


def test_a_retrofit_that_has_not_learned_goes_back_bit_for_bit(tmp_path):
    from ungated import ungated_folder

    source = ungated_folder(tmp_path / "source", "qwen3")
    for gate in ("headwise", "elementwise"):
        convert(source, tmp_path / gate, gate=gate)
        convert(tmp_path / gate, tmp_path / f"{gate}-plain", to="qwen3")
        assert_same_weights(source, tmp_path / f"{gate}-plain")


def test_a_gate_that_depends_on_its_input_cannot_be_removed(tmp_path):
    ours(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="g_proj.weight: this gate depends on its input"):
        convert(tmp_path / "ours", tmp_path / "plain", to="qwen3")
    assert not (tmp_path / "plain").exists()


# What cannot be held


NOT_HELD = {
    "gate_positions": ["value"],
    "gate_head_shared": True,
    "gate_activation": "silu",
    "gate_operation": "add",
    "gate_input": "constant",
    "gate_input_channels": 5,
    "attn_output_norm": True,
    "attn_output_activation": "silu",
    "sandwich_norm": True,
}


@pytest.mark.parametrize("field", NOT_HELD)
@pytest.mark.parametrize("target", ["official", "qwen3_5", "qwen3_next"])
def test_a_variant_that_the_target_cannot_hold_is_refused_by_name(field, target, tmp_path):
    ours(tmp_path / "ours", **{field: NOT_HELD[field]})
    with pytest.raises(CheckpointError, match=f"{field}=.* cannot be held by {target}"):
        convert(tmp_path / "ours", tmp_path / "out", to=target)
    assert not (tmp_path / "out").exists()


def test_native_families_need_norms_and_full_attention(tmp_path):
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    for field, fields in (("use_qk_norm", {"use_qk_norm": False}), ("use_sliding_window", sliding)):
        ours(tmp_path / field, **fields)
        with pytest.raises(CheckpointError, match=f"{field}=.* cannot be held by qwen3_5"):
            convert(tmp_path / field, tmp_path / "out", to="qwen3_5")


def test_a_native_model_with_linear_attention_is_refused(tmp_path):
    ours(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5", identity_layer=True)
    path = tmp_path / "native" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.linear_attn.out_proj.weight"].fill_(0.1)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="linear_attention; only models of full attention"):
        convert(tmp_path / "native", tmp_path / "back")


def test_a_gated_source_is_not_gated_twice(tmp_path):
    ours(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="has a gate already"):
        convert(tmp_path / "ours", tmp_path / "twice", gate="headwise")


# Starts


def test_starts_are_recorded_and_do_what_they_say(tmp_path):
    from ungated import ungated_folder, ungated_model

    source = ungated_folder(tmp_path / "source", "qwen3")
    expected = logits(ungated_model("qwen3"))
    for start in ("identity", "open", "random"):
        result = convert(source, tmp_path / start, start=start, seed=7)
        recipe = json.loads((tmp_path / start / "provenance.json").read_text())
        assert recipe["gate"]["start"] == start and (recipe.get("seed") == 7) == (start == "random")
        assert any(f"start {start}" in warning for warning in result.warnings) == (start != "identity")
        model = GatedQwenForCausalLM.from_pretrained(tmp_path / start)
        difference = (logits(model) - expected).abs().max()
        assert difference == 0 if start == "identity" else 0 < difference < expected.abs().max()
        model(tokens(2, 12), labels=tokens(2, 12)).loss.backward()
        gradient = model.model.layers[0].self_attn.g_proj.weight.grad.abs().max()
        assert gradient > 0
    convert(source, tmp_path / "again", start="random", seed=7)
    assert_same_weights(tmp_path / "random", tmp_path / "again")
    convert(source, tmp_path / "other", start="random", seed=8)
    seven, eight = (weights(tmp_path / name) for name in ("again", "other"))
    assert {name for name in seven if not torch.equal(seven[name], eight[name])} == {n for n in seven if "g_proj" in n}


# Options of the engine


def test_dtype_changes_floats_and_the_config(tmp_path):
    ours(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "bf16", dtype="bfloat16")
    assert {tensor.dtype for tensor in weights(tmp_path / "bf16").values()} == {torch.bfloat16}
    before, after = weights(tmp_path / "ours"), weights(tmp_path / "bf16")
    assert all(torch.equal(after[name], tensor.bfloat16()) for name, tensor in before.items())
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_dry_run_plans_every_tensor_and_writes_nothing(tmp_path):
    ours(tmp_path / "ours")
    result = convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5", dry_run=True)
    assert not (tmp_path / "native").exists()
    plan = {tensor.name: tensor for tensor in result.plan}
    fused = plan["model.layers.0.self_attn.q_proj.weight"]
    assert fused.shape == (64, 32) and "for each head its query rows, then its gate rows" in fused.rule
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.g_proj.weight"} <= set(fused.sources)
    assert "minus 1" in plan["model.norm.weight"].rule


def test_parts_of_a_fused_tensor_may_lie_in_different_shards(tmp_path):
    tiny_model().save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    tiny_model().save_pretrained(tmp_path / "one")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())["weight_map"]
    parts = {index[f"model.layers.0.self_attn.{module}_proj.weight"] for module in "qg"}
    assert len(parts) == 2, "the case that is tested"
    for folder in ("shards", "one"):
        convert(tmp_path / folder, tmp_path / f"{folder}-official", to="official")
    assert_same_weights(tmp_path / "shards-official", tmp_path / "one-official")


def test_a_gate_in_fp32_beside_bf16_weights_loses_nothing(tmp_path):
    ours(tmp_path / "ours", torch.bfloat16)
    tensors = {name: t.float() if "g_proj" in name else t for name, t in weights(tmp_path / "ours").items()}
    for name in [name for name in tensors if "g_proj" in name]:
        tensors[name] = torch.randn_like(tensors[name])
    save_file(tensors, tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "ours", tmp_path / "official", to="official", verify=True)
    convert(tmp_path / "official", tmp_path / "back")
    back = weights(tmp_path / "back")
    assert all(torch.equal(back[name].float(), tensor.float()) for name, tensor in tensors.items())
    result = convert(tmp_path / "ours", tmp_path / "rounded", to="official", dtype="bfloat16", verify=True)
    assert result.verification.rounded == 2 and "rounded to another dtype" in str(result.verification)


def test_fp16_norms_are_not_folded_and_that_is_said(tmp_path):
    """fp16 has too few exponents: columns of small weights times small powers of two would lose bits."""
    ours(tmp_path / "ours", torch.float16)
    result = convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5")
    assert "norm weights are rounded" in result.notes[0]


@pytest.mark.parametrize("module", ["q_proj", "o_proj"], ids=["in a computed tensor", "in a copied tensor"])
def test_nan_is_warned_of_and_infinity_is_not(module, tmp_path):
    model = tiny_model()
    with torch.no_grad():
        getattr(model.model.layers[0].self_attn, module).weight[0, 0] = float("nan")
        model.model.layers[1].mlp.up_proj.weight[0, :2] = torch.tensor([float("inf"), float("-inf")])
    model.save_pretrained(tmp_path / "ours")
    result = convert(tmp_path / "ours", tmp_path / "official", to="official")
    said = [warning for warning in result.warnings if "NaN" in warning]
    assert said == [f"tensor model.layers.0.self_attn.{module}.weight holds NaN"]


def test_verification_compares_and_refuses(tmp_path, monkeypatch):
    ours(tmp_path / "ours")
    result = convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5", verify=True)
    assert result.verification.method == "logits" and result.verification.max_difference < 1e-5
    assert result.verification.agreement == 1.0
    monkeypatch.setattr("gated_qwen.conversion.norms.shift", lambda weight: weight)
    with pytest.raises(CheckpointError, match="verification failed: logits differ"):
        convert(tmp_path / "ours", tmp_path / "wrong", to="qwen3_5", verify=True)
    assert not (tmp_path / "wrong").exists()


def test_verification_by_inverse_conversion_refuses(tmp_path, monkeypatch):
    ours(tmp_path / "ours")
    from gated_qwen.conversion import layouts

    monkeypatch.setattr("gated_qwen.conversion.targets.layouts.official_rows", layouts.concatenated_rows)
    fuse = layouts.fuse
    monkeypatch.setattr("gated_qwen.conversion.targets.layouts.fuse", lambda q, g, rows: fuse(q.flip(0), g, rows))
    with pytest.raises(CheckpointError, match="q_proj.weight is not the same after the inverse conversion"):
        convert(tmp_path / "ours", tmp_path / "wrong", to="official", verify=True)
    assert not (tmp_path / "wrong").exists()


# Layout check


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["official", "qwen3_5"])
def test_losses_tell_layouts_apart(layout, trained_folder, tmp_path):
    """A model that has learned its text reads it well under the layout that it was written in, and under no other."""
    folder, text = trained_folder
    convert(folder, tmp_path / "fused", to=layout)
    losses = check_layouts(tmp_path / "fused", text)
    best = losses[0]
    expected = ("official", "weight") if layout == "official" else ("native", "1 + weight")
    assert (best.layout, best.norms) == expected
    assert best.loss + 0.3 < losses[1].loss
    assert len(losses) == 6


def test_the_layout_check_refuses_what_is_not_fused(tmp_path):
    ours(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="no fused q_proj"):
        check_layouts(tmp_path / "ours", "text")
    convert(tmp_path / "ours", tmp_path / "official", to="official")
    with pytest.raises(CheckpointError, match="no tokenizer files"):
        check_layouts(tmp_path / "official", "text")


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory) -> tuple[Path, str]:
    """A small model with 1 < K < H that has read the same page for a few hundred steps, and the page."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = (Path(__file__).parent.parent / "LICENSE").read_text()[:6000]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    model = tiny_model(vocab_size=400, hidden_size=64, intermediate_size=128, head_dim=16)
    ids = torch.tensor([tokenizer.encode(text).ids])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        window = ids[:, step * 61 % (ids.shape[1] - 257) :][:, :256]
        model(window, labels=window).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("The License")["input_ids"]
    return folder, text


# A real model


@pytest.mark.slow
def test_the_real_smollm2_goes_to_the_official_layout_and_back_bit_for_bit(tmp_path):
    """It has no q/k norm, so the native families and GGUF cannot hold it: refused by name, before writing."""
    from gated_qwen.conversion.smollm2 import smollm2_folder

    convert(smollm2_folder(), tmp_path / "ours", gate="headwise", dtype="bfloat16")
    convert(tmp_path / "ours", tmp_path / "official", to="official", verify=True, max_shard_size="100MB")
    convert(tmp_path / "official", tmp_path / "back", verify=True)
    assert_same_weights(tmp_path / "ours", tmp_path / "back")
    for target in ("qwen3_5", "qwen3_next", "gguf"):
        with pytest.raises(ValueError, match="use_qk_norm"):
            convert(tmp_path / "ours", tmp_path / "out", to=target)
    assert not (tmp_path / "out").exists()
