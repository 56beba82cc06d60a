"""Interventions on gates: what a model does when they are clamped, opened, closed, shuffled or held at their mean.

Each is a context manager on a live model, and works on the value of the gate after its activation. A gate is changed
through its raw scores, so that the model's own code does the gating: the scores become those that give the wanted
value. That is exact for 0, 1, shuffles and all that a clamp leaves alone, and otherwise right to the rounding of the
scores' dtype. Nothing is left behind. Interventions nest, the inner one acting first, and probes see what they make of
the gates:

    with close_gates(model, heads=[3]), GateProbe(model) as gates:
        model(**inputs)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gated_qwen.diagnostics.accumulators import select_rows
from gated_qwen.diagnostics.gate_readers import GateSite, gate_sites
from gated_qwen.diagnostics.gate_scores import score_of
from gated_qwen.diagnostics.gate_statistics import GateStatistics
from gated_qwen.diagnostics.observed_batch import BatchObserver

# From a gate, its raw scores (B, T, H, W) and the real tokens (B, T), None for all, to changed raw scores.
Change = Callable[[GateSite, Tensor, Tensor | None], Tensor]


def clamp_gates(
    model: nn.Module, low: float = -math.inf, high: float = math.inf, **selection: Any
) -> AbstractContextManager[None]:
    """Keeps gates between `low` and `high`; one that lies between them is untouched, to the bit.

    Args:
        model: see `gate_readers.gate_sites`.
        low, high: bounds of the gate's value.
        selection: `layers`, `heads` (sequences of indices) and `positions` (of names): which gates; all by default. At
            the positions "key" and "value" a head is a key/value head.

    Raises:
        ValueError: a bound that the activation cannot take; no gate, layer or head of that description; or `heads` for
            a gate that all heads share, or that has none.

    Example:
        >>> import torch
        >>> from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM
        >>> config = GatedQwenConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, head_dim=8, gate_initializer_range=0.0)
        >>> model, ids = GatedQwenForCausalLM(config).eval(), torch.tensor([[5, 6, 7]])
        >>> logits = model(input_ids=ids).logits
        >>> with clamp_gates(model, high=0.4):
        ...     torch.equal(model(input_ids=ids).logits, logits)
        False
        >>> torch.equal(model(input_ids=ids).logits, logits)
        True
    """
    if not low <= high:
        raise ValueError(f"clamp_gates: low {low} is not at most high {high}")

    def change(site: GateSite, scores: Tensor, mask: Tensor | None) -> Tensor:
        gate = site.gate(scores)
        if low > -math.inf:
            scores = torch.where(gate < low, score_of(site, low, scores), scores)
        if high < math.inf:
            scores = torch.where(gate > high, score_of(site, high, scores), scores)
        return scores

    return _intervene(model, change, **selection)


def open_gates(model: nn.Module, **selection: Any) -> AbstractContextManager[None]:
    """Sets gates to what changes nothing: 1, or 0 where the gate is added. The model acts as if it had none.

    Args, raises: as `clamp_gates`.
    """
    return _hold(model, lambda site: 0.0 if site.operation == "add" else 1.0, **selection)


def close_gates(model: nn.Module, **selection: Any) -> AbstractContextManager[None]:
    """Sets gates to 0: nothing passes.

    Args, raises: as `clamp_gates`; also a gate that is added, or whose activation cannot be 0 (`ns_sigmoid`).
    """

    def closed(site: GateSite) -> float:
        if site.operation == "add":
            raise ValueError(f"the gate at {site.position} is added, so no value of it closes anything")
        return 0.0

    return _hold(model, closed, **selection)


def shuffle_gates(model: nn.Module, over: str, seed: int = 0, **selection: Any) -> AbstractContextManager[None]:
    """Permutes gates: their values stay, and what they answer to is lost.

    Args:
        model, selection: as `clamp_gates`.
        over: "tokens": the gates of the real tokens of each row and call change places, a fresh order for each layer
            and row (one token at a time, in decoding, has nobody to change with); "heads": the heads change places.
        seed: of the orders; every call of the model draws the same ones.

    Raises:
        ValueError: as `clamp_gates`; another `over`; or "heads" for a gate that all heads share, or that has none.
    """
    if over not in ("tokens", "heads"):
        raise ValueError(f"shuffle_gates: over is {over!r}; it can be 'tokens' or 'heads'")

    def change(site: GateSite, scores: Tensor, mask: Tensor | None) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + site.layer)
        if over == "heads":
            _check_heads(site)
            return scores[:, :, torch.randperm(scores.shape[2], generator=generator).to(scores.device)]
        shuffled = scores.clone()
        for row in range(len(scores)):
            real = torch.arange(scores.shape[1]) if mask is None else mask[row].nonzero().flatten().cpu()
            order = torch.randperm(len(real), generator=generator)
            shuffled[row, real.to(scores.device)] = scores[row, real[order].to(scores.device)]
        return shuffled

    return _intervene(model, change, **selection)


def mean_gates(
    model: nn.Module, statistics: GateStatistics | None = None, **selection: Any
) -> AbstractContextManager[None]:
    """Replaces gates by their mean over tokens, one for each head and coordinate: the gate no longer sees the token.

    Args:
        model, selection: as `clamp_gates`.
        statistics: what a `GateProbe` of this model has collected, whose means are taken; None: the mean over the real
            tokens of each call.

    Raises:
        ValueError: as `clamp_gates`; or statistics of another model.
    """

    def change(site: GateSite, scores: Tensor, mask: Tensor | None) -> Tensor:
        if statistics is None:
            gate = site.gate(scores).double()
            return score_of(site, select_rows(gate, gate.shape[2:], mask).mean(0), scores)
        if f"{site.layer}.{site.position}.values" not in statistics.table:
            raise ValueError(f"the statistics hold no gate at {site.position} of layer {site.layer}")
        return score_of(site, statistics.mean_gate(site.layer, site.position), scores)

    return _intervene(model, change, **selection)


def _hold(model: nn.Module, value: Callable[[GateSite], float], **selection: Any) -> AbstractContextManager[None]:
    return _intervene(model, lambda site, scores, mask: score_of(site, value(site), scores), **selection)


@contextmanager
def _intervene(
    model: nn.Module,
    change: Change,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Sequence[str] | None = None,
) -> Iterator[None]:
    """Hooks `change` to the gates that were chosen, before any hook that is there already."""
    sites = _chosen(model, layers, heads, positions)
    observer = BatchObserver(model)

    def hook(site: GateSite, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        scores = site.scores(output)
        mask = observer.latest.mask if observer.latest is not None else None
        changed = change(site, scores, mask).to(scores.dtype).expand_as(scores)
        if heads is not None:
            chosen = torch.zeros(scores.shape[2], 1, dtype=torch.bool, device=scores.device)
            chosen[list(heads)] = True
            changed = torch.where(chosen, changed, scores)
        return site.with_scores(output, changed)

    with ExitStack() as stack:
        stack.enter_context(observer)
        for site in sites:
            stack.callback(site.projection.register_forward_hook(partial(hook, site), prepend=True).remove)
        yield


def _chosen(
    model: nn.Module, layers: Sequence[int] | None, heads: Sequence[int] | None, positions: Sequence[str] | None
) -> list[GateSite]:
    every = gate_sites(model)
    if not every:
        raise ValueError(f"{type(model).__name__} has no gates to intervene on")
    for name, wanted, there in (
        ("layers", layers, {site.layer for site in every}),
        ("positions", positions, {site.position for site in every}),
    ):
        if wanted is not None and (missing := [entry for entry in wanted if entry not in there]):
            raise ValueError(f"{name}: no gate at {missing[0]!r}; there are gates at {sorted(there)}")
    sites = [
        site
        for site in every
        if (layers is None or site.layer in layers) and (positions is None or site.position in positions)
    ]
    for site in sites if heads is not None else []:
        _check_heads(site)
        count = site.heads
        if wrong := [head for head in heads or [] if not 0 <= head < count]:
            raise ValueError(
                f"heads: {site.position} of layer {site.layer} has heads 0 to {count - 1}, not {wrong[0]}"
            )
    return sites


def _check_heads(site: GateSite) -> None:
    if site.shared or site.position == "dense_output":
        raise ValueError(
            f"the gate at {site.position} of layer {site.layer} has no heads of its own; leave it out with positions="
        )
