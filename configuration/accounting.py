"""Parameters, FLOPs and cache bytes of a gated model, dense or a mixture of experts, from its config alone.

No model is built and torch is not imported. With H query heads, K key/value heads, D = head_dim and d = hidden_size
a gate projection has these output rows (arXiv 2505.06708, section 2.2, positions G1 to G5):

    position          headwise   elementwise   elements gated
    query (G4)           H           H*D            H*D
    key (G3)             K           K*D            K*D
    value (G2)           K           K*D            K*D
    attn_output (G1)     H           H*D            H*D
    dense_output (G5)    -            d              d

A sparse layer has E experts of 3 * d * w weights, where w = moe_intermediate_size, and a router of E * d. A token uses
k = num_experts_per_tok of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_HEADS_FIELD = {
    "query": "num_attention_heads",
    "key": "num_key_value_heads",
    "value": "num_key_value_heads",
    "attn_output": "num_attention_heads",
}

_MODEL_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "attention_out_bias",
    "use_qk_norm",
    "attn_output_norm",
    "sandwich_norm",
    "gate_positions",
    "gate_granularity",
    "gate_input",
    "gate_input_channels",
    "gate_bias",
)
_EXPERT_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "sparse_layers")
_CACHE_FIELDS = ("num_hidden_layers", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model by part; the parts, from `embedding` on, add up to `total`.

    `attention` is the q, k, v and o projections with their biases, `gate` every gate projection, `mlp` the FFNs and
    all experts, `router` what chooses among these, `norm` every RMSNorm weight. A head tied to the embedding is
    counted once, under `embedding`, and `lm_head` is 0. `active` is what one token uses: all but the experts that it
    is not routed to, so `total` for a dense model.
    """

    total: int
    active: int
    embedding: int
    attention: int
    gate: int
    mlp: int
    router: int
    norm: int
    lm_head: int

    @property
    def gate_share(self) -> float:
        """The gates' part of all parameters, 0 to 1."""
        return self.gate / self.total


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one token's forward pass by part; the parts add up to `total`.

    `projections` is q, k, v and o, `scores` the query-key products and the weighted sum of the values, `gate` the gate
    projections and the products with what they gate, `mlp` the FFNs and the experts that a token is routed to.
    """

    total: int
    projections: int
    scores: int
    gate: int
    mlp: int
    router: int
    lm_head: int

    @property
    def gate_share(self) -> float:
        """The gates' part of all FLOPs, 0 to 1."""
        return self.gate / self.total


def count_parameters(config: Any) -> ParameterCount:
    """Count the parameters of the causal language model that a config describes.

    Args:
        config: a `GatedQwenConfig` or `GatedQwenMoeConfig`, or any object with the attributes of one.

    Returns:
        The count by part; `total` equals `sum(p.numel() for p in model.parameters())` of the causal language model.

    Raises:
        AttributeError: the config lacks a field that the count needs.
        ValueError: the config has shared experts, or names a gate position that does not exist.

    Source: the shapes of arXiv 2505.06708, table 1 ("added param").

    Example:
        >>> from gated_qwen.configuration.presets import preset
        >>> count = count_parameters(preset("dense-28l-headwise"))
        >>> count.total, count.gate
        (1721492480, 917504)
        >>> count = count_parameters(preset("moe-15a2b-headwise"))
        >>> f"{count.total / 1e9:.2f}B, of which a token uses {count.active / 1e9:.2f}B"
        '14.37B, of which a token uses 1.91B'
    """
    _check(config, _MODEL_FIELDS, "count_parameters")
    layers, hidden, head_dim = config.num_hidden_layers, config.hidden_size, config.head_dim
    query_width, key_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    out_bias = config.attention_bias if config.attention_out_bias is None else config.attention_out_bias

    attention = _projection_weights(config)
    attention += (query_width + 2 * key_width) if config.attention_bias else 0
    attention += hidden if out_bias else 0
    norm = 2 * hidden
    norm += 2 * hidden if config.sandwich_norm else 0
    norm += 2 * head_dim if config.use_qk_norm else 0
    norm += head_dim if config.attn_output_norm else 0

    embedding = config.vocab_size * hidden
    parts = {
        "embedding": embedding,
        "attention": layers * attention,
        "gate": layers * sum(_gate_parameters(config, position) for position in config.gate_positions),
        "mlp": _mlp_weights(config),
        "router": _router_weights(config),
        "norm": layers * norm + hidden,
        "lm_head": 0 if config.tie_word_embeddings else embedding,
    }
    total = sum(parts.values())
    return ParameterCount(total=total, active=total - parts["mlp"] + _mlp_weights(config, active=True), **parts)


def flops_per_token(config: Any, context_length: int) -> FlopCount:
    """Count the FLOPs of one token's forward pass that attends to `context_length` keys.

    A multiply-add is 2 FLOPs, so a weight matrix costs twice its size (Kaplan et al., arXiv 2001.08361, section 2.1),
    and a layer's attention costs 4 * H * D for each key: 2 for the score, 2 for the value (PaLM, arXiv 2204.02311,
    appendix B). A layer with a sliding window sees at most that many keys. The product of a gate with what it gates is
    1 FLOP an element. Norms, RoPE, softmax, activations, biases and the embedding's look-up are not counted.

    Args:
        config: a `GatedQwenConfig` or `GatedQwenMoeConfig`, or any object with the attributes of one.
        context_length: keys that the token attends to, itself included, in tokens. That is the position of a token
            while decoding; the mean over a causal prefill of T tokens without a sliding window is (T + 1) / 2.

    Returns:
        The count by part. A training step costs three times as much: the backward pass is twice the forward.

    Raises:
        AttributeError: the config lacks a field that the count needs.
        ValueError: `context_length` is below 1, the config has shared experts, or a layer type is unknown.

    Example:
        >>> from gated_qwen.configuration.presets import preset
        >>> flops = flops_per_token(preset("dense-28l-elementwise"), context_length=4096)
        >>> f"{flops.total:,} of which the gate {flops.gate_share:.1%}"
        '4,615,364,608 of which the gate 5.1%'
    """
    _check(config, _MODEL_FIELDS, "flops_per_token")
    if context_length < 1:
        raise ValueError(f"context_length must be at least 1 (the token attends to itself), got {context_length}")
    layers = config.num_hidden_layers
    keys = sum(_keys_per_layer(config, context_length))
    parts = {
        "projections": layers * 2 * _projection_weights(config),
        "scores": keys * 4 * config.num_attention_heads * config.head_dim,
        "gate": layers * sum(_gate_flops(config, position) for position in config.gate_positions),
        "mlp": 2 * _mlp_weights(config, active=True),
        "router": 2 * _router_weights(config),
        "lm_head": 2 * config.vocab_size * config.hidden_size,
    }
    return FlopCount(total=sum(parts.values()), **parts)


def kv_cache_bytes(config: Any, sequence_length: int, batch_size: int = 1, bytes_per_element: int = 2) -> int:
    """Count the bytes that the cached keys and values of a batch take.

    A gate adds nothing to the cache: gates on keys and values act before it. A layer with a sliding window holds at
    most that many tokens, which is what a static cache allocates; a dynamic one drops the oldest of them a step early.

    Args:
        config: one of our configs, or any config with `num_hidden_layers`, `num_key_value_heads`, `head_dim`,
            `layer_types` and `sliding_window`.
        sequence_length: tokens in the cache of each sequence.
        batch_size: sequences.
        bytes_per_element: 2 for bfloat16 and float16, 4 for float32, 1 for an 8-bit cache without its scales.

    Returns:
        The size in bytes: 2 * K * D * bytes_per_element for each token, layer and sequence.

    Raises:
        AttributeError: the config lacks a field that the count needs.
        ValueError: a length, batch size or element size is negative or zero, or a layer type is unknown.

    Source: PagedAttention, arXiv 2309.06180, section 3, with K heads in place of all of them (GQA, arXiv 2305.13245).

    Example:
        >>> from gated_qwen.configuration.presets import preset
        >>> kv_cache_bytes(preset("dense-28l-headwise"), sequence_length=4096)
        469762048
    """
    _check(config, _CACHE_FIELDS, "kv_cache_bytes")
    given = {"sequence_length": sequence_length, "batch_size": batch_size, "bytes_per_element": bytes_per_element}
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    tokens = sum(_keys_per_layer(config, sequence_length))
    return tokens * 2 * config.num_key_value_heads * config.head_dim * batch_size * bytes_per_element


def _projection_weights(config: Any) -> int:
    """Weights of one layer's q, k, v and o projections, without biases."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return config.hidden_size * heads * config.head_dim


def _mlp_weights(config: Any, active: bool = False) -> int:
    """Weights of all layers' gate, up and down projections (SwiGLU, no biases), or of those that one token uses."""
    widths = [config.intermediate_size] * (config.num_hidden_layers - len(_sparse_layers(config)))
    for _ in _sparse_layers(config):
        experts = config.num_experts_per_tok if active else config.num_experts
        widths.append(experts * config.moe_intermediate_size)
    return 3 * config.hidden_size * sum(widths)


def _router_weights(config: Any) -> int:
    """Weights of all layers' routers."""
    return sum(config.num_experts * config.hidden_size for _ in _sparse_layers(config))


def _sparse_layers(config: Any) -> list[int]:
    return config.sparse_layers if hasattr(config, "num_experts") else []


def _gated_elements(config: Any, position: str) -> int:
    """Elements of one token's tensor at a gate position."""
    if position == "dense_output":
        return config.hidden_size
    if position not in _HEADS_FIELD:
        allowed = ", ".join([*_HEADS_FIELD, "dense_output"])
        raise ValueError(f"gate_positions holds {position!r}; the gate positions are {allowed}")
    return getattr(config, _HEADS_FIELD[position]) * config.head_dim


def _gate_rows(config: Any, position: str) -> int:
    """Output rows of the gate projection; averaging scores over heads (gate_head_shared) leaves them as they are."""
    elements = _gated_elements(config, position)
    if config.gate_granularity == "headwise" and position != "dense_output":
        return elements // config.head_dim
    return elements


def _gate_channels(config: Any) -> int:
    """Input channels of the gate projection; 0 for a constant gate, which is only a bias."""
    if config.gate_input == "constant":
        return 0
    return config.hidden_size if config.gate_input_channels is None else config.gate_input_channels


def _gate_parameters(config: Any, position: str) -> int:
    has_bias = config.gate_bias or config.gate_input == "constant"
    return _gate_rows(config, position) * (_gate_channels(config) + has_bias)


def _gate_flops(config: Any, position: str) -> int:
    return 2 * _gate_rows(config, position) * _gate_channels(config) + _gated_elements(config, position)


def _keys_per_layer(config: Any, length: int) -> list[int]:
    """Keys that the newest of `length` tokens attends to, for each layer."""
    if config.layer_types is None:
        return [length] * config.num_hidden_layers
    keys = {"full_attention": length}
    if config.sliding_window is not None:
        keys["sliding_attention"] = min(length, config.sliding_window)
    unknown = set(config.layer_types) - set(keys)
    if unknown:
        raise ValueError(
            f"layer_types holds {', '.join(sorted(unknown))}; with sliding_window={config.sliding_window} only "
            f"{' and '.join(keys)} can be counted"
        )
    return [keys[layer_type] for layer_type in config.layer_types]


def _check(config: Any, fields: tuple[str, ...], caller: str) -> None:
    if fields is _MODEL_FIELDS and hasattr(config, "num_experts"):
        fields += _EXPERT_FIELDS
    missing = [name for name in (*fields, "layer_types", "sliding_window") if not hasattr(config, name)]
    if missing:
        raise AttributeError(
            f"{caller} needs config fields that this {type(config).__name__} lacks: {', '.join(missing)}; "
            "pass a GatedQwenConfig or GatedQwenMoeConfig (gate_positions=[] describes a model without gates)"
        )
    if fields is not _CACHE_FIELDS and getattr(config, "shared_expert_intermediate_size", None):
        raise ValueError(f"{caller} counts no shared experts; this {type(config).__name__} has them")
