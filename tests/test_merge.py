"""A merged adapter is a complete model folder whose logits are the live model's."""

import json
import re

import pytest
import torch
from fresh_process import FreshProcess
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from small_tokenizers import tokenizer_of
from tiny import EVERY_POSITION, tiny_model, tiny_moe_model, tokens
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from ungated import ungated_folder

from gated_qwen import GatedQwenForSequenceClassification
from gated_qwen.conversion.checkpoint import CheckpointError
from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.merge import merge_adapter
from gated_qwen.training.adapters import lora_config

EMBEDDINGS = ["embed_tokens", "lm_head"]


def trained(model, config, folder):
    """Wraps `model`, moves every weight that would be trained, saves base and adapter, returns the live model."""
    model.save_pretrained(folder / "base")
    live = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in live.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    live.save_pretrained(folder / "adapter")
    return live.eval()


def logits(model, ids=None):
    with torch.no_grad():
        return model(tokens(2, 9) if ids is None else ids).logits


def names(folder):
    return {path.name for path in folder.iterdir()}


def merged_logits(folder, **options):
    merge_adapter(folder / "adapter", folder / "merged", base=folder / "base", **options)
    return logits(AutoModelForCausalLM.from_pretrained(folder / "merged"))


ADAPTERS = {
    "lora": {},
    "lora, gate trained whole": {"gate": "full"},
    "lora, no gate": {"gate": "none"},
    "rslora": {"use_rslora": True, "alpha": 5},
    "dora": {"use_dora": True},
    "ranks by pattern": {"rank_pattern": {"g_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 3}},
    "biases": {"bias": "all"},
    "a norm as well": {"modules_to_save": ["input_layernorm"]},
}
MODELS = {
    "headwise": {"gate_granularity": "headwise"},
    "every position": {"gate_positions": EVERY_POSITION, "gate_bias": True, "attention_bias": True},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_merged_logits_are_the_live_models(adapter, model, tmp_path):
    base = tiny_model(**MODELS[model])
    before = logits(base)
    live = trained(base, lora_config(base, rank=4, **ADAPTERS[adapter]), tmp_path)
    assert not torch.allclose(logits(live), before, atol=1e-2)
    torch.testing.assert_close(merged_logits(tmp_path), logits(live), atol=2e-5, rtol=1e-5)


def test_a_constant_gate_trained_whole_is_merged(tmp_path):
    base = tiny_model(gate_input="constant", gate_positions=EVERY_POSITION)
    live = trained(base, lora_config(base, rank=4, gate="full"), tmp_path)
    torch.testing.assert_close(merged_logits(tmp_path), logits(live), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("targets", [["attention", "mlp", "experts"], ["attention", "router"]], ids=str)
def test_adapted_experts_and_routers_are_merged(targets, tmp_path):
    base = tiny_moe_model()
    live = trained(base, lora_config(base, rank=2, targets=targets), tmp_path)
    torch.testing.assert_close(merged_logits(tmp_path), logits(live), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("options", "stays_tied"),
    [
        ({"target_modules": ["q_proj"]}, True),
        ({"target_modules": ["q_proj", *EMBEDDINGS]}, False),
        ({"target_modules": ["embed_tokens"]}, False),
        ({"target_modules": ["lm_head"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": EMBEDDINGS}, False),
        ({"target_modules": ["q_proj", *EMBEDDINGS], "ensure_weight_tying": True}, True),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    ],
    ids=str,
)
def test_with_embeddings_merged_the_flag_tells_the_truth(options, stays_tied, tied, tmp_path):
    live = trained(tiny_model(tie_word_embeddings=tied), LoraConfig(r=4, **options), tmp_path)
    torch.testing.assert_close(merged_logits(tmp_path), logits(live), atol=2e-5, rtol=1e-5)
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["tie_word_embeddings"] is (tied and stays_tied)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    same = reloaded.lm_head.weight.data_ptr() == reloaded.model.embed_tokens.weight.data_ptr()
    assert same is (tied and stays_tied)


def logits_of(folder, ids):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        return [type(model).__module__.split(".")[0], model(torch.tensor(ids)).logits.tolist()]


def test_a_merged_folder_is_complete_and_loads_in_a_fresh_process(tmp_path):
    base = tiny_model()
    live = trained(base, lora_config(base, rank=4, gate="full"), tmp_path)
    tokenizer_of("byte-level BPE").save_pretrained(tmp_path / "base")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    assert names(tmp_path / "merged") == names(tmp_path / "base") | {"provenance.json"}
    assert {"modeling_gated_qwen.py", "tokenizer.json"} < names(tmp_path / "merged")
    provenance = json.loads((tmp_path / "merged/provenance.json").read_text())
    assert provenance["source"] == {"name": "base"} and provenance["adapter"]["method"] == "LoRA"
    assert str(tmp_path) not in json.dumps(provenance)
    with FreshProcess(tmp_path / "fresh") as process:
        where, values = process.call(logits_of, str(tmp_path / "merged"), tokens(2, 9).tolist())
    assert where == "transformers_modules"
    torch.testing.assert_close(torch.tensor(values), logits(live), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "to"),
    [(tiny_model, "official"), (tiny_model, "qwen3_5"), (tiny_moe_model, "qwen3_5"), (tiny_moe_model, "qwen3_next")],
)
def test_a_merged_model_is_exported_like_any_other(make, to, tmp_path):
    base = make() if to != "qwen3_5" or make is tiny_model else make(mlp_only_layers=[])
    live = trained(base, lora_config(base, rank=4), tmp_path)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    convert(tmp_path / "merged", tmp_path / to, to=to)
    if to == "official":  # transformers cannot load it, so it is read back
        convert(tmp_path / to, tmp_path / "back")
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    else:
        found = AutoModelForCausalLM.from_pretrained(tmp_path / to)
    torch.testing.assert_close(found(tokens(2, 9), use_cache=False).logits, logits(live), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [tiny_model, tiny_moe_model])
def test_a_merged_model_goes_to_gguf(make, tmp_path):
    gguf = pytest.importorskip("gguf")
    base = make() if make is tiny_model else make(mlp_only_layers=[])
    live = trained(base, lora_config(base, rank=4), tmp_path)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    convert(tmp_path / "merged", tmp_path / "merged.gguf", to="gguf", gguf_type="f32")
    written = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(tmp_path / "merged.gguf").tensors}
    for index, layer in enumerate(live.merge_and_unload().model.layers):
        torch.testing.assert_close(written[f"blk.{index}.attn_output.weight"], layer.self_attn.o_proj.weight.data)
        down = getattr(layer.mlp, "experts", layer.mlp).down_proj
        found = written[f"blk.{index}.ffn_down{'_exps' if make is tiny_moe_model else ''}.weight"]
        torch.testing.assert_close(found, getattr(down, "weight", down).data)


def test_what_came_with_the_adapter_goes_above_what_came_with_the_base(tmp_path):
    base = tiny_model()
    trained(base, lora_config(base, rank=4), tmp_path)
    (tmp_path / "base/chat_template.jinja").write_text("of the base")
    (tmp_path / "base/LICENSE").write_text("a licence")
    (tmp_path / "adapter/chat_template.jinja").write_text("of the adapter")
    card = "---\nlicense: mit\nbase_model: someone/model\n---\n"
    (tmp_path / "base/README.md").write_text(card)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    assert (tmp_path / "merged/chat_template.jinja").read_text() == "of the adapter"
    assert (tmp_path / "merged/LICENSE").read_text() == "a licence"
    source = json.loads((tmp_path / "merged/provenance.json").read_text())["source"]
    assert source["card"] == {"license": "mit", "base_model": ["someone/model"]}
    (tmp_path / "base/README.md").write_text("---\nlicense: [\n---\n")
    result = merge_adapter(tmp_path / "adapter", tmp_path / "again", base=tmp_path / "base")
    assert "not valid YAML" in result.notes[0]


def test_what_peft_merges_by_itself_is_saved_without_leftovers(tmp_path):
    base = tiny_model()
    live = trained(base, lora_config(base, rank=4, gate="full"), tmp_path)
    expected = logits(live)
    merged = live.merge_and_unload()
    assert not getattr(merged, "_hf_peft_config_loaded", False) and not hasattr(merged, "peft_config")
    merged.save_pretrained(tmp_path / "merged")
    assert names(tmp_path / "merged") == names(tmp_path / "base")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(found), expected, atol=2e-5, rtol=1e-5)


def test_unmerging_gives_the_base_back_to_rounding():
    base = tiny_model()
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    live = get_peft_model(base, lora_config(base, rank=4, init_lora_weights=False))
    live.merge_adapter()
    live.unmerge_adapter()
    restored = live.unload()
    assert {name for name, _ in restored.named_parameters()} == before.keys()
    for name, parameter in restored.named_parameters():
        torch.testing.assert_close(parameter, before[name], atol=1e-6, rtol=1e-6)


def test_a_task_head_saved_in_the_adapter_is_merged(tmp_path):
    base = tiny_model(GatedQwenForSequenceClassification, num_labels=3, pad_token_id=0)
    live = trained(base, lora_config(base, rank=4, task_type="SEQ_CLS"), tmp_path)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(found), logits(live), atol=2e-5, rtol=1e-5)


def test_half_precision_is_kept_or_asked_for(tmp_path):
    base = tiny_model().to(torch.bfloat16)
    trained(base, lora_config(base, rank=4), tmp_path)
    assert merge_adapter(tmp_path / "adapter", tmp_path / "a", base=tmp_path / "base").dtype == "bfloat16"
    result = merge_adapter(tmp_path / "adapter", tmp_path / "b", base=tmp_path / "base", dtype="float32")
    assert result.dtype == "float32"


def test_the_command_merges_and_refuses_in_one_line(tmp_path, run_command):
    base = tiny_model()
    trained(base, lora_config(base, rank=4), tmp_path)
    arguments = ["merge", tmp_path / "adapter", tmp_path / "merged", "--base", tmp_path / "base"]
    code, out, err = run_command(*arguments)
    assert code == 0 and "LoRA merged into" in out, err
    code, out, err = run_command(*arguments)
    assert code == 1 and "is not empty" in err.splitlines()[-1]
    code, out, err = run_command(*arguments, "--overwrite", "--json")
    assert code == 0 and json.loads(out)["method"] == "LoRA"


def refusal(folder, match, error=CheckpointError, base="base", target="merged"):
    with pytest.raises(error, match=match) as raised:
        merge_adapter(folder / "adapter", folder / target, base=base and folder / base)
    assert "\n" not in str(raised.value)
    assert not (folder / "merged").exists() and not list(folder.glob(".merged*"))


def test_what_cannot_be_merged_is_refused_by_name(tmp_path):
    base = tiny_model()
    trained(base, lora_config(base, rank=4), tmp_path)
    refusal(tmp_path, "names no base model", base=None)
    refusal(tmp_path, "lie in each other", ValueError, target="base/merged")
    refusal(tmp_path, "no such folder", base="absent")
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "shallow")
    refusal(tmp_path, re.escape("tensor model.layers.1.mlp.down_proj.lora_A.weight has no place"), base="shallow")
    tiny_model(hidden_size=40).save_pretrained(tmp_path / "wide")
    refusal(tmp_path, "does not fit its base model", base="wide")
    ungated_folder(tmp_path / "ungated", "qwen3")
    refusal(tmp_path, "g_proj.lora_A.weight has no place", base="ungated")
    convert(tmp_path / "base", tmp_path / "official", to="official")
    refusal(tmp_path, "convert base and adapter", base="official")
    config = tmp_path / "adapter/adapter_config.json"
    fields = json.loads(config.read_text())
    for field, value, match in (
        ("megatron_config", {"a": 1}, "megatron_config"),
        ("task_type", "SEQ_2_SEQ_LM", "task_type 'SEQ_2_SEQ_LM'"),
        ("task_type", ["CAUSAL_LM"], "task_type \\['CAUSAL_LM'"),
        ("peft_type", None, "peft_type is missing"),
        ("peft_type", "SOMETHING", "peft_type 'SOMETHING': .* cannot be merged"),
        ("peft_type", "XLORA", "peft_type 'XLORA': .* cannot be merged"),  # it loads more folders
        ("r", "many", "does not fit its base model"),
        ("target_modules", "(", "does not fit its base model"),  # a regular expression
    ):
        config.write_text(json.dumps({**fields, field: value}))
        refusal(tmp_path, match)
    config.write_text(json.dumps({**fields, "base_model_name_or_path": ["base"]}))
    refusal(tmp_path, "names no base model", base=None)
    config.write_text("{")
    refusal(tmp_path, "not readable as JSON")
    config.write_text(json.dumps(fields))
    (tmp_path / "adapter/adapter_model.safetensors").rename(tmp_path / "adapter/adapter_model.bin")
    refusal(tmp_path, "pickled weights are not read")


def test_a_bias_that_the_base_has_no_place_for_is_refused(tmp_path):
    trained(tiny_model(), LoraConfig(target_modules=["q_proj"], lora_bias=True), tmp_path)
    refusal(tmp_path, "cannot be merged .*base layer has no bias")


def test_a_prompt_is_no_weight_and_is_refused(tmp_path):
    trained(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), tmp_path)
    refusal(tmp_path, "peft_type 'PROMPT_TUNING': this kind of adapter cannot be merged")


def test_a_base_with_pickles_or_paths_out_of_its_folder_is_refused(tmp_path):
    base = tiny_model()
    trained(base, lora_config(base, rank=4), tmp_path)
    weights = tmp_path / "base/model.safetensors"
    (tmp_path / "outside.safetensors").write_bytes(weights.read_bytes())
    weights.unlink()
    torch.save(base.state_dict(), tmp_path / "base/pytorch_model.bin")
    refusal(tmp_path, "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(base.state_dict(), "../outside.safetensors")}
    (tmp_path / "base/model.safetensors.index.json").write_text(json.dumps(index))
    refusal(tmp_path, re.escape("../outside.safetensors"))
