"""How a mixture of experts spreads its tokens: load of each expert and entropy of the router, by layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gated_qwen.diagnostics.accumulator_table import AccumulatorTable
from gated_qwen.diagnostics.accumulators import Moments, select_rows
from gated_qwen.diagnostics.histograms import LinearHistogram


class RouterStatistics:
    """What `RouterProbe` has seen; mergeable over batches and processes."""

    def __init__(self) -> None:
        self.table = AccumulatorTable()
        self.experts: dict[int, tuple[int, int]] = {}  # layer -> experts, experts for each token

    def update(self, layer: int, logits: Tensor, chosen: Tensor, mask: Tensor | None) -> None:
        """Takes the router's logits (N, E) and the experts that it chose (N, k), both before any capacity limit.

        Args:
            layer: index of the decoder layer.
            logits: (N, E), of any float dtype.
            chosen: (N, k) int64, indices of experts.
            mask: (N,) bool, the tokens that are not padding, or None for all.
        """
        experts = logits.shape[-1]
        self.experts[layer] = (experts, chosen.shape[-1])
        log_probabilities = torch.log_softmax(select_rows(logits, [experts], mask).float(), dim=-1)
        probabilities = log_probabilities.exp()
        entropy = -torch.where(probabilities > 0, probabilities * log_probabilities, 0).sum(-1)
        load = self.table.of(f"{layer}.load", lambda: LinearHistogram(0, experts, experts))
        load.update(select_rows(chosen, chosen.shape[-1:], mask).flatten())
        self.table.of(f"{layer}.probability", lambda: Moments([experts])).update(probabilities)
        self.table.of(f"{layer}.entropy", Moments).update(entropy)

    def merge(self, other: RouterStatistics) -> None:
        """Adds what `other` has seen.

        Raises:
            ValueError: the two come from models with other numbers of experts.
        """
        self.table.merge(other.table)
        self.experts.update(other.experts)

    def to_dict(self) -> dict[str, Any]:
        """The exact state, ready for JSON."""
        experts = {str(layer): list(counts) for layer, counts in self.experts.items()}
        return {"experts": experts, "table": self.table.to_dict()}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> RouterStatistics:
        """The statistics that `to_dict` was called on."""
        restored = cls()
        restored.experts = {int(layer): (counts[0], counts[1]) for layer, counts in stored["experts"].items()}
        restored.table = AccumulatorTable.from_dict(stored["table"])
        return restored

    def summary(self) -> dict[str, Any] | None:
        """Load and entropy by layer; None for a model without experts.

        "load" is each expert's share of all choices, "max_load" the largest of them times E (1 when balanced),
        "probability" the router's mean softmax, "entropy" its mean entropy over log E (1 when it has no preference),
        and "balance" is E times the sum of load times probability, the loss of arXiv 2101.03961 (1 when balanced).
        """
        if not self.experts:
            return None
        layers = [self._layer(layer) for layer in sorted(self.experts)]
        worst = max(layers, key=lambda row: row["max_load"])
        return {
            "tokens": max(int(self.table[f"{layer}.entropy"].count) for layer in self.experts),
            "summary": {
                "mean_entropy": sum(row["entropy"] for row in layers) / len(layers),
                "mean_balance": sum(row["balance"] for row in layers) / len(layers),
                "max_load": {"layer": worst["layer"], "value": worst["max_load"]},
                "unused_experts": sum(len(row["unused"]) for row in layers),
            },
            "layers": layers,
        }

    def _layer(self, layer: int) -> dict[str, Any]:
        experts, per_token = self.experts[layer]
        counts = self.table[f"{layer}.load"].counts
        load = counts.double() / counts.sum()
        probability = self.table[f"{layer}.probability"].mean()
        return {
            "layer": layer,
            "experts": experts,
            "experts_per_token": per_token,
            "load": load.tolist(),
            "max_load": load.max().item() * experts,
            "unused": (counts == 0).nonzero().flatten().tolist(),
            "probability": probability.tolist(),
            "entropy": self.table[f"{layer}.entropy"].mean().item() / math.log(experts),
            "balance": experts * (load * probability).sum().item(),
        }
