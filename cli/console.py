"""What every verb shares: quiet libraries, one-line errors, progress bars, JSON or a table."""

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

debug = False
# Packages that only some verbs need, and the extra that brings each.
EXTRAS = {
    "accelerate": "train",
    "datasets": "train",
    "tensorboard": "train",
    "gguf": "gguf",
    "peft": "peft",
    "matplotlib": "plot",
}
Count = Callable[[int], None]


def fail(error: Exception) -> None:
    """Prints an exception as one line on stderr."""
    if type(error).__name__.startswith("StrictDataclass") and error.__cause__ is not None:
        error = ValueError(f"config: {error.__cause__}")  # transformers' own checks, without their class names
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        error = RuntimeError(f"this needs {error.name}: pip install 'gated-qwen[{EXTRAS[error.name]}]'")
    text = " ".join(str(error).split())
    if not isinstance(error, (ValueError, OSError, RuntimeError)) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    print(f"gated-qwen: {text}", file=sys.stderr)


def quiet_libraries() -> None:
    """Turns off the libraries' warnings and bars before they are imported, unless --debug asks for them."""
    if debug:
        return
    unasked = "TRANSFORMERS_VERBOSITY" not in os.environ
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.disable_progress_bar()
    if unasked:
        logging.set_verbosity_error()  # a launcher may have imported it before


def note(message: str) -> None:
    """Prints a line for the person on stderr, so that stdout stays what a machine may read."""
    print(message, file=sys.stderr)


def print_json(content: dict[str, Any]) -> None:
    print(json.dumps(_finite(content), indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """Prints two columns, names and values."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), show_header=False, title_justify="left")
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    Console().print(table)


@contextmanager
def counting_bar(
    description: str, unit: str = "bytes"
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A progress bar on stderr that counts `"bytes"`, with their speed, or other things one by one; and the time left.

    Yields two functions: the first shows the bar and sets the total, the second advances it. A refusal before the
    first call shows no bar.
    """
    from rich import progress as rich_progress
    from rich.console import Console

    counts = (
        (rich_progress.DownloadColumn(), rich_progress.TransferSpeedColumn())
        if unit == "bytes"
        else (rich_progress.MofNCompleteColumn(), rich_progress.TimeElapsedColumn())
    )
    columns = (rich_progress.TextColumn(description), rich_progress.BarColumn(), *counts)
    progress = rich_progress.Progress(*columns, rich_progress.TimeRemainingColumn(), console=Console(stderr=True))
    task = progress.add_task("", total=None)

    def start(total: int) -> None:
        progress.update(task, total=total)
        progress.start()

    try:
        yield start, lambda done: progress.advance(task, done)
    finally:
        if progress.live.is_started:
            progress.stop()


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with the step at hand and its time; finished steps stay as lines, a failed one goes."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def step(description: str) -> None:
            finish()
            progress.add_task(description, total=1)

        def finish() -> None:
            for task in progress.tasks:
                progress.update(task.id, completed=1)

        try:
            yield step
        except BaseException:  # the error is said on a line of its own, with no spinner left above it
            for task in progress.tasks:
                if not task.finished:
                    progress.remove_task(task.id)
            raise
        finish()
