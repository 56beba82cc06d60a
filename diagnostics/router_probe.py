"""A context manager that reads the routers of a mixture of experts."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gated_qwen.diagnostics.decoder import decoder_body, decoder_layers
from gated_qwen.diagnostics.observed_batch import BatchObserver
from gated_qwen.diagnostics.router_statistics import RouterStatistics

if TYPE_CHECKING:
    from typing_extensions import Self

# Their routers return (logits, weights, chosen experts) and turn logits into weights by a softmax.
SOFTMAX_FAMILIES = ("gated_qwen_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "mixtral", "gpt_oss")
ROUTER_NAMES = ("gate", "router")


class RouterProbe:
    """Collects `RouterStatistics` while its block runs; the model is unchanged during it and after it.

    On a model without experts, or a family that is not in `SOFTMAX_FAMILIES`, nothing is collected and
    `statistics.summary()` is None.

    Args:
        model: a causal LM or base model.

    Raises:
        ValueError: an encoder-decoder model.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
        >>> model = MixtralForCausalLM(config)
        >>> with RouterProbe(model) as routers, torch.no_grad():
        ...     _ = model(input_ids=torch.tensor([[5, 6, 7]]))
        >>> round(sum(routers.statistics.summary()["layers"][0]["load"]), 6)
        1.0
    """

    def __init__(self, model: nn.Module) -> None:
        self.statistics = RouterStatistics()
        self.routers = _routers(model)
        self._observer = BatchObserver(model)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._observer)
            for layer, router in self.routers.items():
                stack.callback(router.register_forward_hook(partial(self._see, layer)).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @torch.no_grad()
    def _see(self, layer: int, router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        batch = self._observer.current
        if batch is None:
            return
        logits, _, chosen = output
        mask = batch.valid.flatten() if batch.padded else None
        self.statistics.update(layer, logits.detach(), chosen, mask)


def _routers(model: nn.Module) -> dict[int, nn.Module]:
    """The router of each layer that has experts."""
    body: Any = decoder_body(model)
    if body.config.model_type not in SOFTMAX_FAMILIES:
        return {}
    found = {}
    for i, layer in enumerate(decoder_layers(model)):
        ffn = getattr(layer, "mlp", None)
        router = next((child for name in ROUTER_NAMES if (child := getattr(ffn, name, None)) is not None), None)
        if router is not None:
            found[i] = router
    return found
