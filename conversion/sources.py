"""Reading any source as a gated model in our names: nothing is read until a tensor is made."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gated_qwen.configuration.configuration_gated_qwen import GATE_GRANULARITIES
from gated_qwen.conversion import experts, layouts, norms, retrofit
from gated_qwen.conversion.checkpoint import FLOAT_DTYPES, Checkpoint, CheckpointError
from gated_qwen.conversion.families import (
    FAMILIES,
    MOE_FIELDS,
    causal_lm_class,
    config_object,
    detect_source,
    gated_config,
    shared_fields,
    ungated_fields,
)
from gated_qwen.conversion.plan import PlannedTensor, copied, derived

if TYPE_CHECKING:
    from gated_qwen.conversion.families import GatedConfig

# Buffers that old releases saved and every version recomputes.
RECOMPUTED = ("rotary_emb.inv_freq",)
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class GatedCheckpoint:
    """A gated model as it will be, in our config and our names; `recipe` says how it came about."""

    config: "GatedConfig"
    tensors: Mapping[str, PlannedTensor]
    family: str
    side_files: list[Path]
    recipe: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def read_gated(
    checkpoint: Checkpoint,
    *,
    family: str | None = None,
    gate: str | None = None,
    start: str = "identity",
    seed: int = 0,
) -> GatedCheckpoint:
    """Reads a checkpoint of any known family as a gated model.

    Args:
        checkpoint: an open checkpoint.
        family: `"gated_qwen"`, `"official"`, `"qwen3_next"`, `"qwen3_5"` or an ungated family; None detects it.
        gate: for an ungated source, `"headwise"` (None too) or `"elementwise"`.
        start: for an ungated source, `"identity"`, `"open"` or `"random"`.
        seed: of a random start.

    Raises:
        CheckpointError: naming the file, field or tensor that stands in the way.
    """
    family = family or detect_source(checkpoint.config)
    if checkpoint.config.get("quantization_config"):
        raise CheckpointError(
            "config.json: quantization_config: quantised weights are not converted; dequantise first"
        )
    if family not in FAMILIES and start != "identity":
        raise CheckpointError(f"config.json: the source ({family}) has a gate already, so it has no start {start!r}")
    checkpoint = experts.separated(checkpoint)
    _check_layers(checkpoint)
    if family not in FAMILIES and gate is not None:
        has = (
            "has a gate already"
            if checkpoint.config.get("gate_positions", True)
            else "is a gated_qwen config of no gate"
        )
        mend = "" if "already" in has else "; convert it --to qwen3 first"
        raise CheckpointError(f"config.json: the source ({family}) {has}, so no {gate} gate can be added{mend}")
    if family == "gated_qwen":
        return _read_ours(checkpoint)
    if family == "official":
        return _read_official(checkpoint)
    if family in ("qwen3_next", "qwen3_5"):
        return _read_native(checkpoint, family)
    return _read_ungated(checkpoint, family, gate or "headwise", start, seed)


def _read_ours(checkpoint: Checkpoint) -> GatedCheckpoint:
    fields = {name: value for name, value in checkpoint.config.items() if name not in ("auto_map", "model_type")}
    config = gated_config(fields)
    tensors = {
        name: _source(checkpoint, name, shape) for name, shape in _expected(checkpoint, config, {}, set()).items()
    }
    return GatedCheckpoint(config, tensors, "gated_qwen", checkpoint.side_files(), {"gate": "as in the source"})


def _read_ungated(checkpoint: Checkpoint, family: str, gate: str, start: str, seed: int) -> GatedCheckpoint:
    if gate not in GATE_GRANULARITIES:
        raise ValueError(f"gate {gate!r} is not known; choose one of {', '.join(GATE_GRANULARITIES)}")
    if start not in retrofit.STARTS:
        raise ValueError(f"start {start!r} is not known; choose one of {', '.join(retrofit.STARTS)}")
    fields = {**ungated_fields(checkpoint.config, family), "gate_positions": ["attn_output"], "gate_granularity": gate}
    if start != "random":
        fields["gate_initializer_range"] = 0.0  # gate weights that are missing at load time are zeros as well
    config = gated_config({**fields, "gate_bias": start == "open"})
    expected = _expected(
        checkpoint, config, {}, {name for name in _shapes(checkpoint, config) if "self_attn.g_proj." in name}
    )
    tensors = {}
    for name, shape in expected.items():
        if "self_attn.g_proj." in name:
            like = checkpoint.tensors[name.rpartition("g_proj.")[0] + "o_proj.weight"].dtype
            tensors[name] = retrofit.gate_tensor(name, like, shape, start, config.initializer_range, seed)
            continue
        tensor = _source(checkpoint, name, shape)
        if name.endswith(retrofit.DOUBLED) and start != "open":
            tensor = derived(name, (tensor,), retrofit.double, "twice")
        tensors[name] = tensor
    recipe = {
        "gate": {"positions": ["attn_output"], "granularity": gate, "activation": "sigmoid", "start": start},
        "rules": retrofit.RULES[start],
    }
    if start == "random":
        recipe["seed"] = seed
    return GatedCheckpoint(config, tensors, family, checkpoint.side_files(), recipe, list(retrofit.WARNINGS[start]))


def _read_official(checkpoint: Checkpoint) -> GatedCheckpoint:
    """Splits the fused q_proj of the paper's release; its flags are read, never assumed."""
    config = checkpoint.config
    granularities = [name for name in GATE_GRANULARITIES if config.get(f"{name}_attn_output_gate")]
    if len(granularities) != 1:
        raise CheckpointError(
            "config.json: one of headwise_attn_output_gate and elementwise_attn_output_gate must be true, but "
            f"{len(granularities)} are; a gate has one granularity"
        )
    for flag in ("qkv_bias", "use_qk_norm"):
        if not isinstance(config.get(flag), bool):
            raise CheckpointError(
                f"config.json: {flag} is {config.get(flag)!r}; the official layout needs true or false"
            )
    # The official code reads qkv_bias for q, k, v and o, and ignores attention_bias.
    family = "qwen3_moe" if config.get("model_type") == "qwen3_moe" else "qwen3"
    fields = {
        **ungated_fields({**config, "attention_bias": config["qkv_bias"]}, family),
        "use_qk_norm": config["use_qk_norm"],
        "gate_positions": ["attn_output"],
        "gate_granularity": granularities[0],
        "gate_bias": config["qkv_bias"],
    }
    return _split(checkpoint, gated_config(fields), layouts.official_rows, "official", {})


def _read_native(checkpoint: Checkpoint, family: str) -> GatedCheckpoint:
    """Splits the fused q_proj of a Qwen3-Next or Qwen3.5 text model whose layers are all full attention."""
    text = checkpoint.config.get("text_config") or checkpoint.config
    filled_in = config_object(text, native_type(family, any(map(experts.is_expert, checkpoint.tensors))))
    layer_types = list(filled_in.layer_types)
    identity = _identity_layer(checkpoint, layer_types)
    kept = len(layer_types) - (identity is not None)
    if other := sorted(set(layer_types[:kept]) - {"full_attention"}):
        raise CheckpointError(f"config.json: layer_types has {other[0]}; only models of full attention are converted")
    rope = dict(filled_in.rope_parameters)
    if rope.pop("partial_rotary_factor", 0.25) != 1.0:
        raise CheckpointError("config.json: partial_rotary_factor is not 1.0: part of each head is not rotated")
    for name in ("mrope_section", "mrope_interleaved"):  # for images; text has one position in all sections
        rope.pop(name, None)
    fields = {
        **shared_fields(filled_in),
        "head_dim": filled_in.head_dim,
        "num_hidden_layers": kept,
        "attention_bias": filled_in.attention_bias,
        "gate_bias": filled_in.attention_bias,
        "rope_parameters": rope,
        "gate_positions": ["attn_output"],
        "gate_granularity": "elementwise",
        **_native_experts(checkpoint, filled_in, kept, identity),
    }
    config = gated_config(fields)
    prefix = (
        "model.language_model." if any(n.startswith("model.language_model.") for n in checkpoint.tensors) else "model."
    )
    names = {name: name.replace("model.", prefix, 1) for name in _shapes(checkpoint, config) if prefix != "model."}
    dropped = (experts.SHARED_EXPERT,) if identity is None else (experts.SHARED_EXPERT, identity)
    source = _split(checkpoint, config, layouts.native_rows, family, names, dropped)
    tensors = {
        name: derived(name, (tensor,), norms.unshift, "plus 1") if is_norm(name) else tensor
        for name, tensor in source.tensors.items()
    }
    return GatedCheckpoint(source.config, tensors, family, source.side_files, source.recipe, source.warnings)


def native_type(family: str, mixture: bool) -> str:
    """The `model_type` of a text model of a native family; Qwen3-Next has one for dense models and mixtures."""
    return "qwen3_next" if family == "qwen3_next" else "qwen3_5_moe_text" if mixture else "qwen3_5_text"


def _native_experts(checkpoint: Checkpoint, config: Any, layers: int, identity: str | None) -> dict[str, Any]:
    """Fields of the experts of a native model, none for a dense one; a shared expert must not add anything.

    Raises:
        CheckpointError: naming the shared expert that does.
    """
    kept = [name for name in checkpoint.tensors if identity is None or identity not in name]
    if not any(map(experts.is_expert, kept)):
        return {}
    for name in sorted(name for name in kept if name.endswith(f"{experts.SHARED_EXPERT}.down_proj.weight")):
        if bool(checkpoint.load(name).any()):
            raise CheckpointError(
                f"{checkpoint.tensors[name].file.name}: tensor {name} is not zero: the model has a shared expert, and "
                "ours has none; only models whose shared experts add nothing are converted"
            )
    fields = {**experts.QWEN3_5_FIELDS}  # which that family does not write down
    fields |= {name: getattr(config, name) for name in MOE_FIELDS if hasattr(config, name)}
    fields["mlp_only_layers"] = [layer for layer in fields["mlp_only_layers"] if layer < layers]
    if not hasattr(config, "intermediate_size"):  # of a dense layer, of which there is none
        fields["intermediate_size"] = config.moe_intermediate_size * config.num_experts_per_tok
    return fields


def _split(
    checkpoint: Checkpoint,
    config: "GatedConfig",
    rows_of: Any,
    family: str,
    names: dict[str, str],
    dropped: tuple[str, ...] = (),
) -> GatedCheckpoint:
    rows = rows_of(heads_of(config))
    gates = {name for name in _shapes(checkpoint, config) if ".self_attn.g_proj." in name}
    tensors = {}
    for name, shape in _expected(checkpoint, config, names, gates, dropped).items():
        part = name.rpartition("self_attn.")[2]
        if part.startswith(("q_proj.", "g_proj.")):
            fused_name = name.replace(".g_proj.", ".q_proj.")
            fused_shape = (len(rows[0]) + len(rows[1]), *shape[1:])
            fused = _source(checkpoint, fused_name, fused_shape, names)
            function = layouts.query_part if part.startswith("q_proj.") else layouts.gate_part
            which = "query" if part.startswith("q_proj.") else "gate"
            rule = f"{which} rows of the fused projection ({family})"
            tensors[name] = derived(name, (fused,), partial(function, rows=rows), rule, shape)
        else:
            tensors[name] = _source(checkpoint, name, shape, names)
    recipe = {"gate": {"positions": ["attn_output"], "granularity": config.gate_granularity}, "layout": family}
    return GatedCheckpoint(config, tensors, family, checkpoint.side_files(), recipe)


def _check_layers(checkpoint: Checkpoint) -> None:
    """Refuses a config of more layers than the weights have, before anything of that size is built."""
    declared = (checkpoint.config.get("text_config") or checkpoint.config).get("num_hidden_layers")
    found = {int(match[1]) for name in checkpoint.tensors if (match := re.search(r"\blayers\.(\d+)\.", name))}
    if isinstance(declared, int) and declared > len(found):
        raise CheckpointError(f"config.json: num_hidden_layers={declared}, but the weights have {len(found)} layers")


def heads_of(config: "GatedConfig", granularity: str | None = None) -> layouts.Heads:
    """The shape that a layout depends on; `granularity` is the config's unless said."""
    key_value = int(config.num_key_value_heads or config.num_attention_heads)
    return layouts.Heads(
        config.num_attention_heads, key_value, config.head_dim, granularity or config.gate_granularity
    )


def is_norm(name: str) -> bool:
    return name == "model.norm.weight" or name.removesuffix(".weight").endswith(NORMS)


def _identity_layer(checkpoint: Checkpoint, layer_types: list[str]) -> str | None:
    """The name prefix of a last linear-attention layer that adds nothing, as our exports append it, or None."""
    if not layer_types or layer_types[-1] != "linear_attention":
        return None
    prefix = f"layers.{len(layer_types) - 1}."
    outputs = [  # of the attention, and of the MLP or of each expert
        [name for name in checkpoint.tensors if prefix in name and name.endswith(f"{module}.weight")]
        for module in ("out_proj", "down_proj")
    ]
    if not all(outputs) or any(bool(checkpoint.load(name).any()) for name in sum(outputs, [])):
        return None
    return prefix


def live_shapes(config: "GatedConfig") -> dict[str, tuple[int, ...]]:
    """Every tensor of the gated model, by its name in memory; a tied head is not one of its own."""
    import torch

    with torch.device("meta"):
        model = causal_lm_class(config)(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def _shapes(checkpoint: Checkpoint, config: "GatedConfig") -> dict[str, tuple[int, ...]]:
    """Every tensor of the gated model, by its name on disk.

    Raises:
        CheckpointError: the config says more experts than the weights have.
    """
    shapes = live_shapes(config)
    declared, found = experts.count_fused(shapes), experts.count_experts(checkpoint.tensors)
    if declared > found:
        raise CheckpointError(f"config.json: num_experts={declared}, but the weights have {found} experts")
    return experts.separated_shapes(shapes)


def _expected(
    checkpoint: Checkpoint,
    config: "GatedConfig",
    names: dict[str, str],
    made: set[str],
    dropped: tuple[str, ...] = (),
) -> dict[str, tuple[int, ...]]:
    """The gated model's tensors, after checking that the source has them and nothing else.

    `names` maps ours to the source's where they differ; `made` are not in the source; what has a `dropped` part in its
    name is ignored.
    """
    import torch

    shapes = _shapes(checkpoint, config)
    found = {name for name in checkpoint.tensors if not name.endswith(RECOMPUTED)}
    found = {name for name in found if not any(part in name for part in dropped)}
    if config.tie_word_embeddings and (head := names.get("lm_head.weight", "lm_head.weight")) in found:
        embedding = names.get("model.embed_tokens.weight", "model.embed_tokens.weight")
        if embedding in found and not torch.equal(checkpoint.load(head), checkpoint.load(embedding)):
            raise CheckpointError(
                f"{checkpoint.tensors[head].file.name}: {head} differs from the embedding, but config.json says "
                "tie_word_embeddings; set that to false to keep both"
            )
        found.discard(head)  # the same tensor under a second name
    wanted = {names.get(name, name) for name in shapes if name not in made}
    if unknown := sorted(found - wanted):
        file = checkpoint.tensors[unknown[0]].file.name
        raise CheckpointError(f"{file}: tensor {unknown[0]} has no place in a causal language model of this family")
    if missing := sorted(wanted - found):
        raise CheckpointError(f"{checkpoint.folder}: tensor {missing[0]} is missing")
    return shapes


def _source(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], names: dict[str, str] | None = None
) -> PlannedTensor:
    source = (names or {}).get(name, name)
    info = checkpoint.tensors[source]
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file.name}: tensor {source} has shape {info.shape}, config.json asks for {shape}"
        )
    if info.dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"{info.file.name}: tensor {source} is {info.dtype}; dequantise the weights first")
    return copied(checkpoint, source, name)
