"""Named model shapes: those of the gated attention paper (arXiv 2505.06708), the released one, and one for tests.

A preset is a shape and a variant, `dense-28l-headwise`. The variants are `baseline` (no gate), and `headwise` and
`elementwise` with a gate on the attention output (G1).

    shape         layers  width  FFN   heads   head_dim  vocabulary  where the numbers come from
    dense-28l     28      2048   6144  16 / 8  128       151936      paper, table 7, "1.7B-28 layer"
    dense-48l     48      1536   4608  16 / 8  128       151936      paper, table 7, "1.7B-48 layer"
    released-1b   28      2048   6144  16 / 8  128       152064      the QwQZh/gated_attention checkpoints, 1B_*
    tiny          2       32     64    4 / 2   8         64          made for tests

All have tied embeddings and query/key norms. Table 7 stands in the paper's NeurIPS 2025 version, not in arXiv v1. It
gives no vocabulary size: the dense shapes take that of Qwen3-1.7B, whose shape is otherwise the 28-layer one, and so
fit its tokenizer. The released checkpoints are called 1B and hold 1.72 billion parameters; the elementwise one has an
FFN of 5504, which offsets most of its gate. Length and RoPE base are those with which the paper trains before it
extends the context (section 4.4), 4096 tokens and 10000; the released shape takes them from there, not from its files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from gated_qwen.configuration.accounting import count_parameters

if TYPE_CHECKING:
    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig

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
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "vocab_size": 64,
    },
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "baseline": {"gate_positions": []},
    "headwise": {"gate_positions": ["attn_output"], "gate_granularity": "headwise"},
    "elementwise": {"gate_positions": ["attn_output"], "gate_granularity": "elementwise"},
}
_RELEASED_ELEMENTWISE = {"intermediate_size": 5504}

# Overrides that add parameters to a baseline; all others describe the baseline as well.
_ADDITIONS = ("gate_", "attn_output_norm", "sandwich_norm")
_ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
_TOLERANCE = 0.001
# Coarse widths first: they divide evenly into matrix tiles and tensor-parallel ranks.
_WIDTH_MULTIPLES = (256, 128, 64, 32, 16, 8, 4, 2, 1)


def preset_names() -> list[str]:
    """List the names that `preset` knows, shape by shape, the baseline of each first.

    Example:
        >>> preset_names()[:3]
        ['dense-28l-baseline', 'dense-28l-headwise', 'dense-28l-elementwise']
    """
    return [f"{shape}-{variant}" for shape in _SHAPES for variant in _VARIANTS]


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
    fields = {**_COMMON, **_SHAPES[shape], **_VARIANTS[variant]}
    if name == "released-1b-elementwise":
        fields |= _RELEASED_ELEMENTWISE
    return copy.deepcopy(fields)


def preset(name: str, *, match_parameters: bool = False, **overrides: Any) -> GatedQwenConfig:
    """Build the config of a preset.

    With `match_parameters` the FFN is narrowed until all parameters together are within 0.1 % of the baseline of the
    same shape, as the paper does ("we reduce FFN's width so that all methods have the same number of parameters",
    table 2). The width is a multiple of the largest power of two, up to 256, that the tolerance leaves room for. The
    baseline has the same overrides, save those that add to it (`gate_*`, `attn_output_norm`, `sandwich_norm`); an
    `intermediate_size` given here is the baseline's.

    Args:
        name: one of `preset_names()`.
        match_parameters: narrow the FFN to pay for what the variant adds.
        overrides: config fields that replace the preset's. A RoPE scaling given without a base or an original length
            takes those of the preset.

    Returns:
        A new `GatedQwenConfig`.

    Raises:
        ValueError: unknown preset or field, a value that the config refuses, or no FFN width within the tolerance.

    Example:
        >>> preset("dense-28l-elementwise").intermediate_size
        6144
        >>> preset("dense-28l-elementwise", match_parameters=True).intermediate_size
        5456
    """
    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig

    fields = preset_fields(name)
    _check_overrides(overrides)
    if not match_parameters:
        return GatedQwenConfig(**_laid_over(fields, overrides))
    baseline_name = f"{name.rpartition('-')[0]}-baseline"
    shared = {field: value for field, value in overrides.items() if not field.startswith(_ADDITIONS)}
    baseline = GatedQwenConfig(**_laid_over(preset_fields(baseline_name), shared))
    widest = {**_laid_over(fields, overrides), "intermediate_size": baseline.intermediate_size}
    width = _matching_width(name, GatedQwenConfig(**widest), baseline)
    return GatedQwenConfig(**{**widest, "intermediate_size": width})


def _matching_width(name: str, widest: GatedQwenConfig, baseline: GatedQwenConfig) -> int:
    """The FFN width, at most the baseline's, that brings a config's parameters within the tolerance."""
    target = count_parameters(baseline).total
    count = count_parameters(widest)
    if count.mlp < 1:
        raise ValueError(
            f"{name}: there is no FFN to narrow with intermediate_size={widest.intermediate_size} and "
            f"num_hidden_layers={widest.num_hidden_layers}; both must be at least 1"
        )
    per_channel = count.mlp // widest.intermediate_size
    surplus = count.total - target
    ideal = widest.intermediate_size - surplus / per_channel

    def total(width: int) -> int:
        return count.total - (widest.intermediate_size - width) * per_channel

    width = 0
    for multiple in _WIDTH_MULTIPLES:
        width = min(max(1, round(ideal / multiple)) * multiple, widest.intermediate_size)
        if abs(total(width) - target) <= _TOLERANCE * target:
            return width
    raise ValueError(
        f"{name}: no intermediate_size up to {widest.intermediate_size} brings the parameters within 0.1 % of the "
        f"baseline's {target:,}; the nearest is intermediate_size={width} with {total(width):,} "
        f"({abs(total(width) - target) / target:.2%} off). Set that width yourself, without match_parameters, or take "
        "a larger shape"
    )


def _check_overrides(overrides: dict[str, Any]) -> None:
    from gated_qwen.configuration.configuration_gated_qwen import GatedQwenConfig

    known = set(GatedQwenConfig().to_dict()) - {"model_type", "transformers_version"}
    for field in overrides:
        if field not in known and field != "num_labels":  # a property, written as id2label
            raise ValueError(
                f"unknown config field {field!r}{_suggestion(field, known)} "
                "print(GatedQwenConfig()) shows the fields that a preset can override"
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
