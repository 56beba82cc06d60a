"""What a run writes and shows while it goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gated_qwen.conversion.folder import atomic_file


class LogFile(TrainerCallback):
    """Appends everything that the Trainer logs to a file, one JSON object a line, with its step.

    Args:
        path: the file. A resumed run first drops the lines that lie after its checkpoint, since they come again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        kept = [line for line in map(_parsed, lines) if line is not None and line["step"] <= state.global_step]
        with atomic_file(self._path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}, default=float) + "\n")


class Progress(TrainerCallback):
    """Reports the steps of a run to a progress bar.

    Args:
        start: called with the number of all steps.
        advance: called with the number of steps done.
    """

    def __init__(self, start: Callable[[int], None], advance: Callable[[int], None]) -> None:
        self._start, self._advance = start, advance

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._start(state.max_steps)
            self._advance(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._advance(1)


class LastStep(TrainerCallback):
    """Logs and evaluates after the last step, whatever the intervals: inside the run, since trackers close theirs.

    Args:
        evaluates: there is something to evaluate on.
    """

    def __init__(self, evaluates: bool) -> None:
        self._evaluates = evaluates

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True
            if self._evaluates and args.eval_strategy != "epoch":
                control.should_evaluate = True  # before this step's checkpoint, which remembers it

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps and self._evaluates and args.eval_strategy == "epoch":
            control.should_evaluate = True


def _parsed(line: str) -> dict[str, Any] | None:
    """A line of the log; None for one that a kill cut short."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "step" in entry else None
