"""Measures where a live model's attention goes, at any length, for about the cost of its own forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gated_qwen.diagnostics.attention_interface import AttentionCall, watch_attention
from gated_qwen.diagnostics.attention_kernels import BLOCK_BYTES, query_blocks
from gated_qwen.diagnostics.attention_statistics import AttentionSettings, AttentionStatistics, LayerShares
from gated_qwen.diagnostics.column_masses import ColumnMasses, sampling_weights
from gated_qwen.diagnostics.key_masses import Attended, masses_on_keys, rows_of_weights, sees
from gated_qwen.diagnostics.observed_batch import BatchObserver, ObservedBatch
from gated_qwen.diagnostics.query_places import QueryPlaces, has_window, query_places
from gated_qwen.diagnostics.uniform import uniform_share

if TYPE_CHECKING:
    from typing_extensions import Self

ROWS_AT_A_TIME = 64  # of the attention map, for the column masses


class AttentionProbe:
    """Context manager that collects attention statistics of every call of the model, without making attention maps.

    The model runs as it is, whatever attention implementation it was loaded with, and gives the same output up to
    rounding; afterwards, also after an exception, that implementation is back. Calls may be batches with padding or
    packed documents, chunks of a long prefill with a cache, single tokens of a generation, or training steps. Memory
    beyond the model's own grows with the number of tokens, not with its square. Time grows by a few percent; with
    columns="all" by about that of one more attention.

    Shares are taken before dropout. A learned sink logit (gpt-oss) is part of each query's denominator, so the shares
    of the keys sum to less than one there.

    Args:
        model: any causal LM of transformers whose attention goes through its `AttentionInterface`.
        skip_queries, head_keys, keys, columns, sink_threshold: as `AttentionSettings`.

    Attributes:
        statistics: what was seen, `AttentionStatistics`.
        on_share: functions that are called in each layer with (layer, share (B, H, T) float32 of the first token);
            where a query is padding the share means nothing.

    Raises:
        ValueError: settings that are not allowed, or an encoder-decoder model.
        RuntimeError: at the end, the model ran but no layer's attention was seen.

    Example:
        >>> from transformers import LlamaForCausalLM
        >>> model = LlamaForCausalLM.from_pretrained(llama_folder)
        >>> with torch.no_grad(), AttentionProbe(model, skip_queries=2) as probe:
        ...     _ = model(torch.tensor([[5, 6, 7, 8]]))
        >>> round(probe.statistics.summary()["mean"]["uniform"], 4)  # (1 + 1/2 + 1/3 + 1/4) / 4
        0.5208
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        skip_queries: int = 64,
        head_keys: int = 4,
        keys: Sequence[int] = (),
        columns: str = "sample",
        sink_threshold: float = 0.3,
    ) -> None:
        self.model = model
        self.statistics = AttentionStatistics(
            AttentionSettings(skip_queries, head_keys, tuple(keys), columns, sink_threshold)
        )
        self.on_share: list[Callable[[int, Tensor], None]] = []
        self._observer = BatchObserver(model)
        self._stack = ExitStack()
        self._places = _PlacesOfBatch()

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # undone when the second step fails
            stack.enter_context(self._observer)
            stack.enter_context(watch_attention(self.model, self._watch))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._places = _PlacesOfBatch()
        if error is None and self._observer.sequences and not self.statistics.layers:
            raise RuntimeError(
                f"{type(self.model).__name__} ran, but no attention layer of it was seen: it has none that goes "
                "through transformers' AttentionInterface"
            )

    def _watch(self, call: AttentionCall) -> None:
        batch = self._observer.current
        if batch is None:  # gradient checkpointing runs a layer again in the backward pass
            return
        if call.query.shape[2] != batch.valid.shape[1]:
            raise RuntimeError(
                f"layer {call.layer} attends with {call.query.shape[2]} queries to {batch.valid.shape[1]} tokens; "
                "a model that adds tokens of its own cannot be diagnosed"
            )
        places = self._places.of(call, batch)
        attended = Attended(call.query, call.key, call.logsumexp, call.mask, places.seen, call.scale, call.softcap)
        shares = _layer_shares(attended, places, batch, self.statistics.settings)
        for callback in self.on_share:
            callback(call.layer, shares.first)
        self.statistics.update(call.layer, shares, call.sliding_window)
        if self.statistics.settings.columns != "off":
            columns = self.statistics.columns_of(call.layer, call.query.shape[1])
            stands_for = self._places.stands_for(batch, self.statistics.settings.columns)
            _add_columns(columns, attended, places, batch, stands_for)


class _PlacesOfBatch:
    """What all layers of one call of the model share; masks are compared by identity and not kept alive."""

    def __init__(self) -> None:
        self._batch: ObservedBatch | None = None
        self._places: list[tuple[weakref.ref[Tensor] | None, tuple[Any, ...], QueryPlaces]] = []
        self._stands_for: Tensor | None = None

    def of(self, call: AttentionCall, batch: ObservedBatch) -> QueryPlaces:
        if batch is not self._batch:
            self._batch, self._places, self._stands_for = batch, [], None
        kind = (call.causal, call.key.shape[2], has_window(call))
        for reference, known, places in self._places:
            same_mask = call.mask is None if reference is None else call.mask is not None and reference() is call.mask
            if same_mask and known == kind:
                return places
        places = query_places(call, batch)
        reference = None if call.mask is None else weakref.ref(call.mask)
        self._places.append((reference, kind, places))
        return places

    def stands_for(self, batch: ObservedBatch, columns: str) -> Tensor:
        """(B, T) int64 on the CPU: how many queries each one stands for in the column masses, 0 for none."""
        if self._stands_for is None:
            weights = torch.ones_like(batch.position) if columns == "all" else sampling_weights(batch.position)
            self._stands_for = (weights * batch.valid).cpu()
        return self._stands_for


def _layer_shares(
    attended: Attended, places: QueryPlaces, batch: ObservedBatch, settings: AttentionSettings
) -> LayerShares:
    seen = places.seen
    device = seen.first.device
    of_document = places.start[..., None] + torch.tensor([0, *settings.keys], device=device)  # (B, T, 1 + N)
    of_query = seen.first[..., None] + torch.arange(settings.head_keys, device=device)
    masses = masses_on_keys(attended, torch.cat([of_document, of_query], dim=-1), places.shared)
    masses, head = masses.split([of_document.shape[-1], settings.head_keys], dim=-1)
    visible = sees(attended, of_document)
    even = uniform_share(seen.count)
    return LayerShares(
        position=batch.position,
        valid=batch.mask,
        first=masses[..., 0],
        head=head.sum(-1),
        uniform=even * visible[..., 0],
        head_uniform=uniform_share(seen.count, settings.head_keys),
        keys=masses[..., 1:],
        keys_seen=visible[..., 1:],
        key_uniform=even,
    )


def _add_columns(
    columns: ColumnMasses, attended: Attended, places: QueryPlaces, batch: ObservedBatch, stands_for: Tensor
) -> None:
    """Adds the rows of the attention map of the queries that stand for some, a few at a time."""
    device = attended.query.device
    columns.add_documents(batch.position[batch.valid])
    heads, keys = attended.query.shape[1], attended.key.shape[2]
    for row, weights in enumerate(stands_for):
        queries = weights.nonzero()[:, 0]
        # Few at a time, so that early queries are not multiplied with the keys that only late ones see.
        for block in query_blocks(len(queries), max(4 * 4 * heads * keys, BLOCK_BYTES // ROWS_AT_A_TIME)):
            chosen = queries[block].to(device)
            reached = int(places.seen.last[row, chosen].max()) + 1
            shares, visible = rows_of_weights(attended, row, chosen, reached)
            index = torch.arange(reached, device=device)
            start = places.start[row, chosen]
            position = index - start[0] if places.shared else index - start[:, None]
            columns.add_rows(shares, visible, position, weights[queries[block]].to(device))
