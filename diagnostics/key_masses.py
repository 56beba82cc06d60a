"""The attention mass on a few keys, or of a few queries, from the log-sum-exp: exp(s_ij - l_i), pair by pair.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, D head_dim, N chosen keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gated_qwen.diagnostics.attention_kernels import capped_scores
from gated_qwen.diagnostics.visible_keys import VisibleKeys, is_visible


@dataclass(frozen=True)
class Attended:
    """What one layer's attention computed: everything that its weights follow from.

    Attributes:
        query: (B, H, T, D).
        key: (B, K, S, D).
        logsumexp: (B, H, T), of the scaled, capped and masked scores.
        mask: (B or 1, H or 1, T, S), bool or additive, or None.
        seen: which keys each query sees.
        scale, softcap: as `attention_with_logsumexp`.
    """

    query: Tensor
    key: Tensor
    logsumexp: Tensor
    mask: Tensor | None
    seen: VisibleKeys
    scale: float
    softcap: float | None = None


def sees(attended: Attended, index: Tensor) -> Tensor:
    """Whether each query sees the keys `index`.

    Args:
        index: (B, T, N) int64 on the key axis; -1 or beyond the last key: a key that is not there.

    Returns:
        (B, T, N) bool.
    """
    seen = attended.seen
    inside = (index >= seen.first[..., None]) & (index <= seen.last[..., None]) & (seen.count[..., None] > 0)
    if attended.mask is None:
        return inside
    return inside & is_visible(_gather_mask(attended.mask, index)).any(dim=1)


def masses_on_keys(attended: Attended, index: Tensor, shared: bool = False) -> Tensor:
    """The mass of every query on some keys of its own.

    Args:
        index: (B, T, N) int64 on the key axis; a key that the query does not see has mass 0.
        shared: all queries of a row have the same keys, those of its last query, which is one matrix product; entries
            of other queries that differ must be such that the query does not count.

    Returns:
        (B, H, T, N) float32.

    Example:
        >>> from gated_qwen.diagnostics.attention_kernels import attention_with_logsumexp
        >>> from gated_qwen.diagnostics.visible_keys import visible_keys
        >>> query, key = torch.zeros(1, 1, 4, 8), torch.randn(1, 1, 4, 8)  # queries that look at nothing in particular
        >>> _, logsumexp = attention_with_logsumexp(query, key, key, scale=1.0, causal=True)
        >>> seen = visible_keys(None, 1, 4, 4, causal=True, device=query.device)
        >>> first = torch.zeros(1, 4, 1, dtype=torch.long)
        >>> masses_on_keys(Attended(query, key, logsumexp, None, seen, 1.0), first)[0, 0, :, 0].tolist()[::3]
        [1.0, 0.25]
    """
    query, key = attended.query.float(), attended.key
    batch, heads, length, dim = query.shape
    index_in_range = index.clamp(0, key.shape[2] - 1)
    if shared:
        rows = index_in_range[:, -1]  # (B, N)
        chosen = key.gather(2, rows[:, None, :, None].expand(-1, key.shape[1], -1, dim)).float()
        scores = capped_scores(query, chosen, attended.scale, attended.softcap)
    else:
        grouped = query.view(batch, key.shape[1], -1, length, dim)
        columns = []
        for n in range(index.shape[-1]):
            rows = index_in_range[:, None, :, n, None].expand(-1, key.shape[1], -1, dim)
            chosen = key.gather(2, rows).float()[:, :, None]  # (B, K, 1, T, D)
            columns.append((attended.scale * grouped * chosen).sum(-1).view(batch, heads, length))
        scores = torch.stack(columns, dim=-1)
        if attended.softcap is not None:
            scores = attended.softcap * torch.tanh(scores / attended.softcap)
    if attended.mask is not None and attended.mask.dtype != torch.bool:
        scores = scores + _gather_mask(attended.mask, index_in_range).float()
    mass = torch.exp(scores - attended.logsumexp[..., None].float())
    return torch.where(sees(attended, index)[:, None], mass, 0.0)


def rows_of_weights(attended: Attended, row: int, queries: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """The attention weights of some queries of one sequence on its first keys.

    Args:
        row: which sequence of the batch.
        queries: (N,) int64 on the query axis.
        keys: how many keys; those behind must be hidden from all `queries`.

    Returns:
        The weights (H, N, keys), float32, and whether each query sees each key (N, keys), bool.
    """
    scores = capped_scores(
        attended.query[row : row + 1, :, queries].float(),
        attended.key[row : row + 1, :, :keys].float(),
        attended.scale,
        attended.softcap,
    )[0]
    if attended.mask is None:
        visible = torch.arange(keys, device=scores.device) <= attended.seen.last[row, queries, None]
    else:
        chosen = attended.mask[min(row, attended.mask.shape[0] - 1)][:, queries, :keys]  # (H or 1, N, keys)
        visible = is_visible(chosen).any(dim=0)
        if chosen.dtype != torch.bool:
            scores = scores + chosen.float()
    weights = scores.sub_(attended.logsumexp[row, :, queries, None].float()).exp_()
    return weights.masked_fill_(~visible, 0.0), visible


def _gather_mask(mask: Tensor, index: Tensor) -> Tensor:
    """The mask (B or 1, H or 1, T, S) at keys (B, T, N) as (B, H or 1, T, N)."""
    index = index.clamp(0, mask.shape[-1] - 1)
    mask = mask.expand(index.shape[0], -1, index.shape[1], -1)
    return mask.gather(3, index[:, None].expand(-1, mask.shape[1], -1, -1))
