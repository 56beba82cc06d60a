"""Where RoPE settings stand in the content of a config.json: read from either schema, written in both.

The new schema (transformers 5) is `rope_parameters`, the old one (transformers 4) `rope_theta` with `rope_scaling`. In
a model with a vision part they lie inside `text_config`, and a value beside it is read by nothing.
"""

from __future__ import annotations

import copy
from typing import Any

_SCHEMAS = ("rope_parameters", "rope_scaling", "rope_theta")
_RIVALS = (*_SCHEMAS, "partial_rotary_factor", "max_position_embeddings")


def text_block(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the language model: `text_config` where there is one, else all of it.

    Example:
        >>> text_block({"model_type": "qwen3_5", "text_config": {"rope_theta": 1e7}})
        {'rope_theta': 10000000.0}
    """
    block = config.get("text_config")
    return block if isinstance(block, dict) else config


def states_base(config: dict[str, Any]) -> bool:
    """Whether a config says its RoPE base anywhere.

    Example:
        >>> states_base({"rope_scaling": {"type": "linear", "factor": 2.0}})
        False
    """
    blocks = {id(block): block for block in (config, text_block(config))}.values()
    places = [place for block in blocks for place in (block, *(block.get(name) for name in _SCHEMAS[:2]))]
    return any(isinstance(place, dict) and place.get("rope_theta") is not None for place in places)


def read_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The RoPE settings of a config.json in one dict, whichever schema it uses.

    Returns:
        `rope_type`, `rope_theta` and whatever else is stated, numbers as floats, aliases resolved. A config that says
        nothing at all about RoPE has base 10000.0, as transformers has it.

    Raises:
        ValueError: values that contradict each other, an unknown `rope_type`, a scaling without its base, factor or
            original length, RoPE settings beside a `text_config` instead of in it.

    Example:
        >>> read_rope({"rope_theta": 1000000, "rope_scaling": {"type": "linear", "factor": 2}})
        {'factor': 2.0, 'rope_type': 'linear', 'rope_theta': 1000000.0}
    """
    from gated_qwen.configuration.configuration_gated_qwen import normalize_rope_parameters

    block = text_block(config)
    stated = [name for name in _SCHEMAS if config.get(name) is not None]
    if stated and all(block.get(name) is None for name in _SCHEMAS):
        raise ValueError(f"config.json: {stated[0]} lies beside text_config, where nothing reads it; move it inside")
    parameters, scaling = (
        dict(block[name]) if isinstance(block.get(name), dict) else block.get(name) for name in _SCHEMAS[:2]
    )
    # normalize_rope_parameters knows models that rotate whole heads only.
    partial = {block.get("partial_rotary_factor")}
    for settings in (parameters, scaling):
        if isinstance(settings, dict):
            partial.add(settings.pop("partial_rotary_factor", None))
    partial -= {None}
    if len(partial) > 1:
        raise ValueError(
            f"config.json: partial_rotary_factor has the values {sorted(map(str, partial))}; keep one of them"
        )
    try:
        rope = normalize_rope_parameters(parameters or None, scaling or None, block.get("rope_theta"))
    except ValueError as error:
        raise ValueError(str(error).replace("GatedQwenConfig:", "config.json:", 1)) from None
    if partial:
        rope["partial_rotary_factor"] = partial.pop()
    original, rival = rope.get("original_max_position_embeddings"), block.get("original_max_position_embeddings")
    if None not in (original, rival) and original != rival:
        raise ValueError(
            f"config.json: original_max_position_embeddings is {rival} on its own and {original} in the RoPE settings"
            "; keep one value"
        )
    return rope


def read_length(config: dict[str, Any]) -> int:
    """`max_position_embeddings`: the longest text in tokens that the config allows.

    Raises:
        ValueError: it is missing or not a positive whole number.
    """
    length = text_block(config).get("max_position_embeddings")
    if length is None:
        raise ValueError("config.json: max_position_embeddings is missing; add the length in tokens, e.g. 32768")
    return whole_length("config.json: max_position_embeddings", length)


def write_rope(config: dict[str, Any], rope: dict[str, Any], length: int) -> dict[str, Any]:
    """A copy of a config with these RoPE settings in both schemas, and no other value of them anywhere.

    Args:
        config: the content of a config.json; not touched.
        rope: complete settings, as `read_rope` gives them.
        length: the new `max_position_embeddings` in tokens.

    Example:
        >>> write_rope({"text_config": {}, "rope_theta": 1e4}, {"rope_type": "default", "rope_theta": 1e6}, 4096)
        {'text_config': {'rope_parameters': {'rope_type': 'default', 'rope_theta': 1000000.0}, 'rope_theta': 1000000.0,
         'max_position_embeddings': 4096, 'rope_scaling': None}}
    """
    block = {**copy.deepcopy(text_block(config)), "rope_parameters": copy.deepcopy(rope)}
    block |= {"rope_theta": rope["rope_theta"], "max_position_embeddings": length}
    scaling = {name: copy.deepcopy(value) for name, value in rope.items() if name != "rope_theta"}
    plain = rope["rope_type"] == "default" and not set(scaling) - {"rope_type", "partial_rotary_factor"}
    block["rope_scaling"] = None if plain else scaling
    if "partial_rotary_factor" in rope:
        block["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if block.pop("original_max_position_embeddings", None) and "original_max_position_embeddings" in rope:
        # On its own, transformers gives it precedence over the RoPE settings.
        block["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return with_text_block(config, block)


def with_text_block(config: dict[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config with another `text_block`, and no RoPE value beside it."""
    if text_block(config) is config:
        return block
    outer = {name: copy.deepcopy(value) for name, value in config.items() if name not in _RIVALS}
    return {**outer, "text_config": block}


def whole_length(name: str, value: object) -> int:
    """`value`, if it is a length in tokens.

    Raises:
        ValueError: it is not a positive whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number of tokens, e.g. 32768")
    return value
