"""A context manager that reads the gates of a model, and what they leave of the heads' outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gated_qwen.diagnostics.attention_interface import AttentionCall, watch_attention
from gated_qwen.diagnostics.gate_readers import ACTIVATIONS, GateSite, gate_sites
from gated_qwen.diagnostics.gate_statistics import GateStatistics
from gated_qwen.diagnostics.observed_batch import BatchObserver
from gated_qwen.diagnostics.sparsity import THRESHOLDS

if TYPE_CHECKING:
    from typing_extensions import Self

    from gated_qwen.diagnostics.attention_probe import AttentionProbe


class GateProbe:
    """Collects `GateStatistics` while its block runs; the model is unchanged during it (up to rounding) and after it.

    Gates are read after their activation, at every position. Where the attention output is gated, the attention
    function's output is compared with what enters `o_proj`. On a model without gates nothing is collected, and
    `statistics.summary()` is None.

    Args:
        model: see `gate_readers.gate_sites`.
        attention: an `AttentionProbe` of the same model. With it the report also says what heads write of the first
            token (gate times share), beside how much they look at it.
        skip_queries: tokens at the start of each document that form the classes "first" and "early".
        thresholds: tau of S_tau.

    Raises:
        ValueError: an encoder-decoder model, or one that gates its attention in a way that is not known here.

    Example:
        >>> import torch
        >>> from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM
        >>> config = GatedQwenConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, head_dim=8, gate_initializer_range=0.0)
        >>> model = GatedQwenForCausalLM(config)
        >>> with GateProbe(model) as gates, torch.no_grad():
        ...     _ = model(input_ids=torch.tensor([[5, 6, 7]]))
        >>> gates.statistics.summary()["summary"]["attn_output"]["mean"]
        0.5
    """

    def __init__(
        self,
        model: nn.Module,
        attention: AttentionProbe | None = None,
        skip_queries: int = 64,
        thresholds: Sequence[float] = THRESHOLDS,
    ) -> None:
        self.statistics = GateStatistics(skip_queries, thresholds)
        self.sites = gate_sites(model)
        self._model = model
        self._attention = attention
        self._observer = BatchObserver(model)
        self._stack = ExitStack()
        # By layer, from the moment they are known in a forward pass until its o_proj.
        self._gates: dict[int, Tensor] = {}
        self._pre_gate: dict[int, Tensor] = {}
        self._shares: dict[int, Tensor] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self.sites:
                stack.enter_context(self._observer)
            for site in self.sites:
                stack.callback(site.projection.register_forward_hook(partial(self._see_scores, site)).remove)
            at_output = [site for site in self.sites if site.position == "attn_output"]
            if at_output:
                stack.enter_context(watch_attention(self._model, self._see_attention))
            for site in at_output:
                attention: Any = site.attention
                if getattr(attention, "attn_output_norm", None) is not None:
                    norm = attention.attn_output_norm.register_forward_hook(partial(self._see_norm, site.layer))
                    stack.callback(norm.remove)
                stack.callback(attention.o_proj.register_forward_pre_hook(partial(self._see_gated, site)).remove)
            if at_output and self._attention is not None:
                shares = self._attention.on_share
                shares.append(self._see_share)
                stack.callback(shares.remove, self._see_share)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        for kept in (self._gates, self._pre_gate, self._shares):
            kept.clear()

    @torch.no_grad()
    def _see_scores(self, site: GateSite, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        batch = self._observer.current
        if batch is None:
            return
        gate = site.gate(site.scores(output.detach()))
        self.statistics.update(site, gate, batch)
        if site.position == "attn_output":
            self._gates[site.layer] = gate

    def _see_attention(self, call: AttentionCall) -> None:
        self._pre_gate[call.layer] = call.output

    def _see_share(self, layer: int, share: Tensor) -> None:
        self._shares[layer] = share

    def _see_norm(self, layer: int, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._pre_gate[layer] = output.detach()

    @torch.no_grad()
    def _see_gated(self, site: GateSite, module: nn.Module, args: tuple[Any, ...]) -> None:
        gate = self._gates.pop(site.layer, None)
        pre_gate = self._pre_gate.pop(site.layer, None)
        share = self._shares.pop(site.layer, None)
        batch = self._observer.current
        if batch is None or site.operation != "multiply":
            return
        if pre_gate is not None:
            activation = getattr(site.attention.config, "attn_output_activation", None)
            if activation is not None:
                pre_gate = ACTIVATIONS[activation](pre_gate)
            self.statistics.update_outputs(site, pre_gate, args[0].view_as(pre_gate), batch)
        if share is not None and gate is not None:
            self.statistics.update_written(site, gate, share, batch)
