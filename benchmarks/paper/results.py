"""All results as one JSON text, with every setting that they depend on, one run a line."""

import json
import platform
from pathlib import Path
from typing import Any

from backcopy import Setting
from experiments import RECIPE, Run
from measure import DIVERGED, LENGTH, SEQUENCES, SKIPPED
from text_runs import LENGTHENED, YARN_FACTOR

CURVE_POINTS = 50


def collect(out: Path, wanted: list[Run]) -> str:
    """The settings, the corpus and all runs that ended.

    Args:
        out: with `corpus` and `runs`.
        wanted: what is asked for; runs that are not there are named under `not_run`.
    """
    found, missing = [], []
    for run in wanted:
        folder = out / "runs" / run.name
        if not (folder / "result.json").exists():
            missing.append(run.name)
            continue
        measurement = folder / "measurement.json"
        result = json.loads((folder / "result.json").read_text())
        result |= json.loads(measurement.read_text()) if measurement.exists() else {}
        result.pop("setting", None)
        found.append(_rounded(_thinned(result)))
    head = {"settings": _settings(), "corpus": json.loads((out / "corpus" / "corpus.json").read_text())}
    lines = ",\n".join(f"    {json.dumps(run)}" for run in found)
    body = json.dumps({**head, "not_run": missing}, indent=2).removesuffix("\n}")
    return f'{body},\n  "runs": [\n{lines}\n  ]\n}}\n'


def _settings() -> dict[str, Any]:
    import torch
    import transformers

    from gated_qwen import __version__
    from gated_qwen.training.recipe import load_recipe

    return {
        "versions": {
            "gated_qwen": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "recipe": load_recipe(RECIPE).to_dict(),
        "backcopy": vars(Setting()),
        "context": {**LENGTHENED, "yarn_factor": YARN_FACTOR},
        "probes": {"sequences": SEQUENCES, "length": LENGTH, "skip_queries": SKIPPED},
        "diverged_nats": DIVERGED,
    }


def _thinned(result: dict[str, Any]) -> dict[str, Any]:
    """About `CURVE_POINTS` of the losses, evenly, each with its step."""
    losses = result.pop("losses", None)
    if losses is None:
        return result
    every = max(1, len(losses) // CURVE_POINTS)
    return {**result, "loss_curve": [[step, losses[step - 1]] for step in range(every, len(losses) + 1, every)]}


def _rounded(value: Any) -> Any:
    """Five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value
