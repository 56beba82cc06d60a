"""What every target shares: the plan of a folder, Qwen3's config fields, and attention changed layer by layer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gated_qwen.conversion.families import MOE_FIELDS, SHARED_FIELDS, SLIDING_FIELDS, is_mixture
from gated_qwen.conversion.plan import PlannedTensor, derived, filled
from gated_qwen.conversion.sources import GatedCheckpoint

if TYPE_CHECKING:
    import torch

    from gated_qwen.conversion.families import GatedConfig


@dataclass(frozen=True)
class Output:
    """A planned folder: the content of config.json (our own config object for our own family), tensors, notes."""

    config: "GatedConfig | dict[str, Any]"
    tensors: list[PlannedTensor]
    notes: list[str] = field(default_factory=list)


def base_config(source: GatedCheckpoint) -> dict[str, Any]:
    """Qwen3's fields, or Qwen3-MoE's, with RoPE in both schemas."""
    config = source.config
    own = (*SLIDING_FIELDS[:2], *MOE_FIELDS) if is_mixture(config) else SLIDING_FIELDS
    fields = {name: getattr(config, name) for name in (*SHARED_FIELDS, *own)}
    return {
        **fields,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.to_dict()["rope_scaling"],
        "rope_parameters": dict(config.rope_parameters or {}),
    }


def any_bias(config: "GatedConfig") -> bool:
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


def replace_attention(
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


def fuse_gate(
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
