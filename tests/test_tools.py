"""Adapters, quantisers, loaders and patchers find the gate by its name and leave it as it was made."""

import copy
import subprocess
import sys

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import EVERY_POSITION, gates, tiny_config, tiny_model, tokens
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    QuantoConfig,
    Qwen3ForCausalLM,
)

from gated_qwen import GatedQwenForCausalLM, GatedQwenForTokenClassification, GatedQwenModel
from gated_qwen.configuration.configuration_gated_qwen import GATE_MODULES

# The modules that each gate's name stands for.
GATE_NAMES = {name: [f"model.layers.{layer}.self_attn.{name}" for layer in range(2)] for name in GATE_MODULES.values()}


def assert_equal_states(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("name", GATE_NAMES)
def test_a_gates_name_ends_no_other_modules_name(name):
    model = tiny_model(gate_positions=EVERY_POSITION, attn_output_norm=True, sandwich_norm=True)
    assert [module for module, _ in model.named_modules() if module.endswith(name)] == GATE_NAMES[name]


def adapted_modules(model):
    names = [name for name, _ in model.named_modules() if name.endswith(".lora_A")]
    return [name.removeprefix("base_model.model.").removesuffix(".lora_A") for name in names]


@pytest.mark.parametrize("fields", [{}, {"gate_granularity": "headwise"}, {"gate_positions": EVERY_POSITION}], ids=str)
def test_lora_on_the_gate_adapts_one_module_a_layer(fields):
    model = get_peft_model(tiny_model(**fields), LoraConfig(target_modules=["g_proj"]))
    assert adapted_modules(model) == GATE_NAMES["g_proj"]


def test_lora_on_all_linear_takes_every_gate_and_spares_the_head():
    model = tiny_model(gate_positions=EVERY_POSITION)
    gate_names = list(gates(model))
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    adapted = adapted_modules(get_peft_model(model, LoraConfig(target_modules="all-linear")))
    assert adapted == [name for name in linear if name != "lm_head"]
    assert len(gate_names) == 10 and set(gate_names) <= set(adapted)


def test_an_adapted_gate_survives_merging():
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["g_proj"], init_lora_weights=False))
    adapted = model(tokens(2, 9)).logits
    assert not torch.allclose(adapted, tiny_model()(tokens(2, 9)).logits, atol=1e-3)
    torch.testing.assert_close(model.merge_and_unload()(tokens(2, 9)).logits, adapted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_int8_leaves_a_gate_on_the_skip_list_bit_equal(granularity, tmp_path):
    model = tiny_model(gate_granularity=granularity)
    model.save_pretrained(tmp_path)
    skipped = ["g_proj", "lm_head"]
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=QuantoConfig(weights="int8", modules_to_not_convert=skipped)
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found = quantised.get_submodule(name)
            if name.rsplit(".", 1)[-1] in skipped:
                assert type(found) is type(module) and torch.equal(found.weight, module.weight), name
            else:
                assert not torch.equal(found.weight.dequantize(), module.weight), name


@pytest.fixture(scope="module")
def ungated(tmp_path_factory):
    """A Qwen3 folder and its weights."""
    folder = tmp_path_factory.mktemp("ungated")
    model = tiny_model(Qwen3ForCausalLM)
    model.save_pretrained(folder)
    return folder, model.state_dict()


STARTS = {None: 0.02, 0.0: 0.0, 0.1: 0.1}  # gate_initializer_range: standard deviation
LOADERS = {
    "the class": GatedQwenForCausalLM.from_pretrained,
    "AutoModelForCausalLM": AutoModelForCausalLM.from_pretrained,
    "AutoModel": AutoModel.from_pretrained,
    "a fresh build": lambda folder, config: AutoModelForCausalLM.from_config(config),
}
KINDS_OF_GATE = {
    "elementwise": {"gate_positions": EVERY_POSITION, "gate_bias": True},
    "headwise": {"gate_granularity": "headwise"},
    "constant": {"gate_positions": EVERY_POSITION, "gate_input": "constant"},
}


@pytest.mark.parametrize("kind", KINDS_OF_GATE)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("start", STARTS)
def test_a_gate_without_weights_begins_at_its_declared_start(start, loader, kind, ungated):
    folder, weights = ungated
    config = tiny_config(**KINDS_OF_GATE[kind], gate_initializer_range=start)
    model = LOADERS[loader](folder, config=config)
    assert len(gates(model)) == 2 * len(config.gate_positions)
    scores, biases = [], []
    for module in gates(model).values():
        if kind == "constant":
            scores.append(module.bias)
        else:
            scores.append(module.weight)
            biases += [] if module.bias is None else [module.bias]
    scores = torch.cat([tensor.flatten() for tensor in scores])
    assert scores.std().item() == pytest.approx(STARTS[start], rel=0.15)
    assert abs(scores.mean().item()) <= 4 * STARTS[start] / len(scores) ** 0.5
    assert all((bias == 0).all() for bias in biases)
    if loader != "a fresh build":
        prefix = "model." if loader == "AutoModel" else ""
        found = {prefix + name: tensor for name, tensor in model.state_dict().items() if ".g_proj" not in name}
        expected = {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}
        assert_equal_states(found, expected)


def test_an_ungated_folder_loads_by_the_class_alone(ungated):
    folder, weights = ungated
    model = GatedQwenForCausalLM.from_pretrained(folder, gate_granularity="headwise", gate_initializer_range=0.0)
    assert [tuple(gate.weight.shape) for gate in gates(model).values()] == [(4, 32)] * 2
    assert all((gate.weight == 0).all() for gate in gates(model).values())
    assert_equal_states({n: t for n, t in model.state_dict().items() if ".g_proj" not in n}, weights)


@pytest.mark.parametrize("kind", KINDS_OF_GATE)
@pytest.mark.parametrize("loader", ["the class", "AutoModelForCausalLM", "AutoModel"])
def test_a_trained_gate_is_reloaded_bit_equal(loader, kind, tmp_path):
    model = tiny_model(**KINDS_OF_GATE[kind], gate_initializer_range=0.0)
    optimizer = torch.optim.SGD([parameter for gate in gates(model).values() for parameter in gate.parameters()], lr=1)
    before = copy.deepcopy(model.state_dict())
    model(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
    optimizer.step()
    trained = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert trained and all(".g_proj" in name for name in trained)
    model.save_pretrained(tmp_path)
    expected = (model.model if loader == "AutoModel" else model).state_dict()
    assert_equal_states(LOADERS[loader](tmp_path).state_dict(), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings_build_save_and_reload(tied, tmp_path):
    def storages(model):
        return {model.lm_head.weight.data_ptr(), model.model.embed_tokens.weight.data_ptr()}

    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "model.embed_tokens.weight" in saved and ("lm_head.weight" in saved) is not tied
    reloaded = GatedQwenForCausalLM.from_pretrained(tmp_path)
    assert reloaded.config.tie_word_embeddings is tied
    assert len(storages(model)) == len(storages(reloaded)) == (1 if tied else 2)
    assert_equal_states(reloaded.state_dict(), model.state_dict())
    assert torch.equal(reloaded(tokens(2, 9)).logits, model(tokens(2, 9)).logits)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0},
}


def built_on_meta(config, folder):
    with torch.device("meta"):
        model = GatedQwenForCausalLM(config)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(7.0)  # memory that nobody has set
    model.init_weights()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def built_empty_by_accelerate(config, folder):
    with init_empty_weights():
        model = GatedQwenForCausalLM(config)
    return load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})


def loaded_with_a_device_map(config, folder):
    return AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"})


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    "build", [built_on_meta, built_empty_by_accelerate, loaded_with_a_device_map], ids=lambda build: build.__name__
)
def test_a_model_built_without_memory_has_the_frequencies_of_a_normal_one(build, rope, tmp_path):
    model = tiny_model(rope_parameters=ROPES[rope])
    model.save_pretrained(tmp_path)
    found = build(copy.deepcopy(model.config), tmp_path).eval()
    rotary, expected = found.model.rotary_emb, model.model.rotary_emb
    assert rotary.inv_freq.device.type == "cpu" and torch.equal(rotary.inv_freq, expected.inv_freq)
    assert torch.equal(rotary.original_inv_freq, expected.original_inv_freq)
    assert rotary.attention_scaling == expected.attention_scaling
    assert torch.equal(found(tokens(2, 9)).logits, model(tokens(2, 9)).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_bias": True, "rope_parameters": ROPES["yarn"]},
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ],
    ids=["plain", "bias and yarn", "tied and sliding"],
)
def test_without_a_gate_the_logits_are_qwen3s_bit_for_bit(fields, attention, dtype, tmp_path):
    tiny_model(Qwen3ForCausalLM, **fields).to(dtype).save_pretrained(tmp_path)
    options = {"dtype": dtype, "attn_implementation": attention}
    qwen3 = Qwen3ForCausalLM.from_pretrained(tmp_path, **options)
    ours = GatedQwenForCausalLM.from_pretrained(tmp_path, gate_positions=[], **options)
    assert_equal_states(ours.state_dict(), qwen3.state_dict())
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :6] = 0
    for options in ({}, {"attention_mask": mask}):
        assert torch.equal(ours(tokens(2, 9), **options).logits, qwen3(tokens(2, 9), **options).logits)


@pytest.mark.parametrize(
    "head",
    [AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering],
    ids=lambda head: head.__name__,
)
def test_a_head_takes_its_body_from_a_causal_models_folder(head, tmp_path):
    model = tiny_model(gate_positions=EVERY_POSITION)
    model.save_pretrained(tmp_path)
    loaded = head.from_pretrained(tmp_path, num_labels=2, pad_token_id=0)
    assert type(loaded).__name__ == head.__name__.replace("AutoModel", "GatedQwen")
    assert_equal_states(loaded.model.state_dict(), model.model.state_dict())


def test_the_body_and_the_causal_model_read_each_others_folders(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "causal")
    body = AutoModel.from_pretrained(tmp_path / "causal")
    assert type(body) is GatedQwenModel
    body.save_pretrained(tmp_path / "body")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "body")
    assert_equal_states(again.model.state_dict(), model.model.state_dict())


IMPORT_AGAIN = """
import importlib, sys
import gated_qwen
gated_qwen.register_auto_classes()
importlib.reload(gated_qwen)
for name in [name for name in sys.modules if name.split(".")[0] == "gated_qwen"]:
    del sys.modules[name]
import gated_qwen
from transformers import AutoModelForCausalLM, AutoConfig
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
    "gated_qwen", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    intermediate_size=8, vocab_size=8, rope_theta=1e4,
))
assert type(model) is gated_qwen.GatedQwenForCausalLM
"""


@pytest.mark.slow
def test_importing_twice_registers_once_more_without_an_error():
    done = subprocess.run([sys.executable, "-c", IMPORT_AGAIN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_dropout_of_zero_is_zero():
    assert GatedQwenForTokenClassification(tiny_config(classifier_dropout=0.0)).dropout.p == 0.0
    assert GatedQwenForTokenClassification(tiny_config()).dropout.p == 0.1


def test_the_model_takes_the_positional_arguments_that_qwen3_takes():
    model, ids = tiny_model(GatedQwenModel), tokens(1, 5)
    with torch.no_grad():
        assert torch.equal(model(ids, None, None, None, None)[0], model(ids)[0])
