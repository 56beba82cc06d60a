"""Histograms that give quantiles and shares of any amount of data in one pass, with a stated resolution."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from gated_qwen.diagnostics.accumulators import Accumulator, select_rows

SUB_BUCKET_BITS = 5  # 32 buckets for each factor of two
LOWEST_EXPONENT = -40  # smaller magnitudes, and zero, share one bucket
HIGHEST_EXPONENT = 128  # where float32 and bfloat16 end


class Histogram(Accumulator):
    """Counts between ascending `edges`; subclasses say where the edges lie and how values find their bin.

    Attributes:
        counts: int64 (bins,).
        below, above: int64 (), finite values under the first and at or over the last edge.
        nonfinite: int64 (), NaN and infinities.
    """

    COMBINE: ClassVar = dict.fromkeys(("counts", "below", "above", "nonfinite"), torch.add)

    def __init__(self, edges: Tensor) -> None:
        self.edges = edges
        self.counts = torch.zeros(len(edges) - 1, dtype=torch.int64)
        self.below, self.above, self.nonfinite = (torch.zeros((), dtype=torch.int64) for _ in range(3))

    def _add(self, below: Tensor, counts: Tensor, above: Tensor | int = 0, nonfinite: Tensor | int = 0) -> None:
        self.below, self.counts = self.below + below, self.counts + counts
        self.above, self.nonfinite = self.above + above, self.nonfinite + nonfinite

    @property
    def total(self) -> int:
        """How many finite values there were."""
        return int(self.counts.sum() + self.below + self.above)

    def fraction_below(self, value: float) -> float:
        """The share of the finite values under `value`; inside a bin as if they lay evenly in it. NaN without data."""
        edges, total = self.edges, self.total
        if not total:
            return float("nan")
        if value < edges[0]:
            return 0.0
        i = min(int(torch.bucketize(torch.tensor(value, dtype=edges.dtype), edges, right=True)) - 1, len(edges) - 2)
        inside = min(1.0, float((value - edges[i]) / (edges[i + 1] - edges[i])))
        return (int(self.below) + int(self.counts[:i].sum()) + inside * int(self.counts[i])) / total

    def quantile(self, q: float) -> float:
        """The value with a share `q` of the finite ones under it: right to the width of its bin. NaN without data."""
        total = self.total
        if not total:
            return float("nan")
        rank = q * total - int(self.below)
        if rank <= 0 and self.below:
            return float(self.edges[0])
        passed = self.counts.cumsum(0)
        i = int(torch.searchsorted(passed, max(rank, 1e-9)))
        if i == len(passed):
            return float(self.edges[-1])
        inside = (rank - int(passed[i] - self.counts[i])) / int(self.counts[i])
        return float(self.edges[i] + max(inside, 0.0) * (self.edges[i + 1] - self.edges[i]))

    def to_dict(self) -> dict[str, Any]:
        """As `Accumulator.to_dict`; the counts from the first to the last bin that is not empty."""
        stored = super().to_dict()
        used = self.counts.nonzero().flatten()
        first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        stored["state"]["counts"] = {"first": first, "counts": self.counts[first:last].tolist()}
        return stored

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Histogram:
        """The object that `to_dict` was called on."""
        run = stored["state"]["counts"]
        restored = super().from_dict(
            {**stored, "state": {**stored["state"], "counts": cls(**stored["settings"]).counts.tolist()}}
        )
        restored.counts[run["first"] : run["first"] + len(run["counts"])] = torch.tensor(
            run["counts"], dtype=torch.int64
        )
        return restored


class LinearHistogram(Histogram):
    """Bins of equal width between `low` and `high`; the value `high` itself belongs to the last bin.

    Example:
        >>> histogram = LinearHistogram(0.0, 1.0, bins=4)
        >>> histogram.update(torch.tensor([0.1, 0.3, 0.3, 1.0, -2.0, float("inf")]))
        >>> histogram.counts.tolist(), int(histogram.below), int(histogram.nonfinite)
        ([1, 2, 0, 1], 1, 1)
    """

    SETTINGS = ("low", "high", "bins")

    def __init__(self, low: float, high: float, bins: int) -> None:
        self.low, self.high, self.bins = low, high, bins
        super().__init__(torch.linspace(low, high, bins + 1, dtype=torch.float64))

    def update(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Takes values (...) of any float dtype; with `mask` (...) bool only those where it is true."""
        rows = select_rows(values.detach(), [], mask)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        if not bool(torch.isfinite(rows.sum())):
            finite = torch.isfinite(rows)
            self.nonfinite = self.nonfinite + (~finite).sum().cpu()
            rows = rows[finite]
        # 0 is below, 1 to bins are the bins, bins + 1 is above
        scaled = (rows - self.low).mul_(self.bins / (self.high - self.low)).add_(1).clamp_(0, self.bins + 1)
        counts = torch.bincount(scaled.to(torch.int32), minlength=self.bins + 2).cpu()
        at_high = int((rows == self.high).sum()) if counts[-1] else 0
        counts[-2:] += torch.tensor([at_high, -at_high])
        self._add(counts[0], counts[1:-1], above=counts[-1])


class LogHistogram(Histogram):
    """Magnitudes |x| in bins of 1/32 octave (3.1 % wide at most) from 2^-40 to 2^128; signs are ignored.

    The bin is read off the bits of the number, so bins are exact in float32 and bfloat16 and cost no logarithm.

    Example:
        >>> histogram = LogHistogram()
        >>> histogram.update(torch.tensor([0.0, -1.0, 1.5, 3.0]))
        >>> histogram.fraction_below(1.25), int(histogram.below)
        (0.5, 1)
    """

    def __init__(self) -> None:
        exponents = torch.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT, dtype=torch.float64)
        steps = torch.arange(2**SUB_BUCKET_BITS, dtype=torch.float64) / 2**SUB_BUCKET_BITS
        edges = (2**exponents)[:, None] * (1 + steps)
        super().__init__(torch.cat([edges.flatten(), torch.tensor([2.0**HIGHEST_EXPONENT], dtype=torch.float64)]))

    def update(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Takes values (...) of any float dtype; with `mask` (...) bool only those where it is true."""
        rows = select_rows(values.detach(), [], mask)
        if rows.dtype == torch.bfloat16:  # sign, 8 bits of exponent, 7 of mantissa
            found = (rows.view(torch.int16) & 0x7FFF).bitwise_right_shift_(7 - SUB_BUCKET_BITS)
        else:  # sign, 8 bits of exponent, 23 of mantissa
            found = (rows.float().view(torch.int32) & 0x7FFFFFFF).bitwise_right_shift_(23 - SUB_BUCKET_BITS)
        # 0 is below, then come the bins, and the exponent of infinities and NaN follows the highest bin
        found = found.sub_((LOWEST_EXPONENT + 127) * 2**SUB_BUCKET_BITS - 1).clamp_(min=0, max=len(self.counts) + 1)
        counts = torch.bincount(found, minlength=len(self.counts) + 2).cpu()
        self._add(counts[0], counts[1:-1], nonfinite=counts[-1])

    def fraction_below(self, value: float) -> float:
        """As `Histogram.fraction_below`; magnitudes under 2^-40, zeros among them, are below any positive value."""
        if 0 < value < self.edges[0] and self.total:
            return int(self.below) / self.total
        return super().fraction_below(value)

    def quantile(self, q: float) -> float:
        """As `Histogram.quantile`; 0.0 where it falls among the magnitudes under 2^-40."""
        found = super().quantile(q)
        return 0.0 if self.below and found <= self.edges[0] else found
