# Copyright 2026 The gated-qwen authors. Licensed under the Apache License, Version 2.0.
"""Qwen3-MoE with a gate on its softmax heads (arXiv 2505.06708), for transformers 4.57 to 5.x.

What is unusual here:
- attention, gates, layers and heads are those of `modeling_gated_qwen`; only what experts need is written here, and
  router, experts and load-balancing loss are transformers' own: `gate_positions=[]` is exactly Qwen3-MoE;
- the module `mlp.gate` is the router, as in every Qwen3-MoE checkpoint; the gate of the heads is `self_attn.g_proj`;
- checkpoints that store every expert by itself load on every version, since the conversion that transformers knows
  for `qwen3_moe` is registered for this model too;
- a router z-loss can be added to the loss.

Shapes: B batch, T tokens, E experts, C hidden_size.
"""

import functools
import importlib.util
import inspect
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeForCausalLM,
    Qwen3MoeMLP,
    Qwen3MoeModel,
    Qwen3MoePreTrainedModel,
    Qwen3MoeSparseMoeBlock,
)
from transformers.utils import can_return_tuple

from .configuration_gated_qwen_moe import GatedQwenMoeConfig
from .modeling_gated_qwen import (
    CACHE_ARGUMENTS,
    FORWARD_ARGUMENTS,
    GatedPreTrainedMixin,
    GatedQwenAttention,
    GatedQwenBody,
    GatedQwenDecoderLayer,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)

CAUSAL_LM_ARGUMENTS = tuple(inspect.signature(Qwen3MoeForCausalLM.forward).parameters)[1:]


@functools.cache
def register_experts_conversion():
    """Makes transformers load and save our experts as it does Qwen3-MoE's; it looks for them by `model_type`.

    From transformers 5 on a model holds all experts of a layer in one tensor, and a checkpoint each by itself. This is
    not done on import, since it builds transformers' table of all models.
    """
    if importlib.util.find_spec("transformers.conversion_mapping") is None:
        return
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    mapping = get_checkpoint_conversion_mapping("qwen3_moe")
    register_checkpoint_conversion_mapping(GatedQwenMoeConfig.model_type, mapping, overwrite=True)


def router_z_loss(router_logits, attention_mask=None):
    """Mean over tokens and layers of logsumexp(router logits)^2 (ST-MoE, arXiv 2202.08906, equation 5).

    Args:
        router_logits (`tuple[torch.Tensor]`): (B * T, E) of every sparse layer.
        attention_mask (`torch.Tensor`, *optional*): (B, T), 0 for padding, which is not counted.

    Returns:
        `torch.Tensor`: a scalar in float32.
    """
    device = router_logits[0].device
    squares = torch.stack([logits.to(device).float().logsumexp(dim=-1).square() for logits in router_logits])
    if attention_mask is None:
        return squares.mean()
    counted = attention_mask.reshape(-1).to(squares)  # (B * T)
    return (squares * counted).sum() / (counted.sum() * len(router_logits))


def router_gives_probabilities():
    """Whether this version's router hands out probabilities under the name of logits, as transformers 5.0 does."""
    router_class = getattr(modeling_qwen3_moe, "Qwen3MoeTopKRouter", None)
    if router_class is None:  # transformers 4: a linear layer
        return False
    one_of_two = SimpleNamespace(num_experts=2, num_experts_per_tok=1, norm_topk_prob=False, hidden_size=1)
    with torch.device("cpu"), torch.no_grad():
        router = router_class(one_of_two)
        router.weight.zero_()
        return bool(router(torch.zeros(1, 1))[0].any())


# Found out here and not in a model's constructor, where DeepSpeed's ZeRO-3 takes a router's weights away.
HAS_ROUTER_LOGITS = not router_gives_probabilities()


class GatedQwenMoeDecoderLayer(GatedQwenDecoderLayer):
    """The dense model's layer, with experts in place of the MLP in sparse layers."""

    @staticmethod
    def build_mlp(config, layer_idx):
        if layer_idx in config.sparse_layers:
            return Qwen3MoeSparseMoeBlock(config)
        return Qwen3MoeMLP(config, intermediate_size=config.intermediate_size)


class GatedQwenMoePreTrainedModel(GatedPreTrainedMixin, Qwen3MoePreTrainedModel):
    config: GatedQwenMoeConfig
    config_class = GatedQwenMoeConfig
    base_model_prefix = "model"
    _no_split_modules = ["GatedQwenMoeDecoderLayer"]
    _can_record_outputs = {
        **Qwen3MoePreTrainedModel._can_record_outputs,
        "hidden_states": GatedQwenMoeDecoderLayer,
        "attentions": GatedQwenAttention,
    }

    @classmethod
    def _can_set_experts_implementation(cls):
        # transformers looks for @use_experts_implementation in the file of the class; the experts are in its own.
        return Qwen3MoePreTrainedModel._can_set_experts_implementation()


class GatedQwenMoeModel(GatedQwenBody, GatedQwenMoePreTrainedModel, Qwen3MoeModel):
    def __init__(self, config):
        register_experts_conversion()  # every head builds a body, and weights are loaded after that
        super(Qwen3MoeModel, self).__init__(config)
        self.build_modules(config, GatedQwenMoeDecoderLayer)
        self.post_init()

    @functools.wraps(Qwen3MoeModel.forward)
    def forward(self, *args, **kwargs):
        kwargs |= dict(zip(FORWARD_ARGUMENTS, args))  # noqa: B905 (there may be fewer)
        if isinstance(kwargs.get("attention_mask"), dict):  # one for each type of layer, and all have the same
            kwargs["attention_mask"] = kwargs["attention_mask"][self.config.layer_types[0]]
        return super().forward(**kwargs)


@dataclass
class GatedQwenMoeCausalLMOutput(MoeCausalLMOutputWithPast):
    """transformers' output of a mixture of experts, and the router z-loss before its weight."""

    z_loss: torch.FloatTensor | None = None


class GatedQwenMoeForCausalLM(GatedQwenMoePreTrainedModel, Qwen3MoeForCausalLM):
    def __init__(self, config):
        super(Qwen3MoeForCausalLM, self).__init__(config)
        self.model = GatedQwenMoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        if config.router_z_loss_coef and not HAS_ROUTER_LOGITS:
            raise RuntimeError(
                "GatedQwenMoeForCausalLM: this version of transformers does not hand out router logits, so there is "
                "no router z-loss; set router_z_loss_coef=0.0 or upgrade transformers."
            )
        self.post_init()

    @functools.wraps(Qwen3MoeForCausalLM.forward)
    @can_return_tuple
    def forward(self, *args, **kwargs):
        kwargs |= dict(zip(CAUSAL_LM_ARGUMENTS, args))  # noqa: B905 (there may be fewer)
        cached = any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS)
        if cached and kwargs.get("labels") is None and kwargs.get("output_router_logits") is None:
            # A step of decoding needs no router losses, and transformers' fails where the mask covers cached tokens.
            kwargs["output_router_logits"] = False
        output = super().forward(**kwargs, return_dict=True)
        if self.training and output.router_logits:
            self._warn_of_lost_gradients(output.router_logits)
        if not self.config.router_z_loss_coef or not output.router_logits:
            return output
        z_loss = router_z_loss(output.router_logits, kwargs.get("attention_mask"))
        loss = output.loss
        if loss is not None:
            loss = loss + self.config.router_z_loss_coef * z_loss.to(loss.device)
        return GatedQwenMoeCausalLMOutput(**{**output, "loss": loss, "z_loss": z_loss})

    def _warn_of_lost_gradients(self, router_logits):
        """Re-entrant checkpoints run the layers without a graph, so router losses would change no weight."""
        checkpointed = any(layer.gradient_checkpointing for layer in self.model.layers)
        if not checkpointed or any(logits.requires_grad for logits in router_logits):
            return
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.model.layers.parameters()):
            warnings.warn(
                "GatedQwenMoeForCausalLM: the router losses have no gradient under re-entrant gradient checkpointing; "
                'use gradient_checkpointing_kwargs={"use_reentrant": False}.',
                stacklevel=2,
            )

    def prepare_inputs_for_generation(self, *args, **kwargs):
        # Generation needs no router losses, and transformers' fails where the mask covers cached tokens.
        return super().prepare_inputs_for_generation(*args, **{"output_router_logits": False, **kwargs})


class GatedQwenMoeForSequenceClassification(SequenceClassificationHead, GatedQwenMoePreTrainedModel):
    body_class = GatedQwenMoeModel


class GatedQwenMoeForTokenClassification(TokenClassificationHead, GatedQwenMoePreTrainedModel):
    body_class = GatedQwenMoeModel


class GatedQwenMoeForQuestionAnswering(QuestionAnsweringHead, GatedQwenMoePreTrainedModel):
    body_class = GatedQwenMoeModel


GatedQwenMoeModel.register_for_auto_class("AutoModel")
GatedQwenMoeForCausalLM.register_for_auto_class("AutoModelForCausalLM")
GatedQwenMoeForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
GatedQwenMoeForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
GatedQwenMoeForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")

__all__ = [
    "GatedQwenMoeForCausalLM",
    "GatedQwenMoeForQuestionAnswering",
    "GatedQwenMoeForSequenceClassification",
    "GatedQwenMoeForTokenClassification",
    "GatedQwenMoeModel",
    "GatedQwenMoePreTrainedModel",
]
