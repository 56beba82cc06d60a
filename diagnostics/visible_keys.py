"""Which keys each query sees, read from the mask that the attention itself uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gated_qwen.diagnostics.attention_kernels import query_blocks


@dataclass(frozen=True)
class VisibleKeys:
    """For every query the first and the last key that it sees, and how many it sees.

    Attributes:
        first, last: (B, T) int64 indices on the key axis; without meaning where `count` is 0.
        count: (B, T) int64.
    """

    first: Tensor
    last: Tensor
    count: Tensor


def visible_keys(
    mask: Tensor | None, batch: int, queries: int, keys: int, *, causal: bool, device: torch.device
) -> VisibleKeys:
    """Reads the mask, some queries at a time.

    Args:
        mask: (B or 1, H or 1, T, S), bool (True: visible) or additive; None: `causal` says it all.
        batch, queries, keys: B, T and S.
        causal: without a mask, query i sees keys 0 to i; otherwise all.
        device: where the result lies.

    Example:
        >>> seen = visible_keys(None, 1, 3, 3, causal=True, device=torch.device("cpu"))
        >>> seen.last.tolist(), seen.count.tolist()
        ([[0, 1, 2]], [[1, 2, 3]])
    """
    if mask is None:
        last = torch.arange(queries, device=device) if causal else torch.full((queries,), keys - 1, device=device)
        last = last.expand(batch, queries)
        return VisibleKeys(torch.zeros_like(last), last, last + 1)
    parts = []
    for rows in query_blocks(queries, 4 * mask.shape[0] * mask.shape[1] * keys):
        seen = is_visible(mask[:, :, rows]).any(dim=1).view(torch.uint8)  # (B or 1, rows, S)
        first = seen.argmax(-1)  # of equal values the first
        last = keys - 1 - seen.flip(-1).argmax(-1)
        parts.append((first, last, seen.sum(-1, dtype=torch.int32).long()))
    joined = (torch.cat(part, dim=1).expand(batch, queries) for part in zip(*parts, strict=True))
    return VisibleKeys(*joined)


def is_visible(mask: Tensor) -> Tensor:
    """Bool in the shape of the mask; libraries write -inf or the smallest number of the dtype for a hidden key."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
