"""The RoPE base and YaRN (arXiv 2309.00071) in the content of a config.json: dict in, new dict out.

What is unusual here:
- a config is read in either schema (`rope_parameters`, or `rope_theta` with `rope_scaling`) and written in both, with
  equal values, inside `text_config` where there is one; nothing that contradicts it stays behind;
- the base is carried through every change, and YaRN always states the length that the model was trained at;
- no length is guessed: a model that is scaled already, or whose trained length is not plain, is refused with the mend.

An object is changed by way of its dict: `GatedQwenConfig.from_dict(apply_yarn(config.to_dict(), factor=4.0))`.
"""

from __future__ import annotations

import math
from typing import Any

from gated_qwen.configuration.rope_schema import (
    read_length,
    read_rope,
    states_base,
    text_block,
    whole_length,
    with_text_block,
    write_rope,
)

# What belongs to one kind of scaling and goes with it; other keys (mrope_section, partial_rotary_factor) stay.
_YARN_OPTIONS = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
_SCALING_KEYS = {
    *_YARN_OPTIONS,
    *("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
    *("low_freq_factor", "high_freq_factor"),
}
# Above it, or off the powers of two, `max_position_embeddings` often holds more than the length trained at.
LONGEST_PLAIN_LENGTH = 32768


def set_rope_theta(config: dict[str, Any], rope_theta: float, *, train_length: int | None = None) -> dict[str, Any]:
    """Changes the RoPE base, and nothing else: scaling is neither added nor taken away.

    A trained model must go on training after it, since every frequency base ** (-2i / D) but the first moves.

    Args:
        config: the content of a config.json; not touched.
        rope_theta: the new base, e.g. 1e6.
        train_length: the new `max_position_embeddings`, in tokens, when training goes on at another length.

    Returns:
        A new config, in both schemas.

    Raises:
        ValueError: a base that is not above 1, or a `train_length` for a model with scaling.

    Example:
        >>> config = {"max_position_embeddings": 4096, "rope_theta": 10000.0}
        >>> set_rope_theta(config, 1e6)["rope_parameters"]
        {'rope_type': 'default', 'rope_theta': 1000000.0}
    """
    if not _is_number(rope_theta) or rope_theta <= 1:
        raise ValueError(f"rope_theta={rope_theta!r}: the base must be a number above 1, e.g. 1000000.0")
    if not states_base(config):
        config = with_text_block(config, {**text_block(config), "rope_theta": rope_theta})
    rope = {**read_rope(config), "rope_theta": float(rope_theta)}
    length = read_length(config)
    if train_length is not None:
        if rope["rope_type"] != "default":
            raise ValueError(
                f"train_length={train_length}: the model has {rope['rope_type']} scaling; take it off first (--remove)"
            )
        length = whole_length("train_length", train_length)
    return write_rope(config, rope, length)


def apply_yarn(
    config: dict[str, Any],
    *,
    factor: float | None = None,
    to_length: int | None = None,
    original_length: int | None = None,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    truncate: bool | None = None,
    attention_factor: float | None = None,
) -> dict[str, Any]:
    """Extends the context with YaRN, which needs no training; base, other keys and unknown keys are kept.

    It is static: it acts on texts of every length, so the smallest factor that is enough is the best one. Factor 1.0
    is the model without scaling and is written as such. On a model with YaRN, the factor is replaced if
    `original_length` agrees with what is there; its other YaRN options stay unless given anew.

    Args:
        config: the content of a config.json; not touched.
        factor: new length over original length, 1.0 or more.
        to_length: the new length in tokens; either of the two is enough, and both must agree.
        original_length: the length in tokens that the model was trained at. It may be left out when the model is
            unscaled and `max_position_embeddings` is a power of two up to 32768; a longer one, or one with room for
            the answer on top (Qwen3's 40960), does not tell.
        beta_fast, beta_slow: turns within the original length above which a frequency is kept, and below which it is
            interpolated; None for 32 and 1.
        truncate: round the bounds of the blend to whole dimensions; None for True.
        attention_factor: multiplies cos and sin; None for 0.1 ln(factor) + 1.

    Returns:
        A new config, in both schemas, with `max_position_embeddings` = factor * original length.

    Raises:
        ValueError: naming the field, its value and the mend.

    Source: arXiv 2309.00071, sections 3.2 to 3.4.

    Example:
        >>> config = {"max_position_embeddings": 32768, "rope_theta": 1000000.0}
        >>> extended = apply_yarn(config, to_length=131072)
        >>> extended["rope_scaling"], extended["max_position_embeddings"]
        ({'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32768}, 131072)
    """
    rope = read_rope(config)
    original = _original_length(rope, read_length(config), original_length)
    factor, length = _factor_and_length(factor, to_length, original)
    options = (beta_fast, beta_slow, truncate, attention_factor)
    given = {name: value for name, value in zip(_YARN_OPTIONS, options, strict=False) if value is not None}
    for name, value in given.items():
        if name != "truncate" and (not _is_number(value) or value <= 0):
            raise ValueError(f"{name}={value!r}: expected a number above zero, or None for YaRN's own value")
    kept = {name: value for name, value in rope.items() if name not in _SCALING_KEYS and name != "rope_type"}
    if factor == 1.0:
        if given:
            name, value = next(iter(given.items()))
            raise ValueError(f"{name}={value!r}: factor 1.0 scales nothing, so it has no place; leave it out")
        return write_rope(config, {"rope_type": "default", **kept}, original)
    before = {name: rope[name] for name in _YARN_OPTIONS if rope["rope_type"] == "yarn" and name in rope}
    if math.isclose(before.get("attention_factor") or 0.0, yarn_attention_factor(rope.get("factor", 1.0))):
        del before["attention_factor"]  # the default of the old factor, spelled out
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    extended = write_rope(config, {**scaling, **before, **given, **kept}, length)
    return write_rope(extended, read_rope(extended), length)  # checked, and numbers as floats


def remove_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """Takes the scaling off; base and unknown keys are kept.

    `max_position_embeddings` becomes the original length where the scaling states one (YaRN, LongRoPE, Llama 3), and
    stays as it is where it does not (linear, dynamic).

    Raises:
        ValueError: there is no scaling.

    Example:
        >>> config = apply_yarn({"max_position_embeddings": 32768, "rope_theta": 1e6}, factor=4.0)
        >>> remove_scaling(config)["rope_parameters"]
        {'rope_type': 'default', 'rope_theta': 1000000.0}
    """
    rope = read_rope(config)
    if rope["rope_type"] == "default":
        raise ValueError("config.json: the model has no RoPE scaling, so there is nothing to remove")
    length = rope.get("original_max_position_embeddings") or read_length(config)
    kept = {name: value for name, value in rope.items() if name not in _SCALING_KEYS and name != "rope_type"}
    return write_rope(config, {"rope_type": "default", **kept}, length)


def change_context(
    config: dict[str, Any],
    *,
    rope_theta: float | None = None,
    train_length: int | None = None,
    remove: bool = False,
    **yarn: Any,
) -> dict[str, Any]:
    """The changes of `gated-qwen extend` together: first the base, then YaRN; or the scaling taken off.

    Args:
        config: the content of a config.json; not touched.
        rope_theta, train_length: as in `set_rope_theta`.
        remove: as `remove_scaling`; goes with nothing else.
        yarn: arguments of `apply_yarn`.

    Raises:
        ValueError: nothing to change, options that do not go together, or what the single functions refuse.
    """
    yarn = {name: value for name, value in yarn.items() if value is not None}
    if remove:
        if rope_theta is not None or train_length is not None or yarn:
            raise ValueError("remove: it goes with no other change; take the scaling off first, then change the rest")
        return remove_scaling(config)
    if train_length is not None and rope_theta is None:
        raise ValueError(f"train_length={train_length}: it goes with a new base; add rope_theta (--rope-theta)")
    if yarn and not {"factor", "to_length"} & set(yarn):
        name, value = next(iter(yarn.items()))
        raise ValueError(f"{name}={value!r}: belongs to YaRN; add a factor (--yarn-factor) or --to-length")
    if rope_theta is None and not yarn:
        raise ValueError("nothing to change; name a base (--rope-theta), a length (--to-length), or --remove")
    if rope_theta is not None:
        config = set_rope_theta(config, rope_theta, train_length=train_length)
    return apply_yarn(config, **yarn) if yarn else config


def yarn_attention_factor(factor: float) -> float:
    """YaRN's factor on cos and sin, 0.1 ln(factor) + 1 (arXiv 2309.00071, equation 22).

    Example:
        >>> round(yarn_attention_factor(4.0), 5)
        1.13863
    """
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def smallest_factors(config: dict[str, Any]) -> dict[int, float]:
    """For every doubling of the original length, and for the full one, the YaRN factor that is enough.

    Example:
        >>> smallest_factors(apply_yarn({"max_position_embeddings": 32768, "rope_theta": 1e6}, factor=4.0))
        {65536: 2.0, 131072: 4.0}
    """
    rope, longest = read_rope(config), read_length(config)
    if rope["rope_type"] != "yarn":
        return {}
    original = rope["original_max_position_embeddings"]
    doublings = range(1, max(1, math.ceil(math.log2(longest / original))))
    return {length: length / original for length in [*(original * 2**n for n in doublings), longest]}


def _original_length(rope: dict[str, Any], length: int, original: int | None) -> int:
    rope_type, recorded = rope["rope_type"], rope.get("original_max_position_embeddings")
    if original is not None:
        original = whole_length("original_length", original)
    if rope_type not in ("default", "yarn"):
        raise ValueError(
            f"config.json: the model has {rope_type} scaling, and YaRN on top of it has no meaning; take it off first "
            "(--remove)"
        )
    if rope_type == "yarn":
        if original is None:
            raise ValueError(
                f"config.json: the model has YaRN already, factor {rope['factor']} over {recorded} tokens; to replace "
                f"it, say original_length={recorded} (--original-length {recorded}), or take it off first (--remove)"
            )
        if original != recorded:
            raise ValueError(
                f"original_length={original}: config.json says {recorded}; to correct it, take YaRN off (--remove)"
            )
        return original
    if original is None:
        if length > LONGEST_PLAIN_LENGTH or length & (length - 1):
            raise ValueError(
                f"config.json: max_position_embeddings={length} does not tell the length that the model was trained "
                "at; say it with original_length (--original-length), e.g. 32768 for Qwen2.5 and Qwen3"
            )
        return length
    if original > length:
        raise ValueError(f"original_length={original}: above max_position_embeddings={length}; the model has no more")
    return original


def _factor_and_length(factor: float | None, to_length: int | None, original: int) -> tuple[float, int]:
    if factor is None and to_length is None:
        raise ValueError("factor: YaRN needs a factor (--yarn-factor) or a length (--to-length)")
    if factor is not None and (not _is_number(factor) or factor < 1):
        raise ValueError(f"factor={factor!r}: expected a number of 1.0 or more, e.g. 4.0")
    if to_length is not None and whole_length("to_length", to_length) < original:
        raise ValueError(f"to_length={to_length}: below the original length {original}; there is nothing to extend")
    if factor is None:
        assert to_length is not None
        return to_length / original, to_length
    length = factor * original
    if to_length is not None and to_length != length:
        raise ValueError(
            f"factor={factor!r} and to_length={to_length} disagree: {original} * {factor} is {length:g}; give one"
        )
    if length != int(length):
        raise ValueError(f"factor={factor!r}: {original} * {factor} is no whole length; give to_length (--to-length)")
    return float(factor), int(length)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
