"""Norm weights for the Qwen3-Next family, which stores weight - 1, and the fold that makes the shift exact.

In bf16, weight - 1 is exact for weights of 0.5 to 256, off by up to 17 % from 0.01 to 0.5 and by more below; in fp32
it loses the last bits of small weights. A power of two per channel can be moved out of a norm into the columns of the
projections that read it without changing a bit of what the model computes, so that every weight that would be rounded
lies in [1, 2). Signs move likewise.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def shift(weight: "torch.Tensor") -> "torch.Tensor":
    """weight - 1, computed in float64 and rounded once to the weight's dtype."""
    return (weight.double() - 1.0).to(weight.dtype)


def unshift(weight: "torch.Tensor") -> "torch.Tensor":
    """weight + 1, computed in float64 and rounded once."""
    return (weight.double() + 1.0).to(weight.dtype)


def is_exact(weight: "torch.Tensor") -> "torch.Tensor":
    """Where 1 + shift(weight) gives the weight back, as the native model computes it in fp32."""
    return (shift(weight).float() + 1.0) == weight.float()


def fold_factors(weight: "torch.Tensor") -> "torch.Tensor":
    """A signed power of two for each channel, 1 where the shift is exact already.

    `weight / factor` has an exact shift, lying in [1, 2); the columns that read the channel are multiplied by the
    factor. Same dtype and shape as `weight`.

    Example:
        >>> import torch
        >>> fold_factors(torch.tensor([1.5, 0.1, -0.3, 0.0], dtype=torch.bfloat16)).tolist()
        [1.0, 0.0625, -0.25, 1.0]
    """
    import torch

    mantissa, exponent = torch.frexp(weight.double())  # |mantissa| in [0.5, 1)
    factor = torch.sign(mantissa) * torch.exp2((exponent - 1).double())
    return torch.where(is_exact(weight), torch.ones_like(factor), factor).to(weight.dtype)


def row_signs(weight: "torch.Tensor") -> "torch.Tensor":
    """-1 where a per-head norm's weight is negative: that sign moves into the projection's rows."""
    import torch

    return torch.where(weight < 0, -torch.ones_like(weight), torch.ones_like(weight))


def pair_factors(query: "torch.Tensor", key: "torch.Tensor") -> "torch.Tensor":
    """Powers of two traded between the q and k norms, (D,), the same for both halves of a rotary pair.

    Only q . k counts, so the query's weight may be divided by what the key's is multiplied by; RoPE turns the channels
    i and i + D/2 into each other, so they share one factor. The factor with the smallest rounding error is taken, 1
    among equals; where both weights are small there may be none without error.

    Args:
        query: weight of q_norm, (D,), non-negative.
        key: weight of k_norm, (D,), non-negative.
    """
    import torch

    half = query.shape[0] // 2
    exponents = sorted(range(-16, 17), key=lambda e: (abs(e), e))
    errors = []
    for exponent in exponents:
        factor = math.ldexp(1.0, exponent)
        error = torch.maximum(relative_error(query / factor), relative_error(key * factor))
        errors.append(torch.maximum(error[:half], error[half:]))
    best = torch.stack(errors).argmin(dim=0)  # the first of equals, so the smallest exponent
    factors = torch.exp2(torch.tensor(exponents, dtype=torch.float64)[best])
    return torch.cat([factors, factors]).to(query.dtype)


def relative_error(weight: "torch.Tensor") -> "torch.Tensor":
    """What storing weight - 1 does to each weight, as a share of it."""
    restored = shift(weight).double() + 1.0
    return ((restored - weight.double()).abs() / weight.double().abs().clamp_min(1e-30)).nan_to_num(math.inf)
