"""Writing a gated model as another family: what each can hold, its config, and its tensors from ours.

A target that cannot hold a model refuses it by naming the field, before anything is written.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig
from gated_qwen.conversion import constant_gate, layouts, norms
from gated_qwen.conversion.checkpoint import CheckpointError
from gated_qwen.conversion.families import SHARED_FIELDS, SLIDING_FIELDS
from gated_qwen.conversion.plan import PlannedTensor, derived, filled
from gated_qwen.conversion.sources import GatedCheckpoint, heads_of

if TYPE_CHECKING:
    import torch

# What the release and the native families compute: a sigmoid gate on the SDPA output, and nothing else of ours.
PLAIN_GATE: dict[str, Any] = {
    "gate_positions": ["attn_output"],
    "gate_head_shared": False,
    "gate_activation": "sigmoid",
    "gate_operation": "multiply",
    "gate_input": "hidden_states",
    "gate_input_channels": None,
    "attn_output_norm": False,
    "attn_output_activation": None,
    "sandwich_norm": False,
}
HOLDS: dict[str, dict[str, Any]] = {
    "official": PLAIN_GATE,
    "qwen3_next": {**PLAIN_GATE, "use_qk_norm": True, "use_sliding_window": False},
    "qwen3_5": {**PLAIN_GATE, "use_qk_norm": True, "use_sliding_window": False},
    "qwen3": {
        "gate_operation": "multiply",
        "gate_head_shared": False,
        "attn_output_norm": False,
        "attn_output_activation": None,
        "sandwich_norm": False,
        "use_qk_norm": True,
    },
}
TARGETS = ("gated_qwen", *HOLDS)


@dataclass(frozen=True)
class Output:
    """A planned folder: the content of config.json (our own config object for our own family), tensors, notes."""

    config: GatedQwenConfig | dict[str, Any]
    tensors: list[PlannedTensor]
    notes: list[str] = field(default_factory=list)


def plan_target(source: GatedCheckpoint, target: str, *, identity_layer: bool = False) -> Output:
    """Plans a source as a folder of `target`, one of `TARGETS`.

    Args:
        source: the gated model.
        target: the family to write.
        identity_layer: for the native families, append a linear-attention layer that adds nothing; transformers before
            5.15 needs it for cached generation.

    Raises:
        CheckpointError: naming the field that the target cannot hold.
    """
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is not known; choose one of {', '.join(TARGETS)}")
    check_holds(source.config, target)
    if identity_layer and target not in ("qwen3_next", "qwen3_5"):
        raise ValueError(f"the identity layer is for qwen3_next and qwen3_5, not for {target}")
    if target == "gated_qwen":
        return Output(source.config, list(source.tensors.values()))
    if target == "official":
        return _official(source)
    if target == "qwen3":
        return _ungated(source)
    return _native(source, target, identity_layer)


def check_holds(config: GatedQwenConfig, target: str) -> None:
    """Refuses a config that `target` cannot hold.

    Raises:
        CheckpointError: with the field, its value and the one that the target has.
    """
    for name, held in HOLDS.get(target, {}).items():
        if getattr(config, name) != held:
            raise CheckpointError(
                f"config.json: {name}={getattr(config, name)!r} cannot be held by {target}, which has {held!r} there"
            )


def _base_config(source: GatedCheckpoint) -> dict[str, Any]:
    """Qwen3's fields, with RoPE in both schemas."""
    config = source.config
    fields = {name: getattr(config, name) for name in (*SHARED_FIELDS, *SLIDING_FIELDS)}
    return {
        **fields,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.to_dict()["rope_scaling"],
        "rope_parameters": dict(config.rope_parameters or {}),
    }


def _any_bias(config: GatedQwenConfig) -> bool:
    return bool(config.attention_bias or config.attention_out_bias or config.gate_bias)


def _attention(source: GatedCheckpoint, layer: int, with_bias: bool) -> dict[str, PlannedTensor]:
    """The attention's tensors of one layer by their short names, biases of zero added where the target wants them."""
    prefix = f"model.layers.{layer}.self_attn."
    tensors = {name.removeprefix(prefix): t for name, t in source.tensors.items() if name.startswith(prefix)}
    if with_bias:
        for module in ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj"):
            weight = tensors.get(f"{module}.weight")
            if weight is not None and f"{module}.bias" not in tensors:
                name = f"{prefix}{module}.bias"
                tensors[f"{module}.bias"] = filled(name, weight.dtype, weight.shape[:1])
    return tensors


def _replace_attention(
    source: GatedCheckpoint,
    with_bias: bool,
    change: Callable[[dict[str, PlannedTensor]], dict[str, PlannedTensor]],
) -> dict[str, PlannedTensor]:
    """All tensors, with each layer's attention, by short name, passed through `change`."""
    tensors = {name: tensor for name, tensor in source.tensors.items() if ".self_attn." not in name}
    for layer in range(source.config.num_hidden_layers):
        for part, tensor in change(_attention(source, layer, with_bias)).items():
            name = f"model.layers.{layer}.self_attn.{part}"
            tensors[name] = tensor.renamed(name)
    return tensors


def _fused(
    tensors: dict[str, PlannedTensor], function: Callable[..., "torch.Tensor"], rows: int, rule: str
) -> dict[str, PlannedTensor]:
    """Moves g_proj into q_proj, weight and bias; `function` makes the fused tensor of so many rows."""
    tensors = dict(tensors)
    for kind in ("weight", "bias"):
        gate = tensors.pop(f"g_proj.{kind}", None)
        if gate is not None:
            query = tensors[f"q_proj.{kind}"]
            tensors[f"q_proj.{kind}"] = derived(query.name, (query, gate), function, rule, (rows, *query.shape[1:]))
    return tensors


def _official(source: GatedCheckpoint) -> Output:
    config = source.config
    heads = heads_of(config)
    function = partial(layouts.fuse, rows=layouts.official_rows(heads))
    rows, rule = heads.query_rows + heads.gate_rows, "query and gate rows, grouped by KV head"
    tensors = _replace_attention(source, _any_bias(config), lambda part: _fused(part, function, rows, rule))
    fields = _base_config(source)
    del fields["rope_parameters"]  # the official code runs on transformers 4.48 to 4.57
    fields |= {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": _any_bias(config),
        "qkv_bias": _any_bias(config),
        "use_qk_norm": config.use_qk_norm,
        "headwise_attn_output_gate": config.gate_granularity == "headwise",
        "elementwise_attn_output_gate": config.gate_granularity == "elementwise",
    }
    return Output(fields, list(tensors.values()))


def _native(source: GatedCheckpoint, target: str, identity_layer: bool) -> Output:
    config = source.config
    heads = heads_of(config)
    function = partial(layouts.fuse_by_head, heads=heads)
    rows, rule = 2 * heads.query_rows, "for each head its query rows, then its gate rows"
    with_bias = _any_bias(config)
    folded = _folded(source)
    tensors = _replace_attention(folded, with_bias, lambda part: _fused(part, function, rows, rule))
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = derived(name, (tensor,), norms.shift, f"{tensor.rule}, minus 1")
    fields = _base_config(source)
    for name in (*SLIDING_FIELDS, *(() if target == "qwen3_next" else ("rope_scaling",))):
        del fields[name]
    layers = config.num_hidden_layers
    linear = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 32}
    linear |= {"linear_value_head_dim": 32, "linear_conv_kernel_dim": 4}
    fields |= {
        "model_type": {"qwen3_next": "qwen3_next", "qwen3_5": "qwen3_5_text"}[target],
        "architectures": [{"qwen3_next": "Qwen3NextForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM"}[target]],
        "attention_bias": with_bias,
        "attn_output_gate": True,
        "num_hidden_layers": layers + identity_layer,
        "layer_types": ["full_attention"] * layers + ["linear_attention"] * identity_layer,
        "full_attention_interval": 1,  # llama.cpp's converter and SGLang read this one
        # Both places: nested alone is ignored by transformers 5.0 to 5.15 under YaRN.
        "partial_rotary_factor": 1.0,
        "rope_parameters": {**fields["rope_parameters"], "partial_rotary_factor": 1.0},
        **linear,
    }
    if target == "qwen3_next":
        fields |= {"num_experts": 0, "num_experts_per_tok": 0, "decoder_sparse_step": 1}
        fields["mlp_only_layers"] = list(range(layers + identity_layer))
    if identity_layer:
        tensors |= _identity_layer(config, fields, target, source)
    return Output(fields, list(tensors.values()), [_norm_note(folded)])


def _norm_note(folded: GatedCheckpoint) -> str:
    """Says what storing weight - 1 does to these norms; reads them, since they are small."""
    rounded, total, largest, where = 0, 0, 0.0, set()
    for name, tensor in folded.tensors.items():
        if name.endswith("norm.weight"):
            weight = tensor.make()
            error = norms.relative_error(weight)
            count = int((~norms.is_exact(weight)).sum())
            rounded, total, largest = rounded + count, total + weight.numel(), max(largest, float(error.max()))
            if count:
                where.add(re.sub(r"layers\.\d+", "layers.*", name))
    folding = "norms are stored as weight - 1, after powers of two were folded into the projections that read them: "
    if not rounded:
        return folding + "every norm weight is stored exactly"
    return folding + (
        f"{rounded} of {total} norm weights are rounded, by at most {100 * largest:.2g}% of the weight, since they "
        f"could not be folded: {', '.join(sorted(where))}"
    )


def _identity_layer(
    config: GatedQwenConfig, fields: dict[str, Any], target: str, source: GatedCheckpoint
) -> dict[str, PlannedTensor]:
    """A linear-attention layer of zeros: both of its sub-layers add nothing to the residual stream."""
    prefix = f"model.layers.{config.num_hidden_layers}."
    width, inner = config.hidden_size, config.intermediate_size
    key = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    value = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
    value_heads = fields["linear_num_value_heads"]
    shapes = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
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
    dtype = source.tensors["model.embed_tokens.weight"].dtype
    return {prefix + name: filled(prefix + name, dtype, shape) for name, shape in shapes.items()}


def _folded(source: GatedCheckpoint) -> GatedCheckpoint:
    """The same function with every norm weight, as far as possible, such that weight - 1 is exact."""
    tensors = dict(source.tensors)
    factor_of: Callable[[str], torch.Tensor] = cache(lambda name: norms.fold_factors(source.tensors[name].make()))
    if any(tensor.dtype == "F16" for tensor in tensors.values()):
        return source  # fp16 has too few exponents: the columns would lose bits
    readers: dict[str, list[str]] = {}
    for layer in range(source.config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        attention = [f"{prefix}self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "g_proj")]
        readers[f"{prefix}input_layernorm.weight"] = attention
        readers[f"{prefix}post_attention_layernorm.weight"] = [
            f"{prefix}mlp.{p}.weight" for p in ("gate_proj", "up_proj")
        ]
        _fold_query_key(tensors, source.tensors, f"{prefix}self_attn.")
    if not source.config.tie_word_embeddings:
        readers["model.norm.weight"] = ["lm_head.weight"]
    for norm, projections in readers.items():
        get = partial(factor_of, norm)
        tensors[norm] = derived(norm, (tensors[norm],), partial(_divided, factor=get), "powers of two folded out")
        for name in projections:
            rule = f"{tensors[name].rule}, columns times powers of two"
            tensors[name] = derived(name, (tensors[name],), partial(_scaled_columns, factor=get), rule)
    return GatedCheckpoint(source.config, tensors, source.family, source.side_files, source.recipe, source.warnings)


def _fold_query_key(tensors: dict[str, PlannedTensor], original: Mapping[str, PlannedTensor], prefix: str) -> None:
    """Trades powers of two between q_norm and k_norm and moves signs into the rows of q_proj and k_proj."""
    norm = {part: original[f"{prefix}{part}_norm.weight"] for part in ("q", "k")}
    signs = {part: cache(lambda part=part: norms.row_signs(norm[part].make())) for part in norm}
    factor = cache(lambda: norms.pair_factors(norm["q"].make().abs(), norm["k"].make().abs()))
    for part, divide in (("q", True), ("k", False)):
        name = norm[part].name
        function = partial(_traded, factor=factor, divide=divide)
        tensors[name] = derived(name, (norm[part],), function, "powers of two traded")
        for kind in ("weight", "bias"):
            projection = f"{prefix}{part}_proj.{kind}"
            if projection in tensors:
                rule = f"{tensors[projection].rule}, signs of the norm in its rows"
                function = partial(_signed_rows, signs=signs[part])
                tensors[projection] = derived(projection, (tensors[projection],), function, rule)


def _divided(weight: "torch.Tensor", factor: Callable[[], "torch.Tensor"]) -> "torch.Tensor":
    return weight / factor()


def _scaled_columns(weight: "torch.Tensor", factor: Callable[[], "torch.Tensor"]) -> "torch.Tensor":
    return weight * factor().to(weight.dtype)


def _traded(weight: "torch.Tensor", factor: Callable[[], "torch.Tensor"], divide: bool) -> "torch.Tensor":
    scale = factor().to(weight.dtype)
    return weight.abs() / scale if divide else weight.abs() * scale


def _signed_rows(weight: "torch.Tensor", signs: Callable[[], "torch.Tensor"]) -> "torch.Tensor":
    per_head = signs().to(weight.dtype)  # (D,), the same for every head
    rows = per_head.repeat(weight.shape[0] // per_head.shape[0])
    return weight * rows.reshape(-1, *[1] * (weight.ndim - 1))


def _ungated(source: GatedCheckpoint) -> Output:
    """Plain Qwen3: every gate must be a constant, which is multiplied into the neighbouring projection."""
    config = source.config
    for name in source.tensors:
        if ".self_attn.g_proj" in name and name.endswith(".weight") and bool(source.tensors[name].make().any()):
            raise CheckpointError(
                f"tensor {name}: this gate depends on its input, so plain qwen3 cannot hold the model; only constant "
                "gates (gate_input 'constant', or a projection of zeros) can be removed"
            )
    with_bias = bool(config.attention_bias or config.attention_out_bias)
    tensors = _replace_attention(source, with_bias, lambda part: constant_gate.removed(part, config))
    fields = _base_config(source)
    fields |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": with_bias}
    return Output(fields, list(tensors.values()), ["constant gates are multiplied into the projections"])
