"""Every attention backend computes the same function, and the gate acts on all of them in the same way."""

import json

import pytest
import torch
from tiny import CACHE, EVERY_POSITION, set_gate_scores, tiny_model, tokens
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, Qwen3ForCausalLM, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3

from gated_qwen import GatedQwenForCausalLM

VARIANTS = {
    "elementwise": {},
    "headwise": {"gate_granularity": "headwise"},
    "every position": {"gate_positions": EVERY_POSITION, "gate_bias": True, "attn_output_norm": True},
}


def plain(model):
    return model(tokens(2, 9)).logits


def masked(model):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :6] = 0  # left padding
    mask[1, 7:] = 0  # right padding
    return model(tokens(2, 9), attention_mask=mask).logits[mask.bool()]


def packed(model):
    positions = torch.tensor([[*range(4), *range(5)], [*range(7), *range(2)]])
    return model(tokens(2, 9), position_ids=positions, use_cache=False).logits


def cached(model):
    cache = DynamicCache(config=model.config)
    steps = tokens(2, 9).split([5, 1, 1, 2], dim=1)
    return torch.cat([model(step, **{CACHE: cache}, use_cache=True).logits for step in steps], dim=1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("run", [plain, masked, packed, cached], ids=lambda run: run.__name__)
def test_backends_equal_eager(run, attention, variant):
    model = tiny_model(**VARIANTS[variant], attn_implementation="eager")
    # Flex attention has no backward on a CPU; "force_eager" spares its compilation for each shape.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        eager = run(model)
        model.set_attn_implementation(attention)
        assert model.config._attn_implementation == attention
        torch.testing.assert_close(run(model), eager, atol=1e-5, rtol=1e-5)


def test_cached_and_whole_runs_agree():
    model = tiny_model()
    torch.testing.assert_close(cached(model), plain(model), atol=1e-5, rtol=1e-5)


FORCED_GATES = {
    "elementwise": {"gate_bias": True},
    "headwise": {"gate_bias": True, "gate_granularity": "headwise"},
    "constant elementwise": {"gate_input": "constant"},
    "constant headwise": {"gate_input": "constant", "gate_granularity": "headwise"},
}


@pytest.mark.parametrize("gate", FORCED_GATES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_closed_gate_gives_no_attention_output(gate, attention):
    model = set_gate_scores(tiny_model(**FORCED_GATES[gate], attn_implementation=attention), -30.0)
    outputs = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    model(tokens(2, 9))
    assert len(outputs) == 2
    for output in outputs:
        torch.testing.assert_close(output, torch.zeros_like(output), atol=1e-11, rtol=0)


@pytest.mark.parametrize("gate", FORCED_GATES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_open_gate_gives_the_ungated_model(gate, attention):
    gated = set_gate_scores(tiny_model(**FORCED_GATES[gate], attn_implementation=attention), 30.0)
    ungated = tiny_model(Qwen3ForCausalLM, attn_implementation=attention)
    missing, unexpected = ungated.load_state_dict(gated.state_dict(), strict=False)
    assert not missing and all(".g_proj." in name for name in unexpected)
    torch.testing.assert_close(gated(tokens(2, 9)).logits, ungated(tokens(2, 9)).logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch", [1, 2])
def test_an_engine_may_return_its_attention_in_two_dimensions(variant, batch):
    calls = []

    def attention(module, query, key, value, attention_mask, *, scaling, engine_state, **kwargs):
        calls.append((module.layer_idx, scaling, engine_state))
        output, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output.reshape(-1, 4 * 8), weights  # (B * T, H * D)

    AttentionInterface.register("two_dimensions", attention)
    AttentionMaskInterface.register("two_dimensions", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = tiny_model(**VARIANTS[variant])
    expected = model(tokens(batch, 9)).logits
    model.set_attn_implementation("two_dimensions")
    assert torch.equal(model(tokens(batch, 9), engine_state="mine").logits, expected)
    assert calls == [(0, 8**-0.5, "mine"), (1, 8**-0.5, "mine")]  # once a layer, with what the engine passed


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("patched", ["Qwen3Attention", "Qwen3DecoderLayer"])
def test_patches_of_qwen3_leave_the_gate_alone(variant, patched, monkeypatch):
    model = tiny_model(**VARIANTS[variant])
    expected = model(tokens(2, 9)).logits

    def no_gate(self, hidden_states, *args, **kwargs):
        return (torch.zeros_like(hidden_states), None) if patched == "Qwen3Attention" else hidden_states

    monkeypatch.setattr(getattr(modeling_qwen3, patched), "forward", no_gate)
    assert torch.equal(model(tokens(2, 9)).logits, expected)
    assert torch.equal(tiny_model(**VARIANTS[variant])(tokens(2, 9)).logits, expected)


def test_nothing_that_patchers_look_up_is_called_qwen3():
    model = tiny_model()
    assert model.config.model_type == "gated_qwen"
    ours = [type(module).__name__ for module in (model, model.model, *model.model.layers)]
    ours += [type(layer.self_attn).__name__ for layer in model.model.layers]
    assert all(name.startswith("GatedQwen") for name in ours)


def test_attentions_are_the_weights_of_every_layer():
    model = tiny_model(attn_implementation="eager")
    attentions = model(tokens(2, 9), output_attentions=True).attentions
    assert [weights.shape for weights in attentions] == [(2, 4, 9, 9)] * 2
    for weights in attentions:
        assert (weights.triu(1) == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_hidden_states_are_the_embedding_and_every_layer(attention):
    model = tiny_model(attn_implementation=attention)
    output = model(tokens(2, 9), output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert torch.equal(output.hidden_states[0], model.model.embed_tokens(tokens(2, 9)))
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)  # the last is after the final norm


@pytest.mark.slow
def test_prefill_and_decode_compile_without_a_graph_break():
    model = tiny_model(gate_granularity="headwise")
    ids = tokens(1, 12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # C++ for a tiny model takes a minute
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=16)
        steps = ids.split([9, 1, 1, 1], dim=1)
        logits = [compiled(step, **{CACHE: cache}, use_cache=True).logits for step in steps]
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-5, rtol=1e-5)

        model.config.rope_theta = 1e6  # a compiled model sees the change too
        changed = model(ids, use_cache=False).logits
        assert not torch.allclose(changed, expected, atol=1e-2)
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, changed, atol=1e-5, rtol=1e-5)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}


def assign_rope_parameters(config):
    config.rope_parameters = dict(YARN)


def assign_rope_scaling(config):
    config.rope_scaling = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512}


def assign_rope_theta(config):
    config.rope_theta = 1e6


def mutate_rope_theta(config):
    config.rope_parameters["rope_theta"] = 1e6


def mutate_into_yarn(config):
    config.rope_parameters.update(YARN)


CHANGES = [assign_rope_parameters, assign_rope_scaling, assign_rope_theta, mutate_rope_theta, mutate_into_yarn]


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_rope_set_on_a_live_model_takes_effect_and_is_saved(change, used_before, tmp_path):
    model = tiny_model()
    ids = tokens(1, 40)
    before = tiny_model()(ids).logits
    if used_before:
        model(ids)
    change(model.config)
    if "theta" in change.__name__:
        fresh = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    else:
        fresh = tiny_model(rope_parameters=YARN)
    live = model(ids).logits
    assert torch.equal(live, fresh(ids).logits) and not torch.allclose(live, before, atol=1e-2)
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.attention_scaling == fresh.model.rotary_emb.attention_scaling

    model.save_pretrained(tmp_path)
    reloaded = GatedQwenForCausalLM.from_pretrained(tmp_path)
    assert reloaded.config.rope_parameters == fresh.config.rope_parameters
    assert torch.equal(reloaded(ids).logits, live)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == fresh.config.rope_theta
    assert (saved["rope_scaling"] or {"rope_type": "default"})["rope_type"] == fresh.config.rope_parameters[
        "rope_type"
    ]


def test_a_change_inside_rope_scaling_takes_effect_or_raises():
    model = tiny_model(rope_parameters=YARN)
    ids = tokens(1, 40)
    expected = tiny_model(rope_parameters={**YARN, "factor": 8.0})(ids).logits
    try:
        model.config.rope_scaling["factor"] = 8.0
    except TypeError as error:
        assert "rope_parameters" in str(error)
    else:
        assert torch.equal(model(ids).logits, expected)


def test_yarn_set_inside_a_live_config_states_its_original_length_or_raises():
    model = tiny_model()
    model.config.rope_parameters.update(rope_type="yarn", factor=4.0)
    expected = tiny_model(rope_parameters=YARN)(tokens(1, 40)).logits
    try:
        logits = model(tokens(1, 40)).logits
    except ValueError as error:
        assert "original_max_position_embeddings" in str(error)
    else:
        assert torch.equal(logits, expected)
        assert model.config.rope_parameters["original_max_position_embeddings"] == 512
