"""Accumulators by name, merged and stored together: the state of a probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gated_qwen.diagnostics.accumulators import Accumulator, Extremes, Moments, PerPosition
from gated_qwen.diagnostics.histograms import LinearHistogram, LogHistogram
from gated_qwen.diagnostics.largest_values import LargestValues

TYPES = {
    kind.__name__: kind for kind in (Moments, Extremes, PerPosition, LinearHistogram, LogHistogram, LargestValues)
}

Kind = TypeVar("Kind", bound=Accumulator | LargestValues)


class AccumulatorTable(dict[str, Any]):
    """Accumulators by name.

    Example:
        >>> import torch
        >>> table = AccumulatorTable()
        >>> table.of("layer 0", lambda: Moments()).update(torch.tensor([1.0, 3.0]))
        >>> AccumulatorTable.from_dict(table.to_dict())["layer 0"].mean().item()
        2.0
    """

    def of(self, name: str, make: Callable[[], Kind]) -> Kind:
        """The accumulator called `name`, made on first use."""
        if name not in self:
            self[name] = make()
        found: Kind = self[name]
        return found

    def merge(self, other: AccumulatorTable) -> None:
        """Merges the accumulators of equal name, and copies those that only `other` has.

        Raises:
            ValueError: two of equal name have other settings.
        """
        for name, theirs in other.items():
            if name in self:
                self[name].merge(theirs)
            else:
                self[name] = type(theirs).from_dict(theirs.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The exact state, ready for JSON."""
        return {name: accumulator.to_dict() for name, accumulator in self.items()}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> AccumulatorTable:
        """The table that `to_dict` was called on."""
        return cls({name: TYPES[state["type"]].from_dict(state) for name, state in stored.items()})
