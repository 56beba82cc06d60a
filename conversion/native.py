"""Writing a gated model for Qwen3-Next and Qwen3.5: fused q_proj, weight - 1 norms, and, of a mixture, its experts.

Their mixtures have a shared expert in every sparse layer. Ours has none, so one of zeros is written: it adds exactly
zero, and since all its weights are zero no gradient reaches it either.
"""

from functools import partial
from typing import Any

from gated_qwen.conversion import experts, layouts, norms
from gated_qwen.conversion.experts import SHARED_WIDTH
from gated_qwen.conversion.families import SLIDING_FIELDS, is_mixture
from gated_qwen.conversion.norm_fold import folded, norm_note
from gated_qwen.conversion.output import Output, any_bias, base_config, fuse_gate, replace_attention
from gated_qwen.conversion.plan import PlannedTensor, derived, filled
from gated_qwen.conversion.sources import GatedCheckpoint, heads_of, native_type

# target -> architecture of a dense model and of a mixture
ARCHITECTURES = {
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}

Shapes = dict[str, tuple[int, ...]]


def plan_native(source: GatedCheckpoint, target: str, identity_layer: bool) -> Output:
    """Plans a folder of `target`, `"qwen3_next"` or `"qwen3_5"`, optionally with a layer that adds nothing."""
    config = source.config
    mixture = is_mixture(config)
    heads = heads_of(config)
    function = partial(layouts.fuse_by_head, heads=heads)
    rows, rule = 2 * heads.query_rows, "for each head its query rows, then its gate rows"
    exact = folded(source)
    tensors = replace_attention(exact, any_bias(config), lambda part: fuse_gate(part, function, rows, rule))
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = derived(name, (tensor,), norms.shift, f"{tensor.rule}, minus 1")
    fields = _config(source, target, mixture, identity_layer)
    shapes = {
        f"{name.removesuffix('gate.weight')}{part}": shape
        for name in tensors
        if name.endswith(".mlp.gate.weight")
        for part, shape in _shared_expert_shapes(config.hidden_size).items()
    }
    if identity_layer:
        shapes |= _identity_layer_shapes(source, fields, target)
    dtype = source.tensors["model.embed_tokens.weight"].dtype
    tensors |= {name: filled(name, dtype, shape) for name, shape in shapes.items()}
    if mixture and target == "qwen3_5":
        tensors = _with_fused_experts(tensors, config.num_hidden_layers + identity_layer, fields)
    return Output(fields, list(tensors.values()), [norm_note(exact), *_expert_notes(source)])


def _config(source: GatedCheckpoint, target: str, mixture: bool, identity_layer: bool) -> dict[str, Any]:
    fields = base_config(source)
    for name in (*SLIDING_FIELDS, *(() if target == "qwen3_next" else ("rope_scaling",))):
        fields.pop(name, None)
    layers = source.config.num_hidden_layers
    fields |= {
        "model_type": native_type(target, mixture),
        "architectures": [ARCHITECTURES[target][mixture]],
        "attention_bias": any_bias(source.config),
        "attn_output_gate": True,
        "num_hidden_layers": layers + identity_layer,
        "layer_types": ["full_attention"] * layers + ["linear_attention"] * identity_layer,
        "full_attention_interval": 1,  # llama.cpp's converter and SGLang read this one
        # Both places: nested alone is ignored by transformers 5.0 to 5.15 under YaRN.
        "partial_rotary_factor": 1.0,
        "rope_parameters": {**fields["rope_parameters"], "partial_rotary_factor": 1.0},
        **LINEAR_ATTENTION,
    }
    if mixture:
        fields["shared_expert_intermediate_size"] = SHARED_WIDTH
    elif target == "qwen3_next":
        fields |= {"num_experts": 0, "num_experts_per_tok": 0, "decoder_sparse_step": 1}
        fields["mlp_only_layers"] = list(range(layers))
    if target == "qwen3_next":
        fields["mlp_only_layers"] = [*fields["mlp_only_layers"], *([layers] if identity_layer else [])]
    return fields


def _expert_notes(source: GatedCheckpoint) -> list[str]:
    if not is_mixture(source.config):
        return []
    notes = [f"each sparse layer has a shared expert of width {SHARED_WIDTH} whose weights are zero: it adds zero"]
    if coefficient := source.config.router_z_loss_coef:
        notes.append(
            f"router_z_loss_coef={coefficient} is left out: it is for training, and the family has no such loss"
        )
    return notes


def _shared_expert_shapes(width: int) -> Shapes:
    return {
        "shared_expert.gate_proj.weight": (SHARED_WIDTH, width),
        "shared_expert.up_proj.weight": (SHARED_WIDTH, width),
        "shared_expert.down_proj.weight": (width, SHARED_WIDTH),
        "shared_expert_gate.weight": (1, width),
    }


def _with_fused_experts(
    tensors: dict[str, PlannedTensor], layers: int, fields: dict[str, Any]
) -> dict[str, PlannedTensor]:
    """Qwen3.5's own layout: the experts of each layer in two tensors."""
    shapes = experts.fused_shapes(fields["num_experts"], fields["moe_intermediate_size"], fields["hidden_size"])
    result = {name: tensor for name, tensor in tensors.items() if not experts.is_expert(name)}
    for layer in range(layers):
        result |= experts.fused(tensors, f"model.layers.{layer}.mlp.experts.", shapes)
    return result


def _identity_layer_shapes(source: GatedCheckpoint, fields: dict[str, Any], target: str) -> Shapes:
    """A linear-attention layer of zeros: both of its sub-layers add nothing to the residual stream."""
    width = source.config.hidden_size
    key = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    value = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
    value_heads = fields["linear_num_value_heads"]
    shapes: Shapes = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "linear_attn.conv1d.weight": (2 * key + value, 1, fields["linear_conv_kernel_dim"]),
        "linear_attn.dt_bias": (value_heads,),
        "linear_attn.A_log": (value_heads,),
        "linear_attn.norm.weight": (fields["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (width, value),
    }
    if target == "qwen3_next":
        shapes |= {
            "linear_attn.in_proj_qkvz.weight": (2 * key + 2 * value, width),
            "linear_attn.in_proj_ba.weight": (2 * value_heads, width),
        }
    else:
        shapes |= {
            "linear_attn.in_proj_qkv.weight": (2 * key + value, width),
            "linear_attn.in_proj_z.weight": (value, width),
            "linear_attn.in_proj_b.weight": (value_heads, width),
            "linear_attn.in_proj_a.weight": (value_heads, width),
        }
    if fields["model_type"] == "qwen3_5_moe_text":  # which has no dense layers
        shapes["mlp.gate.weight"] = (fields["num_experts"], width)
        shapes |= {f"mlp.{name}": shape for name, shape in _shared_expert_shapes(width).items()}
        fused = experts.fused_shapes(fields["num_experts"], fields["moe_intermediate_size"], width)
        shapes |= experts.separated_shapes({f"mlp.experts.{name}": shape for name, shape in fused.items()})
    else:
        inner = source.config.intermediate_size
        shapes |= {"mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width)}
        shapes["mlp.down_proj.weight"] = (width, inner)
    prefix = f"model.layers.{source.config.num_hidden_layers}."
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}
