"""Where a Hugging Face causal LM keeps its decoder, its layers, and each layer's attention and feed-forward module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer", "mamba")
FFN_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "feedforward")

# Norms on a sub-layer's output, before the residual add: where a layer has both, what is added is what they return.
OUTPUT_NORMS = (
    ("attn_sandwich_layernorm", "mlp_sandwich_layernorm"),  # ours
    ("post_attention_layernorm", "post_feedforward_layernorm"),  # Gemma 2 and 3, OLMo 2
    ("post_self_attn_layernorm", "post_mlp_layernorm"),  # GLM 4
)


def decoder_body(model: nn.Module) -> nn.Module:
    """The module whose forward takes the token ids and runs the layers.

    Args:
        model: a causal LM or base model of transformers.

    Raises:
        ValueError: an encoder-decoder model.
    """
    given: Any = model
    if getattr(given.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model; diagnostics read decoder-only models")
    body: nn.Module = given.get_decoder()
    return body


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order.

    Raises:
        ValueError: no list of modules of the model is as long as its config says.
    """
    body = decoder_body(model)
    config: Any = getattr(body, "config", model.config)
    count = config.get_text_config().num_hidden_layers
    lists = [
        (name.count("."), list(module))
        for name, module in body.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise ValueError(f"{type(body).__name__} has no list of {count} decoder layers, as its config promises")
    return min(lists, key=lambda entry: entry[0])[1]


def attention_module(layer: nn.Module) -> nn.Module | None:
    """The layer's softmax or linear attention, or None if it has none under a known name."""
    return _first_child(layer, ATTENTION_NAMES)


def attention_output_module(layer: nn.Module) -> nn.Module | None:
    """The module whose output the layer adds to the residual stream for its attention."""
    norms = _output_norms(layer)
    return norms[0] if norms else attention_module(layer)


def ffn_output_module(layer: nn.Module) -> nn.Module | None:
    """The module whose output the layer adds to the residual stream for its MLP or experts."""
    norms = _output_norms(layer)
    return norms[1] if norms else _first_child(layer, FFN_NAMES)


def hidden_states_of(output: Any) -> Tensor:
    """The hidden states of what a layer or attention module returned: a tensor, or the first entry of a tuple."""
    states: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return states


def _output_norms(layer: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    for names in OUTPUT_NORMS:
        attention, ffn = (getattr(layer, name, None) for name in names)
        if isinstance(attention, nn.Module) and isinstance(ffn, nn.Module):
            return attention, ffn
    return None


def _first_child(layer: nn.Module, names: Sequence[str]) -> nn.Module | None:
    return next((child for name in names if isinstance(child := getattr(layer, name, None), nn.Module)), None)
