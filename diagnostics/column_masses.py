"""How much attention each key position receives: the columns of the attention map, without the map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Positions of the sampled queries: all below the first bound, then every n-th (bound, n). They depend on the position
# alone, so a document gives the same sample in one pass and in chunks; each sampled query stands for n.
SAMPLING = ((64, 1), (512, 16), (2**62, 128))
# A key that few of the queries used see, such as the last one of a document, is no candidate for a sink: fewer than
# this a document, and fewer than half of those that see the best-seen key.
MIN_QUERIES = 8


def sampling_weights(position: Tensor) -> Tensor:
    """How many queries each query stands for in the sample, 0 for one that is not in it.

    Args:
        position: (...) int64, of the queries in their documents.

    Example:
        >>> sampling_weights(torch.tensor([0, 63, 64, 79, 639])).tolist()
        [1, 1, 0, 16, 128]
    """
    weights = torch.zeros_like(position)
    first = 0
    for bound, step in SAMPLING:
        taken = (position >= first) & (position < bound) & ((position - first) % step == step - 1)
        weights = torch.where(taken, step, weights)
        first = bound
    return weights


class ColumnMasses:
    """Mean share of each key position, by head: over the queries that can see the key, itself included.

    This is alpha of arXiv 2410.10781 for any key. Memory grows with the longest document, not with its square.

    Attributes:
        queries: how many queries were used.
        mass: (H, P) float64, weighted sum of the shares on the key at each position of its document; P is somewhat
            beyond the last one.
        seen_by: (P,) float64, weighted number of queries that saw it.
        used: (P,) int64, how many of the queries that were used saw it.
        documents: (P,) int64, number of documents that reach the position.

    Example:
        >>> columns = ColumnMasses(heads=1)
        >>> weights = torch.tensor([[[1.0, 0.0], [0.75, 0.25]]])  # two queries on two keys
        >>> columns.add_documents(torch.tensor([0, 1]))
        >>> columns.add_rows(weights, weights[0] > 0, torch.tensor([0, 1]), torch.tensor([1, 1]))
        >>> columns.shares().tolist()
        [[0.875, 0.25]]
    """

    def __init__(self, heads: int) -> None:
        self.queries = 0
        self.mass = torch.zeros(heads, 0, dtype=torch.float64)
        self.seen_by = torch.zeros(0, dtype=torch.float64)
        self.used, self.documents = (torch.zeros(0, dtype=torch.int64) for _ in range(2))

    def add_documents(self, position: Tensor) -> None:
        """Counts the documents that reach the positions (N,) of new tokens."""
        counts = torch.bincount(position).cpu()
        self._reach(len(counts))
        self.documents[: len(counts)] += counts

    def add_rows(self, weights: Tensor, visible: Tensor, position: Tensor, stands_for: Tensor) -> None:
        """Adds rows of an attention map.

        Args:
            weights: (H, N, S) float32, of N queries on S keys.
            visible: (N, S) bool.
            position: (S,) or (N, S) int64, of the keys in the documents of the queries.
            stands_for: (N,) int64, how many queries each of them stands for.
        """
        self.queries += len(stands_for)
        factor = stands_for.to(weights.dtype)
        if position.ndim == 1:
            mass, seen_by, used = factor @ weights, factor @ visible.to(weights.dtype), visible.sum(0)  # (H, S), (S,)
        else:
            mass, seen_by = (weights * factor[:, None]).flatten(1), (visible * factor[:, None]).flatten()
            used, position = visible.flatten().long(), position.flatten()
        kept = (used > 0) & (position >= 0)  # a mask that does not end with the document shows keys before it
        position = position[kept].cpu()
        if position.numel():
            self._reach(int(position.max()) + 1)
            self.mass.index_add_(1, position, mass[:, kept].cpu().double())
            self.seen_by.index_add_(0, position, seen_by[kept].cpu().double())
            self.used.index_add_(0, position, used[kept].cpu())

    def merge(self, other: ColumnMasses) -> None:
        """Adds what `other` has seen."""
        length = len(other.seen_by)
        self._reach(length)
        self.queries += other.queries
        self.mass[:, :length] += other.mass
        self.seen_by[:length] += other.seen_by
        self.used[:length] += other.used
        self.documents[:length] += other.documents

    def shares(self) -> Tensor:
        """(H, P) float64: the mean share of each position; 0 where too few queries saw it to tell."""
        if not len(self.seen_by):
            return self.mass
        used_in_a_document = self.used / self.documents.clamp(min=1)
        enough = used_in_a_document >= min(MIN_QUERIES, float(used_in_a_document.max()) / 2)
        return torch.where(enough, self.mass / self.seen_by.clamp(min=1), 0.0)

    def to_dict(self) -> dict[str, Any]:
        """The exact state, ready for JSON."""
        return {
            "queries": self.queries,
            "mass": self.mass.tolist(),
            "seen_by": self.seen_by.tolist(),
            "used": self.used.tolist(),
            "documents": self.documents.tolist(),
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> ColumnMasses:
        """The object that `to_dict` was called on."""
        restored = cls(len(stored["mass"]))
        restored.queries = stored["queries"]
        restored.mass = torch.tensor(stored["mass"], dtype=torch.float64).view(len(stored["mass"]), -1)
        restored.seen_by = torch.tensor(stored["seen_by"], dtype=torch.float64)
        restored.used = torch.tensor(stored["used"], dtype=torch.int64)
        restored.documents = torch.tensor(stored["documents"], dtype=torch.int64)
        return restored

    def _reach(self, length: int) -> None:
        if (missing := length - len(self.seen_by)) > 0:
            missing = max(missing, len(self.seen_by) // 4)  # generation comes here with every token
            self.mass = torch.cat([self.mass, self.mass.new_zeros(len(self.mass), missing)], dim=1)
            self.seen_by = torch.cat([self.seen_by, self.seen_by.new_zeros(missing)])
            self.used = torch.cat([self.used, self.used.new_zeros(missing)])
            self.documents = torch.cat([self.documents, self.documents.new_zeros(missing)])
