"""The skip lists spare every gate, by each tool's own rule, and the gate is bit-equal after quantisation."""

import re

import pytest
import torch
from fresh_process import FreshProcess
from tiny import EVERY_POSITION, gates, tiny_config, tiny_model, tokens
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from gated_qwen import GatedQwenForSequenceClassification
from gated_qwen.conversion.checkpoint import read_config
from gated_qwen.conversion.convert import convert
from gated_qwen.evaluation.perplexity import position_nll
from gated_qwen.training.quantisation import TOOLS, skip_modules

# Wide enough for groups of 32 and for bitsandbytes' blocks.
WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
MODELS = {
    "elementwise": {},
    "headwise": {"gate_granularity": "headwise"},
    "every position": {"gate_positions": EVERY_POSITION, "gate_bias": True},
    "constant": {"gate_input": "constant", "gate_positions": EVERY_POSITION},
    "no gate": {"gate_positions": []},
    "tied": {"tie_word_embeddings": True},
}


def is_skipped(tool, name, skip):
    """Each tool's rule for a module's name, as its source has it."""
    if tool in ("bitsandbytes", "quanto"):
        return not should_convert_module(name, skip)
    if tool == "torchao":  # asked with the parameter's name
        return not should_convert_module(f"{name}.weight", skip)
    if tool == "gptq":
        return any(re.match(rule.removeprefix("-:"), name) for rule in skip)
    return any(re.match(rule.removeprefix("re:"), name) for rule in skip)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("model_class", [None, GatedQwenForSequenceClassification])
@pytest.mark.parametrize("name", MODELS)
def test_exactly_the_gates_and_the_head_are_skipped(name, model_class, tool):
    fields = {**MODELS[name], **({"pad_token_id": 0} if model_class else {})}
    model = tiny_model(model_class, **fields) if model_class else tiny_model(**fields)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    skipped = {name for name in linear if is_skipped(tool, name, skip_modules(model, tool))}
    assert skipped == {name for name in linear if name in gates(model) or name in ("lm_head", "score")}


def test_the_list_is_the_same_for_a_model_its_config_and_its_config_file(tmp_path):
    model = tiny_model(gate_positions=EVERY_POSITION)
    model.save_pretrained(tmp_path)
    for tool in TOOLS:
        expected = skip_modules(model, tool)
        assert skip_modules(model.config, tool) == skip_modules(read_config(tmp_path), tool) == expected


def test_a_router_is_spared_and_unknown_tools_are_refused():
    config = tiny_config().to_dict() | {"num_experts": 4}
    assert is_skipped("torchao", "model.layers.0.mlp.gate", skip_modules(config, "torchao"))
    assert not is_skipped("torchao", "model.layers.0.mlp.gate_proj", skip_modules(config, "torchao"))
    with pytest.raises(ValueError, match="tool 'awq' is not known; choose one of bitsandbytes"):
        skip_modules(config, "awq")


@pytest.mark.parametrize("to", ["official", "qwen3_5", "qwen3_next"])
def test_an_export_says_that_its_gate_cannot_be_spared_alone(to, tmp_path):
    tiny_model().save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / to, to=to)
    with pytest.raises(ValueError, match="lie inside q_proj"):
        skip_modules(read_config(tmp_path / to))
    with pytest.raises(ValueError, match="has no gate to spare"):
        skip_modules({"model_type": "llama"})


def quantiser(kind, skip):
    if kind.startswith("quanto"):
        pytest.importorskip("optimum.quanto")
        return QuantoConfig(kind.split()[1], modules_to_not_convert=skip)
    if kind.startswith("torchao"):
        quantization = pytest.importorskip("torchao.quantization")
        config = quantization.Int8WeightOnlyConfig()
        if "int4" in kind:
            group = pytest.importorskip("torchao.quantization.granularity").PerGroup(32)
            config = quantization.IntxWeightOnlyConfig(torch.int4, group)
        return TorchAoConfig(config, modules_to_not_convert=skip)
    pytest.importorskip("bitsandbytes")
    options = {"load_in_8bit": True} if "int8" in kind else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return BitsAndBytesConfig(**options, llm_int8_skip_modules=skip)


KINDS = ["quanto int8", "quanto int4", "torchao int8", "torchao int4", "bitsandbytes int8", "bitsandbytes nf4"]


def quantised(folder, kind, skip):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=quantiser(kind, skip)
    ).eval()


def is_unchanged(found, module):
    plain = type(found) is type(module) and type(found.weight.data) is torch.Tensor
    return plain and found.weight.dtype == torch.float32 and torch.equal(found.weight, module.weight)


@pytest.mark.parametrize("name", ["headwise", "every position", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_model_has_its_gates_bit_for_bit(kind, name, tmp_path):
    model = tiny_model(**MODELS[name], **WIDE)
    model.save_pretrained(tmp_path)
    found = quantised(tmp_path, kind, skip_modules(model, kind.split()[0]))
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            spared = module_name in gates(model) or module_name == "lm_head"
            assert is_unchanged(found.get_submodule(module_name), module) is spared, module_name
    with torch.no_grad():
        assert found(tokens(2, 9)).logits.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_model_is_evaluated(kind, tmp_path):
    model = tiny_model(**WIDE)
    model.save_pretrained(tmp_path)
    found, document = quantised(tmp_path, kind, skip_modules(model, kind.split()[0])), tokens(1, 20)
    with torch.no_grad():
        loss = found(document, labels=document).loss
    assert position_nll(found, document[0], chunk=8).mean().item() == pytest.approx(
        loss.item(), abs=0.02
    )  # bitsandbytes computes in fp16


def test_a_plain_name_does_not_spare_the_gate_from_torchao(tmp_path):
    """Why the list differs: torchao is asked with the parameter's name, which ends in `weight`."""
    model = tiny_model(**WIDE)
    model.save_pretrained(tmp_path)
    found = quantised(tmp_path, "torchao int8", ["g_proj", "lm_head"])
    for name, gate in gates(model).items():
        assert not is_unchanged(found.get_submodule(name), gate)


@pytest.mark.parametrize("kind", ["bitsandbytes int8", "bitsandbytes nf4"])
def test_bitsandbytes_leaves_gates_alone_without_a_list_too(kind, tmp_path):
    """transformers gives it modules that are nn.Linear and no subclass of it, and the gate is one."""
    model = tiny_model(**WIDE)
    model.save_pretrained(tmp_path)
    found = quantised(tmp_path, kind, ["lm_head"])
    for name, gate in gates(model).items():
        assert is_unchanged(found.get_submodule(name), gate)


def logits_of(folder, ids):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        return [type(model).__module__.split(".")[0], model(torch.tensor(ids)).logits.tolist()]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    with FreshProcess(tmp_path_factory.mktemp("fresh"), blocked=("gated_qwen",)) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes int8", "bitsandbytes nf4"])
def test_a_quantised_folder_loads_in_a_fresh_process_with_remote_code(kind, elsewhere, tmp_path):
    model = tiny_model(**WIDE)
    model.save_pretrained(tmp_path / "ours")
    found = quantised(tmp_path / "ours", kind, skip_modules(model, kind.split()[0]))
    found.save_pretrained(tmp_path / "quantised")
    with torch.no_grad():
        expected = found(tokens(2, 9)).logits
    where, values = elsewhere.call(logits_of, str(tmp_path / "quantised"), tokens(2, 9).tolist())
    assert where == "transformers_modules"
    torch.testing.assert_close(torch.tensor(values), expected, atol=1e-6, rtol=1e-6)
