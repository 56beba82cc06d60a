"""Before and after: two result files side by side, as in the paper's table of RULER before and after YaRN."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAME_PROMPTS = ("seed", "samples", "text", "chat_template", "max_new_tokens")


@dataclass(frozen=True)
class Change:
    """One task at one length, in the mean over depths.

    Attributes:
        before, after: the score (0 to 100) or, for perplexity, the perplexity; None where it was not measured.
    """

    task: str
    length: int
    before: float | None
    after: float | None


def read_results(path: Path) -> dict[str, Any]:
    """Reads a summary that `gated-qwen evaluate` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        content["settings"], content["cells"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a summary that `gated-qwen evaluate --out` wrote") from error
    return content


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Puts two summaries side by side, task by task and length by length; at the end the mean of the tasks' scores.

    A cell is averaged over the depths that both have measured, or over all of its own where the other has none.

    Raises:
        ValueError: the two were not measured on the same prompts; the message names the setting.

    Example:
        >>> def summary(score):
        ...     settings = {"seed": 0, "samples": 5, "text": "noise", "chat_template": False, "max_new_tokens": None}
        ...     cell = {"task": "niah_single", "length": 1024, "depth": 0.5, "samples": 5, "score": score}
        ...     return {"settings": settings, "cells": [cell]}
        >>> compare(summary(40.0), summary(80.0))
        [Change(task='niah_single', length=1024, before=40.0, after=80.0)]
    """
    for name in SAME_PROMPTS:
        one, other = before["settings"].get(name), after["settings"].get(name)
        if one != other:
            raise ValueError(f"{name} is {one!r} before and {other!r} after; only runs on the same prompts compare")
    sides = [_cells(before), _cells(after)]
    keys = sorted({*sides[0], *sides[1]}, key=lambda key: key[1])
    tasks = list(dict.fromkeys(task for side in sides for task, _ in side))
    changes = []
    for task in tasks:
        for _, length in (key for key in keys if key[0] == task):
            one, other = (side.get((task, length), {}) for side in sides)
            shared = (one.keys() & other.keys()) or one.keys() | other.keys()
            changes.append(Change(task, length, *(_mean([s[d] for d in shared if d in s]) for s in (one, other))))
    scored = [change for change in changes if change.task != "perplexity"]
    if len({change.task for change in scored}) > 1:
        for length in sorted({change.length for change in scored}):
            row = [change for change in scored if change.length == length]
            changes.append(Change("mean", length, _mean([c.before for c in row]), _mean([c.after for c in row])))
    return changes


def _cells(summary: dict[str, Any]) -> dict[tuple[str, int], dict[float | None, float]]:
    """(task, length) -> depth -> score or perplexity."""
    found: dict[tuple[str, int], dict[float | None, float]] = defaultdict(dict)
    for cell in summary["cells"]:
        value = cell["perplexity"] if cell["task"] == "perplexity" else cell["score"]
        found[cell["task"], cell["length"]][cell["depth"]] = value
    return found


def _mean(values: list[Any]) -> float | None:
    return sum(values) / len(values) if values and None not in values else None
