"""What gates do: their values by layer, head and position class, the sparsity they make, and what heads write.

Position classes count tokens in their own document: "first" is token 0, "early" the next ones up to `skip_queries`,
"rest" all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gated_qwen.configuration.configuration_gated_qwen import GATE_MODULES
from gated_qwen.diagnostics.accumulator_table import AccumulatorTable
from gated_qwen.diagnostics.accumulators import Extremes, Moments, select_rows
from gated_qwen.diagnostics.gate_readers import GateSite
from gated_qwen.diagnostics.histograms import LinearHistogram
from gated_qwen.diagnostics.observed_batch import ObservedBatch
from gated_qwen.diagnostics.sparsity import THRESHOLDS, sparsity_curves, update_sparsity

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
DEAD_BELOW = 0.01
OPEN_ABOVE = 0.99
SHOWN_BINS = 50
BINS = 20 * SHOWN_BINS  # quantiles are right to a thousandth of the range
RANGES = {"sigmoid": (0.0, 1.0), "ns_sigmoid": (0.0, 1.0)}
WIDE_RANGE = (-8.0, 8.0)  # of unbounded activations


class GateStatistics:
    """What `GateProbe` has seen; mergeable over batches and processes.

    Args:
        skip_queries: tokens at the start of each document that count as "first" and "early".
        thresholds: tau of S_tau.
    """

    def __init__(self, skip_queries: int = 64, thresholds: Sequence[float] = THRESHOLDS) -> None:
        self.skip_queries, self.thresholds = skip_queries, list(thresholds)
        self.tokens = 0
        self.sites: dict[str, dict[str, Any]] = {}  # "layer.position" -> how it is gated
        self.table = AccumulatorTable()

    def update(self, site: GateSite, gate: Tensor, batch: ObservedBatch) -> None:
        """Takes the gate (B, T, H, W) of one site, after its activation."""
        name = f"{site.layer}.{site.position}"
        shape = list(gate.shape[2:])
        rows = select_rows(gate.detach(), shape, batch.mask)
        if not len(rows):
            return
        fields = ("layer", "position", "granularity", "activation", "operation")
        self.sites.setdefault(name, {field: getattr(site, field) for field in fields})
        if name == next(iter(self.sites)):
            self.tokens += len(rows)
        self.table.of(f"{name}.values", lambda: Moments(shape)).update(rows)
        self.table.of(f"{name}.extremes", lambda: Extremes(shape)).update(rows)
        self._histogram(f"{name}.histogram", site).update(rows)
        classes = {
            "first": batch.valid & (batch.position == 0),
            "early": batch.valid & (batch.position > 0) & (batch.position < self.skip_queries),
        }
        for label, mask in classes.items():
            few = select_rows(gate.detach(), shape, mask)
            self.table.of(f"{name}.{label}.values", Moments).update(few)
            self._histogram(f"{name}.{label}.histogram", site).update(few)

    def update_outputs(self, site: GateSite, pre_gate: Tensor, gated: Tensor, batch: ObservedBatch) -> None:
        """Takes what the gate acted on and what came out, both (B, T, H, D)."""
        update_sparsity(self.table, f"{site.layer}.{site.position}", pre_gate.detach(), gated.detach(), batch.mask)

    def update_written(self, site: GateSite, gate: Tensor, share: Tensor, batch: ObservedBatch) -> None:
        """Takes the gate (B, T, H or 1, W) and the attention mass (B, H, T) that each query gives the first token."""
        name = f"{site.layer}.{site.position}"
        share = share.transpose(1, 2)
        heads = [share.shape[-1]]
        written = share * gate.detach().float().mean(-1)  # (B, T, H)
        self.table.of(f"{name}.share", lambda: Moments(heads)).update(share, batch.mask)
        self.table.of(f"{name}.written", lambda: Moments(heads)).update(written, batch.mask)

    def _histogram(self, name: str, site: GateSite) -> LinearHistogram:
        low, high = RANGES.get(site.activation, WIDE_RANGE)
        return self.table.of(name, lambda: LinearHistogram(low, high, BINS))

    def merge(self, other: GateStatistics) -> None:
        """Adds what `other` has seen.

        Raises:
            ValueError: the two have other settings, or come from models with other shapes.
        """
        if (self.skip_queries, self.thresholds) != (other.skip_queries, other.thresholds):
            raise ValueError("GateStatistics can merge only with one of the same skip_queries and thresholds")
        self.table.merge(other.table)
        self.sites = {**other.sites, **self.sites}
        self.tokens += other.tokens

    def to_dict(self) -> dict[str, Any]:
        """The exact state, ready for JSON."""
        return {
            "skip_queries": self.skip_queries,
            "thresholds": self.thresholds,
            "tokens": self.tokens,
            "sites": self.sites,
            "table": self.table.to_dict(),
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> GateStatistics:
        """The statistics that `to_dict` was called on."""
        restored = cls(stored["skip_queries"], stored["thresholds"])
        restored.tokens, restored.sites = stored["tokens"], dict(stored["sites"])
        restored.table = AccumulatorTable.from_dict(stored["table"])
        return restored

    def mean_gate(self, layer: int, position: str = "attn_output") -> Tensor:
        """The mean gate over tokens of one site, float64 (H, W)."""
        mean: Tensor = self.table[f"{layer}.{position}.values"].mean()
        return mean

    def summary(self) -> dict[str, Any] | None:
        """Gates by layer and position; None for a model without gates.

        "mean" of a position is over all gate values of all layers, "mean_of_layer_means" gives layers of different
        size the same weight. Quantiles are right to a thousandth of the histogram's range, S_tau to 1/32 octave of
        tau. A gate that the heads share counts as one head.
        """
        if not self.sites:
            return None
        layers = [self._layer(name, site) for name, site in sorted(self.sites.items(), key=_order)]
        return {
            "tokens": self.tokens,
            "thresholds": self.thresholds,
            "dead_below": DEAD_BELOW,
            "open_above": OPEN_ABOVE,
            "skip_queries": self.skip_queries,
            "summary": {
                position: self._overall([row for row in layers if row["position"] == position])
                for position in dict.fromkeys(row["position"] for row in layers)
            },
            "layers": layers,
        }

    def _overall(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        values = [self.table[f"{row['layer']}.{row['position']}.values"] for row in rows]
        count = sum(moments.count.sum() for moments in values)
        heads = [row["heads"] for row in rows if row["heads"]]
        return {
            "mean": float(sum(moments.total.sum() for moments in values) / count),
            "mean_of_layer_means": sum(row["mean"] for row in rows) / len(rows),
            "dead_heads": sum(len(head["dead"]) for head in heads),
            "always_open_heads": sum(len(head["always_open"]) for head in heads),
        }

    def _layer(self, name: str, site: dict[str, Any]) -> dict[str, Any]:
        values: Moments = self.table[f"{name}.values"]
        extremes: Extremes = self.table[f"{name}.extremes"]
        histogram: LinearHistogram = self.table[f"{name}.histogram"]
        count = values.count.sum()
        mean = (values.total.sum() / count).item()
        low, high = extremes.low.min().item(), extremes.high.max().item()
        written = f"{name}.written" in self.table
        return {
            **site,
            "mean": mean,
            "std": max((values.squares.sum() / count).item() - mean**2, 0.0) ** 0.5,
            "min": low,
            "max": high,
            "nonfinite": int(values.nonfinite.sum()),
            "quantiles": _quantiles(histogram, low, high),
            "histogram": _shown(histogram),
            "by_class": self._classes(name, low, high),
            "heads": None if site["position"] == "dense_output" else _heads(values, extremes, site["operation"]),
            "sparsity": sparsity_curves(self.table, name, mean, self.thresholds)
            if f"{name}.gated.magnitudes" in self.table
            else None,
            "written": {
                "first_token_share": _mean_list(self.table[f"{name}.share"]),
                "written_share": _mean_list(self.table[f"{name}.written"]),
            }
            if written
            else None,
        }

    def _classes(self, name: str, low: float, high: float) -> dict[str, Any]:
        """Mean, quantiles and tokens of each position class; "rest" is what the others leave of all."""
        every: Moments = self.table[f"{name}.values"]
        values = {label: self.table[f"{name}.{label}.values"] for label in ("first", "early")}
        bins = {label: self.table[f"{name}.{label}.histogram"] for label in ("first", "early")}
        whole = self.table[f"{name}.histogram"]
        rest, rest_bins = Moments(), LinearHistogram(whole.low, whole.high, whole.bins)
        for field in ("count", "total"):
            setattr(rest, field, getattr(every, field).sum() - sum(getattr(part, field) for part in values.values()))
        for field in ("counts", "below", "above"):
            setattr(rest_bins, field, getattr(whole, field) - sum(getattr(part, field) for part in bins.values()))
        values["rest"], bins["rest"] = rest, rest_bins
        return {
            label: {
                "mean": moments.mean().item() if moments.count else None,
                "quantiles": _quantiles(bins[label], low, high)
                if moments.count
                else dict.fromkeys(map(str, QUANTILES)),
                "tokens": int(moments.count) // every.count.numel(),
            }
            for label, moments in values.items()
        }


def _order(item: tuple[str, dict[str, Any]]) -> tuple[int, int]:
    return item[1]["layer"], list(GATE_MODULES).index(item[1]["position"])


def _quantiles(histogram: LinearHistogram, low: float, high: float) -> dict[str, float]:
    """Quantiles, kept inside the exact extremes; beyond the histogram's range only those are known."""
    below, above = int(histogram.below), int(histogram.total - histogram.above)
    found = {}
    for q in QUANTILES:
        rank = q * histogram.total
        value = low if rank < below else high if rank > above else histogram.quantile(q)
        found[str(q)] = min(max(value, low), high)
    return found


def _shown(histogram: LinearHistogram) -> dict[str, Any]:
    """The histogram with fewer bins; values outside its range are in the first and the last."""
    counts = histogram.counts.view(SHOWN_BINS, -1).sum(1)
    counts[0] += histogram.below
    counts[-1] += histogram.above
    return {"edges": histogram.edges[:: BINS // SHOWN_BINS].tolist(), "counts": counts.tolist()}


def _heads(values: Moments, extremes: Extremes, operation: str) -> dict[str, Any]:
    """Mean and extremes of each head; dead: never above `DEAD_BELOW`, always open: never below `OPEN_ABOVE`."""
    low, high = extremes.low.amin(-1), extremes.high.amax(-1)
    dead = torch.maximum(low.abs(), high.abs()) < DEAD_BELOW
    open_ = low > OPEN_ABOVE if operation == "multiply" else torch.zeros_like(dead)
    return {
        "mean": (values.total.sum(-1) / values.count.sum(-1)).tolist(),
        "min": low.tolist(),
        "max": high.tolist(),
        "dead": dead.nonzero().flatten().tolist(),
        "always_open": open_.nonzero().flatten().tolist(),
    }


def _mean_list(moments: Moments) -> list[float]:
    means: list[float] = moments.mean().tolist()
    return means
