"""Where each family keeps the gates of its softmax attention: the projection that makes the scores, and which rows.

A gate is read, and by interventions.py changed, at the output of a projection, before the activation. Shapes: B batch,
T tokens, H heads at the position, D head_dim, W scores per head (D elementwise, 1 headwise).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gated_qwen.configuration.configuration_gated_qwen import GATE_MODULES
from gated_qwen.conversion.layouts import Heads, native_rows, official_rows
from gated_qwen.diagnostics.decoder import decoder_body, decoder_layers
from gated_qwen.modeling_gated_qwen import GATE_FUNCTIONS

ACTIVATIONS: dict[str, Any] = {**GATE_FUNCTIONS}

OURS = ("gated_qwen", "gated_qwen_moe")
OFFICIAL_FLAGS = {"headwise_attn_output_gate": "headwise", "elementwise_attn_output_gate": "elementwise"}

# Families of transformers that gate the attention output: by model_type, the projection and the activation.
# In `q_proj` each head's gate rows follow its query rows.
NATIVE = {
    "qwen3_next": ("q_proj", "sigmoid"),
    "qwen3_5_text": ("q_proj", "sigmoid"),
    "qwen3_5_moe_text": ("q_proj", "sigmoid"),
    "afmoe": ("gate_proj", "sigmoid"),
    "laguna": ("g_proj", "softplus"),
    "lfm3": ("g_proj", "sigmoid"),
}

# Attention with a child of one of these names is gated; unless its family is known, nobody knows how.
GATE_NAMES = ("g_proj", "gate_proj", "output_gate", "o_gate", "q_gate_proj")


@dataclass(frozen=True)
class GateSite:
    """One gate of one layer.

    Attributes:
        layer: index of the decoder layer.
        position: "query", "key", "value", "attn_output" or "dense_output".
        granularity: "elementwise" or "headwise".
        activation: a key of `ACTIVATIONS`.
        operation: "multiply" or "add".
        shared: whether the heads share the mean of their scores.
        attention: the attention module.
        projection: the module whose output holds the scores.
        heads: H; 1 where there are none (dense output).
        width: W; the hidden size where there are no heads.
        rows: indices of the scores in the projection's output, by head; None: they are all of it.
    """

    layer: int
    position: str
    granularity: str
    activation: str
    operation: str
    shared: bool
    attention: nn.Module
    projection: nn.Module
    heads: int
    width: int
    rows: tuple[int, ...] | None = None

    def scores(self, output: Tensor) -> Tensor:
        """Raw scores (B, T, H, W) from the projection's output (B, T, rows)."""
        scores = output if self.rows is None else output[..., self._indices(output)]
        return scores.unflatten(-1, (-1, self.width))

    def gate(self, scores: Tensor) -> Tensor:
        """The gate (B, T, H, W), or (B, T, 1, W) where the heads share it, from raw scores (B, T, H, W)."""
        gate: Tensor = ACTIVATIONS[self.activation](scores.mean(dim=-2, keepdim=True) if self.shared else scores)
        return gate

    def with_scores(self, output: Tensor, scores: Tensor) -> Tensor:
        """The projection's output with other raw scores (B, T, H, W)."""
        flat = scores.flatten(-2)
        return flat if self.rows is None else output.index_copy(-1, self._indices(output), flat)

    def _indices(self, output: Tensor) -> Tensor:
        return torch.tensor(self.rows, device=output.device)


def gate_sites(model: nn.Module) -> list[GateSite]:
    """The gates of a model in the order of its layers; none for a model without gates.

    Args:
        model: ours, one in the layout of the paper's release, or a family of `NATIVE`.

    Raises:
        ValueError: a model that gates its attention in a way that is not known here.

    Example:
        >>> from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM
        >>> config = GatedQwenConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        ...     num_attention_heads=4, num_key_value_heads=2, head_dim=8, gate_positions=["value", "attn_output"])
        >>> [(site.layer, site.position) for site in gate_sites(GatedQwenForCausalLM(config))]
        [(0, 'value'), (0, 'attn_output')]
    """
    body: Any = decoder_body(model)
    read = _reader(body.config)
    sites: list[GateSite] = []
    for i, layer in enumerate(decoder_layers(model)):
        attention = getattr(layer, "self_attn", None)
        if attention is None:  # linear attention, or a family without gates
            continue
        if read is not None:
            sites += read(i, attention, body.config)
        elif any(isinstance(getattr(attention, name, None), nn.Module) for name in GATE_NAMES):
            known = ", ".join([*OURS, "the paper's release", *NATIVE])
            raise ValueError(
                f"{type(body).__name__} gates its attention in a way that is not known here; known are {known}"
            )
    return sites


def _reader(config: Any) -> Callable[[int, Any, Any], list[GateSite]] | None:
    if config.model_type in OURS:
        return _ours
    if config.model_type in NATIVE:
        return _native
    if any(getattr(config, flag, False) for flag in OFFICIAL_FLAGS):
        return _official
    return None


def _ours(layer: int, attention: Any, config: Any) -> list[GateSite]:
    sites = []
    for position, name in GATE_MODULES.items():
        if (projection := getattr(attention, name)) is None:
            continue
        dense = position == "dense_output"
        elementwise = dense or config.gate_granularity == "elementwise"
        width = config.hidden_size if dense else attention.head_dim if elementwise else 1
        sites.append(
            GateSite(
                layer=layer,
                position=position,
                granularity="elementwise" if elementwise else "headwise",
                activation=config.gate_activation,
                operation=config.gate_operation,
                shared=config.gate_head_shared and not dense,
                attention=attention,
                projection=projection,
                heads=projection.out_features // width,
                width=width,
            )
        )
    return sites


def _native(layer: int, attention: Any, config: Any) -> list[GateSite]:
    name, activation = NATIVE[config.model_type]
    if (projection := getattr(attention, name)) is None:
        return []
    dim = attention.head_dim
    heads = attention.o_proj.in_features // dim
    if name == "q_proj":
        shape = Heads(query=heads, key_value=heads, dim=dim, granularity="elementwise")
        return [_attn_output_gate(layer, attention, projection, activation, shape, native_rows(shape)[1])]
    granularity = "headwise" if projection.out_features == heads else "elementwise"
    shape = Heads(query=heads, key_value=heads, dim=dim, granularity=granularity)
    return [_attn_output_gate(layer, attention, projection, activation, shape, None)]


def _official(layer: int, attention: Any, config: Any) -> list[GateSite]:
    granularity = next(name for flag, name in OFFICIAL_FLAGS.items() if getattr(config, flag, False))
    shape = Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim, granularity)
    return [_attn_output_gate(layer, attention, attention.q_proj, "sigmoid", shape, official_rows(shape)[1])]


def _attn_output_gate(
    layer: int, attention: nn.Module, projection: nn.Module, activation: str, shape: Heads, rows: list[int] | None
) -> GateSite:
    return GateSite(
        layer=layer,
        position="attn_output",
        granularity=shape.granularity,
        activation=activation,
        operation="multiply",
        shared=False,
        attention=attention,
        projection=projection,
        heads=shape.query,
        width=shape.gate_rows // shape.query,
        rows=None if rows is None else tuple(rows),
    )
