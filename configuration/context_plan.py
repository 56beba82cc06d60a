"""The paper's way to 128k tokens in three stages, with a check that they are taken in order (arXiv 2505.06708, 4.4).

The base moves from 10000 to 1000000 and training goes on at 32768 tokens, for 80 billion tokens in the paper; then
YaRN stretches the result four times without training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gated_qwen.configuration.context import apply_yarn, set_rope_theta
from gated_qwen.configuration.rope_schema import read_length, read_rope


@dataclass(frozen=True)
class ContextStage:
    """A stage: its name, RoPE base, length in tokens, YaRN factor (1.0 for none) and whether it takes training."""

    name: str
    rope_theta: float
    length: int
    factor: float
    needs_training: bool


CONTEXT_PLAN = (
    ContextStage("4k", 1e4, 4096, 1.0, needs_training=True),
    ContextStage("32k", 1e6, 32768, 1.0, needs_training=True),
    ContextStage("128k", 1e6, 131072, 4.0, needs_training=False),
)


def context_stage(config: dict[str, Any]) -> ContextStage | None:
    """The stage of the paper's plan at which a config stands, or None.

    Example:
        >>> context_stage({"max_position_embeddings": 32768, "rope_theta": 1e6}).name
        '32k'
    """
    rope = read_rope(config)
    if rope["rope_type"] not in ("default", "yarn"):
        return None
    here = (rope["rope_theta"], read_length(config), rope.get("factor", 1.0))
    return next((stage for stage in CONTEXT_PLAN if here == (stage.rope_theta, stage.length, stage.factor)), None)


def next_context_stage(config: dict[str, Any]) -> tuple[ContextStage, dict[str, Any]]:
    """Takes a config one stage further in the paper's plan.

    The weights are the caller's: where the stage says `needs_training`, the new config is what to train on with, and
    the model is worth nothing at the new base before that.

    Returns:
        The stage reached and a new config in both schemas.

    Raises:
        ValueError: the config stands at no stage, or at the last.

    Example:
        >>> stage, config = next_context_stage({"max_position_embeddings": 4096, "rope_theta": 1e4})
        >>> stage.name, stage.needs_training, config["rope_theta"], config["max_position_embeddings"]
        ('32k', True, 1000000.0, 32768)
        >>> stage, config = next_context_stage(config)
        >>> stage.name, stage.needs_training, config["rope_parameters"]["factor"]
        ('128k', False, 4.0)
    """
    here = context_stage(config)
    if here is None:
        rope = read_rope(config)
        plan = ", ".join(f"{stage.length} at base {stage.rope_theta:g}" for stage in CONTEXT_PLAN)
        raise ValueError(
            f"config.json: {read_length(config)} tokens at base {rope['rope_theta']:g} is no stage of the paper's "
            f"plan ({plan}); change base and length by themselves (set_rope_theta, apply_yarn)"
        )
    if here is CONTEXT_PLAN[-1]:
        raise ValueError(f"config.json: the model is at {here.name}, the plan's last stage")
    stage = CONTEXT_PLAN[CONTEXT_PLAN.index(here) + 1]
    if stage.factor == 1.0:
        return stage, set_rope_theta(config, stage.rope_theta, train_length=stage.length)
    return stage, apply_yarn(config, factor=stage.factor, original_length=here.length)
