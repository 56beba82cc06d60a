# Copyright 2026 The gated-qwen authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Qwen3-style decoders whose attention heads carry a gate (arXiv 2505.06708).

What is unusual here:
- one file for transformers 4.57 to 5.x: the RoPE settings live in `rope_parameters` on every version, and
  `rope_theta` / `rope_scaling` are views of it, so the two schemas cannot drift apart;
- config.json carries both schemas, and the complete `auto_map`, whichever class was saved;
- a wrong value is an error that names the field, the value and what is allowed.
"""

import math

from transformers.activations import ACT2CLS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .rope_parameters import RopeScaling, normalize_rope_parameters, refuse, scaling_view

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


class TensorParallelPlan:
    """`base_model_tp_plan`: the ungated plan, with the modules that a config really has; on the class, the default's.

    A gate's rows belong to the heads of the projection that it gates, so they are split with it. Two gates are
    computed whole on every rank: that on the dense output, which acts on the reduced output, and a head-shared one,
    whose average runs over all heads.
    """

    def __init__(self, ungated):
        self.ungated = ungated

    def __get__(self, config, owner):
        plan = dict(self.ungated)
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


AUTO_MAP = {
    "AutoConfig": "configuration_gated_qwen.GatedQwenConfig",
    "AutoModel": "modeling_gated_qwen.GatedQwenModel",
    "AutoModelForCausalLM": "modeling_gated_qwen.GatedQwenForCausalLM",
    "AutoModelForSequenceClassification": "modeling_gated_qwen.GatedQwenForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_gated_qwen.GatedQwenForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_gated_qwen.GatedQwenForQuestionAnswering",
}


class GatedAttentionConfigMixin:
    """The gate's fields with their checks, and RoPE settings in one place, over a config class of transformers."""

    code_map = {}  # Auto class -> file.Class, for config.json

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
                self._refuse(name, kwargs[name], f"no such field; the gate's fields are {', '.join(GATE_FIELDS)}")
            if name.endswith("_attn_output_gate") and kwargs[name]:
                self._refuse(name, kwargs[name], "it marks the official release layout, which must be converted first")
        # Of an ungated folder it would stay on this config, and transformers finds the conversion of experts by it.
        kwargs.pop("model_type", None)
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

        rope = self._normalize_rope(rope_parameters, rope_scaling, rope_theta)
        if hasattr(self, "standardize_rope_params"):  # transformers 5: one dict
            kwargs["rope_parameters"] = rope
        else:
            kwargs |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling_view(rope)}
        try:
            super().__init__(**kwargs)
        except Exception as error:
            if not type(error).__name__.startswith("StrictDataclass"):
                raise
            raise ValueError(f"{type(self).__name__}: {error.__cause__ or error}") from None
        self.validate_architecture_fields()

    def _refuse(self, field, value, allowed):
        refuse(field, value, allowed, config_name=type(self).__name__)

    def _normalize_rope(self, *settings, **context):
        try:
            return normalize_rope_parameters(*settings, **context)
        except ValueError as error:
            raise ValueError(str(error).replace("GatedQwenConfig", type(self).__name__, 1)) from None

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
            self._refuse(
                "gate_positions", positions, f"expected a list of any of {', '.join(GATE_POSITIONS)}; [] for no gate"
            )
        if len(set(positions)) != len(positions):
            self._refuse("gate_positions", positions, "each position may be named once")
        for name, allowed in (
            ("gate_granularity", GATE_GRANULARITIES),
            ("gate_activation", GATE_ACTIVATIONS),
            ("gate_operation", GATE_OPERATIONS),
            ("gate_input", GATE_INPUTS),
            ("attn_output_activation", (None, *GATE_ACTIVATIONS)),
        ):
            if getattr(self, name) not in allowed:
                self._refuse(name, getattr(self, name), f"choose one of {', '.join(map(str, allowed))}")
        for name in ("gate_head_shared", "gate_bias", "attn_output_norm", "sandwich_norm", "use_qk_norm"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, getattr(self, name), "expected True or False")
        if self.attention_out_bias not in (None, True, False):
            self._refuse(
                "attention_out_bias", self.attention_out_bias, "expected True, False, or None for attention_bias"
            )
        std = self.gate_initializer_range
        if std is not None and (isinstance(std, bool) or not isinstance(std, (int, float)) or not 0 <= std < math.inf):
            self._refuse(
                "gate_initializer_range", std, "expected a number of 0.0 or more, or None for initializer_range"
            )

    def _validate_gate_combinations(self):
        if "dense_output" in self.gate_positions:
            if self.gate_granularity == "headwise":
                self._refuse(
                    "gate_granularity", "headwise", "the gate position dense_output has no heads: elementwise only"
                )
            if self.gate_head_shared:
                self._refuse("gate_head_shared", True, "the gate position dense_output has no heads to share: False")
        channels = self.gate_input_channels
        if channels is not None:
            if isinstance(channels, bool) or not isinstance(channels, int) or not 1 <= channels <= self.hidden_size:
                self._refuse(
                    "gate_input_channels", channels, f"expected 1 to hidden_size={self.hidden_size}, or None for all"
                )
        if self.gate_input == "constant":
            if channels is not None:
                self._refuse("gate_input_channels", channels, "a constant gate reads no channels: None")
            if self.gate_bias:
                self._refuse("gate_bias", True, "a constant gate is its own bias: False")

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
                self._refuse(name, value, "expected a positive whole number")
        for name, allowed, ok in (
            ("max_position_embeddings", "a positive whole number", lambda value: isinstance(value, int) and value > 0),
            ("sliding_window", "a positive whole number, or None", lambda value: value is None or value > 0),
            ("rms_norm_eps", "a number above 0", lambda value: isinstance(value, (int, float)) and value > 0),
            ("attention_dropout", "0.0 to 1.0", lambda value: isinstance(value, (int, float)) and 0 <= value <= 1),
            ("hidden_act", "a name that transformers knows", lambda value: value in ACT2CLS),
        ):
            if not ok(getattr(self, name)):
                self._refuse(name, getattr(self, name), f"expected {allowed}")
        if self.num_attention_heads % self.num_key_value_heads:
            self._refuse(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"it must divide num_attention_heads={self.num_attention_heads}",
            )
        if self.head_dim % 2:
            self._refuse("head_dim", self.head_dim, "rotary embeddings need an even head_dim")
        allowed = ("full_attention", "sliding_attention")
        if any(layer_type not in allowed for layer_type in self.layer_types):
            self._refuse("layer_types", self.layer_types, f"choose from {', '.join(allowed)}")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            self._refuse(
                "sliding_window", None, "layer_types has sliding_attention: set use_sliding_window and sliding_window"
            )

    def __setattr__(self, name, value):
        if name == "rope_parameters":
            previous = self.__dict__.get("rope_parameters")
            if previous is not None or value is not None:
                value = self._normalize_rope(
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
        scaling = scaling_view(self.rope_parameters)
        return None if scaling is None else RopeScaling(scaling)

    @rope_scaling.setter
    def rope_scaling(self, value):
        self.rope_parameters = value

    def to_dict(self):
        """Serialises with both RoPE schemas and the complete `auto_map`: every consumer finds what it reads."""
        output = super().to_dict()
        output["rope_theta"] = self.rope_theta
        output["rope_scaling"] = scaling_view(self.rope_parameters)
        # Names without a repository: whoever saves this config saves the code beside it.
        output["auto_map"] = {**(output.get("auto_map") or {}), **self.code_map}
        return output


class GatedQwenConfig(GatedAttentionConfigMixin, Qwen3Config):
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
    base_model_tp_plan = TensorParallelPlan(Qwen3Config.base_model_tp_plan)
    code_map = AUTO_MAP

    __init__ = GatedAttentionConfigMixin.__init__  # named here: transformers gives a config class without one its own


GatedQwenConfig.register_for_auto_class()

__all__ = ["GatedQwenConfig"]
