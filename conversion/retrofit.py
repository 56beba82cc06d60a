"""Giving an ungated model a gate: what the gate's weights are at the start, and what happens to `o_proj`.

A zero gate is sigmoid(0) = 0.5, and a doubled `o_proj` weight gives back the ungated function. Both are powers of two,
so logits are equal to the bit in fp32 and bf16 (`identity`). In fp16 a halved head output can be subnormal and lose
bits. The two other starts are not exact: `open` puts the gate near 1, where its slope is nearly zero, and `random`
draws the projection and so perturbs the gate around 0.5.
"""

import zlib
from functools import partial
from typing import TYPE_CHECKING

from gated_qwen.conversion.plan import PlannedTensor, filled, torch_dtype

if TYPE_CHECKING:
    import torch

STARTS = ("identity", "open", "random")
DOUBLED = "self_attn.o_proj.weight"  # the bias of o_proj is added after the gate, so it stays
GATE = "self_attn.g_proj.weight"
OPEN_BIAS = 10.0  # sigmoid(10) = 0.99995

RULES = {
    "identity": {DOUBLED: "twice the source", GATE: "zeros", "every other tensor": "copied bit for bit"},
    "open": {
        GATE: "zeros",
        "self_attn.g_proj.bias": f"all {OPEN_BIAS:g}: the gate starts at 0.99995",
        "every other tensor": "copied bit for bit",
    },
    "random": {
        DOUBLED: "twice the source",
        GATE: "normal, standard deviation initializer_range",
        "every other tensor": "copied bit for bit",
    },
}
WARNINGS = {
    "identity": (),
    "open": (
        "start open: the gate begins at 0.99995, where its slope is 5,500 times smaller than at the identity start, "
        "so it will barely learn; logits differ slightly from the source's",
    ),
    "random": ("start random: the logits differ from the source's",),
}


def double(weight: "torch.Tensor") -> "torch.Tensor":
    """Twice the weight: exact in binary floating point, unless it overflows.

    Raises:
        OverflowError: a finite weight of more than half of the dtype's range.
    """
    doubled = weight * 2
    if bool((doubled.isinf() & ~weight.isinf()).any()):
        raise OverflowError(f"doubling exceeds the range of {weight.dtype}")
    return doubled


def gate_tensor(name: str, dtype: str, shape: tuple[int, ...], start: str, std: float, seed: int) -> PlannedTensor:
    """A weight or bias of `g_proj` at its start."""
    if name.endswith(".bias"):
        return filled(name, dtype, shape, OPEN_BIAS if start == "open" else 0.0)
    if start == "random":
        rule = f"normal, standard deviation {std:g}, seed {seed}"
        return PlannedTensor(name, dtype, shape, rule, partial(drawn, name, dtype, shape, std, seed))
    return filled(name, dtype, shape)


def drawn(name: str, dtype: str, shape: tuple[int, ...], std: float, seed: int) -> "torch.Tensor":
    """A normal tensor drawn from the seed and its name, so that it does not depend on the order of writing."""
    import torch

    # torch's generator on the CPU takes 32 bits of a seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator).mul_(std).to(torch_dtype(dtype))
