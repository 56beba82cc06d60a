"""Where query and gate rows lie in a fused `q_proj`: each layout is one index function that can be read aloud.

H query heads, K key/value heads, G = H / K, D = head_dim, query head h in group kv = h // G at place j = h % G.

    official, headwise     per = G*D + G   q(h, d) = kv*per + j*D + d    gate(h)    = kv*per + G*D + j
    official, elementwise  per = 2*G*D     q(h, d) = kv*per + j*D + d    gate(h, d) = kv*per + G*D + j*D + d
    native, elementwise                    q(h, d) = h*2D + d            gate(h, d) = h*2D + D + d

"official" is the paper's release, "native" Qwen3-Next and Qwen3.5. The shapes are the same, so only the origin, or the
loss on text (see layout_check.py), tells them apart. Biases follow the same rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Heads:
    """The shape that a layout depends on."""

    query: int
    key_value: int
    dim: int
    granularity: str

    @property
    def gate_rows(self) -> int:
        return self.query * (self.dim if self.granularity == "elementwise" else 1)

    @property
    def query_rows(self) -> int:
        return self.query * self.dim


Rows = tuple[list[int], list[int]]


def official_rows(heads: Heads) -> Rows:
    """Rows of the fused projection that hold the queries and the gate scores, each by head.

    Example:
        >>> official_rows(Heads(query=4, key_value=2, dim=2, granularity="headwise"))
        ([0, 1, 2, 3, 6, 7, 8, 9], [4, 5, 10, 11])
    """
    group = heads.query // heads.key_value
    width = heads.dim if heads.granularity == "elementwise" else 1
    per = group * (heads.dim + width)
    query = [h // group * per + h % group * heads.dim + d for h in range(heads.query) for d in range(heads.dim)]
    gate = [
        h // group * per + group * heads.dim + h % group * width + d for h in range(heads.query) for d in range(width)
    ]
    return query, gate


def native_rows(heads: Heads) -> Rows:
    """As `official_rows`, for Qwen3-Next and Qwen3.5: each head's query rows, then its gate rows.

    Example:
        >>> native_rows(Heads(query=2, key_value=1, dim=2, granularity="elementwise"))
        ([0, 1, 4, 5], [2, 3, 6, 7])
    """
    width = heads.dim if heads.granularity == "elementwise" else 1
    per = heads.dim + width
    query = [h * per + d for h in range(heads.query) for d in range(heads.dim)]
    gate = [h * per + heads.dim + d for h in range(heads.query) for d in range(width)]
    return query, gate


def concatenated_rows(heads: Heads) -> Rows:
    """All query rows, then all gate rows: no known release does this, but a naive conversion would."""
    return list(range(heads.query_rows)), list(range(heads.query_rows, heads.query_rows + heads.gate_rows))


LAYOUTS: dict[str, Callable[[Heads], Rows]] = {
    "official": official_rows,
    "native": native_rows,
    "concatenated": concatenated_rows,
}


def query_part(fused: "torch.Tensor", rows: Rows) -> "torch.Tensor":
    """The query rows of a fused weight (rows, C) or bias (rows,), by head."""
    return fused[rows[0]]


def gate_part(fused: "torch.Tensor", rows: Rows) -> "torch.Tensor":
    """The gate rows of a fused weight or bias, by head."""
    return fused[rows[1]]


def fuse(query: "torch.Tensor", gate: "torch.Tensor", rows: Rows) -> "torch.Tensor":
    """The inverse of the two: one weight or bias with the query and gate rows in their places."""
    import torch

    dtype = torch.promote_types(query.dtype, gate.dtype)
    fused = query.new_empty((len(rows[0]) + len(rows[1]), *query.shape[1:]), dtype=dtype)
    fused[rows[0]] = query.to(dtype)
    fused[rows[1]] = gate.to(dtype)
    return fused


def fuse_by_head(query: "torch.Tensor", gate: "torch.Tensor", heads: Heads) -> "torch.Tensor":
    """The native layout from query rows and gate rows; a headwise gate becomes an elementwise one first."""
    if heads.granularity == "headwise":
        gate = repeat_headwise(gate, heads.dim)
    return fuse(query, gate, native_rows(replace(heads, granularity="elementwise")))


def repeat_headwise(gate: "torch.Tensor", dim: int) -> "torch.Tensor":
    """Headwise rows (H, ...) as elementwise ones (H * dim, ...): every coordinate of a head gets the head's score."""
    return gate.repeat_interleave(dim, dim=0)
