"""The gate probe reads what the gate of each family really does, and sums it up right."""

import json
import math

import pytest
import torch
from gated_models import EXPERTS, NATIVE_FAMILIES, native_model, official_model
from peft import LoraConfig, get_peft_model
from probe_models import probe_model
from tiny import CACHE, EVERY_POSITION, TINY_FIELDS, randomize, set_gate_scores, tiny_model, tokens
from torch import nn

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM, GatedQwenMoeConfig, GatedQwenMoeForCausalLM
from gated_qwen.diagnostics.attention_probe import AttentionProbe
from gated_qwen.diagnostics.gate_probe import GateProbe
from gated_qwen.diagnostics.gate_readers import gate_sites
from gated_qwen.diagnostics.gate_statistics import GateStatistics

VARIANTS = {
    "elementwise": {},
    "headwise": {"gate_granularity": "headwise"},
    "shared": {"gate_head_shared": True},
    "shared headwise": {"gate_head_shared": True, "gate_granularity": "headwise"},
    "silu": {"gate_activation": "silu"},
    "ns_sigmoid": {"gate_activation": "ns_sigmoid"},
    "softplus": {"gate_activation": "softplus"},
    "constant": {"gate_input": "constant"},
    "few channels": {"gate_input_channels": 5},
    "bias": {"gate_bias": True},
    "normed": {"attn_output_norm": True},
    "normed and activated": {"attn_output_norm": True, "attn_output_activation": "silu"},
}


def probed(model, *calls, skip_queries=4, attention=False, **fields):
    """The probe after the given calls, each a dict of keyword arguments, with what it saw by layer and position."""
    attend = AttentionProbe(model) if attention else None
    probe = GateProbe(model, attend, skip_queries=skip_queries)
    probe.gates, probe.outputs = {}, {}
    update, update_outputs = probe.statistics.update, probe.statistics.update_outputs

    def keep_gate(site, gate, batch):
        probe.gates[site.layer, site.position] = gate
        update(site, gate, batch)

    def keep_outputs(site, pre_gate, gated, batch):
        probe.outputs[site.layer] = (pre_gate, gated)
        update_outputs(site, pre_gate, gated, batch)

    probe.statistics.update, probe.statistics.update_outputs = keep_gate, keep_outputs
    with torch.no_grad(), probe:
        if attend is None:
            for call in calls or [fields]:
                model(**call)
        else:
            with attend:
                for call in calls or [fields]:
                    model(**call)
    return probe


def row_of(summary, layer=0, position="attn_output"):
    return next(row for row in summary["layers"] if (row["layer"], row["position"]) == (layer, position))


def two_token_model():
    """One head of two coordinates that reads (0.8, 2.2) at its second token and writes (0.08, 1.76) of it.

    Token 0 is the first unit vector and token 1 the second. Query 1 has weights (0.4, 0.6) on the values (2, 1) and
    (0, 3); its gate is (0.1, 0.8), and that of token 0 is (0.5, 0.5).
    """
    config = GatedQwenConfig(
        vocab_size=2,
        hidden_size=2,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        use_qk_norm=False,
        tie_word_embeddings=False,
    )
    model = GatedQwenForCausalLM(config).eval()
    layer = model.model.layers[0]
    attention = layer.self_attn
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.eye(2))
        layer.input_layernorm.weight.fill_(0.5**0.5)  # undoes the norm of a unit vector
        attention.v_proj.weight.copy_(torch.tensor([[2.0, 0.0], [1.0, 3.0]]))
        attention.q_proj.weight.copy_(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
        # Query 1 is turned by RoPE to (cos 1, sin 1); key 1 is zero.
        score = 2**0.5 * math.log(0.4 / 0.6) / math.cos(1)
        attention.k_proj.weight.copy_(torch.tensor([[score, 0.0], [0.0, 0.0]]))
        attention.g_proj.weight.copy_(torch.tensor([[0.0, math.log(0.1 / 0.9)], [0.0, math.log(0.8 / 0.2)]]))
    return model


def test_the_two_token_example_of_the_literature():
    probe = probed(two_token_model(), input_ids=torch.tensor([[0, 1]]), attention=True)
    pre_gate, gated = probe.outputs[0]
    torch.testing.assert_close(pre_gate[0, :, 0], torch.tensor([[2.0, 1.0], [0.8, 2.2]]))
    torch.testing.assert_close(gated[0, :, 0], torch.tensor([[1.0, 0.5], [0.08, 1.76]]))
    probe.statistics.thresholds = [0.625, 1.5]
    row = row_of(probe.statistics.summary())
    assert row["mean"] == pytest.approx((0.5 + 0.5 + 0.1 + 0.8) / 4)
    assert (row["min"], row["max"]) == (pytest.approx(0.1, rel=1e-5), pytest.approx(0.8, rel=1e-5))
    assert row["sparsity"]["pre_gate"] == [0.0, 0.5]
    assert row["sparsity"]["gated"] == [0.5, 0.75]
    assert row["sparsity"]["mean_scaled"] == [0.5, 1.0]  # times 0.475: 0.95, 0.475, 0.38, 1.045
    assert row["sparsity"]["norm_matched"] == [0.25, 1.0]  # times 0.645: 1.29, 0.645, 0.516, 1.42
    assert row["written"]["first_token_share"] == [pytest.approx((1 + 0.4) / 2)]
    assert row["written"]["written_share"] == [pytest.approx((1 * 0.5 + 0.4 * 0.45) / 2)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_gate_acts_on_times_the_gate_is_what_enters_o_proj(variant):
    model = tiny_model(**VARIANTS[variant])
    probe = probed(model, input_ids=tokens(2, 9))
    for layer in range(2):
        pre_gate, gated = probe.outputs[layer]
        gate = probe.gates[layer, "attn_output"]
        assert gate.shape[2] == (1 if "shared" in variant else 4)
        torch.testing.assert_close(pre_gate * gate, gated)
        assert not torch.allclose(pre_gate, gated)


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_native_families_are_read(family):
    model = native_model(family)
    probe = probed(model, input_ids=tokens(2, 9), attention=True)
    assert [site.layer for site in probe.sites] == [0, 1]
    for layer in range(2):
        pre_gate, gated = probe.outputs[layer]
        torch.testing.assert_close(pre_gate * probe.gates[layer, "attn_output"], gated)
    written = row_of(probe.statistics.summary())["written"]
    assert all(
        0 < part < share for part, share in zip(written["written_share"], written["first_token_share"], strict=True)
    )


def test_linear_attention_layers_of_a_hybrid_have_no_gate():
    summary = probed(probe_model("qwen3_next hybrid"), input_ids=tokens(1, 9)).statistics.summary()
    assert [row["layer"] for row in summary["layers"]] == [1]


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_the_official_layout_gives_the_numbers_of_ours(granularity):
    ours = tiny_model(gate_granularity=granularity)
    official = official_model(ours)
    ids = tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(official(ids).logits, ours(ids).logits)
    found, wanted = (probed(model, input_ids=ids) for model in (official, ours))
    for layer in range(2):
        torch.testing.assert_close(found.gates[layer, "attn_output"], wanted.gates[layer, "attn_output"])
        torch.testing.assert_close(found.outputs[layer], wanted.outputs[layer])


def test_every_position_is_reported_with_its_own_heads():
    model = tiny_model(gate_positions=EVERY_POSITION)
    summary = probed(model, input_ids=tokens(2, 9)).statistics.summary()
    assert [row["position"] for row in summary["layers"]] == EVERY_POSITION * 2
    assert list(summary["summary"]) == EVERY_POSITION
    heads = [row["heads"] and len(row["heads"]["mean"]) for row in summary["layers"][:5]]
    assert heads == [4, 2, 2, 4, None]
    assert [row["sparsity"] is not None for row in summary["layers"][:5]] == [False, False, False, True, False]


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_the_gate_at_each_position_is_the_activation_of_its_projection(position):
    model = tiny_model(gate_positions=[position], gate_activation="silu", gate_operation="add")
    seen = []
    (site, _) = gate_sites(model)
    site.projection.register_forward_hook(lambda module, args, output: seen.append(output))
    probe = probed(model, input_ids=tokens(2, 9))
    torch.testing.assert_close(probe.gates[0, position].flatten(2), nn.functional.silu(seen[0]))
    row = row_of(probe.statistics.summary(), position=position)
    assert row["mean"] == pytest.approx(nn.functional.silu(seen[0]).mean().item(), rel=1e-5)
    assert (row["operation"], row["sparsity"]) == ("add", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_are_those_of_the_gates_of_real_tokens(dtype):
    model = tiny_model(gate_granularity="headwise").to(dtype)
    real = torch.tensor([[0, 0, 0] + [1] * 9, [1] * 12]).bool()
    probe = probed(model, input_ids=tokens(2, 12), attention_mask=real.long())
    row = row_of(probe.statistics.summary())
    gate = probe.gates[0, "attn_output"][real].squeeze(-1).double()  # (N, H)
    assert row["mean"] == pytest.approx(gate.mean().item(), rel=1e-6)
    assert row["std"] == pytest.approx(gate.std(correction=0).item(), rel=1e-6)
    assert (row["min"], row["max"]) == (gate.min().item(), gate.max().item())
    assert row["heads"]["mean"] == pytest.approx(gate.mean(0).tolist(), rel=1e-6)
    assert row["heads"]["max"] == gate.amax(0).tolist()
    # With few values two neighbours may lie on both sides of a quantile: it is between the lower and the higher.
    for q, value in row["quantiles"].items():
        low, high = (torch.quantile(gate, float(q), interpolation=way).item() for way in ("lower", "higher"))
        assert low - 2e-3 <= value <= high + 2e-3
    assert sum(row["histogram"]["counts"]) == gate.numel()
    assert len(row["histogram"]["edges"]) == len(row["histogram"]["counts"]) + 1
    place = torch.cat([torch.arange(9), torch.arange(12)])
    classes = {"first": place == 0, "early": (place > 0) & (place < 4), "rest": place >= 4}
    for name, mask in classes.items():
        assert row["by_class"][name]["tokens"] == int(mask.sum())
        assert row["by_class"][name]["mean"] == pytest.approx(gate[mask].mean().item(), rel=1e-6)


def test_sparsity_equals_counting():
    model = tiny_model()
    probe = probed(model, input_ids=tokens(4, 40))
    pre_gate, gated = probe.outputs[1]
    probe.statistics.thresholds = [2.0**-8, 0.01, 0.1, 0.3]
    row = row_of(probe.statistics.summary(), layer=1)
    matched = pre_gate * (gated.square().mean() / pre_gate.square().mean()).sqrt()
    wanted = {
        "pre_gate": pre_gate,
        "mean_scaled": pre_gate * row["mean"],
        "gated": gated,
        "norm_matched": matched,
    }
    for name, states in wanted.items():
        counted = [(states.abs() < tau).double().mean().item() for tau in probe.statistics.thresholds]
        assert row["sparsity"][name] == pytest.approx(counted, abs=2e-3)
        if name in ("pre_gate", "gated"):
            assert row["sparsity"][name][0] == counted[0]  # a power of two is the edge of a bin


def test_dead_and_always_open_heads_are_named():
    model = set_gate_scores(tiny_model(gate_bias=True), 0.0)
    with torch.no_grad():
        bias = model.model.layers[1].self_attn.g_proj.bias.view(4, 8)
        bias[1], bias[3] = -30.0, 30.0
        bias[0, :7], bias[2, :7] = -30.0, 30.0  # one coordinate is different
    summary = probed(model, input_ids=tokens(2, 9)).statistics.summary()
    heads = row_of(summary, layer=1)["heads"]
    assert (heads["dead"], heads["always_open"]) == ([1], [3])
    assert summary["summary"]["attn_output"]["dead_heads"] == 1
    assert summary["summary"]["attn_output"]["always_open_heads"] == 1


def close_enough(found, wanted):
    """Equal summaries up to rounding; a value at the edge of a bin may change sides."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(close_enough(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(close_enough, found, wanted))
    return found == (pytest.approx(wanted, rel=1e-2, abs=2e-3) if isinstance(wanted, float) else wanted)


def without_histogram(summary):
    return {**summary, "layers": [{**row, "histogram": None} for row in summary["layers"]]}


def test_chunks_with_a_cache_and_merged_halves_equal_one_pass():
    model, ids = tiny_model(), tokens(2, 12)
    whole = without_histogram(probed(model, input_ids=ids, attention=True).statistics.summary())

    chunked, attention = None, AttentionProbe(model)
    with attention, GateProbe(model, attention, skip_queries=4) as probe, torch.no_grad():
        for first, last in ((0, 3), (3, 11), (11, 12)):
            chunk = {"input_ids": ids[:, first:last], CACHE: chunked}
            chunked = model(**chunk, use_cache=True).past_key_values
    assert close_enough(without_histogram(probe.statistics.summary()), whole)

    halves = [probed(model, input_ids=ids[i : i + 1], attention=True).statistics for i in range(2)]
    stored = [json.loads(json.dumps(half.to_dict(), allow_nan=False)) for half in halves]
    merged = GateStatistics.from_dict(stored[1])
    merged.merge(GateStatistics.from_dict(stored[0]))
    assert close_enough(without_histogram(merged.summary()), whole)
    assert merged.tokens == 24


def test_a_report_is_json():
    model = tiny_model(gate_positions=EVERY_POSITION, gate_activation="softplus")
    summary = probed(model, input_ids=tokens(1, 3), attention=True).statistics.summary()
    rest = summary["layers"][0]["by_class"]["rest"]
    assert (rest["mean"], rest["tokens"], set(rest["quantiles"].values())) == (None, 0, {None})
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_a_model_without_gates_reports_none(name):
    assert probed(probe_model(name), input_ids=tokens(1, 5)).statistics.summary() is None


def test_an_unknown_gate_is_refused_by_name():
    model = probe_model("llama")
    model.model.layers[1].self_attn.g_proj = nn.Linear(32, 4)
    with pytest.raises(ValueError, match="LlamaModel gates its attention in a way that is not known here"):
        GateProbe(model)


@pytest.mark.parametrize("first", ["attention", "gates"])
def test_probes_nest_in_any_order_and_leave_nothing(first):
    model, ids = tiny_model(attn_output_norm=True), tokens(2, 9)
    attention = AttentionProbe(model)
    gates = GateProbe(model, attention)
    outer, inner = (attention, gates) if first == "attention" else (gates, attention)
    with torch.no_grad():
        plain = model(ids).logits
        with outer, inner:
            torch.testing.assert_close(model(ids).logits, plain)
        with pytest.raises(IndexError), outer, inner:
            model(torch.tensor([[64]]))
        assert torch.equal(model(ids).logits, plain)
    assert row_of(gates.statistics.summary())["written"] is not None
    assert not attention.on_share
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_a_training_step_keeps_its_gradients_and_counts_checkpointed_layers_once():
    model, ids = tiny_model(), tokens(2, 5)
    model.train()

    def gradient():
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return model.model.layers[0].self_attn.g_proj.weight.grad.clone()

    plain = gradient()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with GateProbe(model) as probe:
        torch.testing.assert_close(gradient(), plain)
    assert probe.statistics.summary()["tokens"] == 10
    assert probe.statistics.table["0.attn_output.histogram"].total == 2 * 5 * 32


def test_the_gates_of_a_mixture_of_experts_are_read():
    config = GatedQwenMoeConfig(**TINY_FIELDS, **EXPERTS, gate_granularity="headwise")
    model = randomize(GatedQwenMoeForCausalLM(config)).eval()
    probe = probed(model, input_ids=tokens(2, 9))
    pre_gate, gated = probe.outputs[1]
    torch.testing.assert_close(pre_gate * probe.gates[1, "attn_output"], gated)


def test_a_gate_with_an_adapter_is_read_through_it():
    model = tiny_model(gate_granularity="headwise")
    before = probed(model, input_ids=tokens(2, 9)).gates[0, "attn_output"]
    adapted = get_peft_model(model, LoraConfig(target_modules=["g_proj"], r=2, init_lora_weights=False))
    probe = probed(adapted, input_ids=tokens(2, 9))
    pre_gate, gated = probe.outputs[0]
    torch.testing.assert_close(pre_gate * probe.gates[0, "attn_output"], gated)
    assert not torch.allclose(probe.gates[0, "attn_output"], before, atol=1e-3)


def test_one_probe_serves_inference_mode_and_no_grad_in_turn():
    model = tiny_model()
    probe = GateProbe(model)
    with torch.inference_mode(), probe:
        model(tokens(2, 5))
    with torch.no_grad(), probe:
        model(tokens(2, 5))
    assert probe.statistics.summary()["tokens"] == 20


def test_gates_that_are_not_finite_are_counted_and_averaged_with_nothing():
    model = tiny_model(gate_bias=True, gate_granularity="headwise")
    with torch.no_grad():
        model.model.layers[1].self_attn.g_proj.bias[2] = math.nan
    row = row_of(probed(model, input_ids=tokens(2, 9)).statistics.summary(), layer=1)
    assert row["nonfinite"] == 18
    assert all(math.isfinite(row["heads"]["mean"][head]) for head in (0, 1, 3))
    assert math.isfinite(row["mean"]) and math.isfinite(row["quantiles"]["0.5"])
    with torch.no_grad():
        model.model.layers[0].self_attn.g_proj.bias.fill_(math.nan)
    summary = probed(model, input_ids=tokens(2, 9)).statistics.summary()  # everything is broken, and can be said
    assert math.isnan(summary["summary"]["attn_output"]["mean"])
    assert row_of(summary)["nonfinite"] == 72
