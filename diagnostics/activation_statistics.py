"""Maxima, medians and quantiles of |x| by layer, and where the largest are: massive activations (arXiv 2402.17762).

The residual stream is raw: index 0 is what enters the first layer (the embedding), index i what layer i - 1 leaves.
The last one is before the final norm, unlike the last of transformers' `hidden_states`. `attention_output` and
`ffn_output` at index i are what layer i adds to the stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gated_qwen.diagnostics.accumulator_table import AccumulatorTable
from gated_qwen.diagnostics.accumulators import select_rows
from gated_qwen.diagnostics.histograms import LogHistogram
from gated_qwen.diagnostics.largest_values import LargestValues, largest_indices
from gated_qwen.diagnostics.observed_batch import ObservedBatch

KINDS = ("residual", "attention_output", "ffn_output")
QUANTILES = (0.5, 0.9, 0.99, 0.999, 0.9999)
LABELS = ("sequence", "document", "position", "channel", "token_id")


class ActivationStatistics:
    """What `ActivationProbe` has seen; mergeable over batches and processes.

    Args:
        top: how many of the largest values to keep, for each kind and index.
    """

    def __init__(self, top: int = 10) -> None:
        self.top = top
        self.tokens = 0
        self.table = AccumulatorTable()

    def update(self, kind: str, index: int, states: Tensor, batch: ObservedBatch) -> None:
        """Takes the activations (B, T, C), of any float dtype, of one kind at one index."""
        rows = select_rows(states.detach(), states.shape[-1:], batch.mask)
        if not len(rows):
            return
        if kind == "residual" and index == 0:
            self.tokens += len(rows)
        self.table.of(f"{kind}.{index}.magnitudes", LogHistogram).update(rows)
        peaks = _peaks(rows)
        if not bool(torch.isfinite(peaks).all()):
            peaks = _peaks(torch.where(torch.isfinite(rows), rows, 0))
        # The largest values all lie in the tokens with the largest peaks, so only those rows are searched.
        tokens = largest_indices(peaks, self.top)
        of_token = {
            "sequence": batch.sequence,
            "document": batch.document,
            "position": batch.position,
            "token_id": torch.full_like(batch.position, -1) if batch.input_ids is None else batch.input_ids,
        }
        channels = rows.shape[1]
        labels = {
            name: select_rows(of, [], batch.mask)[tokens.to(of.device)].repeat_interleave(channels)
            for name, of in of_token.items()
        }
        labels["channel"] = torch.arange(channels, device=rows.device).repeat(len(tokens))
        largest = self.table.of(f"{kind}.{index}.largest", lambda: LargestValues(self.top, LABELS))
        largest.update(rows[tokens].flatten(), **labels)

    def merge(self, other: ActivationStatistics) -> None:
        """Adds what `other` has seen.

        Raises:
            ValueError: the two keep another number of largest values.
        """
        self.table.merge(other.table)
        self.tokens += other.tokens

    def to_dict(self) -> dict[str, Any]:
        """The exact state, ready for JSON."""
        return {"top": self.top, "tokens": self.tokens, "table": self.table.to_dict()}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> ActivationStatistics:
        """The statistics that `to_dict` was called on."""
        restored = cls(stored["top"])
        restored.tokens = stored["tokens"]
        restored.table = AccumulatorTable.from_dict(stored["table"])
        return restored

    def summary(self) -> dict[str, Any]:
        """Maxima, median, quantiles and largest values by kind and index, and both ways to sum up the maxima.

        "mean_of_layer_maxima" and "max_over_layers" are both called the maximal activation in the literature, and may
        differ by a factor of the number of layers. Those of the residual stream leave the embedding (index 0) out.
        Medians and quantiles are of |x|, right to 1/32 octave (3.1 %); maxima are exact.
        """
        rows: dict[str, list[dict[str, Any]]] = {kind: self._rows(kind) for kind in KINDS}
        found = [kind for kind in KINDS if rows[kind]]
        return {
            "tokens": self.tokens,
            "kinds": found,
            "summary": {kind: _overall(rows[kind][1:] if kind == "residual" else rows[kind]) for kind in found},
            **{kind: rows[kind] for kind in found},
        }

    def _rows(self, kind: str) -> list[dict[str, Any]]:
        indices = sorted(
            int(name.split(".")[1]) for name in self.table if name.startswith(f"{kind}.") and "largest" in name
        )
        return [
            _row(index, self.table[f"{kind}.{index}.magnitudes"], self.table[f"{kind}.{index}.largest"])
            for index in indices
        ]


def _row(index: int, magnitudes: LogHistogram, largest: LargestValues) -> dict[str, Any]:
    largest_magnitude = abs(largest.entries[0]["value"]) if largest.entries else 0.0
    quantiles = {str(q): min(magnitudes.quantile(q), largest_magnitude) for q in QUANTILES}
    median = quantiles["0.5"]
    return {
        "index": index,
        "max": largest_magnitude,
        "median": median,
        "ratio": largest_magnitude / median if median else None,
        "quantiles": quantiles,
        "nonfinite": int(magnitudes.nonfinite),
        "top": [
            {**entry, "token_id": None if entry["token_id"] < 0 else entry["token_id"]} for entry in largest.entries
        ],
    }


def _overall(rows: list[dict[str, Any]]) -> dict[str, Any]:
    maxima = [row["max"] for row in rows]
    highest = max(rows, key=lambda row: row["max"])
    return {
        "mean_of_layer_maxima": sum(maxima) / len(maxima),
        "max_over_layers": highest["max"],
        "max_index": highest["index"],
    }


def _peaks(rows: Tensor) -> Tensor:
    """The largest magnitude of each row (N, C), without a copy of it."""
    return torch.maximum(rows.amax(1), -rows.amin(1))
