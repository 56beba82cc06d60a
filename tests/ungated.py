"""Tiny ungated source folders of every family that can be given a gate."""

from pathlib import Path

import torch
from tiny import TINY_FIELDS, randomize
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 5e5,
}
# 1 < active experts < experts, and a width of their own.
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
# name -> (model class, config class, fields on top of the tiny shape)
SOURCES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama biased, tied, llama3 RoPE": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_attention_heads": 6}),
    "qwen2 sliding": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3 biased, YaRN": (Qwen3ForCausalLM, Qwen3Config, {"attention_bias": True, "rope_parameters": YARN}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
    "qwen3_moe with a dense layer, biased, tied, YaRN, sliding": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            **EXPERTS,
            "mlp_only_layers": [0],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
            "use_sliding_window": True,
            "sliding_window": 4,
        },
    ),
}


def ungated_model(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A model of `SOURCES`, with random weights."""
    model_class, config_class, fields = SOURCES[name]
    fields = {**TINY_FIELDS, **fields}
    if fields["num_attention_heads"] == 6:
        fields["hidden_size"] = 48  # Qwen2 has no head_dim of its own: hidden_size / heads
    elif config_class is Qwen2Config:
        fields["hidden_size"] = 32
    return randomize(model_class(config_class(**fields)), seed=3).to(dtype).eval()


def ungated_folder(folder: Path, name: str, dtype: torch.dtype = torch.float32, **save: object) -> Path:
    """Writes a model of `SOURCES` to `folder`; `save` goes to save_pretrained."""
    ungated_model(name, dtype).save_pretrained(folder, **save)
    return folder
