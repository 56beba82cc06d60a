"""The activation probe reports raw activations where they are, on any model and however the tokens are fed."""

import json

import pytest
import torch
from probe_models import PROBE_MODELS, probe_model
from tiny import CACHE, tiny_model, tokens

from gated_qwen.diagnostics.activation_probe import ActivationProbe
from gated_qwen.diagnostics.activation_statistics import ActivationStatistics


def measured(model, *calls, top=10, **fields):
    """The summary after the given calls, each a dict of keyword arguments."""
    with ActivationProbe(model, top) as probe, torch.no_grad():
        for call in calls or [fields]:
            model(**call)
    return probe.statistics.summary()


@pytest.mark.parametrize("name", PROBE_MODELS)
def test_maxima_and_medians_are_those_of_the_hidden_states(name):
    model = probe_model(name)
    ids = tokens(2, 9)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    rows = measured(model, input_ids=ids)["residual"]
    assert [row["index"] for row in rows] == list(range(model.config.num_hidden_layers + 1))
    for row, states in zip(rows[:-1], hidden[:-1], strict=True):  # the last of the library's is after the final norm
        assert row["max"] == states.abs().max().item()
        assert row["median"] == pytest.approx(states.abs().median().item(), rel=1 / 16)
    assert rows[-1]["max"] != pytest.approx(hidden[-1].abs().max().item(), rel=1e-3)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "qwen3_next hybrid", "gemma2 soft-capped", "elementwise"])
def test_what_attention_and_ffn_add_is_the_step_of_the_residual_stream(name):
    """Index i + 1 of the stream minus index i is what the two parts of layer i add."""
    model = probe_model(name)
    states = {}
    with ActivationProbe(model) as probe, torch.no_grad():
        update = probe.statistics.update

        def keep(kind, index, seen, batch):
            states[kind, index] = seen.clone()
            update(kind, index, seen, batch)

        probe.statistics.update = keep
        model(tokens(2, 5))
    for i in range(model.config.num_hidden_layers):
        step = states["attention_output", i] + states["ffn_output", i]
        torch.testing.assert_close(states["residual", i] + step, states["residual", i + 1])


def test_sandwich_norms_are_part_of_what_is_added():
    model = tiny_model(sandwich_norm=True)
    norm = model.model.layers[1].mlp_sandwich_layernorm
    seen = []
    norm.register_forward_hook(lambda module, args, output: seen.append(output))
    summary = measured(model, input_ids=tokens(1, 5))
    assert summary["ffn_output"][1]["max"] == seen[0].abs().max().item()


@pytest.mark.parametrize("layer", [0, 1], ids=["first layer", "last layer"])
def test_a_planted_activation_is_reported_where_it_is(layer):
    """1e3 in one channel of one token at the output of a layer."""
    model, ids = tiny_model(), tokens(2, 7)
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])

    def plant(module, args, output):
        if output.shape[1] == 7:
            output[0, 4, 11] = -1e3
            output[0, 1, 5] = 1e6  # on padding
        return output

    handle = model.model.layers[layer].register_forward_hook(plant)
    summary = measured(model, {"input_ids": tokens(3, 4)}, {"input_ids": ids, "attention_mask": real})
    handle.remove()
    largest = summary["residual"][layer + 1]["top"][0]
    assert largest == {
        "value": -1e3,
        "sequence": 3,
        "document": 0,
        "position": 2,
        "channel": 11,
        "token_id": ids[0, 4].item(),
    }
    assert summary["residual"][layer + 1]["max"] == 1e3
    assert summary["summary"]["residual"]["max_over_layers"] >= 1e3
    assert summary["residual"][layer]["max"] < 100  # not where it was not planted
    assert summary["tokens"] == 12 + 5 + 7


def test_index_0_is_the_embedding_and_does_not_enter_the_summary():
    model, ids = tiny_model(), tokens(1, 6)
    with torch.no_grad():
        model.get_input_embeddings().weight[ids[0, 2], 9] = 500.0
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, output: output * 0 + 2.0)
    summary = measured(model, input_ids=ids)
    assert summary["residual"][0]["max"] == 500.0
    assert summary["residual"][0]["top"][0]["token_id"] == ids[0, 2].item()
    assert summary["summary"]["residual"] == {"mean_of_layer_maxima": 2.0, "max_over_layers": 2.0, "max_index": 1}


def test_mean_of_layer_maxima_and_maximum_over_layers_are_told_apart():
    summary = measured(tiny_model(), input_ids=tokens(2, 9))
    for kind in ("attention_output", "ffn_output"):
        maxima = [row["max"] for row in summary[kind]]
        assert summary["summary"][kind]["mean_of_layer_maxima"] == pytest.approx(sum(maxima) / 2)
        assert summary["summary"][kind]["max_over_layers"] == max(maxima)
        assert summary["summary"][kind]["max_index"] == maxima.index(max(maxima))


def test_top_values_are_the_largest_in_order():
    model, ids = tiny_model(), tokens(2, 9)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states[1]
    top = measured(model, input_ids=ids, top=25)["residual"][1]["top"]
    wanted = states.abs().flatten().topk(25).values.tolist()
    assert [abs(entry["value"]) for entry in top] == wanted
    for entry in top:
        assert states[entry["sequence"], entry["position"], entry["channel"]].item() == entry["value"]
        assert ids[entry["sequence"], entry["position"]].item() == entry["token_id"]


def test_bfloat16_values_are_exact():
    model, ids = tiny_model().bfloat16(), tokens(2, 9)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states[1]
    row = measured(model, input_ids=ids)["residual"][1]
    assert row["max"] == states.abs().max().item()
    assert row["quantiles"]["0.9"] == pytest.approx(torch.quantile(states.abs().float(), 0.9).item(), rel=1 / 32)


def rows_without_rounding(summary):
    return [
        (kind, row["index"], round(row["max"], 4), row["top"][0]["position"], row["top"][0]["channel"])
        for kind in summary["kinds"]
        for row in summary[kind]
    ]


def test_padding_changes_nothing():
    model, ids = tiny_model(), tokens(1, 6)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    real = torch.tensor([[0] * 4 + [1] * 6])
    places = (real.cumsum(1) - 1).clamp(min=0)
    alone = measured(model, input_ids=ids)
    together = measured(model, input_ids=padded, attention_mask=real, position_ids=places)
    assert rows_without_rounding(alone) == rows_without_rounding(together)
    assert together["tokens"] == 6


def test_packed_documents_are_told_apart():
    model, ids = tiny_model(), tokens(1, 6)
    summary = measured(model, input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)
    for entry in summary["residual"][2]["top"]:
        assert ids[0, 3 * entry["document"] + entry["position"]].item() == entry["token_id"]


def test_chunks_with_a_cache_equal_one_pass():
    model, ids = tiny_model(), tokens(2, 9)
    whole = measured(model, input_ids=ids)
    cache = None
    with ActivationProbe(model) as probe, torch.no_grad():
        for first, last in ((0, 4), (4, 8), (8, 9)):
            cache = model(**{"input_ids": ids[:, first:last], CACHE: cache}, use_cache=True).past_key_values
    assert rows_without_rounding(probe.statistics.summary()) == rows_without_rounding(whole)
    assert probe.statistics.summary()["tokens"] == 18


def test_merged_processes_equal_one():
    model, ids = tiny_model(), tokens(4, 6)
    whole = measured(model, {"input_ids": ids[:2]}, {"input_ids": ids[2:]})
    parts = []
    for half in (ids[:2], ids[2:]):
        with ActivationProbe(model) as probe, torch.no_grad():
            model(half)
        parts.append(json.loads(json.dumps(probe.statistics.to_dict(), allow_nan=False)))
    merged = ActivationStatistics.from_dict(parts[1])
    merged.merge(ActivationStatistics.from_dict(parts[0]))
    merged = merged.summary()
    assert merged["tokens"] == whole["tokens"] == 24
    for kind in whole["kinds"]:
        for row, wanted in zip(merged[kind], whole[kind], strict=True):
            assert (row["max"], row["median"], row["quantiles"]) == (
                wanted["max"],
                wanted["median"],
                wanted["quantiles"],
            )


def test_values_that_are_not_finite_are_counted_and_hide_nothing():
    model, ids = tiny_model(), tokens(1, 6)

    def spoil(module, args, output):
        output[0, 3, 0], output[0, 4, 1], output[0, 5, 2] = float("nan"), float("inf"), 77.0
        return output

    model.model.layers[1].register_forward_hook(spoil)
    row = measured(model, input_ids=ids)["residual"][2]
    assert (row["nonfinite"], row["max"], row["top"][0]["position"]) == (2, 77.0, 5)
    json.dumps(row, allow_nan=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    summary = measured(model, input_ids=ids)  # nothing is finite, and can be said
    assert (summary["residual"][0]["nonfinite"], summary["residual"][0]["top"]) == (6 * 32, [])


def test_logits_are_untouched_and_no_hook_stays():
    model, ids = tiny_model(), tokens(2, 9)
    with torch.no_grad():
        plain = model(ids).logits
        with ActivationProbe(model) as probe:
            assert torch.equal(model(ids).logits, plain)
        with pytest.raises(RuntimeError, match="stop"), probe:
            model.model.layers[1].register_forward_pre_hook(stop := Stop())
            model(ids)
        stop.armed = False
        assert torch.equal(model(ids).logits, plain)
    own = [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert own == [model.model.layers[1]]  # the test's own


class Stop:
    armed = True

    def __call__(self, *_):
        if self.armed:
            raise RuntimeError("stop")


def test_a_training_step_keeps_its_gradients_and_counts_checkpointed_layers_once():
    model, ids = tiny_model(), tokens(2, 5)
    model.train()

    def gradient():
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    plain = gradient()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with ActivationProbe(model) as probe:
        torch.testing.assert_close(gradient(), plain)
    assert probe.statistics.table["ffn_output.0.magnitudes"].total == 2 * 5 * 32
