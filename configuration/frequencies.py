"""The rotary frequencies of a config in closed form: which are kept, blended or interpolated. Plain Python, no torch.

Frequency i of D / 2 turns a pair of coordinates by inv_freq[i] radians a token. Unscaled it is base ** (-2i / D), and
its wavelength is 2 pi / inv_freq tokens. A scaling divides some of them by its factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gated_qwen.configuration.context import yarn_attention_factor
from gated_qwen.configuration.rope_schema import read_length, read_rope, text_block

# What transformers' config classes have where a config.json is silent; elsewhere hidden size / heads, and 1.0.
_HEAD_DIM = {"gated_qwen": 128, "qwen3": 128, "qwen3_next": 256, "qwen3_5_text": 256, "qwen3_5_moe_text": 256}
_PARTIAL_ROTARY_FACTOR = {"qwen3_next": 0.25, "qwen3_5_text": 0.25, "qwen3_5_moe_text": 0.25}


@dataclass(frozen=True)
class RopeFrequencies:
    """Frequencies in radians a token, from fast to slow.

    `interpolated_share[i]` is 0.0 where frequency i is the unscaled one, 1.0 where it is divided by the whole factor,
    between where it is a blend of the two. `attention_factor` multiplies cos and sin.
    """

    inv_freq: tuple[float, ...]
    unscaled: tuple[float, ...]
    interpolated_share: tuple[float, ...]
    attention_factor: float

    @property
    def wavelengths(self) -> tuple[float, ...]:
        """Tokens for one turn."""
        return tuple(2 * math.pi / frequency for frequency in self.inv_freq)

    @property
    def kept(self) -> int:
        return sum(share == 0.0 for share in self.interpolated_share)

    @property
    def interpolated(self) -> int:
        return sum(share == 1.0 for share in self.interpolated_share)

    @property
    def blended(self) -> int:
        return len(self.inv_freq) - self.kept - self.interpolated


def rotary_dim(config: dict[str, Any]) -> int:
    """Coordinates of a head that are rotated: head_dim * partial_rotary_factor.

    Raises:
        ValueError: the config does not say how wide a head is.

    Example:
        >>> rotary_dim({"model_type": "qwen3_next", "head_dim": 256})
        64
    """
    block = text_block(config)
    model_type = block.get("model_type", config.get("model_type"))
    head_dim = block.get("head_dim") or _HEAD_DIM.get(str(model_type))
    if head_dim is None:
        if not block.get("hidden_size") or not block.get("num_attention_heads"):
            raise ValueError("config.json: the width of a head is not stated; add head_dim")
        head_dim = block["hidden_size"] // block["num_attention_heads"]
    partial = read_rope(config).get("partial_rotary_factor", _PARTIAL_ROTARY_FACTOR.get(str(model_type), 1.0))
    return int(head_dim * partial)


def rope_frequencies(config: dict[str, Any], length: int | None = None) -> RopeFrequencies:
    """The frequencies that a model with this config uses.

    Args:
        config: the content of a config.json.
        length: of the text in tokens; counts for `dynamic` and `longrope` only, which change with it. None for a
            short text.

    Raises:
        ValueError: as `read_rope` and `rotary_dim`.

    Source: for YaRN arXiv 2309.00071 section 3.2, with the bounds of the blend as in transformers; the other kinds
    as in transformers' `modeling_rope_utils`.

    Example:
        >>> config = {"head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 1e6,
        ...           "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
        >>> frequencies = rope_frequencies(config)
        >>> frequencies.kept, frequencies.blended, frequencies.interpolated, round(frequencies.attention_factor, 5)
        (24, 16, 24, 1.13863)
    """
    rope, dim = read_rope(config), rotary_dim(config)
    base, factor, rope_type = rope["rope_theta"], rope.get("factor", 1.0), rope["rope_type"]
    attention_factor = 1.0
    unscaled = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if rope_type == "yarn":
        share = _yarn_share(rope, dim)
        attention_factor = _yarn_attention_factor(rope)
    elif rope_type == "llama3":
        share = [_llama3_share(frequency, rope) for frequency in unscaled]
    elif rope_type == "longrope":
        original = rope["original_max_position_embeddings"]
        divisors = rope["short_factor" if length is None or length <= original else "long_factor"]
        factor = factor if rope.get("factor") else read_length(config) / original
        attention_factor = rope.get("attention_factor") or (
            math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        )
        scaled = [frequency / divisor for frequency, divisor in zip(unscaled, divisors, strict=True)]
        return RopeFrequencies(tuple(scaled), tuple(unscaled), _shares(unscaled, scaled, factor), attention_factor)
    elif rope_type == "dynamic":
        longest = read_length(config)
        growth = factor * max(length or 0, longest) / longest - (factor - 1)
        scaled = [(base * growth ** (dim / (dim - 2))) ** (-2 * i / dim) for i in range(dim // 2)]
        return RopeFrequencies(tuple(scaled), tuple(unscaled), _shares(unscaled, scaled, factor), 1.0)
    else:
        share = [1.0 if rope_type == "linear" else 0.0] * len(unscaled)
    if factor == 1.0:
        share = [0.0] * len(unscaled)
    scaled = [f * (1 - part) + f / factor * part for f, part in zip(unscaled, share, strict=True)]
    return RopeFrequencies(tuple(scaled), tuple(unscaled), tuple(share), attention_factor)


def describe_context(config: dict[str, Any]) -> dict[str, Any]:
    """Lengths in tokens, base, scaling and frequencies of a config, as JSON values.

    Example:
        >>> state = describe_context({"head_dim": 8, "max_position_embeddings": 512, "rope_theta": 1e4})
        >>> state["rope_type"], state["frequencies"]
        ('default', {'kept': 4, 'blended': 0, 'interpolated': 0})
    """
    rope, frequencies = read_rope(config), rope_frequencies(config)
    return {
        "max_position_embeddings": read_length(config),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
        "rope_theta": rope["rope_theta"],
        "rope_type": rope["rope_type"],
        "factor": rope.get("factor"),
        "attention_factor": frequencies.attention_factor,
        "frequencies": {
            "kept": frequencies.kept,
            "blended": frequencies.blended,
            "interpolated": frequencies.interpolated,
        },
        "wavelengths": list(frequencies.wavelengths),
        "rope_parameters": rope,
    }


def _yarn_share(rope: dict[str, Any], dim: int) -> list[float]:
    """A ramp over the index: 0 where a frequency turns beta_fast times or more in the original length, 1 below
    beta_slow times."""
    bounds = []
    for turns in (rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0):
        ratio = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        bounds.append(dim * math.log(ratio) / (2 * math.log(rope["rope_theta"])))
    low, high = bounds
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)]


def _yarn_attention_factor(rope: dict[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor, mscale, all_dim = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim and factor > 1:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
    return yarn_attention_factor(factor)


def _llama3_share(frequency: float, rope: dict[str, Any]) -> float:
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    return min(max((high - turns) / (high - low), 0.0), 1.0)


def _shares(unscaled: list[float], scaled: list[float], factor: float) -> tuple[float, ...]:
    """How far each frequency went from itself (0.0) to itself / factor (1.0)."""
    if factor == 1.0:
        return tuple(0.0 if before == after else 0.5 for before, after in zip(unscaled, scaled, strict=True))
    ratios = [(1 - after / before) / (1 - 1 / factor) for before, after in zip(unscaled, scaled, strict=True)]
    return tuple(round(min(max(ratio, 0.0), 1.0), 12) for ratio in ratios)
