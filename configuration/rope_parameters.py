# Copyright 2026 The gated-qwen authors. Licensed under the Apache License, Version 2.0.
"""RoPE settings of a config: one complete dict, read from either schema of transformers.

The new schema (transformers 5) is `rope_parameters`; the old one (transformers 4) is `rope_theta` with `rope_scaling`.
"""

import copy
import math

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_SCALED_BY_FACTOR = ("linear", "dynamic", "yarn", "llama3")
_NEEDS_ORIGINAL_LENGTH = ("yarn", "longrope", "llama3")
_ROPE_FLOATS = (
    "rope_theta",
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)


def refuse(field, value, allowed, config_name="GatedQwenConfig"):
    """Raises the ValueError of a field whose value has no meaning."""
    raise ValueError(f"{config_name}: {field}={value!r} is not allowed; {allowed}.")


def _one_rope_dict(parameters, field):
    """Copies one RoPE dict with its aliases resolved: `type` -> `rope_type`, `attn_factor` -> `attention_factor`."""
    if not isinstance(parameters, dict):
        refuse(field, parameters, "expected a dict or None")
    parameters = copy.deepcopy(dict(parameters))
    for alias, name in (("type", "rope_type"), ("attn_factor", "attention_factor")):
        if alias in parameters:
            value = parameters.pop(alias)
            if parameters.setdefault(name, value) != value:
                refuse(
                    f"{field}[{alias!r}]", value, f"it contradicts {name}={parameters[name]!r}; keep one of the two"
                )
    if "rope_type" not in parameters:
        if set(parameters) - {"rope_theta", "partial_rotary_factor"}:
            refuse(field, parameters, f"it scales without a rope_type; add one of {', '.join(ROPE_TYPES)}")
        parameters["rope_type"] = "default"
    if parameters["rope_type"] not in ROPE_TYPES:
        refuse(f"{field}['rope_type']", parameters["rope_type"], f"choose one of {', '.join(ROPE_TYPES)}")
    for name in _ROPE_FLOATS:
        if parameters.get(name) is not None:
            value = parameters[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                refuse(f"{field}[{name!r}]", value, "expected a finite number")
            parameters[name] = float(value)
    return parameters


def _check_rope(parameters, field):
    rope_type = parameters["rope_type"]
    if parameters["rope_theta"] <= 0:
        refuse(f"{field}['rope_theta']", parameters["rope_theta"], "the base must be positive")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(
            f"{field}['partial_rotary_factor']",
            parameters["partial_rotary_factor"],
            "this model rotates whole heads: 1.0",
        )
    if rope_type == "default" and parameters.get("factor", 1.0) != 1.0:
        refuse(
            f"{field}['factor']",
            parameters["factor"],
            "rope_type 'default' does not scale; name the scaling in rope_type",
        )
    if rope_type in _SCALED_BY_FACTOR and (parameters.get("factor") is None or parameters["factor"] < 1.0):
        refuse(
            f"{field}['factor']", parameters.get("factor"), f"rope_type {rope_type!r} needs a factor of 1.0 or more"
        )
    if rope_type in _NEEDS_ORIGINAL_LENGTH:
        original = parameters.get("original_max_position_embeddings")
        if isinstance(original, bool) or not isinstance(original, int) or original <= 0:
            refuse(
                f"{field}['original_max_position_embeddings']",
                original,
                f"rope_type {rope_type!r} needs the length in tokens that the model had before scaling, e.g. 32768",
            )
    if rope_type == "yarn":
        if parameters.get("attention_factor") is not None and parameters["attention_factor"] <= 0:
            refuse(f"{field}['attention_factor']", parameters["attention_factor"], "it must be positive")
        fast, slow = (parameters.get(name) for name in ("beta_fast", "beta_slow"))
        if (32.0 if fast is None else fast) < (1.0 if slow is None else slow):
            refuse(f"{field}['beta_fast']", fast, f"it must not be below beta_slow={slow!r}")
        if not isinstance(parameters.get("truncate", True), bool):
            refuse(f"{field}['truncate']", parameters["truncate"], "expected True or False")
    required = {"longrope": ("short_factor", "long_factor"), "llama3": ("low_freq_factor", "high_freq_factor")}
    for name in required.get(rope_type, ()):
        if parameters.get(name) is None:
            refuse(f"{field}[{name!r}]", None, f"rope_type {rope_type!r} needs it")


def normalize_rope_parameters(
    rope_parameters=None, rope_scaling=None, rope_theta=None, *, previous=None, max_position_embeddings=None
):
    """Returns one complete RoPE dict from input in either schema; the caller's dicts are not touched.

    Args:
        rope_parameters (`dict`, *optional*): new schema (transformers 5): `rope_type`, `rope_theta` and scaling keys.
        rope_scaling (`dict`, *optional*): old schema (transformers 4): scaling keys, the base apart.
        rope_theta (`float`, *optional*): old schema: the base of the rotary frequencies, base ** (-2i / head_dim).
        previous (`dict`, *optional*): the RoPE dict in force so far. Its base is carried when none is given, and an
            unscaled `previous` makes `max_position_embeddings` the original length of a new scaling.
        max_position_embeddings (`int`, *optional*): longest position in tokens, used with `previous` only.

    Returns:
        `dict`: always with `rope_type` and `rope_theta`; numbers as floats; no aliases.

    Raises:
        ValueError: values that contradict each other, an unknown `rope_type`, a scaling without its factor, base or
            original length.

    Example:
        >>> normalize_rope_parameters(rope_scaling={"type": "linear", "factor": 2}, rope_theta=1000000)
        {'factor': 2.0, 'rope_type': 'linear', 'rope_theta': 1000000.0}
    """
    given = {
        name: _one_rope_dict(value, name)
        for name, value in (("rope_parameters", rope_parameters), ("rope_scaling", rope_scaling))
        if value is not None
    }
    bases = {
        f"{name}['rope_theta']": d.pop("rope_theta") for name, d in given.items() if d.get("rope_theta") is not None
    }
    if rope_theta is not None:
        if isinstance(rope_theta, bool) or not isinstance(rope_theta, (int, float)) or not math.isfinite(rope_theta):
            refuse("rope_theta", rope_theta, "expected a positive number")
        bases["rope_theta"] = float(rope_theta)
    if len(set(bases.values())) > 1:
        raise ValueError(
            "GatedQwenConfig: the RoPE base is given with different values: "
            + ", ".join(f"{name}={value}" for name, value in bases.items())
            + "; keep one value in every place."
        )
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        refuse(
            "rope_scaling", rope_scaling, f"it contradicts rope_parameters={rope_parameters!r}; keep one of the two"
        )

    parameters = next(iter(given.values()), {"rope_type": "default"})
    if bases:
        parameters["rope_theta"] = next(iter(bases.values()))
    elif previous is not None:
        parameters["rope_theta"] = previous["rope_theta"]
    elif not given:
        parameters["rope_theta"] = 10000.0  # Qwen3Config's default, when nothing at all was said about RoPE
    else:
        refuse("rope_theta", None, "RoPE settings were given without their base; add rope_theta, e.g. 1000000.0")
    if previous is not None and parameters["rope_type"] in _NEEDS_ORIGINAL_LENGTH:
        was_scaled = previous["rope_type"] in _NEEDS_ORIGINAL_LENGTH
        original = previous.get("original_max_position_embeddings") if was_scaled else max_position_embeddings
        parameters.setdefault("original_max_position_embeddings", original)
    _check_rope(
        parameters, "rope_scaling" if rope_parameters is None and rope_scaling is not None else "rope_parameters"
    )
    return parameters


class RopeScaling(dict):
    """What `config.rope_scaling` returns: a change inside it would be lost, so it raises."""

    def _refuse_change(self, *args, **kwargs):
        raise TypeError("rope_scaling is a copy; change config.rope_parameters, or assign all of rope_scaling.")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse_change

    def __reduce__(self):  # copies and pickles are plain dicts
        return dict, (dict(self),)


def scaling_view(parameters):
    """The old schema's `rope_scaling`: a copy of `rope_parameters` without the base, None where nothing is scaled."""
    if parameters["rope_type"] == "default":
        return None
    return {name: copy.deepcopy(value) for name, value in parameters.items() if name != "rope_theta"}
