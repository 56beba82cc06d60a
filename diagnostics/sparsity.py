"""How sparse the gate makes what the heads of a layer write: S_tau, the share of entries with |x| < tau (paper, A.3).

A gate below 1 makes every entry smaller, so more of them fall under a threshold whether or not the gate selects
anything. Two scaled versions of the ungated output take that away: times the mean gate (as the paper does), and scaled
to the root mean square of the gated output. What the gated output has beyond them is selection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gated_qwen.diagnostics.accumulator_table import AccumulatorTable
from gated_qwen.diagnostics.accumulators import Moments, select_rows
from gated_qwen.diagnostics.histograms import LogHistogram

THRESHOLDS = (1e-4, 1e-3, 1e-2, 1e-1)


def update_sparsity(table: AccumulatorTable, name: str, pre_gate: Tensor, gated: Tensor, mask: Tensor | None) -> None:
    """Takes what the gate acts on and what comes out, both (B, T, H, D); mask (B, T) bool."""
    for part, states in (("pre_gate", pre_gate), ("gated", gated)):
        rows = select_rows(states, states.shape[2:], mask)
        table.of(f"{name}.{part}.magnitudes", LogHistogram).update(rows)
        norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.promote_types(rows.dtype, torch.float32))
        table.of(f"{name}.{part}.norms", Moments).update(norms)


def sparsity_curves(
    table: AccumulatorTable, name: str, mean_gate: float, thresholds: Sequence[float] = THRESHOLDS
) -> dict[str, list[float]]:
    """S_tau of the pre-gate, mean-scaled, gated and norm-matched outputs.

    All four come from histograms of |x| with 32 bins an octave, so that S_tau of a scaled output, the share of
    |x| < tau / scale, needs no second pass.

    Args:
        table, name: what `update_sparsity` was called with.
        mean_gate: mean of the layer's gate over tokens, heads and coordinates.
        thresholds: tau, in units of the output.
    """
    pre_gate, gated = (table[f"{name}.{part}.magnitudes"] for part in ("pre_gate", "gated"))
    rms = {part: table[f"{name}.{part}.norms"].rms().item() for part in ("pre_gate", "gated")}
    matched = rms["gated"] / rms["pre_gate"] if rms["pre_gate"] else 0.0
    return {
        "pre_gate": _below(pre_gate, thresholds, 1.0),
        "mean_scaled": _below(pre_gate, thresholds, abs(mean_gate)),
        "gated": _below(gated, thresholds, 1.0),
        "norm_matched": _below(pre_gate, thresholds, matched),
    }


def _below(magnitudes: LogHistogram, thresholds: Sequence[float], scale: float) -> list[float]:
    return [magnitudes.fraction_below(tau / scale) if scale > 0 else 1.0 for tau in thresholds]
