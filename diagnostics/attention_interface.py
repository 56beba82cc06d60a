"""Routes a live model's attention through a function of ours, so that several probes can watch it at once.

transformers looks up the attention function of a layer, and the function that makes its mask, by the name in
`config._attn_implementation`. While a model is watched the configs of its decoder hold the name `NAME`, and both
registries know it. The first watcher of a config puts the name there and the last one takes it away, in whatever order
they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from gated_qwen.diagnostics.attention_kernels import attention_with_logsumexp
from gated_qwen.diagnostics.decoder import decoder_body

NAME = "gated_qwen_watched"


@dataclass(frozen=True)
class AttentionCall:
    """One call of a layer's softmax attention. Shapes as in attention_kernels.py; nothing carries gradients.

    Attributes:
        module: the attention module, and `layer` its index.
        query, key: (B, H, T, D) and (B, K, S, D), as they enter the scores.
        mask: (B or 1, H or 1, T, S), bool or additive; None: `causal` says it all.
        causal: without a mask, query i sees keys 0 to i; otherwise all.
        scale, softcap: of the scores.
        sliding_window: how far back the layer sees, or None.
        output: (B, T, H, E), before any gate.
        logsumexp: (B, H, T).
    """

    module: nn.Module
    layer: int
    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    softcap: float | None
    sliding_window: int | None
    output: Tensor
    logsumexp: Tensor


Watcher = Callable[[AttentionCall], None]


@dataclass
class _Watched:
    config: Any
    implementation: str | None  # what the config held before
    watchers: list[Watcher] = field(default_factory=list)


_WATCHED: dict[int, _Watched] = {}  # by id of the config


@contextmanager
def watch_attention(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """Calls `watcher` after every softmax attention of the model's decoder, whatever implementation was loaded.

    The output of a layer is what its own implementation gives, up to rounding: it is computed by the kernel that
    PyTorch's `scaled_dot_product_attention` uses, or exactly in blocks where there is none. Weights are not returned,
    so `output_attentions` gives nothing meanwhile. Masks are those of SDPA: packed documents are kept apart where it
    keeps them apart, without a 2-D mask or a cache. Contexts on one model nest and end in any order.

    Args:
        model: a causal LM or base model of transformers whose attention goes through `AttentionInterface`.
        watcher: called with each `AttentionCall`; what it raises goes to the caller of the model.

    Raises:
        ValueError: an encoder-decoder model.

    Example:
        >>> from transformers import LlamaForCausalLM
        >>> model = LlamaForCausalLM.from_pretrained(llama_folder)
        >>> calls = []
        >>> with watch_attention(model, calls.append):
        ...     _ = model(torch.tensor([[5, 6, 7]]))
        >>> [(call.layer, tuple(call.logsumexp.shape)) for call in calls]
        [(0, (1, 4, 3)), (1, (1, 4, 3))]
    """
    configs = _decoder_configs(model)
    try:
        for config in configs:
            _begin(config, watcher)
        yield
    finally:
        for config in configs:
            _end(config, watcher)


def _decoder_configs(model: nn.Module) -> list[Any]:
    """The configs that the decoder's modules read their attention implementation from, each once."""
    found = (getattr(module, "config", None) for module in decoder_body(model).modules())
    return list({id(config): config for config in found if hasattr(config, "_attn_implementation_internal")}.values())


def _begin(config: Any, watcher: Watcher) -> None:
    if not _WATCHED:
        AttentionInterface.register(NAME, _watched_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
    watched = _WATCHED.setdefault(id(config), _Watched(config, config._attn_implementation_internal))
    watched.watchers.append(watcher)
    # The public setter also changes sub-configs, and `set_attn_implementation` refuses remote code by its looks.
    config._attn_implementation_internal = NAME


def _end(config: Any, watcher: Watcher) -> None:
    watched = _WATCHED.get(id(config))
    if watched is not None and watcher in watched.watchers:
        watched.watchers.remove(watcher)
        if not watched.watchers:
            config._attn_implementation_internal = watched.implementation
            del _WATCHED[id(config)]
    if not _WATCHED:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(NAME, None)


@torch.compiler.disable
def _watched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: returns the output (B, T, H, E) and no weights."""
    if position_bias is not None:
        raise ValueError(
            f"{type(module).__name__} adds a position bias to its scores, which the diagnostics do not read"
        )
    query, key, value = _autocast(query, key, value)
    decoder = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # As in transformers' SDPA function: one query sees all keys, and further keys without a mask are an empty cache.
    causal = decoder and attention_mask is None and query.shape[2] > 1
    if causal:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output, logsumexp = attention_with_logsumexp(
        query,
        key,
        value,
        attention_mask,
        scale=scale,
        causal=causal,
        softcap=softcap,
        sink_logits=s_aux,
        dropout=dropout,
    )
    output = output.transpose(1, 2).contiguous()
    watched = _WATCHED.get(id(getattr(module, "config", None)))
    if watched and decoder:
        call = AttentionCall(
            module=module,
            layer=_layer_index(module),
            query=query.detach(),
            key=key.detach(),
            mask=attention_mask,
            causal=causal,
            scale=scale,
            softcap=softcap,
            sliding_window=sliding_window,
            output=output.detach(),
            logsumexp=logsumexp,
        )
        # What a watcher keeps from an inference mode could not be updated outside of it.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            for watcher in list(watched.watchers):
                watcher(call)
    return output, None


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast does before `scaled_dot_product_attention`; the kernels below it are not on its list."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise ValueError(f"{type(module).__name__} has no layer_idx, so its numbers cannot be given to a layer")
    return int(index)
