"""What a GGUF file of a gated model holds: llama.cpp's `qwen35` or `qwen35moe` architecture, its keys and tensors.

These are Qwen3.5's text models, dense and a mixture: q, k norm, rotary embedding, attention, sigmoid gate, no biases.
They keep query and gate rows in one matrix, head by head (`layouts.native_rows`), and norm weights as they are. They
insist on at least one linear-attention layer, so one is appended whose weights are all zero: it adds exactly zero.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from gated_qwen.conversion import gguf_experts
from gated_qwen.conversion.experts import QWEN3_5_FIELDS
from gated_qwen.conversion.families import is_mixture
from gated_qwen.conversion.layouts import fuse_by_head
from gated_qwen.conversion.plan import PlannedTensor, derived, filled
from gated_qwen.conversion.sources import heads_of

if TYPE_CHECKING:
    from gated_qwen.conversion.families import GatedConfig

# By our model_type.
ARCHITECTURES = {"gated_qwen": "qwen35", "gated_qwen_moe": "qwen35moe"}

# Our names on the left, GGUF's on the right; %d is the layer.
MODEL_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",  # absent when tied
}
LAYER_TENSORS = {
    "model.layers.%d.input_layernorm.weight": "blk.%d.attn_norm.weight",
    "model.layers.%d.self_attn.k_proj.weight": "blk.%d.attn_k.weight",
    "model.layers.%d.self_attn.v_proj.weight": "blk.%d.attn_v.weight",
    "model.layers.%d.self_attn.q_norm.weight": "blk.%d.attn_q_norm.weight",
    "model.layers.%d.self_attn.k_norm.weight": "blk.%d.attn_k_norm.weight",
    "model.layers.%d.self_attn.o_proj.weight": "blk.%d.attn_output.weight",
    "model.layers.%d.post_attention_layernorm.weight": "blk.%d.post_attention_norm.weight",
}
MLP_TENSORS = {
    "model.layers.%d.mlp.gate_proj.weight": "blk.%d.ffn_gate.weight",
    "model.layers.%d.mlp.up_proj.weight": "blk.%d.ffn_up.weight",
    "model.layers.%d.mlp.down_proj.weight": "blk.%d.ffn_down.weight",
}
QUERY_TENSOR = "model.layers.%d.self_attn.q_proj.weight"
GATE_TENSOR = "model.layers.%d.self_attn.g_proj.weight"
FUSED_TENSOR = "blk.%d.attn_q.weight"

# The linear attention of the appended layer: one head of Qwen3.5's size, which every backend's kernel takes.
SSM_HEAD_DIM = 128
SSM_CONV_KERNEL = 4

# The one value of each field that llama.cpp computes.
HOLDABLE_FIELDS = {
    "gate_positions": ["attn_output"],
    "gate_activation": "sigmoid",
    "gate_operation": "multiply",
    "gate_input": "hidden_states",
    "gate_head_shared": False,
    "gate_bias": False,
    "attention_bias": False,
    "attn_output_norm": False,
    "attn_output_activation": None,
    "sandwich_norm": False,
    "use_qk_norm": True,
    "hidden_act": "silu",
}
ROPE_TYPES = ("default", "linear", "yarn")
YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # there are keys for them, which llama.cpp's `qwen35` does not read


def check_gguf(config: "GatedConfig") -> None:
    """Checks that llama.cpp can hold a model, from its config alone.

    Args:
        config: the gated model's config.

    Raises:
        ValueError: naming every field that GGUF cannot hold, its value and why.

    Example:
        >>> from gated_qwen import GatedQwenConfig
        >>> check_gguf(GatedQwenConfig(gate_granularity="headwise"))
        >>> check_gguf(GatedQwenConfig(gate_activation="silu"))
        Traceback (most recent call last):
        ValueError: GGUF cannot hold this model: gate_activation='silu' (llama.cpp has 'sigmoid')
    """
    found = [
        f"{field}={getattr(config, field)!r} (llama.cpp has {value!r})"
        for field, value in _holdable_fields(config).items()
        if getattr(config, field) != value
    ]
    if config.gate_input_channels not in (None, config.hidden_size):
        found.append(f"gate_input_channels={config.gate_input_channels} (llama.cpp's gate reads every channel)")
    if config.attention_out_bias:
        found.append("attention_out_bias=True (llama.cpp has no bias there)")
    if "sliding_attention" in (config.layer_types or []):
        found.append("layer_types with 'sliding_attention' (llama.cpp attends to every position)")
    rope = cast("dict[str, Any]", config.rope_parameters)
    if rope["rope_type"] not in ROPE_TYPES:
        found.append(f"rope_type={rope['rope_type']!r} (llama.cpp has {', '.join(ROPE_TYPES)} here)")
    if rope["rope_type"] == "yarn" and not rope.get("truncate", True):
        found.append("truncate=False (llama.cpp's YaRN rounds the correction range)")
    for name, value in YARN_BETAS.items():
        if rope["rope_type"] == "yarn" and (rope.get(name) or value) != value:
            found.append(f"{name}={rope[name]} (llama.cpp has {value} for this architecture)")
    if found:
        raise ValueError(f"GGUF cannot hold this model: {'; '.join(found)}")


def _holdable_fields(config: "GatedConfig") -> dict[str, Any]:
    return {**HOLDABLE_FIELDS, **(QWEN3_5_FIELDS if is_mixture(config) else {})}


def gguf_keys(config: "GatedConfig") -> dict[str, Any]:
    """The keys that describe the architecture, with its name and a dot before each.

    Returns:
        Name to value: int, float, or a list of int or bool. Lengths and dimensions are in tokens and channels.

    Example:
        >>> from gated_qwen import GatedQwenConfig
        >>> keys = gguf_keys(GatedQwenConfig(num_hidden_layers=2, head_dim=128))
        >>> keys["qwen35.block_count"], keys["qwen35.attention.recurrent_layers"]
        (3, [False, False, True])
        >>> keys["qwen35.rope.dimension_sections"]
        [22, 21, 21, 0]
    """
    half = config.head_dim // 2
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers + 1,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        **(
            gguf_experts.expert_keys(config)
            if is_mixture(config)
            else {"feed_forward_length": config.intermediate_size}
        ),
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.recurrent_layers": [False] * config.num_hidden_layers + [True],
        "rope.dimension_count": config.head_dim,
        # Multimodal RoPE interleaves the pairs of time, height and width. Text has one position for the three, and a
        # fourth that is always 0: no pair may be left to it.
        "rope.dimension_sections": [(half + 2) // 3, (half + 1) // 3, half // 3, 0],
        **rope_keys(config),
        "ssm.conv_kernel": SSM_CONV_KERNEL,
        "ssm.state_size": SSM_HEAD_DIM,
        "ssm.inner_size": SSM_HEAD_DIM,
        "ssm.group_count": 1,
        "ssm.time_step_rank": 1,
    }
    return {f"{ARCHITECTURES[config.model_type]}.{name}": value for name, value in keys.items()}


def rope_keys(config: "GatedConfig") -> dict[str, Any]:
    """The RoPE base and scaling, under `rope.`.

    llama.cpp multiplies YaRN's cos and sin by its own 0.1 ln(factor) + 1 (arXiv 2309.00071, equation 22), so
    `attn_factor` is what the model's attention factor is apart from that, 1 unless the config says otherwise.
    """
    rope = cast("dict[str, Any]", config.rope_parameters)
    keys: dict[str, Any] = {"rope.freq_base": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
        keys |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.attn_factor": attention_factor / (0.1 * math.log(rope["factor"]) + 1.0),
        }
    return keys


def gguf_tensors(config: "GatedConfig", tensors: Mapping[str, PlannedTensor]) -> list[PlannedTensor]:
    """The tensors of the file under GGUF's names, in the order in which they are written.

    Args:
        config: a config that `check_gguf` accepts.
        tensors: the model's tensors by our names; not changed and not read.

    Raises:
        ValueError: a tensor is missing, or there is one that has no place in the file.
    """
    left = dict(tensors)

    def take(name: str) -> PlannedTensor:
        if name not in left:
            raise ValueError(f"GGUF export: tensor {name} is missing")
        return left.pop(name)

    names = [name for name in MODEL_TENSORS if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    plan = [take(name).renamed(MODEL_TENSORS[name]) for name in names]
    function = partial(fuse_by_head, heads=heads_of(config))
    rows = 2 * config.num_attention_heads * config.head_dim
    for layer in range(config.num_hidden_layers):
        fused = (take(QUERY_TENSOR % layer), take(GATE_TENSOR % layer))
        rule = "query and gate rows, head by head"
        plan.append(derived(FUSED_TENSOR % layer, fused, function, rule, (rows, config.hidden_size)))
        same = LAYER_TENSORS if is_mixture(config) else {**LAYER_TENSORS, **MLP_TENSORS}
        plan += [take(ours % layer).renamed(theirs % layer) for ours, theirs in same.items()]
        if is_mixture(config):
            plan += gguf_experts.expert_tensors(config, layer, take)
    if left:
        raise ValueError(f"GGUF export: tensor {sorted(left)[0]} has no place in the file")
    return plan + identity_layer(config)


def identity_layer(config: "GatedConfig") -> list[PlannedTensor]:
    """The appended linear-attention layer: zeros everywhere, so that both its sub-layers add zero to the residual."""
    size, ffn, ssm = config.hidden_size, config.intermediate_size, SSM_HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (size,),
        "attn_qkv.weight": (3 * ssm, size),
        "attn_gate.weight": (ssm, size),
        "ssm_conv1d.weight": (3 * ssm, SSM_CONV_KERNEL),
        "ssm_dt.bias": (1,),
        "ssm_a": (1,),
        "ssm_beta.weight": (1, size),
        "ssm_alpha.weight": (1, size),
        "ssm_norm.weight": (ssm,),
        "ssm_out.weight": (size, ssm),
        "post_attention_norm.weight": (size,),
    }
    layer = config.num_hidden_layers
    if is_mixture(config):
        return [*_zeros(layer, shapes), *gguf_experts.zero_experts(config, layer)]
    shapes |= {"ffn_gate.weight": (ffn, size), "ffn_up.weight": (ffn, size), "ffn_down.weight": (size, ffn)}
    return _zeros(layer, shapes)


def _zeros(layer: int, shapes: dict[str, tuple[int, ...]]) -> list[PlannedTensor]:
    return [filled(f"blk.{layer}.{name}", "F32", shape) for name, shape in shapes.items()]
