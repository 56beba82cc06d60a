"""Tiny random models: 4 query heads, 2 key/value heads, head_dim 8, hidden size 32, 2 layers, vocabulary 64, fp32.

1 < K < H, since with K = 1 or K = H a wrong split of heads passes unseen. Norms, biases and gates are far from their
initial values, since a norm of ones or a bias of zeros hides a term that is left out. The mixture of experts has three
layers, the middle one dense, and 5 experts of which a token uses 2.
"""

import inspect

import torch
from torch import nn
from transformers import Qwen3Model

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM, GatedQwenMoeConfig, GatedQwenMoeForCausalLM

TINY_FIELDS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
TINY_EXPERTS = {
    "num_hidden_layers": 3,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}

# The forward's name for the KV cache in this version of transformers.
CACHE = "cache" if "cache" in inspect.signature(Qwen3Model.forward).parameters else "past_key_values"
EVERY_POSITION = ["query", "key", "value", "attn_output", "dense_output"]


def tiny_config(config_class=GatedQwenConfig, **fields):
    """A config of the tiny shape; `fields` override it or add to it."""
    return config_class(**{**TINY_FIELDS, **fields})


def tiny_model(cls=GatedQwenForCausalLM, seed=0, **fields):
    """A model of the tiny shape with random weights, in eval mode; `fields` go to its config."""
    config = tiny_config(cls.config_class, **fields)
    config.dtype = torch.float32
    return randomize(cls(config), seed).eval()


def tiny_moe_config(config_class=GatedQwenMoeConfig, **fields):
    """A config of the tiny shape with experts; `fields` override it or add to it."""
    return tiny_config(config_class, **{**TINY_EXPERTS, **fields})


def tiny_moe_model(cls=GatedQwenMoeForCausalLM, seed=0, **fields):
    """A model of the tiny shape with experts and random weights, in eval mode; `fields` go to its config."""
    return tiny_model(cls, seed, **{**TINY_EXPERTS, **fields})


@torch.no_grad()
def randomize(model, seed=0):
    """Redraws every parameter of `model` in place: matrices of unit gain, lognormal norms, random biases."""
    generator = torch.Generator().manual_seed(seed)
    norms = {id(module.weight) for module in model.modules() if type(module).__name__.endswith("RMSNorm")}
    for parameter in model.parameters():  # a tied pair comes once
        noise = torch.randn(parameter.shape, generator=generator)
        if id(parameter) in norms:
            parameter.copy_(torch.exp(0.4 * noise))
        elif parameter.ndim == 1:
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def gates(model):
    """The gate modules of `model` by their full name."""
    return {name: module for name, module in model.named_modules() if name.split(".")[-1].startswith("g_proj")}


def tokens(batch, length, seed=0, vocab_size=64):
    """Random token ids (batch, length) of at least 1, so that 0 may pad."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (batch, length), generator=generator)


def set_gate_scores(model, score):
    """Makes every gate give the raw score `score` for any input; each gate needs `gate_bias` or a constant gate."""
    with torch.no_grad():
        for module in gates(model).values():
            if isinstance(module, nn.Linear):
                module.weight.zero_()
            module.bias.fill_(score)
    return model
