"""Interventions set the gate to what they say, change what they must, and leave no trace."""

import pytest
import torch
from gated_models import NATIVE_FAMILIES, native_model, official_model
from probe_models import probe_model
from tiny import EVERY_POSITION, set_gate_scores, tiny_model, tokens

from gated_qwen.diagnostics.gate_probe import GateProbe
from gated_qwen.diagnostics.gate_readers import gate_sites
from gated_qwen.diagnostics.gate_scores import INVERSES
from gated_qwen.diagnostics.interventions import clamp_gates, close_gates, mean_gates, open_gates, shuffle_gates
from gated_qwen.modeling_gated_qwen import GATE_FUNCTIONS

IDS = tokens(2, 9)


def outcome(model, *contexts, **inputs):
    """Logits, the gates by (layer, position) and what enters each o_proj, inside the contexts."""
    seen, entering = {}, {}
    probe = GateProbe(model)
    update = probe.statistics.update

    def keep(site, gate, batch):
        seen[site.layer, site.position] = gate
        update(site, gate, batch)

    probe.statistics.update = keep
    hooks = [
        site.attention.o_proj.register_forward_pre_hook(
            lambda module, args, layer=site.layer: entering.__setitem__(layer, args[0])
        )
        for site in gate_sites(model)
    ]
    inputs = inputs or {"input_ids": IDS}
    with torch.no_grad(), probe:  # entered first: it has to see what later contexts change
        for context in contexts:
            context.__enter__()
        logits = model(**inputs).logits
        for context in reversed(contexts):
            context.__exit__(None, None, None)
    for hook in hooks:
        hook.remove()
    return logits, seen, entering


@pytest.mark.parametrize("activation", INVERSES)
def test_inverses_give_the_value_back(activation):
    low, high = {"ns_sigmoid": (0.5, 1.0), "sigmoid": (0.0, 1.0), "softplus": (0.0, 9.0)}.get(activation, (-0.25, 9.0))
    values = torch.linspace(low, high, 101, dtype=torch.float64)
    scores = INVERSES[activation](values).clamp(-1e4, 1e4)
    torch.testing.assert_close(GATE_FUNCTIONS[activation](scores), values, rtol=1e-9, atol=1e-9)
    bounds = torch.tensor([0.0, 1.0] if activation != "ns_sigmoid" else [0.5, 1.0], dtype=torch.float64)
    exact = GATE_FUNCTIONS[activation](INVERSES[activation](bounds).clamp(-1e4, 1e4).float())
    assert exact[0] == bounds[0] and exact[1] == pytest.approx(1.0, abs=1e-7)


def models():
    yield "elementwise", tiny_model
    yield "headwise", lambda: tiny_model(gate_granularity="headwise")
    yield "shared", lambda: tiny_model(gate_head_shared=True)
    yield "constant", lambda: tiny_model(gate_input="constant")
    yield "official", lambda: official_model(tiny_model())
    yield "official headwise", lambda: official_model(tiny_model(gate_granularity="headwise"))
    yield from ((family, lambda family=family: native_model(family)) for family in NATIVE_FAMILIES)


@pytest.mark.parametrize(("name", "make"), list(models()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_family_opens_closes_and_clamps(name, make):
    model = make()
    plain, gates, _ = outcome(model)
    logits, opened, entering = outcome(model, open_gates(model))
    assert all(torch.allclose(gate, torch.ones(()), rtol=0, atol=1e-6) for gate in opened.values())
    assert not torch.allclose(logits, plain, atol=1e-3)
    _, closed, entering = outcome(model, close_gates(model))
    assert all((gate == 0).all() for gate in closed.values())
    assert all((states == 0).all() for states in entering.values())
    _, clamped, _ = outcome(model, clamp_gates(model, 0.4, 0.6))
    for place, gate in clamped.items():
        if place[0] == 0:  # later layers see other hidden states
            torch.testing.assert_close(gate, gates[place].clamp(0.4, 0.6))
    assert torch.equal(outcome(model)[0], plain)


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_an_open_gate_is_no_gate(position):
    """Logits of the model with the gate replaced by 1 are those of the same weights without gates."""
    gated, plain = tiny_model(gate_positions=[position]), tiny_model(gate_positions=[])
    plain.load_state_dict(gated.state_dict(), strict=False)
    logits, _, _ = outcome(gated, open_gates(gated))
    with torch.no_grad():
        torch.testing.assert_close(logits, plain(IDS).logits)


def test_an_added_gate_is_open_at_0_and_cannot_be_closed():
    gated, plain = tiny_model(gate_operation="add", gate_activation="silu"), tiny_model(gate_positions=[])
    plain.load_state_dict(gated.state_dict(), strict=False)
    logits, _, _ = outcome(gated, open_gates(gated))
    with torch.no_grad():
        torch.testing.assert_close(logits, plain(IDS).logits)
    with pytest.raises(ValueError, match="attn_output is added"):
        outcome(gated, close_gates(gated))


def test_a_closed_layer_adds_nothing():
    model = tiny_model()
    added = []
    hook = model.model.layers[1].self_attn.register_forward_hook(lambda module, args, out: added.append(out[0]))
    outcome(model, close_gates(model, layers=[1]))
    hook.remove()
    assert (added[0] == 0).all()


def test_a_clamp_that_holds_nothing_back_changes_nothing():
    for model in (tiny_model(gate_positions=EVERY_POSITION), tiny_model(gate_head_shared=True)):
        with torch.no_grad():
            plain = model(IDS).logits
            with clamp_gates(model, 0.0, 1.0):
                assert torch.equal(model(IDS).logits, plain)
            with clamp_gates(model, 0.45, 0.55):
                assert not torch.allclose(model(IDS).logits, plain, atol=1e-3)


@pytest.mark.parametrize("activation", ["sigmoid", "silu", "softplus", "ns_sigmoid", "identity"])
def test_a_clamp_is_a_clamp_of_the_activated_gate(activation):
    model = tiny_model(gate_activation=activation)
    low, high = (0.6, 0.8) if activation == "ns_sigmoid" else (0.3, 0.7)
    _, gates, _ = outcome(model)
    _, clamped, _ = outcome(model, clamp_gates(model, low, high))
    torch.testing.assert_close(clamped[0, "attn_output"], gates[0, "attn_output"].clamp(low, high))


def test_only_the_chosen_layers_heads_and_positions_change():
    model = tiny_model(gate_positions=["value", "attn_output"])
    _, gates, _ = outcome(model)
    _, changed, _ = outcome(model, close_gates(model, layers=[0], heads=[1, 3], positions=["attn_output"]))
    assert (changed[0, "attn_output"][:, :, [1, 3]] == 0).all()
    assert torch.equal(changed[0, "attn_output"][:, :, [0, 2]], gates[0, "attn_output"][:, :, [0, 2]])
    assert torch.equal(changed[0, "value"], gates[0, "value"])
    assert (changed[1, "attn_output"] > 0).all()


@pytest.mark.parametrize("make", [tiny_model, lambda: native_model("qwen3_next")], ids=["ours", "native"])
def test_shuffling_over_tokens_moves_the_gates_of_real_tokens_only(make):
    model = make()
    real = torch.tensor([[0, 0, 0] + [1] * 6, [1] * 9])
    inputs = {"input_ids": torch.arange(1, 19).view(2, 9), "attention_mask": real}  # no token comes twice
    plain, gates, _ = outcome(model, **inputs)
    logits, shuffled, _ = outcome(model, shuffle_gates(model, "tokens", seed=3), **inputs)
    assert not torch.allclose(logits, plain, atol=1e-3)
    before, after = gates[0, "attn_output"], shuffled[0, "attn_output"]
    assert not torch.equal(before, after)
    assert torch.equal(before[0, :3], after[0, :3])
    for row, first in ((0, 3), (1, 0)):
        assert torch.equal(before[row, first:].sort(0).values, after[row, first:].sort(0).values)
        order = [int((before[row] == token).flatten(1).all(1).nonzero()[0]) for token in after[row, first:]]
        assert sorted(order) == list(range(first, 9))  # whole tokens changed places
    again, _, _ = outcome(model, shuffle_gates(model, "tokens", seed=3), **inputs)
    other, _, _ = outcome(model, shuffle_gates(model, "tokens", seed=4), **inputs)
    assert torch.equal(again, logits) and not torch.equal(other, logits)


def test_shuffling_over_heads_moves_whole_heads():
    model = tiny_model()
    plain, gates, _ = outcome(model)
    logits, shuffled, _ = outcome(model, shuffle_gates(model, "heads", seed=1))
    assert not torch.allclose(logits, plain, atol=1e-3)
    before, after = gates[0, "attn_output"], shuffled[0, "attn_output"]
    order = [next(h for h in range(4) if torch.equal(before[:, :, h], after[:, :, new])) for new in range(4)]
    assert sorted(order) == [0, 1, 2, 3] and order != [0, 1, 2, 3]


def test_the_mean_of_a_call_or_of_a_report_replaces_the_gate():
    model = tiny_model()
    plain, gates, _ = outcome(model)
    logits, averaged, _ = outcome(model, mean_gates(model))
    mean = gates[0, "attn_output"].mean((0, 1))
    torch.testing.assert_close(averaged[0, "attn_output"], mean.expand(2, 9, 4, 8))
    assert not torch.allclose(logits, plain, atol=1e-3)
    with GateProbe(model) as probe, torch.no_grad():
        model(IDS)
    _, held, _ = outcome(model, mean_gates(model, probe.statistics), input_ids=tokens(1, 3, seed=9))
    for layer in range(2):
        wanted = gates[layer, "attn_output"].mean((0, 1)).expand(1, 3, 4, 8)
        torch.testing.assert_close(held[layer, "attn_output"], wanted)
    with pytest.raises(ValueError, match="no gate at value"):
        outcome(gated := tiny_model(gate_positions=["value"]), mean_gates(gated, probe.statistics))


def test_the_mean_leaves_padding_out():
    model = tiny_model()
    real = torch.tensor([[0] * 5 + [1] * 4, [1] * 9])
    inputs = {"input_ids": IDS, "attention_mask": real}
    _, gates, _ = outcome(model, **inputs)
    _, averaged, _ = outcome(model, mean_gates(model), **inputs)
    torch.testing.assert_close(averaged[0, "attn_output"][1, 0], gates[0, "attn_output"][real.bool()].mean(0))


def test_the_mean_of_a_constant_gate_is_the_gate():
    model = tiny_model(gate_input="constant")
    logits, _, _ = outcome(model, mean_gates(model))
    with torch.no_grad():
        torch.testing.assert_close(logits, model(IDS).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_exact_at_the_ends_and_rounded_between(dtype):
    model = tiny_model().to(dtype)
    assert (outcome(model, close_gates(model))[1][0, "attn_output"] == 0).all()
    assert (outcome(model, open_gates(model))[1][0, "attn_output"] == 1).all()
    held = outcome(model, clamp_gates(model, 0.3, 0.3))[1][0, "attn_output"]
    assert (held.float() - 0.3).abs().max() < 0.3 * torch.finfo(dtype).eps * 2


def test_interventions_nest_and_the_inner_one_acts_first():
    model = tiny_model()
    _, gates, _ = outcome(model, close_gates(model, heads=[0]), clamp_gates(model, 0.5, 0.5))
    assert (gates[0, "attn_output"][:, :, 0] == 0).all()
    torch.testing.assert_close(gates[0, "attn_output"][:, :, 1:], torch.full((2, 9, 3, 8), 0.5))


@pytest.mark.parametrize("enter", [open_gates, close_gates, lambda model: shuffle_gates(model, "tokens"), mean_gates])
def test_nothing_is_left_behind_also_after_an_exception(enter):
    model = tiny_model()
    with torch.no_grad():
        plain = model(IDS).logits
        with pytest.raises(IndexError), enter(model):
            model(torch.tensor([[64]]))
        assert torch.equal(model(IDS).logits, plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_generation_under_an_intervention_equals_the_model_that_has_it():
    model = tiny_model(gate_bias=True)
    closed = set_gate_scores(tiny_model(gate_bias=True), -1e4)
    with close_gates(model):
        found = model.generate(IDS, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, closed.generate(IDS, max_new_tokens=5, do_sample=False))


def test_gradients_flow_through_a_clamp():
    model = tiny_model()
    with clamp_gates(model, 0.45, 0.55):
        model(IDS, labels=IDS).loss.backward()
    gradient = model.model.layers[0].self_attn.g_proj.weight.grad
    assert gradient.isfinite().all() and gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("fields", "enter", "message"),
    [
        ({}, lambda model: clamp_gates(model, 0.7, 0.3), "low 0.7 is not at most high 0.3"),
        ({}, lambda model: clamp_gates(model, 0.5, 1.5), "sigmoid and is never 1.5"),
        ({"gate_activation": "ns_sigmoid"}, close_gates, "ns_sigmoid and is never 0"),
        ({"gate_activation": "silu"}, lambda model: clamp_gates(model, high=-0.3), "silu and is never -0.3"),
        ({}, lambda model: open_gates(model, layers=[2]), r"no gate at 2; there are gates at \[0, 1\]"),
        ({}, lambda model: open_gates(model, positions=["value"]), "no gate at 'value'"),
        ({}, lambda model: open_gates(model, heads=[4]), "heads 0 to 3, not 4"),
        ({"gate_positions": ["key"]}, lambda model: open_gates(model, heads=[2]), "heads 0 to 1, not 2"),
        ({"gate_head_shared": True}, lambda model: open_gates(model, heads=[0]), "no heads of its own"),
        ({"gate_positions": ["dense_output"]}, lambda model: shuffle_gates(model, "heads"), "no heads of its own"),
        ({}, lambda model: shuffle_gates(model, "layers"), "'tokens' or 'heads'"),
        ({"gate_positions": []}, open_gates, "has no gates to intervene on"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(fields, enter, message):
    model = tiny_model(**fields)
    with pytest.raises(ValueError, match=message), enter(model), torch.no_grad():
        model(IDS)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_of_another_kind_has_no_gates_to_intervene_on():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no gates"), open_gates(probe_model("llama")):
        pass
