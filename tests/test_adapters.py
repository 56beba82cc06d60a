"""LoRA knows this model's modules, gates train alone, and adapters follow their base into another layout."""

import json

import pytest
import torch
from gated_folders import ours
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from test_tools import adapted_modules
from tiny import EVERY_POSITION, TINY_EXPERTS, gates, tiny_config, tiny_model, tiny_moe_model, tokens
from transformers import AutoModelForCausalLM, Qwen3Config
from ungated import ungated_folder, ungated_model

from gated_qwen.conversion.adapters import convert_adapter
from gated_qwen.conversion.checkpoint import CheckpointError
from gated_qwen.conversion.convert import convert
from gated_qwen.training.adapters import lora_config
from gated_qwen.training.gates import freeze_all_but_gates, gate_parameters, load_gates, save_gates

GATED = {
    "elementwise": {},
    "headwise": {"gate_granularity": "headwise"},
    "every position": {"gate_positions": EVERY_POSITION, "gate_bias": True},
    "head-shared": {"gate_head_shared": True, "gate_positions": ["query", "attn_output"]},
    "constant": {"gate_input": "constant", "gate_positions": EVERY_POSITION},
}


def logits(model):
    with torch.no_grad():
        return model(tokens(2, 9), use_cache=False).logits


def move(model, seed=1):
    """Changes everything that would be trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1)
    return model.eval()


# LoRA and gates


@pytest.mark.parametrize("gate", ["lora", "full", "none"])
@pytest.mark.parametrize("name", GATED)
def test_every_choice_for_the_gate_trains_what_it_says(name, gate, tmp_path):
    model = tiny_model(**GATED[name])
    if name == "constant" and gate == "lora":
        with pytest.raises(ValueError, match="a constant gate is one vector"):
            lora_config(model, gate=gate)
        return
    gate_names = set(gates(model))
    live = get_peft_model(model, lora_config(model.config, rank=4, gate=gate))
    adapted = set(adapted_modules(live))
    assert len(adapted - gate_names) == 2 * 7 and "lm_head" not in adapted
    assert adapted & gate_names == (gate_names if gate == "lora" else set())
    trained = {key for key, parameter in live.named_parameters() if parameter.requires_grad and ".g_proj" in key}
    assert all((".modules_to_save." in key) == (gate == "full") for key in trained)
    assert bool(trained) is (gate != "none")

    move(live).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert any(".g_proj" in key for key in saved) is (gate != "none")
    reloaded = PeftModel.from_pretrained(tiny_model(**GATED[name]), tmp_path)
    torch.testing.assert_close(logits(reloaded), logits(live), atol=0, rtol=0)


def test_targets_and_options_reach_peft():
    config = lora_config(
        tiny_config(),
        rank=4,
        alpha=3,
        targets=["attention"],
        modules_to_save=["embed_tokens"],
        use_dora=True,
        gate="full",
    )
    assert (config.r, config.lora_alpha, config.use_dora) == (4, 3, True)
    assert config.modules_to_save == ["embed_tokens", "g_proj"] and config.task_type == "CAUSAL_LM"
    assert config.target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_experts_are_adapted_by_their_parameters_and_routers_when_asked(tmp_path):
    model = tiny_moe_model()
    live = get_peft_model(model, lora_config(model, rank=2))
    trained = {name for name, parameter in live.named_parameters() if parameter.requires_grad}
    for index in model.config.sparse_layers:
        in_experts = [name for name in trained if f"layers.{index}.mlp.experts." in name]
        assert len(in_experts) == 4  # A and B of gate_up_proj and down_proj
    assert not any(".mlp.gate." in name for name in trained)
    move(live).save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_moe_model(), tmp_path)), logits(live))

    model = tiny_moe_model()
    live = get_peft_model(model, lora_config(model, rank=2, gate="none", targets=["attention", "router"]))
    trained = {name for name, parameter in live.named_parameters() if parameter.requires_grad}
    assert any(".mlp.gate.modules_to_save." in name for name in trained)
    assert not any(".experts." in name or ".g_proj" in name for name in trained)
    with pytest.raises(ValueError, match="no dropout on experts"):
        lora_config(model, lora_dropout=0.1)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"gate": "half"}, "gate='half' is not known; choose one of lora, full, none"),
        ({"targets": "mlp"}, "'mlp' is not understood; give a list"),
        ({"targets": ["mlp", "heads"]}, "'heads' is not understood"),
    ],
    ids=str,
)
def test_unknown_choices_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        lora_config(tiny_config(), **arguments)


def test_a_model_whose_gate_lies_in_q_proj_is_told_so():
    with pytest.raises(ValueError, match="a qwen3 model has no gate modules of its own"):
        lora_config(Qwen3Config())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("trained", ["lora", "lora and whole gates", "gates alone"])
def test_checkpointing_with_a_frozen_base_gives_the_same_gradients(trained, reentrant):
    def gradients(checkpointing):
        torch.manual_seed(0)  # LoRA's A is drawn
        model = tiny_model(gate_positions=EVERY_POSITION)
        if trained == "gates alone":
            freeze_all_but_gates(model)
        else:
            gate = "full" if "whole" in trained else "lora"
            model = move(get_peft_model(model, lora_config(model, rank=4, gate=gate)))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()  # the re-entrant kind needs an input with a gradient
        model.train()(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}

    expected, found = gradients(False), gradients(True)
    assert expected.keys() == found.keys() and all(gradient.any() for gradient in expected.values())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", GATED)
def test_gates_train_alone_and_travel_in_a_file_of_their_own(name, tmp_path):
    model = tiny_model(**GATED[name])
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    trainable = freeze_all_but_gates(model)
    assert trainable == [key for key in before if ".g_proj" in key] == list(gate_parameters(model))
    move(model)
    assert {key for key, parameter in model.named_parameters() if not torch.equal(parameter, before[key])} == set(
        trainable
    )
    save_gates(model, tmp_path / "gates.safetensors")
    assert set(load_file(tmp_path / "gates.safetensors")) == set(trainable)
    other = tiny_model(**GATED[name])
    assert not torch.equal(logits(other), logits(model))
    load_gates(other, tmp_path / "gates.safetensors")
    assert torch.equal(logits(other), logits(model))


def test_gates_of_another_kind_or_a_broken_file_are_refused(tmp_path):
    file = tmp_path / "gates.safetensors"
    save_gates(tiny_model(), file)
    for fields, match in (
        ({"gate_granularity": "headwise"}, "made for gate_granularity='elementwise', but the model has 'headwise'"),
        ({"num_hidden_layers": 3}, "is in only one of file and model"),
        ({"hidden_size": 40}, "has shape"),
    ):
        model = tiny_model(**fields)
        before = logits(model)
        with pytest.raises(ValueError, match=match):
            load_gates(model, file)
        assert torch.equal(logits(model), before)
    with pytest.raises(ValueError, match="has no gate to train"):
        freeze_all_but_gates(tiny_model(gate_positions=[]))
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_gates(tiny_model(), tmp_path / "absent")
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="not a file of gates"):
        load_gates(tiny_model(), file)


# Adapters in another layout

ADAPTERS = {
    "everything": {},
    "gate alone": {"target_modules": ["g_proj"]},
    "queries alone": {"target_modules": ["q_proj"]},
    "other ranks and alphas": {
        "rank_pattern": {"g_proj": 2, "layers.1.self_attn.q_proj": 6},
        "alpha_pattern": {"g_proj": 3, "up_proj": 1},
    },
    "rslora": {"use_rslora": True, "rank_pattern": {"g_proj": 3}},
    "one layer": {"layers_to_transform": [1]},
    "head and embedding": {"target_modules": ["q_proj", "g_proj", "lm_head", "embed_tokens"]},
}
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "gate_proj", "up_proj", "down_proj"]


def adapter_of(model, folder, **options):
    """Saves a trained adapter and returns the live model's logits."""
    live = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": EVERYTHING, **options}))
    move(live).save_pretrained(folder)
    return logits(live)


def adapted_logits(base, adapter):
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    saved = load_file(adapter / "adapter_model.safetensors")
    placed = get_peft_model_state_dict(loaded, save_embedding_layers=True)
    assert saved.keys() <= placed.keys()  # PEFT leaves out what has no place without an error
    return logits(loaded.eval())


@pytest.mark.parametrize("fields", [{}, {"gate_granularity": "headwise"}, {"tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_pair_in_qwen3_5s_layout_gives_the_same_logits(name, fields, tmp_path):
    model = tiny_model(**fields)
    with torch.no_grad():  # negative norm weights move signs into rows
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight[1] *= -1
            layer.input_layernorm.weight[2] *= -0.1
    model.save_pretrained(tmp_path / "ours")
    expected = adapter_of(model, tmp_path / "adapter", **ADAPTERS[name])
    convert(tmp_path / "ours", tmp_path / "native", to="qwen3_5")
    convert_adapter(tmp_path / "adapter", tmp_path / "converted", base=tmp_path / "ours", to="qwen3_5")
    found = adapted_logits(tmp_path / "native", tmp_path / "converted")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    convert(tmp_path / "native", tmp_path / "back")  # a headwise gate comes back as an elementwise one
    convert_adapter(tmp_path / "converted", tmp_path / "returned", base=tmp_path / "native")
    found = adapted_logits(tmp_path / "back", tmp_path / "returned")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fields", [{}, {"gate_granularity": "headwise"}], ids=str)
@pytest.mark.parametrize("name", [*ADAPTERS, "dora"])
def test_a_pair_comes_back_from_the_official_layout(name, fields, tmp_path):
    """transformers cannot run the official layout, so both are taken back and compared there."""
    options = ADAPTERS.get(name, {"use_dora": True, "target_modules": EVERYTHING})
    model = tiny_model(**fields)
    model.save_pretrained(tmp_path / "ours")
    expected = adapter_of(model, tmp_path / "adapter", **options)
    convert(tmp_path / "ours", tmp_path / "official", to="official")
    convert_adapter(tmp_path / "adapter", tmp_path / "fused", base=tmp_path / "ours", to="official")
    assert not any(".g_proj" in key for key in load_file(tmp_path / "fused/adapter_model.safetensors"))
    convert_adapter(tmp_path / "fused", tmp_path / "returned", base=tmp_path / "official")
    torch.testing.assert_close(
        adapted_logits(tmp_path / "ours", tmp_path / "returned"), expected, atol=2e-5, rtol=1e-5
    )


def test_rows_of_the_fused_update_follow_the_written_rule(tmp_path):
    model = tiny_model(gate_granularity="headwise")
    model.save_pretrained(tmp_path / "ours")
    adapter_of(model, tmp_path / "adapter", rank_pattern={"g_proj": 2}, alpha_pattern={"g_proj": 7})
    convert_adapter(tmp_path / "adapter", tmp_path / "fused", base=tmp_path / "ours", to="official")
    before = load_file(tmp_path / "adapter/adapter_model.safetensors")
    after = load_file(tmp_path / "fused/adapter_model.safetensors")
    config = json.loads((tmp_path / "fused/adapter_config.json").read_text())
    prefix = "base_model.model.model.layers.1.self_attn."

    def update(tensors, name, scaling):
        return scaling * tensors[f"{prefix}{name}.lora_B.weight"] @ tensors[f"{prefix}{name}.lora_A.weight"]

    assert config["rank_pattern"] == {"q_proj": 6} and config["alpha_pattern"] == {"q_proj": 9}
    fused = update(after, "q_proj", 9 / 6)
    query, gate = update(before, "q_proj", 6 / 4), update(before, "g_proj", 7 / 2)
    for head in range(4):  # two heads a group of 2 * 8 query rows and 2 gate rows
        start = head // 2 * 18
        rows = slice(start + head % 2 * 8, start + head % 2 * 8 + 8)
        torch.testing.assert_close(fused[rows], query[head * 8 : head * 8 + 8])
        torch.testing.assert_close(fused[start + 16 + head % 2], gate[head])


@pytest.mark.parametrize("start", ["identity", "open"])
@pytest.mark.parametrize("to", ["gated_qwen", "qwen3_5"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_the_ungated_source_serves_the_retrofit(kind, to, start, tmp_path):
    base = ungated_folder(tmp_path / "source", "qwen3")
    modules = [name for name in EVERYTHING if name != "g_proj"]
    options = {"target_modules": modules, "use_dora": kind == "dora"}
    if kind == "dora":
        options["target_modules"] = ["o_proj", "down_proj"]  # no norm is folded into these
    expected = adapter_of(ungated_model("qwen3"), tmp_path / "adapter", **options)
    convert(base, tmp_path / "gated", start=start)
    convert(tmp_path / "gated", tmp_path / "target", to=to)
    convert_adapter(tmp_path / "adapter", tmp_path / "converted", base=base, to=to, start=start)
    found = adapted_logits(tmp_path / "target", tmp_path / "converted")
    exact = start == "identity"
    torch.testing.assert_close(found, expected, atol=1e-4 if exact else 1e-2, rtol=1e-4)
    unchanged = adapted_logits(tmp_path / "target", tmp_path / "adapter") if to == "gated_qwen" else None
    if exact and unchanged is not None:
        assert not torch.allclose(unchanged, expected, atol=1e-3)


def test_bf16_retrofits_keep_adapted_logits_bit_equal(tmp_path):
    base = ungated_folder(tmp_path / "source", "llama", torch.bfloat16)
    model = ungated_model("llama", torch.bfloat16)
    adapter_of(model, tmp_path / "adapter", target_modules=["o_proj", "up_proj"])
    convert(base, tmp_path / "gated")
    convert_adapter(tmp_path / "adapter", tmp_path / "converted", base=base)
    expected = adapted_logits(base, tmp_path / "adapter")
    assert torch.equal(adapted_logits(tmp_path / "gated", tmp_path / "converted"), expected)


# Of a mixture of experts, attention and gate follow into another layout, and experts stay where they are.

EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_an_adapter_of_an_ungated_mixture_serves_the_retrofit(tmp_path):
    base = ungated_folder(tmp_path / "source", "qwen3_moe")
    options = {"target_modules": ATTENTION, "modules_to_save": ["mlp.gate"], **EXPERTS}
    expected = adapter_of(ungated_model("qwen3_moe"), tmp_path / "adapter", **options)
    convert(base, tmp_path / "gated")
    convert_adapter(tmp_path / "adapter", tmp_path / "converted", base=base)
    found = adapted_logits(tmp_path / "gated", tmp_path / "converted")
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
@pytest.mark.parametrize("to", ["qwen3_5", "qwen3_next"])
def test_a_pair_with_experts_in_a_native_layout_gives_the_same_logits(to, granularity, tmp_path):
    dense = [] if to == "qwen3_5" else [1]
    model = ours(tmp_path / "ours", **{**TINY_EXPERTS, "mlp_only_layers": dense}, gate_granularity=granularity)
    expected = adapter_of(model, tmp_path / "adapter", target_modules=[*ATTENTION, "g_proj"])
    convert(tmp_path / "ours", tmp_path / "native", to=to)
    convert_adapter(tmp_path / "adapter", tmp_path / "converted", base=tmp_path / "ours", to=to)
    found = adapted_logits(tmp_path / "native", tmp_path / "converted")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    convert(tmp_path / "native", tmp_path / "back")
    convert_adapter(tmp_path / "converted", tmp_path / "returned", base=tmp_path / "native")
    found = adapted_logits(tmp_path / "back", tmp_path / "returned")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (EXPERTS, "target_parameters: qwen3_5 keeps experts otherwise"),
        ({"modules_to_save": ["mlp.gate"]}, "mlp.gate.weight: not an update of low rank"),
    ],
    ids=["experts", "router"],
)
def test_adapted_experts_and_routers_do_not_go_to_a_native_layout(options, match, tmp_path):
    model = tiny_moe_model(mlp_only_layers=[])
    model.save_pretrained(tmp_path / "ours")
    adapter_of(model, tmp_path / "adapter", target_modules=ATTENTION, **options)
    refusal(tmp_path, match, "qwen3_5")


# Files


def test_the_command_converts_and_refuses_in_one_line(tmp_path, run_command):
    base = ungated_folder(tmp_path / "source", "qwen3")
    modules = [name for name in EVERYTHING if name != "g_proj"]
    expected = adapter_of(ungated_model("qwen3"), tmp_path / "adapter", target_modules=modules)
    (tmp_path / "adapter/chat_template.jinja").write_text("of the adapter")
    convert(base, tmp_path / "gated", gate="elementwise")
    arguments = ["convert-adapter", tmp_path / "adapter", tmp_path / "converted", "--base", base]
    arguments += ["--gate", "elementwise", "--new-base", "me/gated"]
    code, out, err = run_command(*arguments)
    assert code == 0 and "adapter of 14 modules" in out and "for gated_qwen from qwen3" in out, err
    found = adapted_logits(tmp_path / "gated", tmp_path / "converted")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (
        json.loads((tmp_path / "converted/adapter_config.json").read_text())["base_model_name_or_path"] == "me/gated"
    )
    assert (tmp_path / "converted/chat_template.jinja").read_text() == "of the adapter"
    provenance = json.loads((tmp_path / "converted/provenance.json").read_text())
    assert provenance["base"] == {"name": "source", "family": "qwen3", "gate": "elementwise", "start": "identity"}
    assert provenance["adapter"]["name"] == "adapter" and str(tmp_path) not in json.dumps(provenance)

    code, out, err = run_command(*arguments)
    assert code == 1 and len(err.splitlines()) == 1 and "is not empty" in err
    code, out, err = run_command(*arguments, "--overwrite", "--json")
    assert code == 0 and json.loads(out)["modules"] == 14
    for place in ("adapter", "source", "adapter/converted"):
        arguments[2] = tmp_path / place
        code, out, err = run_command(*arguments, "--overwrite")
        assert code == 1 and "lie in each other" in err
    assert (base / "model.safetensors").exists() and (tmp_path / "adapter/adapter_config.json").exists()


def refusal(folder, match, to, error=CheckpointError, base="ours"):
    with pytest.raises(error, match=match) as raised:
        convert_adapter(folder / "adapter", folder / "converted", base=folder / base, to=to)
    assert "\n" not in str(raised.value) and not (folder / "converted").exists()


REFUSED = {
    "gate trained whole": (
        {"target_modules": ["q_proj"], "modules_to_save": ["g_proj"]},
        "official",
        "the gate lies in",
    ),
    "queries trained whole": (
        {"target_modules": ["v_proj"], "modules_to_save": ["q_proj"]},
        "official",
        "q_proj.weight",
    ),
    "a norm": ({"target_modules": ["v_proj"], "modules_to_save": ["q_norm"]}, "qwen3_5", "stores norms"),
    "DoRA on half": ({"target_modules": ["q_proj"], "use_dora": True}, "official", "DoRA on only one"),
    "DoRA on folded columns": ({"use_dora": True}, "qwen3_5", "DoRA normalises rows"),
    "no adapter there": ({}, "gguf", "'gguf' takes no adapter"),
    "an MLP in Qwen3-Next": ({}, "qwen3_next", "PEFT takes it for experts"),
    "another kind": ({"init_lora_weights": "olora"}, "official", "init_lora_weights='olora'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_other_layout_cannot_hold_is_refused_by_name(name, tmp_path):
    options, to, match = REFUSED[name]
    model = tiny_model()
    model.save_pretrained(tmp_path / "ours")
    adapter_of(model, tmp_path / "adapter", **options)
    refusal(tmp_path, match, to, ValueError)


def test_the_adapter_of_another_base_is_refused(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "ours")
    adapter_of(model, tmp_path / "adapter")
    tiny_model(hidden_size=40).save_pretrained(tmp_path / "wide")
    refusal(tmp_path, r"shape \(32, 48\), and the base has \(40, 48\); name the model", "official", base="wide")
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "shallow")
    refusal(tmp_path, "layers.1.* no such module", "gated_qwen", base="shallow")
    convert(tmp_path / "ours", tmp_path / "official", to="official")
    refusal(tmp_path, "q_proj: the adapter's update has 32 rows, and the base has 64", "gated_qwen", base="official")


def test_an_adapter_of_wrong_values_or_pickles_is_refused(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "ours")
    adapter_of(model, tmp_path / "adapter")
    config = tmp_path / "adapter/adapter_config.json"
    fields = json.loads(config.read_text())
    for field, value, match in (
        ("lora_alpha", "much", "lora_alpha and alpha_pattern give module"),
        ("alpha_pattern", {"(": 1}, "lora_alpha and alpha_pattern give module"),
        ("peft_type", "LOHA", "peft_type 'LOHA'; only LORA is converted"),
        ("layer_replication", [[0, 2], [1, 2]], "layer_replication"),
    ):
        config.write_text(json.dumps({**fields, field: value}))
        refusal(tmp_path, match, "official")
    config.write_text(json.dumps(fields))
    weights = tmp_path / "adapter/adapter_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[:-8])
    refusal(tmp_path, "truncated or not a safetensors file", "official")
    weights.unlink()
    torch.save({}, tmp_path / "adapter/adapter_model.bin")
    refusal(tmp_path, "pickled weights are not read", "official")


def test_a_base_that_the_target_cannot_hold_is_refused_for_its_adapter_too(tmp_path):
    model = tiny_model(gate_activation="silu")
    model.save_pretrained(tmp_path / "ours")
    adapter_of(model, tmp_path / "adapter")
    refusal(tmp_path, "gate_activation='silu' cannot be held by official", "official")
