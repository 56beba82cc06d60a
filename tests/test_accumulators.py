"""Streaming statistics equal those of all data at once, however it was split, merged and stored."""

import json
import math

import pytest
import torch

from gated_qwen.diagnostics.accumulator_table import AccumulatorTable
from gated_qwen.diagnostics.accumulators import Extremes, Moments, PerPosition, log_spaced_positions
from gated_qwen.diagnostics.histograms import LinearHistogram, LogHistogram
from gated_qwen.diagnostics.largest_values import LargestValues, largest_indices

LABELS = ["sequence", "position"]


def awkward_values(n=600, dtype=torch.float32):
    """Heavy tails, ties, zeros, and a few values that are not finite."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(n, 3, generator=generator) * torch.exp(3 * torch.randn(n, 3, generator=generator))
    values[::7] = values[::7].round()
    values[5, 0], values[50, 1], values[500, 2] = math.nan, math.inf, -math.inf
    return values.to(dtype)


def _largest(rows, at):
    largest = LargestValues(7, LABELS)
    tokens = at.repeat_interleave(3)
    largest.update(rows.flatten(), sequence=tokens // 100, position=tokens % 100)
    return largest


def _updated(accumulator, *arguments):
    accumulator.update(*arguments)
    return accumulator


ACCUMULATORS = {
    "moments": lambda rows, at: _updated(Moments([3]), rows),
    "one mean": lambda rows, at: _updated(Moments(), rows),
    "extremes": lambda rows, at: _updated(Extremes([3]), rows),
    "by position": lambda rows, at: _updated(PerPosition(log_spaced_positions(octaves=9), [3]), at, rows),
    "linear": lambda rows, at: _updated(LinearHistogram(-2.0, 2.0, 40), rows),
    "logarithmic": lambda rows, at: _updated(LogHistogram(), rows),
    "largest": _largest,
}


def assert_same(found, wanted):
    """Equal states: integers to the last, float64 sums to their rounding."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-12, abs=1e-9)
    else:
        assert found == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ACCUMULATORS)
@pytest.mark.parametrize("seed", range(3))
def test_any_split_merged_in_any_order_equals_one_pass(name, dtype, seed):
    rows, at = awkward_values(dtype=dtype), torch.arange(600)
    whole = ACCUMULATORS[name](rows, at)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows), generator=generator)
    cuts = sorted(torch.randint(0, len(rows), (5,), generator=generator).tolist())  # empty parts are possible
    parts = [ACCUMULATORS[name](rows[part], at[part]) for part in (p.sort().values for p in order.tensor_split(cuts))]
    merged = parts.pop()
    for part in parts:
        merged.merge(part)
    assert_same(merged.to_dict(), whole.to_dict())


@pytest.mark.parametrize("name", ACCUMULATORS)
def test_state_survives_json(name):
    whole = ACCUMULATORS[name](awkward_values(), torch.arange(600))
    text = json.dumps(AccumulatorTable({"it": whole}).to_dict(), allow_nan=False)
    assert AccumulatorTable.from_dict(json.loads(text))["it"].to_dict() == whole.to_dict()


def test_an_empty_accumulator_survives_json_and_changes_nothing_when_merged():
    empty = Extremes.from_dict(json.loads(json.dumps(Extremes([3]).to_dict(), allow_nan=False)))
    whole = ACCUMULATORS["extremes"](awkward_values(), None)
    before = whole.to_dict()
    whole.merge(empty)
    assert whole.to_dict() == before


def test_a_table_merges_by_name_and_copies_what_is_new():
    one, other = AccumulatorTable(), AccumulatorTable()
    one.of("both", Moments).update(torch.tensor([1.0]))
    other.of("both", Moments).update(torch.tensor([4.0]))
    other.of("new", Moments).update(torch.tensor([7.0]))
    one.merge(other)
    other["new"].update(torch.tensor([100.0]))
    assert (one["both"].mean(), one["new"].mean()) == (2.5, 7.0)


@pytest.mark.parametrize("name", [name for name in ACCUMULATORS if name != "largest"])
def test_inference_mode_and_no_grad_may_take_turns(name):
    """A state that inference mode had made could not be updated outside it."""
    rows, at = awkward_values(), torch.arange(600)
    table = AccumulatorTable()
    with torch.inference_mode():
        kind = ACCUMULATORS[name](rows[:0], at[:0])
        accumulator = table.of("it", lambda: type(kind)(*(getattr(kind, setting) for setting in kind.SETTINGS)))
        arguments = (at, rows) if name == "by position" else (rows,)
        accumulator.update(*arguments)
    accumulator.update(*arguments)
    accumulator.merge(ACCUMULATORS[name](rows, at))
    wanted = ACCUMULATORS[name](torch.cat([rows] * 3), torch.cat([at] * 3))
    assert_same(accumulator.to_dict(), wanted.to_dict())


def test_other_settings_do_not_merge():
    with pytest.raises(ValueError, match="same settings"):
        LinearHistogram(0.0, 1.0, 10).merge(LinearHistogram(0.0, 1.0, 20))
    with pytest.raises(ValueError, match="same k"):
        LargestValues(2, LABELS).merge(LargestValues(3, LABELS))


def test_moments_are_those_of_the_finite_values():
    rows = awkward_values()
    moments = ACCUMULATORS["moments"](rows, None)
    for column in range(3):
        finite = rows[:, column][rows[:, column].isfinite()].double()
        assert moments.mean()[column].item() == pytest.approx(finite.mean().item(), rel=1e-12)
        assert moments.std()[column].item() == pytest.approx(finite.std(correction=0).item(), rel=1e-9)
        assert moments.rms()[column].item() == pytest.approx(finite.square().mean().sqrt().item(), rel=1e-12)
    assert moments.nonfinite.tolist() == [1, 1, 1]


def test_a_small_mean_beside_a_large_one_is_kept_by_float64():
    """In float32 the sum 1e8 + 1 is 1e8."""
    moments = _updated(Moments(), torch.tensor([1e8, 1.0, -1e8]))
    assert moments.mean().item() == pytest.approx(1 / 3, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_update_leaves_its_argument_as_it_was(dtype):
    values = awkward_values().to(dtype)
    before = values.clone()
    for make in ACCUMULATORS.values():
        make(values, torch.arange(600))
    assert torch.equal(values.nan_to_num(), before.nan_to_num())


def test_a_mask_leaves_values_out():
    values, mask = torch.tensor([[1.0, 100.0], [3.0, math.nan]]), torch.tensor([[True, False], [True, False]])
    assert _updated(Moments(), values, mask).mean() == 2.0
    assert _updated(Extremes(), values, mask).high == 3.0
    assert _updated(LogHistogram(), values, mask).total == 2
    assert _updated(LinearHistogram(0.0, 4.0, 4), values, mask).counts.tolist() == [0, 1, 0, 1]
    curve = _updated(PerPosition([0, 1, 2]), torch.tensor([[0, 1], [1, 0]]), values, mask)
    assert (curve.count.tolist(), curve.mean().tolist()) == ([1, 1], [1.0, 3.0])


def test_positions_fall_into_their_bins_and_late_ones_into_the_last():
    curve = _updated(PerPosition([0, 1, 2, 4]), torch.tensor([0, 1, 2, 3, 4, 99]), torch.arange(6.0))
    assert curve.count.tolist() == [1, 1, 4]
    assert curve.mean().tolist() == [0.0, 1.0, 3.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantiles_of_magnitudes_are_right_to_a_bin(dtype):
    values = torch.exp(2 * torch.randn(20000)).to(dtype)
    histogram = _updated(LogHistogram(), -values)
    for q in (0.01, 0.1, 0.5, 0.9, 0.999):
        assert histogram.quantile(q) == pytest.approx(torch.quantile(values.float(), q).item(), rel=1 / 32)
        edge = histogram.quantile(q)
        assert histogram.fraction_below(edge) == pytest.approx(q, abs=1e-9)


def test_shares_below_a_power_of_two_are_exact():
    """Powers of two are edges of bins, so nothing is interpolated."""
    values = torch.randn(5000)
    histogram = _updated(LogHistogram(), values)
    for tau in (2.0**-12, 2.0**-3, 1.0, 2.0):
        assert histogram.fraction_below(tau) == (values.abs() < tau).double().mean().item()


def test_zeros_tiny_values_and_the_largest_float_have_a_place():
    histogram = _updated(LogHistogram(), torch.tensor([0.0, -0.0, 1e-42, 3.4e38, math.nan, -math.inf]))
    assert (histogram.total, int(histogram.below), int(histogram.nonfinite)) == (4, 3, 2)
    assert histogram.fraction_below(1e-30) == 0.75
    assert histogram.quantile(0.5) == 0.0
    assert histogram.quantile(1.0) == pytest.approx(3.4e38, rel=1 / 32)


def test_quantiles_and_shares_of_linear_bins():
    values = torch.rand(20000)
    histogram = _updated(LinearHistogram(0.0, 1.0, 1000), values)
    for q in (0.0, 0.05, 0.5, 0.95, 1.0):
        assert histogram.quantile(q) == pytest.approx(torch.quantile(values, q).item(), abs=1e-3)
        assert histogram.fraction_below(q) == pytest.approx((values < q).double().mean().item(), abs=1e-3)
    assert math.isnan(LinearHistogram(0.0, 1.0, 10).quantile(0.5))


def test_the_largest_values_are_found_with_their_labels_and_ties_by_the_smaller_label():
    largest = LargestValues(3, ["token"])
    largest.update(torch.tensor([2.0, -5.0, 5.0, math.inf, 5.0]), token=torch.tensor([0, 1, 2, 3, 4]))
    assert [(entry["value"], entry["token"]) for entry in largest.entries] == [(-5.0, 1), (5.0, 2), (5.0, 4)]


def test_largest_indices_prefer_the_first_of_equal_values():
    assert largest_indices(torch.ones(100), 3).tolist() == [0, 1, 2]
    assert largest_indices(torch.tensor([1.0, 3.0, 1.0, 1.0, 2.0]), 4).tolist() == [0, 1, 2, 4]
    assert largest_indices(torch.tensor([4.0]), 9).tolist() == [0]
