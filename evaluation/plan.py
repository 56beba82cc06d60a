"""What a run measures: tasks, lengths, depths, samples; and how long a model's context is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gated_qwen.evaluation.tasks import find_task

PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Plan:
    """What a run measures.

    Attributes:
        tasks: names of `gated_qwen.evaluation.tasks.TASKS`, and `perplexity`.
        lengths: tokens; of prompt and answer, or of the window whose perplexity is measured.
        depths: of the needle, 0.0 to 1.0, for the tasks that take one.
        samples: for each task, length and depth; for perplexity, consecutive windows of the text.
        seed: of all samples.
        text: a UTF-8 file that needles lie in and whose perplexity is measured; None: needles lie in noise.
        chat_template: wrap the questions with the tokenizer's chat template.
        max_new_tokens: room for an answer; None: each task's own.
        batch_size: prompts at a time, of one task and length.
        beyond_limit: allow lengths over the model's longest context, to see what happens there.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 5
    seed: int = 0
    text: Path | None = None
    chat_template: bool = False
    max_new_tokens: int | None = None
    batch_size: int = 1
    beyond_limit: bool = False

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task != PERPLEXITY:
                find_task(task)
        if PERPLEXITY in self.tasks and self.text is None:
            raise ValueError("perplexity is measured on a text; give a file with --text")
        if not (self.tasks and self.lengths and self.depths) or self.samples < 1 or self.batch_size < 1:
            raise ValueError("give at least one task, length, depth and sample, and a batch size of at least 1")
        for depth in self.depths:
            if not 0.0 <= depth <= 1.0:
                raise ValueError(f"depth {depth}: give a number from 0 (first) to 1 (last)")

    def cells(self) -> Iterator[tuple[str, int, float | None]]:
        """Every task, length and depth, short lengths first."""
        for length in sorted(self.lengths):
            for task in self.tasks:
                takes_depth = task != PERPLEXITY and find_task(task).takes_depth
                for depth in self.depths if takes_depth else (None,):
                    yield task, length, depth


def longest_context(config: Any) -> int | None:
    """The most tokens that a config says its model takes, or None where it says nothing.

    That is `max_position_embeddings`, or what `rope_parameters` scale to where that is more: both ways of writing an
    extended context are in use.

    Example:
        >>> from transformers import LlamaConfig
        >>> longest_context(LlamaConfig(max_position_embeddings=8192))
        8192
        >>> yarn = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 2.0, "original_max_position_embeddings": 8192}
        >>> longest_context(LlamaConfig(max_position_embeddings=8192, rope_parameters=yarn))
        16384
    """
    config = config.get_text_config(decoder=True)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    scaled = int(factor * original) if factor and original else 0
    return max(limit, scaled) if limit else limit
