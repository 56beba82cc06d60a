"""The exact retrofit: a gate that changes nothing at the start (see docs/retrofit.md).

A zero gate is sigmoid(0) = 0.5, and a doubled `o_proj` weight gives back the ungated function. Both are powers of two,
so logits are equal to the bit in fp32 and bf16. In fp16 a halved head output can be subnormal and lose bits.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Of an attention module `self_attn`: the bias of o_proj stays as it is, since it is added after the gate.
DOUBLED = "self_attn.o_proj.weight"
GATE = "self_attn.g_proj.weight"


def gate_rows(granularity: str, num_attention_heads: int, head_dim: int) -> int:
    """Rows of `g_proj`: one for each head (headwise), or one for each coordinate of each head (elementwise).

    Example:
        >>> gate_rows("headwise", 16, 128), gate_rows("elementwise", 16, 128)
        (16, 2048)
    """
    return num_attention_heads * (head_dim if granularity == "elementwise" else 1)


def double(weight: "torch.Tensor") -> "torch.Tensor":
    """Twice the weight: exact in binary floating point, unless it overflows.

    Raises:
        OverflowError: a finite weight of more than half of the dtype's range.
    """
    doubled = weight * 2
    if bool((doubled.isinf() & ~weight.isinf()).any()):
        raise OverflowError(f"doubling exceeds the range of {weight.dtype}")
    return doubled
