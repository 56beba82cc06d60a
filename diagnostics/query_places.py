"""Where each query's document begins on the key axis of a layer, with padding, packing, caches and windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gated_qwen.diagnostics.attention_interface import AttentionCall
from gated_qwen.diagnostics.observed_batch import ObservedBatch
from gated_qwen.diagnostics.visible_keys import VisibleKeys, visible_keys


@dataclass(frozen=True)
class QueryPlaces:
    """What the queries of one call see.

    Attributes:
        seen: the keys that each query sees.
        start: (B, T) int64, key index of the first token of the query's document; negative once it left the cache.
        shared: whether the queries of a row that are not padding all have one `start`, and one first visible key.
    """

    seen: VisibleKeys
    start: Tensor
    shared: bool


def query_places(call: AttentionCall, batch: ObservedBatch) -> QueryPlaces:
    """Places the queries of a call.

    In a layer that sees everything before the query the document begins at the first key that the mask shows, whatever
    the packing. In a layer with a window that key slides, and the beginning is counted back from the query itself: the
    last key that a causal query sees, less the query's position.

    Args:
        call: of one layer.
        batch: the tokens that the queries belong to.
    """
    length, keys = call.query.shape[2], call.key.shape[2]
    seen = visible_keys(call.mask, len(call.query), length, keys, causal=call.causal, device=call.query.device)
    if call.mask is None and not has_window(call):
        return QueryPlaces(seen, seen.first, True)
    seen = VisibleKeys(_fill_padding(seen.first, batch.mask), seen.last, seen.count)
    start = seen.first
    if has_window(call):
        start = _fill_padding(seen.last - batch.position, batch.mask)
    return QueryPlaces(seen, start, _same_in_row(start) and _same_in_row(seen.first))


def has_window(call: AttentionCall) -> bool:
    if call.sliding_window is not None:
        return True
    types = getattr(call.module.config, "layer_types", None)
    return types is not None and types[call.layer] == "chunked_attention"


def _fill_padding(index: Tensor, valid: Tensor | None) -> Tensor:
    """Gives padding the largest index of its row, which for a row of one document is that of all its tokens."""
    if valid is None:
        return index
    largest = torch.where(valid, index, -(2**62)).amax(1, keepdim=True)
    return torch.where(valid, index, largest)


def _same_in_row(index: Tensor) -> bool:
    return bool((index == index[:, -1:]).all())
