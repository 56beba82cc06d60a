"""Runs on real text: each is one `gated-qwen train` call, whose model and log are kept."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from experiments import RECIPE, Run

LENGTHENED: dict[str, Any] = {"rope_theta": 1_000_000.0, "train_length": 1024}
YARN_FACTOR = 4.0
PREFIX = "diagnostics/"


def train_on_text(run: Run, out: Path) -> dict[str, Any]:
    """Does what `commands(run)` says, in this process, which saves its start-up.

    Args:
        run: a run of the sweep, the ladder, the context stages or the retrofit on text.
        out: with `corpus`, `tokenizer` and `runs`; the source of the run is among the latter.

    Returns:
        What `gated-qwen train --json` prints, the losses of all steps, `history`, what the recipe's diagnostics saw on
        the way, and the commands; `error` where it ended in one.
    """
    from gated_qwen import register_auto_classes
    from gated_qwen.training.recipe import load_recipe
    from gated_qwen.training.run import train

    register_auto_classes()
    folder = out / "runs" / run.name
    if run.source is not None:
        prepare_source(run, out)
    try:
        found = train(load_recipe(RECIPE, recipe_changes(run, out)), folder, overwrite=True)
    except RuntimeError as error:  # such as a model that broke
        return {"error": str(error), "commands": commands(run)}
    finally:
        for path in (folder / "data", folder / "checkpoints", *folder.parent.glob(f"{run.name}.[sq]*")):
            shutil.rmtree(path, ignore_errors=True)
    log = [json.loads(line) for line in (folder / "log.jsonl").open(encoding="utf-8")]
    return {
        "commands": commands(run),
        "steps": found.steps,
        "tokens": found.tokens,
        "seconds": found.seconds,
        "evaluation_loss": _number(found.evaluation_loss),
        "losses": [_number(entry["loss"]) for entry in log if "loss" in entry],
        **({"history": found_on_the_way} if (found_on_the_way := _diagnoses(log)) else {}),
    }


def _diagnoses(log: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What the diagnostics logged, each with its step."""
    return [
        {"step": entry["step"]}
        | {name.removeprefix(PREFIX): value for name, value in entry.items() if name.startswith(PREFIX)}
        for entry in log
        if any(name.startswith(PREFIX) for name in entry)
    ]


def prepare_source(run: Run, out: Path) -> None:
    """The finished model of another run as this one needs it: with a gate, or with another RoPE base."""
    from gated_qwen.conversion.convert import convert
    from gated_qwen.conversion.extend import extend

    assert run.source is not None
    source, target, plain = out / "runs" / run.source / "model", _start(run, out), _start(run, out, ".qwen3")
    if target == source:
        return
    for folder in (target, plain):
        shutil.rmtree(folder, ignore_errors=True)
    if run.gate is None:
        extend(source, target, **LENGTHENED)
    else:
        convert(source, plain, to="qwen3")  # which ours without a gate is; an ungated source is given one
        convert(plain, target, gate=run.gate)


def recipe_changes(run: Run, out: Path) -> dict[str, Any]:
    """The fields of the recipe that this run sets, by their path."""
    return {
        **({} if run.source is None else {"model": {"source": str(_start(run, out))}}),
        **run.changes,
        "data.train.0.json": str(out / "corpus" / "train.jsonl"),
        "data.evaluation.0.json": str(out / "corpus" / "evaluation.jsonl"),
        "tokenizer": {"source": str(out / "tokenizer")},
    }


def commands(run: Run) -> list[str]:
    """What a run does, written for a shell in the folder of all runs."""
    here = Path(".")
    options = [
        f"--set '{name}={value if isinstance(value, str) else json.dumps(value)}'"
        for name, value in recipe_changes(run, here).items()
    ]
    trained = " ".join(["gated-qwen train", RECIPE, "--out", f"runs/{run.name}", *options])
    if run.source is None or _start(run, here).name == "model":
        return [trained]
    source, start, plain = f"runs/{run.source}/model", _start(run, here), _start(run, here, ".qwen3")
    if run.gate is None:
        rope = f"--rope-theta {LENGTHENED['rope_theta']:.0f} --train-length {LENGTHENED['train_length']}"
        return [f"gated-qwen extend {source} {start} {rope}", trained]
    return [
        f"gated-qwen convert {source} {plain} --to qwen3",
        f"gated-qwen convert {plain} {start} --gate {run.gate}",
        trained,
    ]


def _start(run: Run, out: Path, suffix: str = ".start") -> Path:
    """The model that a run goes on with."""
    if run.gate is None and run.experiment != "context":
        return out / "runs" / str(run.source) / "model"
    return out / "runs" / f"{run.name}{suffix}"


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
