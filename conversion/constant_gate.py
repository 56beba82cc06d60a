"""Removing a gate that does not depend on its input: its factor moves into a projection's rows or columns.

A factor on the SDPA output is a factor on the columns of `o_proj`; on queries, keys, values and the dense output it is
one on the rows (and the bias) of the projection that makes them.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from gated_qwen.configuration.configuration_gated_qwen import GATE_MODULES
from gated_qwen.conversion.plan import PlannedTensor, derived

if TYPE_CHECKING:
    import torch

    from gated_qwen.conversion.families import GatedConfig

# Position -> the projection that takes the factor, and whether in its columns.
TAKES = {
    "query": ("q_proj", False),
    "key": ("k_proj", False),
    "value": ("v_proj", False),
    "attn_output": ("o_proj", True),
    "dense_output": ("o_proj", False),
}


def removed(part: dict[str, PlannedTensor], config: "GatedConfig") -> dict[str, PlannedTensor]:
    """One layer's attention tensors, by short name, without their constant multiplicative gates."""
    part = dict(part)
    for position in config.gate_positions:
        module = GATE_MODULES[position]
        weight, bias = part.pop(f"{module}.weight", None), part.pop(f"{module}.bias", None)
        projection, columns = TAKES[position]
        for kind in ("weight", "bias"):
            name = f"{projection}.{kind}"
            if name not in part or (columns and kind == "bias"):
                continue
            tensor = part[name]
            # Without a bias the raw score of a zero projection is 0; any tensor of the gate's rows will do for that.
            score = bias if bias is not None else weight
            assert score is not None
            length = tensor.shape[-1] if columns else tensor.shape[0]
            function = partial(_scaled, activation=config.gate_activation, length=length, columns=columns)
            part[name] = derived(tensor.name, (tensor, score), function, f"{tensor.rule}, times the constant gate")
    return part


def _scaled(
    projection: "torch.Tensor", score: "torch.Tensor", activation: str, length: int, columns: bool
) -> "torch.Tensor":
    from gated_qwen.modeling_gated_qwen import GATE_FUNCTIONS

    raw = score if score.ndim == 1 else score[:, 0] * 0  # a projection of zeros scores 0
    function: Callable[[torch.Tensor], torch.Tensor] = GATE_FUNCTIONS[activation]  # type: ignore[assignment]
    factor = function(raw.double()).repeat_interleave(length // raw.shape[0])
    scale = factor if columns else factor.reshape(-1, *[1] * (projection.ndim - 1))
    return (projection.double() * scale).to(projection.dtype)
