"""What a GGUF file of a mixture holds where a dense one holds an MLP: llama.cpp's `qwen35moe` architecture.

That is Qwen3.5's mixture: softmax routing whose chosen weights are scaled to a sum of 1, experts in every layer, and a
shared expert, which ours has not: one of zeros is written, which adds zero.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from gated_qwen.conversion.experts import SHARED_WIDTH
from gated_qwen.conversion.plan import PlannedTensor, filled, stacked

if TYPE_CHECKING:
    from gated_qwen.configuration.configuration_gated_qwen_moe import GatedQwenMoeConfig

ROUTER = ("model.layers.%d.mlp.gate.weight", "blk.%d.ffn_gate_inp.weight")
# Ours for layer and expert on the left; GGUF has all experts of a layer in one tensor.
EXPERT_TENSORS = {
    "model.layers.%d.mlp.experts.%d.gate_proj.weight": "blk.%d.ffn_gate_exps.weight",
    "model.layers.%d.mlp.experts.%d.up_proj.weight": "blk.%d.ffn_up_exps.weight",
    "model.layers.%d.mlp.experts.%d.down_proj.weight": "blk.%d.ffn_down_exps.weight",
}


def expert_keys(config: "GatedQwenMoeConfig") -> dict[str, int]:
    """The keys that describe the experts, without the architecture's prefix.

    Example:
        >>> from gated_qwen import GatedQwenMoeConfig
        >>> expert_keys(GatedQwenMoeConfig(num_experts=64, moe_intermediate_size=512))["expert_count"]
        64
    """
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": SHARED_WIDTH,
    }


def expert_tensors(
    config: "GatedQwenMoeConfig", layer: int, take: Callable[[str], PlannedTensor]
) -> list[PlannedTensor]:
    """The router, the experts and the shared expert of one layer.

    Args:
        config: the model's config.
        layer: of the model and of the file.
        take: gives a tensor by our name.
    """
    plan = [take(ROUTER[0] % layer).renamed(ROUTER[1] % layer)]
    for ours, theirs in EXPERT_TENSORS.items():
        parts = [take(ours % (layer, expert)) for expert in range(config.num_experts)]
        shape = (config.num_experts, *parts[0].shape)
        plan.append(stacked(theirs % layer, parts, f"of every expert: {parts[0].rule}", shape))
    shapes = _shared_expert(config.hidden_size)
    return plan + [filled(f"blk.{layer}.{name}", "F32", shape) for name, shape in shapes.items()]


def zero_experts(config: "GatedQwenMoeConfig", layer: int) -> list[PlannedTensor]:
    """The same tensors for the appended layer: zeros, as many as of a layer with experts."""
    count, width, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    matrices = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    plan = [filled(ROUTER[1] % layer, "F32", (count, width))]
    for name, shape in matrices.items():
        part = filled(f"blk.{layer}.ffn_{name}_exps.weight", "F32", shape)
        plan.append(stacked(part.name, [part] * count, part.rule, (count, *shape)))
    return plan + [filled(f"blk.{layer}.{name}", "F32", shape) for name, shape in _shared_expert(width).items()]


def _shared_expert(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "ffn_gate_inp_shexp.weight": (width,),
        "ffn_gate_shexp.weight": (SHARED_WIDTH, width),
        "ffn_up_shexp.weight": (SHARED_WIDTH, width),
        "ffn_down_shexp.weight": (width, SHARED_WIDTH),
    }
