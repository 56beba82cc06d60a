"""The ungated families that can be given a gate, and how each one's config becomes ours.

The rules are data: a family says which of our fields it fixes and what it cannot take with it. Weights keep their
names in all of them.
"""

from dataclasses import dataclass, field
from typing import Any

from gated_qwen.conversion.checkpoint import CheckpointError

# Fields that have the same name and meaning in every family and in ours.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "tie_word_embeddings",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
SLIDING_FIELDS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


@dataclass(frozen=True)
class Family:
    """One source family: the fields it adds, those it fixes, and values that our model cannot hold."""

    model_type: str
    title: str
    fixed: dict[str, Any]
    copied: tuple[str, ...] = ()
    required: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "Llama",
            # Llama's attention_bias covers q, k, v and o alike.
            fixed={"use_qk_norm": False, "attention_out_bias": None},
            copied=("attention_bias",),
            required={"mlp_bias": False},
        ),
        Family(
            "qwen2",
            "Qwen2 / Qwen2.5",
            fixed={"use_qk_norm": False, "attention_bias": True, "attention_out_bias": False},
            copied=SLIDING_FIELDS,
        ),
        Family(
            "qwen3",
            "Qwen3",
            fixed={"use_qk_norm": True, "attention_out_bias": None},
            copied=("attention_bias", *SLIDING_FIELDS),
        ),
    )
}


def official_gate_flags(config: dict[str, Any]) -> list[str]:
    """The flags by which the official release marks its fused gate, where they are set."""
    return [name for name in ("headwise_attn_output_gate", "elementwise_attn_output_gate") if config.get(name)]


def detect_family(config: dict[str, Any]) -> Family:
    """Finds the ungated family of a config.json.

    Raises:
        CheckpointError: the model is gated already, or of a family that cannot be given a gate.
    """
    model_type = config.get("model_type")
    if model_type in ("gated_qwen", "gated_qwen_moe"):
        raise CheckpointError("config.json: this model has a gate already; there is nothing to add")
    if flags := official_gate_flags(config):
        raise CheckpointError(
            f"config.json: {flags[0]} marks a gate fused into q_proj (the official release layout); "
            "a gate is added to ungated models only"
        )
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(
            f"config.json: model_type {model_type!r} cannot be given a gate; known families: {known}"
        )
    return FAMILIES[model_type]


def ungated_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Our config's fields, without a gate, for a model of a known family.

    Defaults that the file leaves out are the family's own, filled in by transformers' config class.

    Args:
        config: the content of config.json.

    Returns:
        dict: keyword arguments of `GatedQwenConfig`, with `gate_positions=[]`.

    Raises:
        CheckpointError: naming the field whose value our model cannot hold.
    """
    from transformers import CONFIG_MAPPING

    family = detect_family(config)
    if config.get("quantization_config"):
        raise CheckpointError(
            "config.json: quantization_config: quantised weights are not converted; dequantise first"
        )
    try:
        filled = CONFIG_MAPPING[family.model_type].from_dict(dict(config))
    except Exception as error:  # the config classes raise types of their own
        raise CheckpointError(f"config.json: not a valid {family.title} config ({_one_line(error)})") from error
    for name, allowed in family.required.items():
        if getattr(filled, name) != allowed:
            raise CheckpointError(
                f"config.json: {name}={getattr(filled, name)!r} has no counterpart here; only {allowed!r}"
            )
    fields = {name: getattr(filled, name) for name in (*SHARED_FIELDS, *family.copied)}
    head_dim = getattr(filled, "head_dim", None)
    return {
        **fields,
        **family.fixed,
        "head_dim": head_dim or filled.hidden_size // filled.num_attention_heads,
        "rope_parameters": dict(filled.rope_parameters),
        "gate_positions": [],
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
