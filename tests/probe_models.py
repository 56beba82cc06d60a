"""Tiny random models of the families that the probes are tested on; the tiny shape where the family can take it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from tiny import TINY_FIELDS, randomize
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM

MULTI_HEAD = {"num_key_value_heads": 4}  # one key/value head for each query head; the tiny shape groups them by two
WINDOW = 5


def _fields(**fields: Any) -> dict[str, Any]:
    """The tiny shape, a fresh copy: some configs write into the RoPE parameters that they are given."""
    return {**copy.deepcopy(TINY_FIELDS), **fields}


def _gpt2() -> torch.nn.Module:
    config = GPT2Config(vocab_size=64, n_positions=512, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def _qwen3_next(*layer_types: str) -> torch.nn.Module:
    config = Qwen3NextConfig(
        **_fields(num_hidden_layers=len(layer_types)),
        layer_types=list(layer_types),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=list(range(len(layer_types))),
    )
    return Qwen3NextForCausalLM(config)


def _gemma2() -> torch.nn.Module:
    config = Gemma2Config(**_fields(), query_pre_attn_scalar=8, attn_logit_softcapping=2.0, sliding_window=WINDOW)
    return Gemma2ForCausalLM(config)


def _gpt_oss() -> torch.nn.Module:
    config = GptOssConfig(**_fields(), num_local_experts=2, num_experts_per_tok=1, sliding_window=WINDOW)
    return GptOssForCausalLM(config)


def _gemma3() -> torch.nn.Module:
    text = _fields(layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW, query_pre_attn_scalar=8)
    del text["rope_parameters"]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=0)
    return Gemma3ForConditionalGeneration(config)


def _llama4() -> torch.nn.Module:
    fields = _fields(layer_types=["chunked_attention", "full_attention"], attention_chunk_size=6)
    return Llama4ForCausalLM(Llama4TextConfig(**fields, num_local_experts=2, intermediate_size_mlp=32))


def _deepseek() -> torch.nn.Module:
    fields = _fields(**MULTI_HEAD, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6)
    del fields["head_dim"]
    return DeepseekV3ForCausalLM(DeepseekV3Config(**fields, first_k_dense_replace=2, moe_intermediate_size=8))


PROBE_MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_fields())),
    "qwen3 multi-head": lambda: Qwen3ForCausalLM(Qwen3Config(**_fields(**MULTI_HEAD))),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_fields())),
    "gpt2": _gpt2,
    "qwen3_next hybrid": lambda: _qwen3_next("linear_attention", "full_attention", "linear_attention"),
    "qwen3_next": lambda: _qwen3_next("full_attention", "full_attention"),
    "mistral sliding": lambda: MistralForCausalLM(MistralConfig(**_fields(sliding_window=WINDOW))),
    "gemma2 soft-capped": _gemma2,
    "gpt_oss sinks": _gpt_oss,
    "headwise": lambda: GatedQwenForCausalLM(GatedQwenConfig(**_fields(gate_granularity="headwise"))),
    "elementwise": lambda: GatedQwenForCausalLM(GatedQwenConfig(**_fields())),
    "elementwise multi-head": lambda: GatedQwenForCausalLM(GatedQwenConfig(**_fields(**MULTI_HEAD))),
}
# Further ways to attend: a language model inside a larger one, chunks, values narrower than keys.
FURTHER_MODELS = {"gemma3 nested": _gemma3, "llama4 chunked": _llama4, "deepseek_v3 latent": _deepseek}


def probe_model(name: str, dtype: torch.dtype = torch.float32, attention: str | None = None) -> torch.nn.Module:
    """A model of `PROBE_MODELS` or `FURTHER_MODELS` with random weights, in eval mode.

    Args:
        name: its key.
        dtype: of all parameters.
        attention: the attention implementation to switch to ("eager", "sdpa"); None: the family's default.
    """
    model = randomize({**PROBE_MODELS, **FURTHER_MODELS}[name](), seed=5).to(dtype).eval()
    if attention is not None:
        model.set_attn_implementation(attention)
    return model
