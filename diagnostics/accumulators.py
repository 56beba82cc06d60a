"""Streaming statistics: small objects that are updated with tensors, merged over batches and processes, and stored.

Sums are float64 and counts are integers, so a result does not depend on how the data were cut into batches (up to the
rounding of float64 sums, 1e-16). NaN and infinities are counted apart and enter no sum. State lies on the CPU, and no
tensor that was given is kept. Histograms are in histograms.py, the largest values in largest_values.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK_VALUES = 2**16


class Accumulator:
    """A statistic with tensors as state; a subclass names its settings, its tensors and how two of them combine.

    Tensors of the state are replaced and never updated in place, which `torch.inference_mode` would make impossible
    for calls after it.

    Attributes:
        SETTINGS: the constructor's arguments; only objects with equal settings merge.
        COMBINE: for each tensor of the state the function of two tensors that merges them.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ()
    COMBINE: ClassVar[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {}

    def merge(self, other: Self) -> None:
        """Adds what `other` has seen to what this object has seen.

        Raises:
            ValueError: the two have other settings.
        """
        mine = [getattr(self, name) for name in self.SETTINGS]
        if type(other) is not type(self) or mine != [getattr(other, name) for name in self.SETTINGS]:
            raise ValueError(f"{type(self).__name__} can merge only with one of the same settings {self.SETTINGS}")
        for name, combine in self.COMBINE.items():
            setattr(self, name, combine(getattr(self, name), getattr(other, name)))

    def to_dict(self) -> dict[str, Any]:
        """The exact state, ready for JSON; `from_dict` gives an equal object."""
        settings = {name: getattr(self, name) for name in self.SETTINGS}
        state = {name: _finite_or_none(getattr(self, name).tolist()) for name in self.COMBINE}
        return {"type": type(self).__name__, "settings": settings, "state": state}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Self:
        """The object that `to_dict` was called on."""
        restored = cls(**stored["settings"])
        for name in cls.COMBINE:
            empty = getattr(restored, name)
            filled = _replace_none(stored["state"][name], empty)
            setattr(restored, name, torch.tensor(filled, dtype=empty.dtype).reshape(empty.shape))
        return restored


class Moments(Accumulator):
    """Count, mean and standard deviation of values, one of each per entry of `shape`.

    Attributes:
        count: int64 `shape`, the finite values.
        nonfinite: int64 `shape`, NaN and infinities: counted, and in no sum.
        total, squares: float64 `shape`, sums of the values and of their squares.

    Example:
        >>> moments = Moments(shape=[2])
        >>> moments.update(torch.tensor([[1.0, 2.0], [3.0, float("nan")]]))
        >>> moments.mean().tolist(), moments.nonfinite.tolist()
        ([2.0, 2.0], [0, 1])
    """

    SETTINGS = ("shape",)
    COMBINE: ClassVar = dict.fromkeys(("count", "nonfinite", "total", "squares"), torch.add)

    def __init__(self, shape: Sequence[int] = ()) -> None:
        self.shape = list(shape)
        self.count, self.nonfinite = (torch.zeros(self.shape, dtype=torch.int64) for _ in range(2))
        self.total, self.squares = (torch.zeros(self.shape, dtype=torch.float64) for _ in range(2))

    def update(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Takes values (..., *shape) of any float dtype; with `mask` (...) bool only those where it is true."""
        rows = select_rows(values.detach(), self.shape, mask)
        total, squares = _sums(rows)
        seen = torch.full(self.shape, len(rows))
        if not bool(torch.isfinite(total).all()):
            finite = torch.isfinite(rows)
            total, squares = _sums(torch.where(finite, rows, 0))
            seen = finite.sum(0).cpu()
        self.count = self.count + seen
        self.nonfinite = self.nonfinite + (len(rows) - seen)
        self.total = self.total + total
        self.squares = self.squares + squares

    def mean(self) -> Tensor:
        """float64 `shape`; NaN where there was no finite value."""
        return self.total / self.count

    def std(self) -> Tensor:
        """float64 `shape`, of the population (divided by the count)."""
        return (self.squares / self.count - self.mean().square()).clamp(min=0).sqrt()

    def rms(self) -> Tensor:
        """float64 `shape`, the root of the mean square."""
        return (self.squares / self.count).sqrt()


class Extremes(Accumulator):
    """The smallest and the largest finite value, one of each per entry of `shape`; infinities where there was none."""

    SETTINGS = ("shape",)
    COMBINE: ClassVar = {"low": torch.minimum, "high": torch.maximum}

    def __init__(self, shape: Sequence[int] = ()) -> None:
        self.shape = list(shape)
        self.low = torch.full(self.shape, math.inf, dtype=torch.float64)
        self.high = torch.full(self.shape, -math.inf, dtype=torch.float64)

    def update(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Takes values (..., *shape) of any float dtype; with `mask` (...) bool only those where it is true."""
        rows = select_rows(values.detach(), self.shape, mask)
        if not len(rows):
            return
        low, high = rows.amin(0), rows.amax(0)
        if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            finite = torch.isfinite(rows)
            low = torch.where(finite, rows, math.inf).amin(0)
            high = torch.where(finite, rows, -math.inf).amax(0)
        self.low = torch.minimum(self.low, low.double().cpu())
        self.high = torch.maximum(self.high, high.double().cpu())


class PerPosition(Accumulator):
    """Means of values over runs of positions: bin i holds the positions from edges[i] up to edges[i + 1].

    Positions at or beyond the last edge fall into the last bin. `count` and `nonfinite` are int64 (bins, *shape), and
    `total` is float64 (bins, *shape).

    Example:
        >>> curve = PerPosition(edges=[0, 1, 4])
        >>> curve.update(torch.tensor([0, 1, 3]), torch.tensor([1.0, 0.5, 0.25]))
        >>> curve.mean().tolist()
        [1.0, 0.375]
    """

    SETTINGS = ("edges", "shape")
    COMBINE: ClassVar = dict.fromkeys(("count", "nonfinite", "total"), torch.add)

    def __init__(self, edges: Sequence[int], shape: Sequence[int] = ()) -> None:
        self.edges, self.shape = list(edges), list(shape)
        self.count, self.nonfinite = (
            torch.zeros(len(self.edges) - 1, *self.shape, dtype=torch.int64) for _ in range(2)
        )
        self.total = torch.zeros(len(self.edges) - 1, *self.shape, dtype=torch.float64)

    def update(self, positions: Tensor, values: Tensor, mask: Tensor | None = None) -> None:
        """Takes values (..., *shape) at the positions (...) int64, all of them at least edges[0]."""
        rows = select_rows(values.detach(), self.shape, mask).cpu().double()
        at = select_rows(positions, [], mask).cpu()
        bins = torch.bucketize(at, torch.tensor(self.edges[1:-1], dtype=at.dtype), right=True)
        finite = torch.isfinite(rows)
        self.count = self.count.index_add(0, bins, finite.long())
        self.nonfinite = self.nonfinite.index_add(0, bins, (~finite).long())
        self.total = self.total.index_add(0, bins, torch.where(finite, rows, 0.0))

    def mean(self) -> Tensor:
        """float64 (bins, *shape); NaN where a bin is empty."""
        return self.total / self.count


def log_spaced_positions(per_octave: int = 2, octaves: int = 24) -> list[int]:
    """Edges for `PerPosition` that grow by a factor of 2^(1 / per_octave), from 0 to beyond any context length.

    Example:
        >>> log_spaced_positions(per_octave=1, octaves=4)
        [0, 1, 2, 4, 8, 16]
    """
    return [0, *sorted({round(2 ** (i / per_octave)) for i in range(per_octave * octaves + 1)})]


def select_rows(values: Tensor, shape: Sequence[int], mask: Tensor | None) -> Tensor:
    """Values (..., *shape) as (N, *shape), without those where `mask` (...) is false."""
    leading = values.shape[: values.ndim - len(shape)]
    if list(values.shape[len(leading) :]) != list(shape):
        raise ValueError(f"values of shape {tuple(values.shape)} do not end in {tuple(shape)}")
    if mask is not None:
        return values[mask.to(values.device)]  # a model may lie on several devices
    return values.reshape(-1, *shape)


def _sums(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float64 sums of rows (N, ...) and of their squares, by blocks, since a float64 copy of all would be large."""
    total = torch.zeros(rows.shape[1:], dtype=torch.float64, device=rows.device)
    squares = torch.zeros_like(total)
    for block in rows.split(max(1, BLOCK_VALUES // max(1, total.numel()))):
        wide = block.double()
        total += wide.sum(0)
        squares += wide.square().sum(0)
    return total.cpu(), squares.cpu()


def _finite_or_none(state: Any) -> Any:
    """Infinities (an extreme of nothing) as None, since JSON has no word for them."""
    if isinstance(state, list):
        return [_finite_or_none(entry) for entry in state]
    return None if isinstance(state, float) and not math.isfinite(state) else state


def _replace_none(state: Any, empty: Tensor) -> Any:
    if isinstance(state, list):
        return [_replace_none(entry, empty) for entry in state]
    return empty.flatten()[0].item() if state is None else state
