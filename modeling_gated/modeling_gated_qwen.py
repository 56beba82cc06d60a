# Copyright 2026 The gated-qwen authors. Licensed under the Apache License, Version 2.0.
"""Qwen3 with a gate on its softmax heads (arXiv 2505.06708), for transformers 4.57 to 5.x.

What is unusual here:
- only the difference to transformers' Qwen3 is written down; `gate_positions=[]` is exactly Qwen3;
- every gate is a module of its own (`self_attn.g_proj` on the SDPA output), so it can be named by tools;
- the gate reads the same normalised hidden state as q, k and v, and no tensor is kept between calls;
- the order is: project -> gates on q, k, v -> q/k norm -> RoPE -> cache -> attention -> output norm, activation
  -> gate on the SDPA output -> o_proj -> gate on the dense output.

Shapes: B batch, T tokens, H query heads, K key/value heads, D head_dim, C hidden_size.
"""

import copy
import functools
import inspect
import warnings

import torch
from torch import nn
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3MLP,
    Qwen3Model,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .configuration_gated_qwen import GATE_MODULES, GatedQwenConfig

# The KV cache reaches the layers as `cache` from transformers 5.24 on. Before, it was `past_key_values`, and `cache`
# was the paged cache of continuous batching, which belongs to the attention function and must pass through.
CACHE_IS_CACHE = "cache" in inspect.signature(Qwen3Attention.forward).parameters
CACHE_ARGUMENTS = ("cache", "past_key_values") if CACHE_IS_CACHE else ("past_key_values", "past_key_value")


FORWARD_ARGUMENTS = tuple(inspect.signature(Qwen3Model.forward).parameters)[1:]

# Flash and paged attention take the boundaries from position_ids or their own indices, whatever mask there is.
BOUNDARY_KEEPERS = ("flash", "paged")


def ns_sigmoid(scores):
    """The paper's non-sparse sigmoid, 0.5 + 0.5 sigmoid(x), with values in (0.5, 1)."""
    return 0.5 + 0.5 * torch.sigmoid(scores)


GATE_FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "silu": nn.functional.silu,
    "ns_sigmoid": ns_sigmoid,
    "softplus": nn.functional.softplus,
    "identity": lambda scores: scores,
}


def apply_gate(states, scores, activation="sigmoid", operation="multiply"):
    """Gates states: Y' = Y * act(scores), or Y + act(scores) (paper, equations 5 to 8).

    Args:
        states (`torch.Tensor`): (..., H, D), what is gated.
        scores (`torch.Tensor`): raw scores that broadcast to it: (..., H, D) elementwise, (..., H, 1) headwise,
            (..., 1, D) or (..., 1, 1) when the heads share them.
        activation (`str`): a key of `GATE_FUNCTIONS`.
        operation (`str`): `"multiply"` or `"add"`.

    Returns:
        `torch.Tensor`: (..., H, D), in the dtype of `states` and `scores`.
    """
    gate = GATE_FUNCTIONS[activation](scores)
    return states * gate if operation == "multiply" else states + gate


class GatedQwenGateProjection(nn.Linear):
    """Raw scores of one gate; a class of its own, since only a leaf keeps the gate's initialisation on every path."""


class GatedQwenConstantGate(nn.Module):
    """Raw scores that do not depend on the input: one learned parameter per row."""

    def __init__(self, rows):
        super().__init__()
        self.out_features = rows  # read by tensor parallelism
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, hidden_states):
        return self.bias.expand(*hidden_states.shape[:-1], -1)


class GatedQwenRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's, but a change of `config.rope_parameters` on a live model takes effect at the next call."""

    def __init__(self, config, device=None):
        super().__init__(config, **({} if device is None else {"device": device}))
        self.rope_in_use = copy.deepcopy(config.rope_parameters)

    def forward(self, x, position_ids):
        if self.config.rope_parameters != self.rope_in_use:
            fresh = type(self)(self.config)
            self.rope_type, self.rope_in_use = fresh.rope_type, fresh.rope_in_use
            self.attention_scaling = fresh.attention_scaling
            self.max_seq_len_cached = self.original_max_seq_len = fresh.original_max_seq_len
            self.inv_freq = fresh.inv_freq.to(self.inv_freq.device)
            self.original_inv_freq = fresh.original_inv_freq.to(self.inv_freq.device)
            if hasattr(fresh, "rope_init_fn"):  # transformers 4
                self.rope_init_fn = fresh.rope_init_fn
        return super().forward(x, position_ids)


class GatedQwenAttention(Qwen3Attention):
    """Grouped-query attention whose query, key, value, SDPA output or dense output is gated."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if not config.use_qk_norm:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        if config.attention_out_bias not in (None, config.attention_bias):
            self.o_proj = nn.Linear(self.o_proj.in_features, self.o_proj.out_features, bias=config.attention_out_bias)
        self.attn_output_norm = (
            Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.attn_output_norm else None
        )

        rows_per_head = self.head_dim if config.gate_granularity == "elementwise" else 1
        rows = {
            "query": config.num_attention_heads * rows_per_head,
            "key": config.num_key_value_heads * rows_per_head,
            "value": config.num_key_value_heads * rows_per_head,
            "attn_output": config.num_attention_heads * rows_per_head,
            "dense_output": config.hidden_size,
        }
        for position, name in GATE_MODULES.items():
            setattr(self, name, self._build_gate(rows[position]) if position in config.gate_positions else None)

    def _build_gate(self, rows):
        if self.config.gate_input == "constant":
            return GatedQwenConstantGate(rows)
        channels = self.config.gate_input_channels or self.config.hidden_size
        return GatedQwenGateProjection(channels, rows, bias=self.config.gate_bias)

    def _gate(self, states, scores):
        """Gates states (B, T, heads * D) or (B, T, heads, D) and returns them as (B, T, heads, D)."""
        config = self.config
        shape = scores.shape[:-1]
        states = states.view(*shape, -1, self.head_dim)
        scores = scores.view(*shape, -1, self.head_dim if config.gate_granularity == "elementwise" else 1)
        if config.gate_head_shared:
            if scores.shape[-2] != states.shape[-2] and torch.is_grad_enabled():
                raise NotImplementedError("training a head-shared gate under tensor parallelism would lose gradients")
            scores = scores.mean(dim=-2, keepdim=True)
        return apply_gate(states, scores, config.gate_activation, config.gate_operation)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        """Attends and gates.

        Args:
            hidden_states (`torch.Tensor`): (B, T, C), already normalised.
            position_embeddings (`tuple[torch.Tensor, torch.Tensor]`): cos and sin, each (B, T, D).
            attention_mask: whatever the attention function of `config._attn_implementation` takes.
            kwargs: the KV cache under its name in this version of transformers, `cache_position` before 5.4; the
                rest goes to the attention function.

        Returns:
            `tuple`: the output (B, T, C) and the attention weights (B, H, T, keys), or None where they are not made.
        """
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        channels = self.config.gate_input_channels
        gate_input = hidden_states if channels is None else hidden_states[..., :channels]

        query_states = self.q_proj(hidden_states)
        key_states = self.k_proj(hidden_states)
        value_states = self.v_proj(hidden_states)
        gate_scores = self.g_proj(gate_input) if self.g_proj is not None else None

        if self.g_proj_query is not None:
            query_states = self._gate(query_states, self.g_proj_query(gate_input))
        if self.g_proj_key is not None:
            key_states = self._gate(key_states, self.g_proj_key(gate_input))
        if self.g_proj_value is not None:
            value_states = self._gate(value_states, self.g_proj_value(gate_input))

        query_states = self.q_norm(query_states.view(hidden_shape)).transpose(1, 2)  # (B, H, T, D)
        key_states = self.k_norm(key_states.view(hidden_shape)).transpose(1, 2)  # (B, K, T, D)
        value_states = value_states.view(hidden_shape).transpose(1, 2)  # (B, K, T, D)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        key_states, value_states = self._update_cache(key_states, value_states, cos, sin, kwargs)

        attention_interface = eager_attention_forward
        if self.config._attn_implementation not in ("eager", None):
            attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )

        # Serving engines return (T, H * D): bring the heads back before anything acts on them.
        attn_output = attn_output.reshape(hidden_shape)
        if self.attn_output_norm is not None:
            attn_output = self.attn_output_norm(attn_output)
        if self.config.attn_output_activation is not None:
            attn_output = GATE_FUNCTIONS[self.config.attn_output_activation](attn_output)
        if gate_scores is not None:
            attn_output = self._gate(attn_output, gate_scores)
        attn_output = self.o_proj(attn_output.reshape(*input_shape, -1).contiguous())
        if self.g_proj_dense is not None:
            dense_scores = self.g_proj_dense(gate_input)
            attn_output = apply_gate(
                attn_output, dense_scores, self.config.gate_activation, self.config.gate_operation
            )
        return attn_output, attn_weights

    def _update_cache(self, key_states, value_states, cos, sin, kwargs):
        """Takes the cache arguments out of `kwargs` and returns the keys and values to attend to."""
        given = [kwargs.pop(name, None) for name in CACHE_ARGUMENTS]
        cache = next((value for value in given if value is not None), None)  # an empty cache is falsy
        cache_position = kwargs.pop("cache_position", None)
        if cache is None:
            return key_states, value_states
        if CACHE_IS_CACHE:  # the paged cache reads its indices from the kwargs and writes to them
            return cache.update(key_states, value_states, self.layer_idx, kwargs=kwargs)
        if cache_position is not None:
            cache_kwargs = {"sin": sin, "cos": cos, "cache_position": cache_position}
            return cache.update(key_states, value_states, self.layer_idx, cache_kwargs)
        return cache.update(key_states, value_states, self.layer_idx)


class GatedQwenDecoderLayer(Qwen3DecoderLayer):
    """Pre-norm decoder layer; `sandwich_norm` also normalises each sub-layer's output before the residual add."""

    def __init__(self, config, layer_idx):
        super(Qwen3DecoderLayer, self).__init__()
        self.hidden_size = config.hidden_size
        self.attention_type = config.layer_types[layer_idx]  # read by transformers before 5.4
        self.self_attn = GatedQwenAttention(config, layer_idx)
        self.mlp = self.build_mlp(config, layer_idx)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn_sandwich_layernorm = self.mlp_sandwich_layernorm = None
        if config.sandwich_norm:
            self.attn_sandwich_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.mlp_sandwich_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @staticmethod
    def build_mlp(config, layer_idx):
        return Qwen3MLP(config)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        """Returns the residual stream (B, T, C) after attention and MLP; kwargs go to the attention."""
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask, **kwargs)
        if self.attn_sandwich_layernorm is not None:
            hidden_states = self.attn_sandwich_layernorm(hidden_states)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        if isinstance(hidden_states, tuple):  # experts of transformers 4 return their router logits as well
            hidden_states = hidden_states[0]
        if self.mlp_sandwich_layernorm is not None:
            hidden_states = self.mlp_sandwich_layernorm(hidden_states)
        return residual + hidden_states


class GatedPreTrainedMixin:
    """Draws the initial weights of the gates, and saves a model that FSDP2 shards under its own class."""

    @functools.wraps(PreTrainedModel.save_pretrained)
    def save_pretrained(self, *args, **kwargs):
        found, names = type(self), ("__module__", "__name__", "__qualname__")
        if not found.__module__.startswith("torch."):
            return super().save_pretrained(*args, **kwargs)
        # FSDP2's subclass: a saved model names its class, and brings the file that it is in.
        kept = {name: getattr(found, name) for name in names}
        try:
            for name in names:
                setattr(found, name, getattr(found.__bases__[-1], name))
            return super().save_pretrained(*args, **kwargs)
        finally:
            for name, value in kept.items():
                setattr(found, name, value)

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, (GatedQwenGateProjection, GatedQwenConstantGate)):
            std = self.config.gate_initializer_range
            std = self.config.initializer_range if std is None else std
            scores = module.bias if isinstance(module, GatedQwenConstantGate) else module.weight
            nn.init.normal_(scores, mean=0.0, std=std)
            if isinstance(module, GatedQwenGateProjection) and module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            super()._init_weights(module)


class GatedQwenPreTrainedModel(GatedPreTrainedMixin, Qwen3PreTrainedModel):
    config: GatedQwenConfig
    config_class = GatedQwenConfig
    base_model_prefix = "model"
    _no_split_modules = ["GatedQwenDecoderLayer"]
    _can_record_outputs = {"hidden_states": GatedQwenDecoderLayer, "attentions": GatedQwenAttention}


class GatedQwenBody:
    """The modules of a decoder with gated layers, and a forward that keeps packed samples apart where it can."""

    def build_modules(self, config, layer_class):
        """Builds what the constructor of transformers' body builds, with our layers."""
        config.validate_architecture_fields()  # attributes may have been set since the config was built
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = GatedQwenRotaryEmbedding(config)
        self.gradient_checkpointing = False

    @functools.wraps(Qwen3Model.forward)
    def forward(self, *args, **kwargs):
        kwargs |= dict(zip(FORWARD_ARGUMENTS, args))  # noqa: B905 (there may be fewer)
        position_ids = kwargs.get("position_ids")
        if position_ids is not None and position_ids.shape[-1] > 1:
            if not torch.compiler.is_compiling():
                self._keep_boundaries(kwargs.get("attention_mask"), position_ids, kwargs)
            elif self.training and kwargs.get("attention_mask") is None:
                kwargs.setdefault("use_cache", False)  # positions cannot be looked at in a graph
        return super().forward(**kwargs)

    def _keep_boundaries(self, attention_mask, position_ids, kwargs):
        """Drops a default cache that would let packed samples see each other; warns of a mask or cache that does.

        transformers' masks tell samples apart by `position_ids` (B, T) only without a 2-D mask and without a cache.
        """
        cached = any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS)
        use_cache = kwargs.get("use_cache")
        at_risk = attention_mask is not None or cached or (self.config.use_cache if use_cache is None else use_cache)
        prepared = attention_mask is not None and getattr(attention_mask, "ndim", None) != 2
        attention = self.config._attn_implementation or "eager"
        if not at_risk or prepared or any(name in attention for name in BOUNDARY_KEEPERS):
            return
        jumps = position_ids.diff(dim=-1) != 1
        if attention_mask is not None:  # positions of padding do not matter
            counted = attention_mask[:, -position_ids.shape[-1] :].bool()
            jumps = jumps & counted[:, 1:] & counted[:, :-1]
        if not jumps.any():
            return
        if attention_mask is None and not cached and use_cache is None:
            kwargs["use_cache"] = False
            return
        warnings.warn(
            f"{type(self).__name__}: position_ids restart inside a row, but packed samples are told apart only "
            "without a 2-D attention_mask and without a cache (use_cache=False): here they see each other.",
            stacklevel=2,
        )


class GatedQwenModel(GatedQwenBody, GatedQwenPreTrainedModel, Qwen3Model):
    def __init__(self, config):
        super(Qwen3Model, self).__init__(config)
        self.build_modules(config, GatedQwenDecoderLayer)
        self.has_sliding_layers = "sliding_attention" in config.layer_types
        self.post_init()


class GatedQwenForCausalLM(GatedQwenPreTrainedModel, Qwen3ForCausalLM):
    def __init__(self, config):
        super(Qwen3ForCausalLM, self).__init__(config)
        self.model = GatedQwenModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# The generic heads build their body through AutoModel.from_config, which does not know a class that came as remote
# code, so each names it; their forwards are inherited.
class SequenceClassificationHead(GenericForSequenceClassification):
    body_class = None

    def __init__(self, config):
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = self.body_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class TokenClassificationHead(GenericForTokenClassification):
    body_class = None

    def __init__(self, config):
        super(GenericForTokenClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = self.body_class(config)
        self.dropout = nn.Dropout(0.1 if (dropout := getattr(config, "classifier_dropout", None)) is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class QuestionAnsweringHead(GenericForQuestionAnswering):
    body_class = None

    def __init__(self, config):
        super(GenericForQuestionAnswering, self).__init__(config)
        self.model = self.body_class(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


class GatedQwenForSequenceClassification(SequenceClassificationHead, GatedQwenPreTrainedModel):
    body_class = GatedQwenModel


class GatedQwenForTokenClassification(TokenClassificationHead, GatedQwenPreTrainedModel):
    body_class = GatedQwenModel


class GatedQwenForQuestionAnswering(QuestionAnsweringHead, GatedQwenPreTrainedModel):
    body_class = GatedQwenModel


GatedQwenModel.register_for_auto_class("AutoModel")
GatedQwenForCausalLM.register_for_auto_class("AutoModelForCausalLM")
GatedQwenForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
GatedQwenForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
GatedQwenForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")

__all__ = [
    "GatedQwenForCausalLM",
    "GatedQwenForQuestionAnswering",
    "GatedQwenForSequenceClassification",
    "GatedQwenForTokenClassification",
    "GatedQwenModel",
    "GatedQwenPreTrainedModel",
]
