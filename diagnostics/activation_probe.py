"""A context manager that reads the residual stream, the attention output and the FFN output of every layer."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gated_qwen.diagnostics.activation_statistics import ActivationStatistics
from gated_qwen.diagnostics.decoder import (
    attention_output_module,
    decoder_layers,
    ffn_output_module,
    hidden_states_of,
)
from gated_qwen.diagnostics.observed_batch import BatchObserver

if TYPE_CHECKING:
    from typing_extensions import Self


class ActivationProbe:
    """Collects `ActivationStatistics` while its block runs; the model is unchanged during it and after it.

    Reads any decoder-only causal LM of transformers, in batches or in chunks of a prefill with a cache; padding is
    left out. `attention_output` is the output of whatever mixes tokens in a layer, linear attention included.

    Args:
        model: a causal LM or base model.
        top: how many of the largest values to keep, for each kind and layer.

    Raises:
        ValueError: an encoder-decoder model, layers that are not found, or a layer whose output is not (B, T, C).

    Example:
        >>> import torch
        >>> from transformers import LlamaForCausalLM
        >>> model = LlamaForCausalLM.from_pretrained(llama_folder)
        >>> with ActivationProbe(model) as activations, torch.no_grad():
        ...     _ = model(input_ids=torch.tensor([[5, 6, 7]]))
        >>> summary = activations.statistics.summary()
        >>> summary["tokens"], [row["index"] for row in summary["residual"]]
        (3, [0, 1, 2])
    """

    def __init__(self, model: nn.Module, top: int = 10) -> None:
        self.statistics = ActivationStatistics(top)
        self._layers = decoder_layers(model)
        self._observer = BatchObserver(model)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._observer)
            see_embedding = self._layers[0].register_forward_pre_hook(self._see_embedding, with_kwargs=True)
            stack.callback(see_embedding.remove)
            for i, layer in enumerate(self._layers):
                sources = {
                    ("residual", i + 1): layer,
                    ("attention_output", i): attention_output_module(layer),
                    ("ffn_output", i): ffn_output_module(layer),
                }
                for (kind, index), module in sources.items():
                    if module is not None:
                        stack.callback(module.register_forward_hook(partial(self._see_output, kind, index)).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _see_embedding(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._see("residual", 0, args[0] if args else kwargs["hidden_states"])

    def _see_output(self, kind: str, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._see(kind, index, hidden_states_of(output))

    def _see(self, kind: str, index: int, states: Tensor) -> None:
        batch = self._observer.current
        if batch is None:
            return
        if states.ndim == 2 and len(states) == batch.valid.numel():  # experts that return their tokens flat
            states = states.view(*batch.valid.shape, -1)
        if states.ndim != 3 or states.shape[:2] != batch.valid.shape:
            raise ValueError(
                f"{kind} {index} has shape {tuple(states.shape)}; the activation probe reads (B, T, C) only"
            )
        self.statistics.update(kind, index, states, batch)
