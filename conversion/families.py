"""The families that can be a source: how each is told by its config.json, and how its config becomes ours.

The rules for ungated families are data: a family says which of our fields it fixes and what it cannot take with it.
Weights keep their names in all of them.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

from gated_qwen.conversion.checkpoint import CheckpointError

if TYPE_CHECKING:
    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig
    from gated_qwen.configuration.configuration_gated_qwen_moe import GatedQwenMoeConfig

    GatedConfig = GatedQwenConfig | GatedQwenMoeConfig

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
# Of these a mixture has the first two: all its layers are alike.
SLIDING_FIELDS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
# Of a mixture of experts, as Qwen3-MoE names them.
MOE_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "mlp_only_layers",
    "decoder_sparse_step",
    "output_router_logits",
    "router_aux_loss_coef",
)


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
        Family(
            "qwen3_moe",
            "Qwen3-MoE",
            fixed={"use_qk_norm": True, "attention_out_bias": None},
            copied=("attention_bias", *SLIDING_FIELDS[:2], *MOE_FIELDS),
        ),
    )
}


# Native families whose full-attention layers carry an elementwise gate, by model_type.
NATIVE = {
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
}
OURS = ("gated_qwen", "gated_qwen_moe")
OFFICIAL = ("qwen3", "qwen3_moe")  # with a gate flag; the release itself is dense
SOURCES = ("gated_qwen", "official", "qwen3_next", "qwen3_5", *FAMILIES)


def official_gate_flags(config: dict[str, Any]) -> list[str]:
    """The flags by which the official release marks its fused gate, where they are set."""
    return [name for name in ("headwise_attn_output_gate", "elementwise_attn_output_gate") if config.get(name)]


def detect_source(config: dict[str, Any]) -> str:
    """Finds the family of a config.json, one of `SOURCES`.

    Raises:
        CheckpointError: the family is not known, or the config says two things at once.
    """
    model_type = config.get("model_type")
    flags = official_gate_flags(config)
    if flags and model_type not in OFFICIAL:
        raise CheckpointError(
            f"config.json: {flags[0]} marks the official release layout, which is model_type {' or '.join(OFFICIAL)}, "
            f"but model_type is {model_type!r}; say which it is with --from"
        )
    if len(flags) > 1:
        raise CheckpointError(f"config.json: both {' and '.join(flags)} are true; a gate has one granularity")
    if flags:
        return "official"
    if model_type in OURS:
        return "gated_qwen"
    if model_type in NATIVE:
        if not (config.get("text_config") or config).get("attn_output_gate", True):
            raise CheckpointError("config.json: attn_output_gate is false: this model has no gate to convert")
        return NATIVE[model_type]
    if model_type in FAMILIES:
        return FAMILIES[model_type].model_type
    raise CheckpointError(f"config.json: model_type {model_type!r} is not understood; known: {', '.join(SOURCES)}")


def config_object(config: dict[str, Any], model_type: str) -> Any:
    """The config as transformers' own class of `model_type` fills it in.

    Raises:
        CheckpointError: the class refuses it.
    """
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type].from_dict(dict(config))
    except Exception as error:  # the config classes raise types of their own
        reason = " ".join(str(error).split())
        raise CheckpointError(f"config.json: not a valid {model_type} config ({reason})") from error


def shared_fields(config: Any) -> dict[str, Any]:
    """The fields that mean the same in every family and in ours; Qwen3.5-MoE lacks the width of a dense layer."""
    return {name: getattr(config, name) for name in SHARED_FIELDS if hasattr(config, name)}


def gated_config(fields: dict[str, Any]) -> "GatedConfig":
    """Our config from its fields: a mixture of experts where they say how many there are.

    Raises:
        ValueError: naming the field whose value has no meaning.
    """
    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig
    from gated_qwen.configuration.configuration_gated_qwen_moe import GatedQwenMoeConfig

    if "num_experts" in fields or "num_local_experts" in fields:
        return GatedQwenMoeConfig(**fields)
    return GatedQwenConfig(**fields)


def is_mixture(config: "GatedConfig") -> TypeGuard["GatedQwenMoeConfig"]:
    """Whether a config of ours is of a mixture of experts."""
    return config.model_type == "gated_qwen_moe"


def causal_lm_class(config: "GatedConfig") -> Any:
    """Our causal language model for a config of ours."""
    import gated_qwen

    return gated_qwen.GatedQwenMoeForCausalLM if is_mixture(config) else gated_qwen.GatedQwenForCausalLM


def ungated_fields(config: dict[str, Any], family_name: str) -> dict[str, Any]:
    """Our config's fields, without a gate, for a model of a known family.

    Defaults that the file leaves out are the family's own, filled in by transformers' config class.

    Args:
        config: the content of config.json.
        family_name: a key of `FAMILIES`.

    Returns:
        dict: keyword arguments of `gated_config`.

    Raises:
        CheckpointError: naming the field whose value our model cannot hold.
    """
    family = FAMILIES[family_name]
    filled = config_object(config, family.model_type)
    for name, allowed in family.required.items():
        if getattr(filled, name) != allowed:
            raise CheckpointError(
                f"config.json: {name}={getattr(filled, name)!r} has no counterpart here; only {allowed!r}"
            )
    head_dim = getattr(filled, "head_dim", None)
    return {
        **shared_fields(filled),
        **{name: getattr(filled, name) for name in family.copied},
        **family.fixed,
        "head_dim": head_dim or filled.hidden_size // filled.num_attention_heads,
        "rope_parameters": dict(filled.rope_parameters),
    }
