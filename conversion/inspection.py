"""What a model folder holds: family, gate and its layout, RoPE, parameters, dtypes; from config and headers alone."""

import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from gated_qwen.conversion.checkpoint import Checkpoint, CheckpointError, TensorInfo, open_checkpoint
from gated_qwen.conversion.experts import SHARED_EXPERT, is_expert
from gated_qwen.conversion.families import FAMILIES, NATIVE, OURS, official_gate_flags

OUR_LAYOUT = "gated_qwen: self_attn.g_proj, rows by head"
OFFICIAL_LAYOUT = "official release: inside q_proj, for each KV head its query rows, then its gate rows"
NATIVE_LAYOUT = "Qwen3-Next / Qwen3.5: inside q_proj, for each query head its query rows, then its gate rows"

# What a summary's `gate` says unless a model differs; positions and granularity are always said.
GATE_DEFAULTS: dict[str, Any] = {
    "head_shared": False,
    "activation": "sigmoid",
    "operation": "multiply",
    "input": "hidden_states",
    "input_channels": None,
    "bias": False,
}


@dataclass(frozen=True)
class CheckpointSummary:
    """A model folder in numbers; `gate` is None for an ungated model, `rope` is read from either schema.

    `experts` is None for a dense model. `active_parameters` leaves out, of each sparse layer, the experts that a token
    does not go through.
    """

    model_type: str
    gate: dict[str, Any] | None
    layout: str | None
    rope: dict[str, Any]
    shape: dict[str, Any]
    experts: dict[str, Any] | None
    parameters: int
    active_parameters: int
    gate_parameters: int
    dtypes: dict[str, int]
    files: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_checkpoint(folder: str | os.PathLike[str]) -> CheckpointSummary:
    """Summarises a model folder without loading weights.

    Args:
        folder: a folder with config.json and safetensors weights.

    Raises:
        CheckpointError: the folder is missing, broken, or of a family that is not understood.

    Example:
        >>> summary = inspect_checkpoint(llama_folder)
        >>> summary.model_type, summary.gate, summary.dtypes
        ('llama', None, {'F32': 19616})
    """
    checkpoint = open_checkpoint(folder)
    text_config = checkpoint.config.get("text_config") or checkpoint.config
    if not isinstance(text_config, dict):
        raise CheckpointError(f"config.json: text_config is {text_config!r}; expected an object")
    gate, layout = _gate(checkpoint.config, text_config)
    dtypes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        dtypes[info.dtype] += info.elements
    files = {info.file for info in checkpoint.tensors.values()}
    experts = _experts(checkpoint, text_config)
    return CheckpointSummary(
        model_type=checkpoint.config.get("model_type", "unknown"),
        gate=gate,
        layout=layout,
        rope=_rope(text_config),
        shape=_shape(text_config, dense=experts is None),
        experts=experts,
        parameters=sum(dtypes.values()),
        active_parameters=sum(dtypes.values()) - _idle_parameters(checkpoint, experts),
        gate_parameters=_gate_parameters(checkpoint, text_config, layout),
        dtypes=dict(dtypes),
        files=len(files),
        bytes=sum(file.stat().st_size for file in files),
    )


def _gate(config: dict[str, Any], text_config: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    model_type = config.get("model_type")
    if model_type in OURS:
        gate = {name.removeprefix("gate_"): value for name, value in config.items() if name.startswith("gate_")}
        return (gate, OUR_LAYOUT) if config.get("gate_positions", ["attn_output"]) else (None, None)
    if flags := official_gate_flags(config):
        if len(flags) > 1:
            raise CheckpointError(f"config.json: both {' and '.join(flags)} are true; a gate has one granularity")
        return {"positions": ["attn_output"], "granularity": flags[0].split("_")[0]}, OFFICIAL_LAYOUT
    if model_type in NATIVE:
        if not text_config.get("attn_output_gate", True):
            return None, None
        return {"positions": ["attn_output"], "granularity": "elementwise"}, NATIVE_LAYOUT
    if model_type in FAMILIES:
        return None, None
    known = ", ".join([*OURS, *FAMILIES, *NATIVE])
    raise CheckpointError(f"config.json: model_type {model_type!r} is not understood; known: {known}")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"config.json: the RoPE settings are {parameters!r}; expected an object")
    return {
        "rope_type": parameters.get("rope_type", parameters.get("type", "default")),
        "rope_theta": parameters.get("rope_theta", config.get("rope_theta")),
        "factor": parameters.get("factor"),
        "original_max_position_embeddings": parameters.get("original_max_position_embeddings"),
        "max_position_embeddings": config.get("max_position_embeddings"),
    }


def _shape(config: dict[str, Any], dense: bool) -> dict[str, Any]:
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    for name in needed:
        # Qwen3.5-MoE has no dense layers and does not say how wide they would be.
        if not isinstance(config.get(name), int) and (dense or name != "intermediate_size"):
            raise CheckpointError(f"config.json: {name} is {config.get(name)!r}; expected a whole number")
    shape = {name: config.get(name) for name in (*needed, "num_key_value_heads", "head_dim", "tie_word_embeddings")}
    if shape["head_dim"] is None and shape["hidden_size"] and shape["num_attention_heads"]:
        shape["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    return shape


def _experts(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Any] | None:
    """How many experts, how many of them a token goes through, their width, which layers are dense."""
    layers = {name.partition(".mlp.")[0] for name in checkpoint.tensors if is_expert(name)}
    if not layers:
        return None
    experts = {
        "num_experts": config.get("num_experts", config.get("num_local_experts")),
        "num_experts_per_tok": config.get("num_experts_per_tok"),
        "moe_intermediate_size": config.get("moe_intermediate_size"),
    }
    for name, value in experts.items():
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {name} is {value!r}; expected a positive whole number")
    shared = any(SHARED_EXPERT in name for name in checkpoint.tensors)
    return {**experts, "sparse_layers": len(layers), "shared_expert": shared}


def _idle_parameters(checkpoint: Checkpoint, experts: dict[str, Any] | None) -> int:
    if experts is None:
        return 0
    count = experts["num_experts"]
    every = sum(info.elements for name, info in checkpoint.tensors.items() if is_expert(name))
    return every // count * max(0, count - experts["num_experts_per_tok"])


def _gate_parameters(checkpoint: Checkpoint, config: dict[str, Any], layout: str | None) -> int:
    if layout == OUR_LAYOUT:
        return sum(info.elements for name, info in checkpoint.tensors.items() if ".self_attn.g_proj" in name)
    if layout in (OFFICIAL_LAYOUT, NATIVE_LAYOUT):
        heads, head_dim = config["num_attention_heads"], _shape(config, dense=False)["head_dim"]
        fused = [info for name, info in checkpoint.tensors.items() if ".self_attn.q_proj." in name]
        return sum(_rows_beyond(info, heads * head_dim) for info in fused)
    return 0


def _rows_beyond(info: TensorInfo, query_rows: int) -> int:
    """Elements of a fused projection that are not query rows."""
    return (info.shape[0] - query_rows) * (info.elements // info.shape[0])
