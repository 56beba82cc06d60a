# Copyright 2026 The gated-qwen authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Qwen3-style mixtures of experts whose attention heads carry a gate (arXiv 2505.06708).

What is unusual here:
- the fields of the gate, their checks and the RoPE settings are those of `GatedQwenConfig`;
- config.json states the number of experts under both names that versions of transformers read;
- all layers have the same attention window, as in Qwen3-MoE, so `layer_types` follows from `sliding_window`.
"""

import math

from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from .configuration_gated_qwen import GatedAttentionConfigMixin, TensorParallelPlan

# Before 5.12 transformers copies what a local file imports, but not what that file imports in turn.
from .rope_parameters import normalize_rope_parameters  # noqa: F401

AUTO_MAP = {
    "AutoConfig": "configuration_gated_qwen_moe.GatedQwenMoeConfig",
    "AutoModel": "modeling_gated_qwen_moe.GatedQwenMoeModel",
    "AutoModelForCausalLM": "modeling_gated_qwen_moe.GatedQwenMoeForCausalLM",
    "AutoModelForSequenceClassification": "modeling_gated_qwen_moe.GatedQwenMoeForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_gated_qwen_moe.GatedQwenMoeForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_gated_qwen_moe.GatedQwenMoeForQuestionAnswering",
}


class GatedQwenMoeConfig(GatedAttentionConfigMixin, Qwen3MoeConfig):
    """Configuration of a gated Qwen3-style mixture of experts: Qwen3-MoE's fields and those of the gate.

    A layer is sparse unless `mlp_only_layers` names it or `decoder_sparse_step` passes over it; the others have an
    FFN of `intermediate_size`. The router takes the `num_experts_per_tok` largest of a softmax over `num_experts`, and
    `norm_topk_prob` scales them to a sum of 1.

    With `output_router_logits` the loss of the causal language model is, for the model's L_CE,

        L_CE + router_aux_loss_coef * L_balance + router_z_loss_coef * L_z

    where L_balance is transformers' load-balancing loss (Switch Transformer, arXiv 2101.03961, equations 4 to 6) and
    L_z the mean over tokens and sparse layers of logsumexp(router logits)^2 (ST-MoE, arXiv 2202.08906, equation 5).
    Neither counts padding.

    Args:
        head_dim (`int`, *optional*): channels of a head; None means `hidden_size // num_attention_heads`.
        router_z_loss_coef (`float`, defaults to 0.0): weight of L_z; above 0 it needs `output_router_logits=True`.
        num_local_experts (`int`, *optional*): another name of `num_experts`.
        layer_types (`list[str]`, *optional*): accepted where it says what follows from `sliding_window`.
        kwargs: `GatedQwenConfig`'s fields of the gate and of RoPE, and Qwen3MoeConfig's fields.

    Raises:
        ValueError: a value or a combination that has no meaning; the message names the field and what is allowed.

    Example:
        >>> config = GatedQwenMoeConfig(num_experts=64, head_dim=128, gate_granularity="headwise")
        >>> config.num_experts, config.num_experts_per_tok, config.gate_positions
        (64, 8, ['attn_output'])
    """

    model_type = "gated_qwen_moe"
    attribute_map = {"num_experts": "num_local_experts"}
    base_model_tp_plan = TensorParallelPlan(Qwen3MoeConfig.base_model_tp_plan)
    code_map = AUTO_MAP

    def __init__(self, head_dim=None, router_z_loss_coef=0.0, num_local_experts=None, layer_types=None, **kwargs):
        if num_local_experts is not None and kwargs.setdefault("num_experts", num_local_experts) != num_local_experts:
            self._refuse("num_local_experts", num_local_experts, f"num_experts={kwargs['num_experts']} contradicts it")
        self.head_dim = head_dim
        self.router_z_loss_coef = router_z_loss_coef
        super().__init__(head_dim=head_dim, **kwargs)
        if layer_types not in (None, self.layer_types):
            self._refuse(
                "layer_types", layer_types, f"sliding_window={self.sliding_window} makes it {self.layer_types}"
            )

    @property
    def layer_types(self):
        """`list[str]`: the attention of every layer, which is the same."""
        return ["full_attention" if self.sliding_window is None else "sliding_attention"] * self.num_hidden_layers

    @property
    def sparse_layers(self):
        """`list[int]`: indices of the layers that have experts."""
        layers = range(self.decoder_sparse_step - 1, self.num_hidden_layers, self.decoder_sparse_step)
        return [layer for layer in layers if layer not in self.mlp_only_layers]

    def validate_architecture_fields(self):
        if self.head_dim is None and self.num_attention_heads:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().validate_architecture_fields()
        self._validate_experts()

    def _validate_experts(self):
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self._refuse(name, value, "expected a positive whole number")
        if self.num_experts_per_tok > self.num_experts:
            self._refuse("num_experts_per_tok", self.num_experts_per_tok, f"there are num_experts={self.num_experts}")
        layers = self.mlp_only_layers
        if not isinstance(layers, list) or any(layer not in range(self.num_hidden_layers) for layer in layers):
            self._refuse("mlp_only_layers", layers, f"expected a list of 0 to {self.num_hidden_layers - 1}")
        for name in ("norm_topk_prob", "output_router_logits"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, getattr(self, name), "expected True or False")
        for name in ("router_aux_loss_coef", "router_z_loss_coef"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                self._refuse(name, value, "expected a number of 0.0 or more")
        if self.output_router_logits and not self.sparse_layers:
            self._refuse("output_router_logits", True, "no layer has a router; set it to False")
        if self.router_z_loss_coef and not self.output_router_logits:
            self._refuse(
                "router_z_loss_coef",
                self.router_z_loss_coef,
                "the loss has no router terms without output_router_logits=True; set both",
            )

    def to_dict(self):
        """Serialises as `GatedQwenConfig` does, with `num_experts` under both of its names."""
        return {**super().to_dict(), "num_experts": self.num_experts, "num_local_experts": self.num_experts}


GatedQwenMoeConfig.register_for_auto_class()

__all__ = ["GatedQwenMoeConfig"]
