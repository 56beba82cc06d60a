"""The attention probe gives the numbers of full attention maps, on any model, however the tokens are fed."""

import json

import pytest
import torch
from probe_models import FURTHER_MODELS, PROBE_MODELS, WINDOW, probe_model
from probe_runs import (
    IDS,
    INPUTS,
    LEFT,
    LENGTH,
    SETTINGS,
    SIDE,
    assert_equal_statistics,
    assert_layer_equals_map,
    full_maps,
    layer_types,
    probed,
)
from tiny import CACHE, tokens
from transformers import DynamicCache, StaticCache

from gated_qwen.diagnostics.attention_interface import watch_attention
from gated_qwen.diagnostics.attention_probe import AttentionProbe
from gated_qwen.diagnostics.attention_statistics import AttentionSettings, AttentionStatistics

BLIND_TO_PACKING = ("gpt_oss sinks",)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", [*PROBE_MODELS, *FURTHER_MODELS])
def test_numbers_equal_those_of_the_full_maps(name, inputs):
    model = probe_model(name)
    arguments, documents = INPUTS[inputs]
    if name in BLIND_TO_PACKING and inputs == "packed":
        pytest.skip("transformers gives this family masks that do not keep packed documents apart")
    statistics = probed(model, **arguments)
    maps = full_maps(model, **arguments)
    assert sorted(statistics.layers) == sorted(maps)
    for layer, weights in maps.items():
        assert_layer_equals_map(statistics, layer, weights, documents)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "elementwise"])
def test_half_precision_equals_a_softmax_of_the_same_queries_and_keys(name, dtype):
    """To 1e-5: in half precision PyTorch's CPU kernel takes an exponential that is good to some 3e-5 of itself."""
    model = probe_model(name, dtype)
    calls = []
    with torch.no_grad(), watch_attention(model, calls.append), AttentionProbe(model, **SETTINGS) as probe:
        model(IDS, attention_mask=LEFT)
    for call in calls:
        key = call.key.double().repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
        scores = call.scale * call.query.double() @ key.transpose(-1, -2)
        weights = scores.masked_fill(~call.mask, -torch.inf).softmax(-1)
        assert_layer_equals_map(probe.statistics, call.layer, weights, INPUTS["left padding"][1], 1e-5)


@pytest.mark.parametrize("name", ["qwen3", "llama", "elementwise"])
def test_bf16_is_within_the_rounding_of_eager_maps(name):
    """An eager score s is off by up to 2^-9 |s|, here |s| < 6: a weight by up to 1.2 % of itself, and then rounded."""
    model = probe_model(name, torch.bfloat16)
    statistics = probed(model)
    for layer, weights in full_maps(model).items():
        expected = weights[..., 0].mean(dim=(0, 2))
        found = torch.tensor(statistics.summary()["layers"][layer]["heads"]["first_token_share"]).double()
        torch.testing.assert_close(found, expected, rtol=0.016, atol=0)


CHUNKED = ["qwen3", "gpt2", "elementwise", "mistral sliding", "gemma2 soft-capped", "gpt_oss sinks"]


def dynamic(model):
    return DynamicCache(config=model.config)


def static(model):
    return StaticCache(config=model.config, max_cache_len=64)


@pytest.mark.parametrize("cuts", [(1, 2, 18, 39), range(1, LENGTH)], ids=["chunks", "tokens"])
@pytest.mark.parametrize("make_cache", [dynamic, static])
@pytest.mark.parametrize("padding", ["plain", "left padding"])
@pytest.mark.parametrize("name", CHUNKED)
def test_a_prefill_in_chunks_gives_the_numbers_of_one_pass(name, padding, make_cache, cuts):
    model = probe_model(name)
    mask = INPUTS[padding][0].get("attention_mask", SIDE)
    cache = make_cache(model)
    with torch.no_grad(), AttentionProbe(model, **SETTINGS) as probe:
        for first, last in zip([0, *cuts], [*cuts, LENGTH], strict=True):
            model(IDS[:, first:last], attention_mask=mask[:, :last], use_cache=True, **{CACHE: cache})
    assert_equal_statistics(probe.statistics, probed(model, **INPUTS[padding][0]))


@pytest.mark.parametrize("columns", ["off", "sample"])
def test_a_long_document_in_chunks_gives_the_sample_of_one_pass(columns):
    model = probe_model("qwen3")
    ids = tokens(1, 400)
    settings = {**SETTINGS, "columns": columns}
    cache = dynamic(model)
    with torch.no_grad(), AttentionProbe(model, **settings) as probe:
        for first in range(0, 400, 150):
            model(ids[:, first : first + 150], use_cache=True, **{CACHE: cache})
    assert_equal_statistics(probe.statistics, probed(model, ids, settings))
    if columns == "off":
        assert probe.statistics.columns == {}
    else:
        assert probe.statistics.columns[0].queries == 64 + (400 - 64) // 16


def test_generation_is_measured_like_a_pass_over_what_was_generated():
    model = probe_model("elementwise")
    with torch.no_grad(), AttentionProbe(model, **SETTINGS) as probe:
        written = model.generate(IDS, attention_mask=LEFT, max_new_tokens=6, do_sample=False, pad_token_id=0)
    mask = torch.cat([LEFT, torch.ones(2, 5, dtype=torch.long)], dim=1)
    assert_equal_statistics(probe.statistics, probed(model, written[:, :-1], attention_mask=mask))


@pytest.mark.parametrize("through_json", [False, True])
def test_two_batches_merge_to_one(through_json):
    model = probe_model("qwen3")
    one = probed(model, attention_mask=LEFT)
    first = probed(model, IDS[:1], attention_mask=LEFT[:1])
    second = probed(model, IDS[1:], attention_mask=LEFT[1:])
    if through_json:  # as between processes
        second = AttentionStatistics.from_dict(json.loads(json.dumps(second.to_dict())))
    first.merge(second)
    assert_equal_statistics(first, one)


@pytest.mark.parametrize("modes", [(torch.no_grad, torch.no_grad), (torch.inference_mode, torch.no_grad)], ids=str)
def test_calls_of_one_probe_add_up(modes):
    model = probe_model("qwen3")
    first, second = modes
    with AttentionProbe(model, **SETTINGS) as probe:
        with first():
            model(IDS[:1], attention_mask=LEFT[:1])
        with second():
            model(IDS[1:])
    expected = probed(model, attention_mask=LEFT)
    assert_equal_statistics(probe.statistics, expected)
    probe.statistics.merge(expected)
    assert probe.statistics.summary()["queries"] == 2 * expected.summary()["queries"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_prepared_mask_counts_like_the_padding_it_was_made_of(dtype):
    model = probe_model("qwen3")
    visible = LEFT.bool()[:, None, None, :] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask = visible
    if dtype == torch.float32:
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    places = (LEFT.cumsum(1) - 1).clamp(min=0)
    prepared = probed(model, attention_mask=mask, position_ids=places, use_cache=False)
    assert_equal_statistics(prepared, probed(model, attention_mask=LEFT, position_ids=places))


def test_statistics_of_other_settings_do_not_merge():
    with pytest.raises(ValueError, match="cannot be merged"):
        AttentionStatistics().merge(AttentionStatistics(AttentionSettings(skip_queries=3)))


@pytest.mark.parametrize("settings", [{"columns": "some"}, {"skip_queries": -1}, {"head_keys": 0}, {"keys": [-1]}])
def test_settings_without_a_meaning_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        AttentionProbe(probe_model("qwen3"), **settings)


def test_what_was_not_measured_is_null_and_json():
    model = probe_model("mistral sliding")
    summary = probed(model, settings={"skip_queries": 64, "keys": [50]}).summary()
    layer = summary["layers"][0]
    assert layer["first_token_share_skipped"] is layer["uniform_skipped"] is layer["key_shares"][0] is None
    assert summary["mean"]["first_token_share_skipped"] is None and layer["sliding_window"] == WINDOW
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert AttentionStatistics().summary()["layers"] == []


def test_a_model_that_ignores_packing_has_the_first_token_of_the_row():
    model = probe_model("gpt_oss sinks")
    arguments = INPUTS["packed"][0]
    full_layer = layer_types(model).index("full_attention")
    summary = probed(model, **arguments).summary()["layers"][full_layer]
    assert summary["first_token_share"] == pytest.approx(
        full_maps(model, **arguments)[full_layer][..., 0].mean().item()
    )
    assert summary["uniform"] == pytest.approx(sum(1 / n for n in range(1, LENGTH + 1)) / LENGTH)


def test_callbacks_receive_the_share_of_every_query():
    model = probe_model("qwen3")
    seen = {}
    with torch.no_grad(), AttentionProbe(model) as probe:
        probe.on_share.append(lambda layer, share: seen.update({layer: share}))
        model(IDS, attention_mask=LEFT)
    for layer, weights in full_maps(model, attention_mask=LEFT).items():
        expected = torch.stack([weights[0, :, :, 7], weights[1, :, :, 0]])
        real = LEFT.bool()[:, None].expand(-1, 4, -1)
        torch.testing.assert_close(seen[layer].double()[real], expected[real], atol=1e-6, rtol=0)
