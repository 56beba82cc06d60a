"""The raw score at which a gate has a given value: the inverse of each activation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gated_qwen.diagnostics.gate_readers import GateSite

SATURATED = 1e4  # a raw score at which a bounded activation has reached its bound exactly; fits into float16
SILU_LOWEST = -1.278464542761074  # where SiLU has its minimum


def _inverse_silu(value: Tensor) -> Tensor:
    """The score of at least `SILU_LOWEST`, where SiLU grows, by bisection in float64."""
    low = torch.full_like(value, SILU_LOWEST)
    high = value.clamp(min=0) + 2
    for _ in range(100):
        middle = (low + high) / 2
        over = torch.nn.functional.silu(middle) > value
        low, high = torch.where(over, low, middle), torch.where(over, middle, high)
    lowest = torch.nn.functional.silu(torch.tensor(SILU_LOWEST, dtype=value.dtype))
    return torch.where(value == 0, 0.0, torch.where(value < lowest, torch.nan, low))


# By activation; NaN where it has no such value.
INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.logit,
    "ns_sigmoid": lambda value: torch.logit(2 * value - 1),
    "softplus": lambda value: torch.where(value < 0, torch.nan, value + torch.log(-torch.expm1(-value))),
    "identity": lambda value: value,
    "silu": _inverse_silu,
}


def score_of(site: GateSite, value: float | Tensor, like: Tensor) -> Tensor:
    """Raw scores at which the gate is `value`, in the dtype and on the device of `like`.

    Args:
        site: the gate.
        value: a number, or a tensor that broadcasts to raw scores (B, T, H, W).
        like: raw scores.

    Raises:
        ValueError: the activation does not take that value.

    Example:
        >>> from gated_qwen.diagnostics.gate_scores import INVERSES
        >>> round(INVERSES["sigmoid"](torch.tensor(0.9)).item(), 4)
        2.1972
    """
    wanted = torch.as_tensor(value, dtype=torch.float64)
    scores = INVERSES[site.activation](wanted)
    if bool(scores.isnan().any()):
        number = wanted[scores.isnan()].flatten()[0].item()
        raise ValueError(f"the gate at {site.position} is {site.activation} and is never {number:g}")
    return scores.clamp(-SATURATED, SATURATED).to(like)
