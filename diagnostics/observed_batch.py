"""What the running forward pass looks at: which tokens are real, and where each lies in its own document."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gated_qwen.diagnostics.decoder import decoder_body

if TYPE_CHECKING:
    from typing_extensions import Self

CACHE_NAMES = ("cache", "past_key_values", "past_key_value")


@dataclass(frozen=True)
class ObservedBatch:
    """The tokens of one call of the decoder: a batch (B, T), or the next chunk of one whose start lies in the cache.

    Attributes:
        input_ids: (B, T) int64, or None where the model was given embeddings.
        valid: (B, T) bool, False on padding.
        position: (B, T) int64, index of each token in its own document, counted from 0 over real tokens, those in the
            cache included. Without meaning on padding.
        document: (B, T) int64, number of the packed document in its row, from 0.
        sequence_offset: the number of sequences (rows) that ended before these began.
        padded: whether any token is padding, known without looking at the device.
    """

    input_ids: Tensor | None
    valid: Tensor
    position: Tensor
    document: Tensor
    sequence_offset: int
    padded: bool

    @property
    def sequence(self) -> Tensor:
        """(B, T) int64, the number of each token's row among all rows that the observer has seen."""
        rows = torch.arange(self.valid.shape[0], device=self.valid.device)
        return (self.sequence_offset + rows)[:, None].expand_as(self.valid)

    @property
    def mask(self) -> Tensor | None:
        """`valid`, or None where there is no padding."""
        return self.valid if self.padded else None


@dataclass(frozen=True)
class _RowEnds:
    """Where each row (B,) stood after the last chunk: what the next chunk goes on from."""

    columns: int  # tokens in the cache, padding included
    next_position: Tensor
    document: Tensor
    position_id: Tensor  # of the last real token; -1 where not known


class BatchObserver:
    """Context manager that keeps `current`, the batch that the model's decoder is running on, or None between calls.

    `latest` stays between calls, for what also has to work when gradient checkpointing runs a layer again.

    A new batch of sequences begins with a call whose cache is empty or absent. Padding is read from a 2-D mask
    (of a cached chunk its last T columns) or the diagonal of a prepared 4-D one. A document starts where
    `position_ids` (B, T) do not go on by one.

    Args:
        model: a causal LM or base model of transformers.

    Raises:
        ValueError: an encoder-decoder model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.body = decoder_body(model)
        self.current: ObservedBatch | None = None
        self.latest: ObservedBatch | None = None
        self.sequences = 0
        self._arguments = [name for name in inspect.signature(self.body.forward).parameters if name != "self"]
        self._ends: _RowEnds | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._hooks = [
            self.body.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
            self.body.register_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.current, self.latest, self._ends = [], None, None, None

    def _end(self, *_: Any) -> None:
        # Layers that gradient checkpointing runs again in the backward pass find no batch, and are not counted twice.
        self.current = None

    @torch.no_grad()
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._arguments, args, strict=False)) | kwargs
        ids = given.get("input_ids")
        tokens = ids if ids is not None else given.get("inputs_embeds")
        if tokens is None:
            return  # the model will say so itself
        (batch, length), device = tokens.shape[:2], tokens.device
        cached = _cached_columns(given)
        mask = _padding_mask(given.get("attention_mask"), length, cached)
        valid = torch.ones(batch, length, dtype=torch.bool, device=device)
        padded = False
        if mask is not None and not bool(mask[:, -length:].all()):
            valid, padded = mask[:, -length:].to(device).expand(batch, length), True

        ends = self._ends
        if not cached:
            self.sequences += batch
            ends = _unseen_ends(batch, 0, None, device)
        elif ends is None or ends.columns != cached or len(ends.document) != batch:
            ends = _unseen_ends(batch, cached, None if mask is None else mask[:, :-length], device)
        position, document, self._ends = _place_tokens(valid, given.get("position_ids"), ends)
        self.current = self.latest = ObservedBatch(ids, valid, position, document, self.sequences - batch, padded)


def _place_tokens(valid: Tensor, position_ids: Tensor | None, ends: _RowEnds) -> tuple[Tensor, Tensor, _RowEnds]:
    """Position and document of each token of a chunk (B, T), counted on from the end of the last one."""
    starts, last_id = _document_starts(position_ids, valid, ends.position_id)
    document = ends.document[:, None] + starts.cumsum(1)
    count = valid.cumsum(1) - 1  # real tokens of the chunk before each one
    start = torch.where(starts, count, -1).cummax(1).values  # that count at the start of its document
    position = torch.where(start >= 0, count - start, count + ends.next_position[:, None])
    after = _RowEnds(ends.columns + valid.shape[1], position[:, -1] + 1, document[:, -1], last_id)
    return position.clamp(min=0), document, after


def _document_starts(position_ids: Tensor | None, valid: Tensor, last_id: Tensor) -> tuple[Tensor, Tensor]:
    """Where a document begins inside a row, (B, T) bool, and the position id of the last real token, (B,)."""
    if position_ids is not None and position_ids.ndim == 3 and len(position_ids) == 4:
        position_ids = position_ids[0]  # Qwen3.5: text positions, then three for vision
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] != valid.shape[1]:
        return torch.zeros_like(valid), torch.full_like(last_id, -1)
    ids = position_ids.expand_as(valid).to(valid.device)
    columns = torch.arange(valid.shape[1], device=valid.device)
    real = torch.where(valid, columns, -1).cummax(1).values  # the last real token up to each column
    before = torch.cat([torch.full_like(real[:, :1], -1), real[:, :-1]], dim=1)
    previous = torch.where(before >= 0, ids.gather(1, before.clamp(min=0)), last_id[:, None])
    starts = valid & (previous >= 0) & (ids != previous + 1)
    last = torch.where(real[:, -1] >= 0, ids.gather(1, real[:, -1:].clamp(min=0))[:, 0], last_id)
    return starts, last


def _unseen_ends(batch: int, cached: int, mask: Tensor | None, device: torch.device) -> _RowEnds:
    """Row ends of `cached` tokens that were not observed: one document, as long as mask (B, cached) or cache says."""
    zeros = torch.zeros(batch, dtype=torch.int64, device=device)
    seen = mask.sum(1) if mask is not None and mask.shape[1] == cached else zeros + cached
    return _RowEnds(cached, seen, zeros, torch.full_like(zeros, -1))


def _cached_columns(given: dict[str, Any]) -> int:
    """How many tokens the cache that came with the call holds."""
    cache: Any = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0


def _padding_mask(mask: Any, length: int, cached: int) -> Tensor | None:
    """Real tokens as (B, at least T) bool from whatever mask the model was given, or None where it does not say."""
    if isinstance(mask, dict):  # prepared, one for each kind of layer
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim == 2:
        return mask.bool()
    if mask.ndim == 4 and mask.shape[-1] >= cached + length:  # a padding token does not see itself
        own = mask[:, 0, :, cached : cached + length].diagonal(dim1=1, dim2=2)
        return own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
    return None
