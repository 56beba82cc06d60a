# Copyright 2026 The gated-qwen authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Qwen3-style decoders whose attention heads carry a gate (arXiv 2505.06708).

What is unusual here:
- one file for transformers 4.57 to 5.x: the RoPE settings live in `rope_parameters` on every version, and
  `rope_theta` / `rope_scaling` are views of it, so the two schemas cannot drift apart;
- config.json carries both schemas, and the complete `auto_map`, whichever class was saved;
- a wrong value is an error that names the field, the value and what is allowed.
"""

import copy
import math

from transformers.activations import ACT2CLS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

# Position -> module under `self_attn`. Paper names: query G4, key G3, value G2, attn_output G1, dense_output G5.
GATE_MODULES = {
    "query": "g_proj_query",
    "key": "g_proj_key",
    "value": "g_proj_value",
    "attn_output": "g_proj",
    "dense_output": "g_proj_dense",
}
GATE_POSITIONS = tuple(GATE_MODULES)
GATE_GRANULARITIES = ("elementwise", "headwise")
GATE_ACTIVATIONS = ("sigmoid", "silu", "ns_sigmoid", "softplus", "identity")
GATE_OPERATIONS = ("multiply", "add")
GATE_INPUTS = ("hidden_states", "constant")
GATE_FIELDS = (
    "gate_positions",
    "gate_granularity",
    "gate_head_shared",
    "gate_activation",
    "gate_operation",
    "gate_input",
    "gate_input_channels",
    "gate_bias",
    "gate_initializer_range",
)

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


def _refuse(field, value, allowed):
    raise ValueError(f"GatedQwenConfig: {field}={value!r} is not allowed; {allowed}.")


def _one_rope_dict(parameters, field):
    """Copies one RoPE dict with its aliases resolved: `type` -> `rope_type`, `attn_factor` -> `attention_factor`."""
    if not isinstance(parameters, dict):
        _refuse(field, parameters, "expected a dict or None")
    parameters = copy.deepcopy(dict(parameters))
    for alias, name in (("type", "rope_type"), ("attn_factor", "attention_factor")):
        if alias in parameters:
            value = parameters.pop(alias)
            if parameters.setdefault(name, value) != value:
                _refuse(
                    f"{field}[{alias!r}]", value, f"it contradicts {name}={parameters[name]!r}; keep one of the two"
                )
    if "rope_type" not in parameters:
        if set(parameters) - {"rope_theta", "partial_rotary_factor"}:
            _refuse(field, parameters, f"it scales without a rope_type; add one of {', '.join(ROPE_TYPES)}")
        parameters["rope_type"] = "default"
    if parameters["rope_type"] not in ROPE_TYPES:
        _refuse(f"{field}['rope_type']", parameters["rope_type"], f"choose one of {', '.join(ROPE_TYPES)}")
    for name in _ROPE_FLOATS:
        if parameters.get(name) is not None:
            value = parameters[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                _refuse(f"{field}[{name!r}]", value, "expected a finite number")
            parameters[name] = float(value)
    return parameters


def _check_rope(parameters, field):
    rope_type = parameters["rope_type"]
    if parameters["rope_theta"] <= 0:
        _refuse(f"{field}['rope_theta']", parameters["rope_theta"], "the base must be positive")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse(
            f"{field}['partial_rotary_factor']",
            parameters["partial_rotary_factor"],
            "this model rotates whole heads: 1.0",
        )
    if rope_type == "default" and parameters.get("factor", 1.0) != 1.0:
        _refuse(
            f"{field}['factor']",
            parameters["factor"],
            "rope_type 'default' does not scale; name the scaling in rope_type",
        )
    if rope_type in _SCALED_BY_FACTOR and (parameters.get("factor") is None or parameters["factor"] < 1.0):
        _refuse(
            f"{field}['factor']", parameters.get("factor"), f"rope_type {rope_type!r} needs a factor of 1.0 or more"
        )
    if rope_type in _NEEDS_ORIGINAL_LENGTH:
        original = parameters.get("original_max_position_embeddings")
        if isinstance(original, bool) or not isinstance(original, int) or original <= 0:
            _refuse(
                f"{field}['original_max_position_embeddings']",
                original,
                f"rope_type {rope_type!r} needs the length in tokens that the model had before scaling, e.g. 32768",
            )
    if rope_type == "yarn":
        if parameters.get("attention_factor") is not None and parameters["attention_factor"] <= 0:
            _refuse(f"{field}['attention_factor']", parameters["attention_factor"], "it must be positive")
        fast, slow = (parameters.get(name) for name in ("beta_fast", "beta_slow"))
        if (32.0 if fast is None else fast) < (1.0 if slow is None else slow):
            _refuse(f"{field}['beta_fast']", fast, f"it must not be below beta_slow={slow!r}")
        if not isinstance(parameters.get("truncate", True), bool):
            _refuse(f"{field}['truncate']", parameters["truncate"], "expected True or False")
    required = {"longrope": ("short_factor", "long_factor"), "llama3": ("low_freq_factor", "high_freq_factor")}
    for name in required.get(rope_type, ()):
        if parameters.get(name) is None:
            _refuse(f"{field}[{name!r}]", None, f"rope_type {rope_type!r} needs it")


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
            _refuse("rope_theta", rope_theta, "expected a positive number")
        bases["rope_theta"] = float(rope_theta)
    if len(set(bases.values())) > 1:
        raise ValueError(
            "GatedQwenConfig: the RoPE base is given with different values: "
            + ", ".join(f"{name}={value}" for name, value in bases.items())
            + "; keep one value in every place."
        )
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        _refuse(
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
        _refuse("rope_theta", None, "RoPE settings were given without their base; add rope_theta, e.g. 1000000.0")
    if previous is not None and parameters["rope_type"] in _NEEDS_ORIGINAL_LENGTH:
        was_scaled = previous["rope_type"] in _NEEDS_ORIGINAL_LENGTH
        original = previous.get("original_max_position_embeddings") if was_scaled else max_position_embeddings
        parameters.setdefault("original_max_position_embeddings", original)
    _check_rope(
        parameters, "rope_scaling" if rope_parameters is None and rope_scaling is not None else "rope_parameters"
    )
    return parameters


class TensorParallelPlan:
    """`base_model_tp_plan`: Qwen3's plan, with the modules that a config really has; on the class, the default's.

    A gate's rows belong to the heads of the projection that it gates, so they are split with it. Two gates are
    computed whole on every rank: that on the dense output, which acts on the reduced output, and a head-shared one,
    whose average runs over all heads.
    """

    def __get__(self, config, owner):
        plan = dict(Qwen3Config.base_model_tp_plan)
        prefix = "layers.*.self_attn"
        norm_style = plan.get(f"{prefix}.q_norm")  # in the plan from transformers 5 on
        if config is None:
            return {**plan, f"{prefix}.g_proj": "colwise"}
        if not config.gate_head_shared:
            positions = [position for position in config.gate_positions if position != "dense_output"]
            plan |= {f"{prefix}.{GATE_MODULES[position]}": "colwise" for position in positions}
        if config.attn_output_norm and norm_style is not None:
            plan[f"{prefix}.attn_output_norm"] = norm_style
        if not config.use_qk_norm:
            plan = {name: style for name, style in plan.items() if not name.endswith(("q_norm", "k_norm"))}
        return plan


class GatedQwenConfig(Qwen3Config):
    """Configuration of a gated Qwen3-style decoder: Qwen3's fields and those of the gate.

    Args:
        gate_positions (`list[str]`, defaults to `["attn_output"]`): any of `query` (G4), `key` (G3), `value` (G2),
            `attn_output` (G1), `dense_output` (G5). `[]` is exactly Qwen3.
        gate_granularity (`str`, defaults to `"elementwise"`): one score for each coordinate, or `"headwise"`: one for
            each head. `dense_output` has no heads, so it is elementwise.
        gate_head_shared (`bool`, defaults to `False`): average the raw scores over heads before the activation.
        gate_activation (`str`, defaults to `"sigmoid"`): or `"silu"`, `"ns_sigmoid"` (0.5 + 0.5 sigmoid),
            `"softplus"`, `"identity"`.
        gate_operation (`str`, defaults to `"multiply"`): or `"add"`.
        gate_input (`str`, defaults to `"hidden_states"`): the normalised hidden state that q, k and v read, or
            `"constant"`: a learned parameter, no projection.
        gate_input_channels (`int`, *optional*): read only the first n channels of the hidden state.
        gate_bias (`bool`, defaults to `False`): a bias in the gate projection.
        gate_initializer_range (`float`, *optional*): standard deviation of the gate's initial weights; None means
            `initializer_range`, 0.0 means zeros.
        attn_output_norm (`bool`, defaults to `False`): RMSNorm of every head's SDPA output (before the gate).
        attn_output_activation (`str`, *optional*): an activation on the SDPA output (before the gate), e.g. `"silu"`.
        sandwich_norm (`bool`, defaults to `False`): RMSNorm on each sub-layer's output before the residual add.
        use_qk_norm (`bool`, defaults to `True`): per-head RMSNorm of queries and keys; False for Llama and Qwen2.
        attention_out_bias (`bool`, *optional*): bias of `o_proj`; None means `attention_bias`.
        rope_parameters, rope_theta, rope_scaling: RoPE settings in the new or the old schema, or both if they agree.
        kwargs: Qwen3Config's fields; unknown keys are kept, unknown keys that begin with `gate_` are refused.

    Raises:
        ValueError: a value or a combination that has no meaning; the message names the field and what is allowed.

    Example:
        >>> config = GatedQwenConfig(gate_granularity="headwise", rope_theta=1e6)
        >>> config.gate_positions, config.rope_parameters
        (['attn_output'], {'rope_type': 'default', 'rope_theta': 1000000.0})
    """

    model_type = "gated_qwen"

    base_model_tp_plan = TensorParallelPlan()

    def __init__(
        self,
        gate_positions=("attn_output",),
        gate_granularity="elementwise",
        gate_head_shared=False,
        gate_activation="sigmoid",
        gate_operation="multiply",
        gate_input="hidden_states",
        gate_input_channels=None,
        gate_bias=False,
        gate_initializer_range=None,
        attn_output_norm=False,
        attn_output_activation=None,
        sandwich_norm=False,
        use_qk_norm=True,
        attention_out_bias=None,
        rope_parameters=None,
        rope_theta=None,
        rope_scaling=None,
        **kwargs,
    ):
        for name in kwargs:
            if name.startswith("gate_"):
                _refuse(name, kwargs[name], f"no such field; the gate's fields are {', '.join(GATE_FIELDS)}")
            if name.endswith("_attn_output_gate") and kwargs[name]:
                _refuse(name, kwargs[name], "it marks the official release layout, which must be converted first")
        self.gate_positions = list(gate_positions) if isinstance(gate_positions, (list, tuple)) else gate_positions
        self.gate_granularity = gate_granularity
        self.gate_head_shared = gate_head_shared
        self.gate_activation = gate_activation
        self.gate_operation = gate_operation
        self.gate_input = gate_input
        self.gate_input_channels = gate_input_channels
        self.gate_bias = gate_bias
        self.gate_initializer_range = gate_initializer_range
        self.attn_output_norm = attn_output_norm
        self.attn_output_activation = attn_output_activation
        self.sandwich_norm = sandwich_norm
        self.use_qk_norm = use_qk_norm
        self.attention_out_bias = attention_out_bias

        rope = normalize_rope_parameters(rope_parameters, rope_scaling, rope_theta)
        if hasattr(Qwen3Config, "standardize_rope_params"):  # transformers 5: one dict
            super().__init__(rope_parameters=rope, **kwargs)
        else:
            super().__init__(rope_theta=rope["rope_theta"], rope_scaling=_scaling_view(rope), **kwargs)
        self.validate_architecture_fields()

    def validate_architecture_fields(self):
        """Checks the gate's fields and the shapes; the model calls it too, since attributes can be set later.

        Raises:
            ValueError: naming the field, its value and what is allowed.
        """
        self._validate_choices()
        self._validate_gate_combinations()
        self._validate_shapes()

    def _validate_choices(self):
        positions = self.gate_positions
        if not isinstance(positions, list) or any(position not in GATE_POSITIONS for position in positions):
            _refuse(
                "gate_positions", positions, f"expected a list of any of {', '.join(GATE_POSITIONS)}; [] for no gate"
            )
        if len(set(positions)) != len(positions):
            _refuse("gate_positions", positions, "each position may be named once")
        for name, allowed in (
            ("gate_granularity", GATE_GRANULARITIES),
            ("gate_activation", GATE_ACTIVATIONS),
            ("gate_operation", GATE_OPERATIONS),
            ("gate_input", GATE_INPUTS),
            ("attn_output_activation", (None, *GATE_ACTIVATIONS)),
        ):
            if getattr(self, name) not in allowed:
                _refuse(name, getattr(self, name), f"choose one of {', '.join(map(str, allowed))}")
        for name in ("gate_head_shared", "gate_bias", "attn_output_norm", "sandwich_norm", "use_qk_norm"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "expected True or False")
        if self.attention_out_bias not in (None, True, False):
            _refuse("attention_out_bias", self.attention_out_bias, "expected True, False, or None for attention_bias")
        std = self.gate_initializer_range
        if std is not None and (isinstance(std, bool) or not isinstance(std, (int, float)) or not 0 <= std < math.inf):
            _refuse("gate_initializer_range", std, "expected a number of 0.0 or more, or None for initializer_range")

    def _validate_gate_combinations(self):
        if "dense_output" in self.gate_positions:
            if self.gate_granularity == "headwise":
                _refuse(
                    "gate_granularity", "headwise", "the gate position dense_output has no heads: elementwise only"
                )
            if self.gate_head_shared:
                _refuse("gate_head_shared", True, "the gate position dense_output has no heads to share: False")
        channels = self.gate_input_channels
        if channels is not None:
            if isinstance(channels, bool) or not isinstance(channels, int) or not 1 <= channels <= self.hidden_size:
                _refuse(
                    "gate_input_channels", channels, f"expected 1 to hidden_size={self.hidden_size}, or None for all"
                )
        if self.gate_input == "constant":
            if channels is not None:
                _refuse("gate_input_channels", channels, "a constant gate reads no channels: None")
            if self.gate_bias:
                _refuse("gate_bias", True, "a constant gate is its own bias: False")

    def _validate_shapes(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                _refuse(name, value, "expected a positive whole number")
        for name, allowed, ok in (
            ("max_position_embeddings", "a positive whole number", lambda value: isinstance(value, int) and value > 0),
            ("rms_norm_eps", "a number above 0", lambda value: isinstance(value, (int, float)) and value > 0),
            ("attention_dropout", "0.0 to 1.0", lambda value: isinstance(value, (int, float)) and 0 <= value <= 1),
            ("hidden_act", "a name that transformers knows", lambda value: value in ACT2CLS),
        ):
            if not ok(getattr(self, name)):
                _refuse(name, getattr(self, name), f"expected {allowed}")
        if self.num_attention_heads % self.num_key_value_heads:
            _refuse(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"it must divide num_attention_heads={self.num_attention_heads}",
            )
        if self.head_dim % 2:
            _refuse("head_dim", self.head_dim, "rotary embeddings need an even head_dim")
        allowed = ("full_attention", "sliding_attention")
        if any(layer_type not in allowed for layer_type in self.layer_types):
            _refuse("layer_types", self.layer_types, f"choose from {', '.join(allowed)}")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            _refuse(
                "sliding_window", None, "layer_types has sliding_attention: set use_sliding_window and sliding_window"
            )

    def __setattr__(self, name, value):
        if name == "rope_parameters":
            previous = self.__dict__.get("rope_parameters")
            if previous is not None or value is not None:
                value = normalize_rope_parameters(
                    value, previous=previous, max_position_embeddings=self.__dict__.get("max_position_embeddings")
                )
        elif name in ("rope_theta", "rope_scaling"):  # a property's setter must win over the parents' __setattr__
            return object.__setattr__(self, name, value)
        super().__setattr__(name, value)

    @property
    def rope_theta(self):
        """`float`: the RoPE base, a view of `rope_parameters`."""
        return self.rope_parameters["rope_theta"]

    @rope_theta.setter
    def rope_theta(self, value):
        previous = self.__dict__.get("rope_parameters") or {"rope_type": "default"}
        self.rope_parameters = {**previous, "rope_theta": value}

    @property
    def rope_scaling(self):
        """`dict` or `None`: the old schema's scaling, a copy of `rope_parameters` without the base."""
        scaling = _scaling_view(self.rope_parameters)
        return None if scaling is None else _RopeScaling(scaling)

    @rope_scaling.setter
    def rope_scaling(self, value):
        self.rope_parameters = value

    def to_dict(self):
        """Serialises with both RoPE schemas and the complete `auto_map`: every consumer finds what it reads."""
        output = super().to_dict()
        output["rope_theta"] = self.rope_theta
        output["rope_scaling"] = _scaling_view(self.rope_parameters)
        # Names without a repository: whoever saves this config saves the code beside it.
        output["auto_map"] = {**(output.get("auto_map") or {}), **AUTO_MAP}
        return output


class _RopeScaling(dict):
    """What `config.rope_scaling` returns: a change inside it would be lost, so it raises."""

    def _refuse_change(self, *args, **kwargs):
        raise TypeError(
            "GatedQwenConfig: rope_scaling is a copy; change config.rope_parameters, or assign all of rope_scaling."
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse_change

    def __reduce__(self):  # copies and pickles are plain dicts
        return dict, (dict(self),)


def _scaling_view(parameters):
    if parameters["rope_type"] == "default":
        return None
    return {name: copy.deepcopy(value) for name, value in parameters.items() if name != "rope_theta"}


AUTO_MAP = {
    "AutoConfig": "configuration_gated_qwen.GatedQwenConfig",
    "AutoModel": "modeling_gated_qwen.GatedQwenModel",
    "AutoModelForCausalLM": "modeling_gated_qwen.GatedQwenForCausalLM",
    "AutoModelForSequenceClassification": "modeling_gated_qwen.GatedQwenForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_gated_qwen.GatedQwenForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_gated_qwen.GatedQwenForQuestionAnswering",
}

GatedQwenConfig.register_for_auto_class()

__all__ = ["GatedQwenConfig"]
