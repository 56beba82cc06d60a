"""Tiny random models of every family whose gates can be read, and the official layout as a small stand-in."""

import copy

import torch
import transformers
from tiny import TINY_FIELDS, randomize
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb, eager_attention_forward

from gated_qwen.conversion.layouts import Heads, fuse, official_rows

LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
ROPE_BY_LAYER = {"rope_parameters": {"full_attention": TINY_FIELDS["rope_parameters"]}}

# By family: the config class, and what it needs beyond the tiny shape.
NATIVE_FAMILIES = {
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        {**LINEAR_ATTENTION, "num_experts": 0, "mlp_only_layers": [0, 1]},
    ),
    "qwen3_5": (transformers.Qwen3_5TextConfig, LINEAR_ATTENTION),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, {**LINEAR_ATTENTION, **EXPERTS}),
    "afmoe": (transformers.AfmoeConfig, {"num_dense_layers": 2}),
    "laguna": (transformers.LagunaConfig, {**EXPERTS, **ROPE_BY_LAYER}),
    "laguna elementwise": (transformers.LagunaConfig, {**EXPERTS, **ROPE_BY_LAYER, "gating": "per-element"}),
    "lfm3": (transformers.Lfm3Config, {**ROPE_BY_LAYER, "bos_token_id": 1, "eos_token_id": 2}),
}


def native_model(family):
    """A model of `NATIVE_FAMILIES` with random weights, in eval mode."""
    config_class, extra = NATIVE_FAMILIES[family]
    fields = {"layer_types": ["full_attention"] * 2, "pad_token_id": 0, **TINY_FIELDS, **extra}
    model = transformers.AutoModelForCausalLM.from_config(config_class(**copy.deepcopy(fields)))
    return randomize(model).eval()


class OfficialAttention(Qwen3Attention):
    """Attention of the paper's release: each key/value head's rows of `q_proj` are its queries, then their gates."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.gate_width = self.head_dim if config.elementwise_attn_output_gate else 1
        heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * (self.head_dim + self.gate_width), bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        batch, length, _ = hidden_states.shape
        groups = self.num_key_value_groups
        fused = self.q_proj(hidden_states).view(batch, length, self.config.num_key_value_heads, -1)
        query, scores = fused.split([groups * self.head_dim, groups * self.gate_width], dim=-1)
        query = self.q_norm(query.reshape(batch, length, -1, self.head_dim)).transpose(1, 2)
        scores = scores.reshape(batch, length, -1, self.gate_width)
        key = self.k_norm(self.k_proj(hidden_states).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling)
        output = output * torch.sigmoid(scores)
        return self.o_proj(output.reshape(batch, length, -1)), weights


def official_model(gated):
    """The release's layout of one of our models with a gate on the attention output, with the same weights."""
    granularity = gated.config.gate_granularity
    flags = {f"{name}_attn_output_gate": name == granularity for name in ("headwise", "elementwise")}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**copy.deepcopy(TINY_FIELDS), **flags))
    rows = official_rows(Heads(query=4, key_value=2, dim=8, granularity=granularity))
    state = gated.state_dict()
    for i, layer in enumerate(model.model.layers):
        layer.self_attn = OfficialAttention(model.config, i)
        attention = f"model.layers.{i}.self_attn."
        gate = state.pop(attention + "g_proj.weight")
        state[attention + "q_proj.weight"] = fuse(state[attention + "q_proj.weight"], gate, rows)
    model.load_state_dict(state)
    return model.eval()
