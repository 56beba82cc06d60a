"""Writing a gated model as another family: what each can hold, its config, and its tensors from ours.

A target that cannot hold a model refuses it by naming the field, before anything is written.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from gated_qwen.conversion import constant_gate, layouts
from gated_qwen.conversion.checkpoint import CheckpointError
from gated_qwen.conversion.experts import QWEN3_5_FIELDS
from gated_qwen.conversion.families import is_mixture
from gated_qwen.conversion.native import plan_native
from gated_qwen.conversion.output import Output, any_bias, base_config, fuse_gate, replace_attention
from gated_qwen.conversion.sources import GatedCheckpoint, heads_of

if TYPE_CHECKING:
    from gated_qwen.conversion.families import GatedConfig

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
QWEN3 = {
    "gated_qwen": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "gated_qwen_moe": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
}


def plan_target(source: GatedCheckpoint, target: str, *, identity_layer: bool = False) -> Output:
    """Plans a source as a folder of `target`, one of `TARGETS`; a mixture of experts becomes the target's mixture.

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
    return plan_native(source, target, identity_layer)


def check_holds(config: "GatedConfig", target: str) -> None:
    """Refuses a config that `target` cannot hold.

    Raises:
        CheckpointError: with the field, its value and the one that the target has.
    """
    experts = QWEN3_5_FIELDS if is_mixture(config) and target == "qwen3_5" else {}
    for name, held in {**HOLDS.get(target, {}), **experts}.items():
        if getattr(config, name) != held:
            raise CheckpointError(
                f"config.json: {name}={getattr(config, name)!r} cannot be held by {target}, which has {held!r} there"
            )


def _official(source: GatedCheckpoint) -> Output:
    config = source.config
    heads = heads_of(config)
    function = partial(layouts.fuse, rows=layouts.official_rows(heads))
    rows, rule = heads.query_rows + heads.gate_rows, "query and gate rows, grouped by KV head"
    tensors = replace_attention(source, any_bias(config), lambda part: fuse_gate(part, function, rows, rule))
    fields = base_config(source)
    del fields["rope_parameters"]  # the official code runs on transformers 4.48 to 4.57
    fields |= {
        **QWEN3[config.model_type],
        "attention_bias": any_bias(config),
        "qkv_bias": any_bias(config),
        "use_qk_norm": config.use_qk_norm,
        "headwise_attn_output_gate": config.gate_granularity == "headwise",
        "elementwise_attn_output_gate": config.gate_granularity == "elementwise",
    }
    return Output(fields, list(tensors.values()))


def _ungated(source: GatedCheckpoint) -> Output:
    """Plain Qwen3 or Qwen3-MoE: each gate must be a constant, which is multiplied into the neighbouring projection."""
    config = source.config
    for name in source.tensors:
        if ".self_attn.g_proj" in name and name.endswith(".weight") and bool(source.tensors[name].make().any()):
            raise CheckpointError(
                f"tensor {name}: this gate depends on its input, so plain qwen3 cannot hold the model; only constant "
                "gates (gate_input 'constant', or a projection of zeros) can be removed"
            )
    with_bias = bool(config.attention_bias or config.attention_out_bias)
    tensors = replace_attention(source, with_bias, lambda part: constant_gate.removed(part, config))
    fields = base_config(source)
    fields |= {**QWEN3[config.model_type], "attention_bias": with_bias}
    return Output(fields, list(tensors.values()), ["constant gates are multiplied into the projections"])
