"""The largest values of a stream, each with where it was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class LargestValues:
    """The `k` values of largest magnitude, signed, with integer labels that say where they were.

    Of equal magnitudes the one with the smaller labels comes first, so that the result does not depend on the order of
    updates and merges. NaN and infinities are left out.

    Args:
        k: how many.
        labels: the names of the labels, in the order that breaks ties.

    Example:
        >>> largest = LargestValues(2, labels=["token"])
        >>> largest.update(torch.tensor([1.0, -7.0, 3.0]), token=torch.tensor([0, 1, 2]))
        >>> largest.entries
        [{'value': -7.0, 'token': 1}, {'value': 3.0, 'token': 2}]
    """

    def __init__(self, k: int, labels: Sequence[str]) -> None:
        self.k, self.labels = k, list(labels)
        self.entries: list[dict[str, Any]] = []

    def update(self, values: Tensor, **labels: Tensor) -> None:
        """Takes values (N,) and for each label a tensor (N,) int64; equal magnitudes in ascending order of labels."""
        magnitudes = torch.where(torch.isfinite(values), values.abs(), -1)
        found = largest_indices(magnitudes, self.k)
        found = found[magnitudes[found] >= 0]
        columns = [
            values[found].tolist(),
            *(labels[name][found.to(labels[name].device)].tolist() for name in self.labels),
        ]
        names = ["value", *self.labels]
        self._keep([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)])

    def merge(self, other: LargestValues) -> None:
        """Adds what `other` has seen.

        Raises:
            ValueError: the two keep another number of values, or other labels.
        """
        if (self.k, self.labels) != (other.k, other.labels):
            raise ValueError("LargestValues can merge only with one of the same k and labels")
        self._keep(other.entries)

    def _keep(self, entries: list[dict[str, Any]]) -> None:
        together = self.entries + [dict(entry) for entry in entries]
        together.sort(key=lambda entry: (-abs(entry["value"]), *(entry[name] for name in self.labels)))
        self.entries = together[: self.k]

    def to_dict(self) -> dict[str, Any]:
        """The exact state, ready for JSON."""
        settings = {"k": self.k, "labels": self.labels}
        return {"type": type(self).__name__, "settings": settings, "state": self.entries}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> LargestValues:
        """The object that `to_dict` was called on."""
        restored = cls(**stored["settings"])
        restored.entries = [dict(entry) for entry in stored["state"]]
        return restored


def largest_indices(values: Tensor, k: int) -> Tensor:
    """Indices of the `k` largest of values (N,), ascending; of equal ones the first, which topk does not promise."""
    if len(values) <= k:
        return torch.arange(len(values), device=values.device)
    smallest_kept = values.topk(k).values[-1]
    above = (values > smallest_kept).nonzero().flatten()
    equal = (values == smallest_kept).nonzero().flatten()[: k - len(above)]
    return torch.cat([above, equal]).sort().values
