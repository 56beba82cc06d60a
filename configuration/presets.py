"""Named model shapes: those of the gated attention paper (arXiv 2505.06708), the released one, and two for tests.

A preset is a shape and a variant, `dense-28l-headwise`. The variants are `baseline` (no gate), and `headwise` and
`elementwise` with a gate on the attention output (G1).

    shape         layers  width  FFN      heads   head_dim  vocabulary  where the numbers come from
    dense-28l     28      2048   6144     16 / 8  128       151936      paper, table 7, "1.7B-28 layer"
    dense-48l     48      1536   4608     16 / 8  128       151936      paper, table 7, "1.7B-48 layer"
    released-1b   28      2048   6144     16 / 8  128       152064      the QwQZh/gated_attention checkpoints, 1B_*
    moe-15a2b     24      2048   128x704  32 / 4  128       151936      paper, the 15A2B mixture of experts; see below
    tiny          2       32     64       4 / 2   8         64          made for tests
    tiny-moe      2       32     8x16     4 / 2   8         64          made for tests

All have query/key norms, and those without experts have tied embeddings. Table 7 stands in the paper's NeurIPS 2025
version, not in arXiv v1. It gives no vocabulary size: the dense shapes take that of Qwen3-1.7B, whose shape is
otherwise the 28-layer one, and so fit its tokenizer. The released checkpoints are called 1B and hold 1.72 billion
parameters; the elementwise one has an FFN of 5504, which offsets most of its gate. Length and RoPE base are those with
which the paper trains before it extends the context (section 4.4), 4096 tokens and 10000; the released shape takes
them from there, not from its files.

We found no width of an expert in the paper. It says 128 experts of which a token uses 8, 15B parameters in all and
2.54B in use; the difference is what a token does not use, whatever else there is:

    (128 - 8) experts * 24 layers * 3 matrices * 2048 * width = 15B - 2.54B, so width = 704 (a multiple of 64)

With it this shape has 14.37B parameters and a token uses 1.91B of them: experts 13,288M (830M in use), attention 453M,
embedding and head 311M each, routers 6M. What is left of both numbers of the paper, 0.63B that every token uses, it
is not explained; shared experts could be it, but Qwen3-MoE has none. Three more variants of this shape are the paper's
controls, which spend the parameters on something else than a gate: `kv8` has 8 key/value heads, `q48` 48 query heads,
`experts132` four more experts. The router losses are on, with the weights 0.001 that Qwen3-MoE and ST-MoE have.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from gated_qwen.configuration.accounting import count_parameters

if TYPE_CHECKING:
    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig
    from gated_qwen.configuration.configuration_gated_qwen_moe import GatedQwenMoeConfig

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_qk_norm": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_PAPER: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "vocab_size": 151936,
}
_EXPERTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.001,
    "router_z_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
_TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "vocab_size": 64,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "dense-28l": {**_PAPER, "num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144},
    "dense-48l": {**_PAPER, "num_hidden_layers": 48, "hidden_size": 1536, "intermediate_size": 4608},
    "released-1b": {
        **_PAPER,
        "num_hidden_layers": 28,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "vocab_size": 152064,
    },
    "moe-15a2b": {
        **_PAPER,
        **_EXPERTS,
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 704,
    },
    "tiny": _TINY,
    "tiny-moe": {**_TINY, **_EXPERTS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "baseline": {"gate_positions": []},
    "headwise": {"gate_positions": ["attn_output"], "gate_granularity": "headwise"},
    "elementwise": {"gate_positions": ["attn_output"], "gate_granularity": "elementwise"},
}
_CONTROLS: dict[str, dict[str, Any]] = {
    "kv8": {"gate_positions": [], "num_key_value_heads": 8},
    "q48": {"gate_positions": [], "num_attention_heads": 48},
    "experts132": {"gate_positions": [], "num_experts": 132},
}
_VARIANTS_OF: dict[str, dict[str, dict[str, Any]]] = {"moe-15a2b": {**_VARIANTS, **_CONTROLS}}
_RELEASED_ELEMENTWISE = {"intermediate_size": 5504}

# Overrides that add parameters to a baseline; all others describe the baseline as well.
_ADDITIONS = ("gate_", "attn_output_norm", "sandwich_norm")
_ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
_TOLERANCE = {"intermediate_size": 0.001, "moe_intermediate_size": 0.005}
# Coarse widths first: they divide evenly into matrix tiles and tensor-parallel ranks.
_WIDTH_MULTIPLES = {
    "intermediate_size": (256, 128, 64, 32, 16, 8, 4, 2, 1),
    "moe_intermediate_size": (256, 128, 64, 32, 16, 8),
}


def preset_names() -> list[str]:
    """List the names that `preset` knows, shape by shape, the baseline of each first.

    Example:
        >>> preset_names()[:3]
        ['dense-28l-baseline', 'dense-28l-headwise', 'dense-28l-elementwise']
    """
    return [f"{shape}-{variant}" for shape in _SHAPES for variant in _VARIANTS_OF.get(shape, _VARIANTS)]


def preset_fields(name: str) -> dict[str, Any]:
    """Give the config fields of a preset as plain JSON values.

    Args:
        name: one of `preset_names()`.

    Returns:
        A fresh dict, the caller's to change.

    Raises:
        ValueError: no preset has this name.

    Source: the table at the top of this module.

    Example:
        >>> preset_fields("dense-48l-headwise")["hidden_size"]
        1536
    """
    if name not in preset_names():
        raise ValueError(
            f"unknown preset {name!r}{_suggestion(name, preset_names())} The presets are {', '.join(preset_names())}"
        )
    shape, _, variant = name.rpartition("-")
    fields = {**_COMMON, **_SHAPES[shape], **_VARIANTS_OF.get(shape, _VARIANTS)[variant]}
    if name == "released-1b-elementwise":
        fields |= _RELEASED_ELEMENTWISE
    return copy.deepcopy(fields)


def preset(name: str, *, match_parameters: bool = False, **overrides: Any) -> GatedQwenConfig | GatedQwenMoeConfig:
    """Build the config of a preset.

    With `match_parameters` the FFN is narrowed until all parameters together are within 0.1 % of the baseline of the
    same shape, as the paper does with the dense models ("we reduce FFN's width so that all methods have the same
    number of parameters", table 2). The width is a multiple of the largest power of two, up to 256, that the tolerance
    leaves room for. Experts are narrowed likewise, to within 0.5 % and a multiple of 8, since one channel of all
    experts weighs more, and grouped matrix products take no other width in bfloat16. The baseline has the same
    overrides, save those that add to it (`gate_*`, `attn_output_norm`, `sandwich_norm`); a width given here,
    `intermediate_size` or `moe_intermediate_size`, is the baseline's.

    Args:
        name: one of `preset_names()`.
        match_parameters: narrow the FFN to pay for what the variant adds.
        overrides: config fields that replace the preset's. A RoPE scaling given without a base or an original length
            takes those of the preset.

    Returns:
        A new `GatedQwenConfig`, or a `GatedQwenMoeConfig` for a shape with experts.

    Raises:
        ValueError: unknown preset or field, a value that the config refuses, or no FFN width within the tolerance.

    Example:
        >>> preset("dense-28l-elementwise").intermediate_size
        6144
        >>> preset("dense-28l-elementwise", match_parameters=True).intermediate_size
        5456
    """
    fields = preset_fields(name)
    config_class = _config_class(fields)
    _check_overrides(overrides, config_class)
    if not match_parameters:
        return config_class(**_laid_over(fields, overrides))
    baseline_name = f"{name.rpartition('-')[0]}-baseline"
    shared = {field: value for field, value in overrides.items() if not field.startswith(_ADDITIONS)}
    baseline = config_class(**_laid_over(preset_fields(baseline_name), shared))
    width_field = "moe_intermediate_size" if "num_experts" in fields else "intermediate_size"
    widest = {**_laid_over(fields, overrides), width_field: getattr(baseline, width_field)}
    width = _matching_width(name, width_field, config_class(**widest), baseline)
    return config_class(**{**widest, width_field: width})


def _config_class(fields: dict[str, Any]) -> Any:
    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig
    from gated_qwen.configuration.configuration_gated_qwen_moe import GatedQwenMoeConfig

    return GatedQwenMoeConfig if "num_experts" in fields else GatedQwenConfig


def _matching_width(name: str, field: str, widest: Any, baseline: Any) -> int:
    """The FFN or expert width, at most the baseline's, that brings a config's parameters within the tolerance."""
    target = count_parameters(baseline).total
    total_of_widest = count_parameters(widest).total
    widest_width = getattr(widest, field)
    narrower = copy.deepcopy(widest)
    setattr(narrower, field, widest_width - 1)
    per_channel = total_of_widest - count_parameters(narrower).total
    if per_channel < 1:
        raise ValueError(
            f"{name}: no layer has experts to narrow with mlp_only_layers={widest.mlp_only_layers} and "
            f"decoder_sparse_step={widest.decoder_sparse_step}; leave one"
        )
    ideal = widest_width - (total_of_widest - target) / per_channel

    def total(width: int) -> int:
        return total_of_widest - (widest_width - width) * per_channel

    width = 0
    for multiple in _WIDTH_MULTIPLES[field]:
        width = min(max(1, round(ideal / multiple)) * multiple, widest_width)
        if abs(total(width) - target) <= _TOLERANCE[field] * target:
            return width
    raise ValueError(
        f"{name}: no {field} up to {widest_width} brings the parameters within {_TOLERANCE[field]:.1%} of the "
        f"baseline's {target:,}; the nearest is {field}={width} with {total(width):,} "
        f"({abs(total(width) - target) / target:.2%} off). Set that width yourself, without match_parameters, or take "
        "a larger shape"
    )


def _check_overrides(overrides: dict[str, Any], config_class: Any) -> None:
    known = set(config_class().to_dict()) - {"model_type", "transformers_version"}
    for field in overrides:
        if field not in known and field != "num_labels":  # a property, written as id2label
            raise ValueError(
                f"unknown config field {field!r}{_suggestion(field, known)} "
                f"print({config_class.__name__}()) shows the fields that a preset can override"
            )


def _laid_over(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides laid over a preset's fields; RoPE settings in either schema keep the preset's base and length."""
    from gated_qwen.configuration.configuration_gated_qwen import normalize_rope_parameters

    plain = {field: value for field, value in overrides.items() if field not in _ROPE_FIELDS}
    rope = {field: value for field, value in overrides.items() if field in _ROPE_FIELDS}
    if rope:
        previous, length = fields["rope_parameters"], fields["max_position_embeddings"]
        plain["rope_parameters"] = normalize_rope_parameters(**rope, previous=previous, max_position_embeddings=length)
    return {**fields, **copy.deepcopy(plain)}


def _suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."
