"""The pictures of the results page, drawn from the JSON."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from experiments import MAIN
from tables import by_variant, chosen

COLOURS = {"baseline": "#444444", "G1 elementwise": "#1f77b4", "G1 headwise": "#2ca02c", "G2 value": "#ff7f0e"}
RETROFIT_COLOURS = {"none": "#444444", "headwise": "#2ca02c", "elementwise": "#1f77b4"}


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draws what there are runs for and returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "0"})
    found = [
        _emergence(chosen(results, "backcopy-long"), folder / "paper-backcopy.png", COLOURS),
        _emergence(chosen(results, "retrofit-backcopy-long"), folder / "paper-retrofit.png", RETROFIT_COLOURS),
        _ladder(chosen(results, "ladder"), folder / "paper-ladder.png"),
    ]
    return [path for path in found if path is not None]


def _emergence(runs: list[dict[str, Any]], path: Path, colours: dict[str, str]) -> Path | None:
    """BOS share, norm of its values and loss at copied tokens over training, one line a run: seeds differ too much."""
    panels = {
        "BOS share": lambda measured: max(measured["bos_share"]),
        "norm of BOS's value / mean of the others'": lambda measured: min(measured["value_norm_ratio"]),
        "loss at copied tokens": lambda measured: measured["copied"],
    }
    if not runs:
        return None
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 2.6))
    for axis, (title, read) in zip(axes, panels.items(), strict=True):
        for variant, those in by_variant(runs).items():
            for number, run in enumerate(those if variant in colours else []):
                steps = [measured["step"] for measured in run["history"]]
                curve = [read(measured) for measured in run["history"]]
                label = variant if number == 0 else None
                axis.plot(steps, curve, color=colours[variant], label=label, linewidth=1.0)
        axis.set(title=title, xlabel="step")
    axes[-1].set(yscale="log")
    axes[-1].legend(frameon=False, loc="upper right")
    return _save(figure, path)


def _ladder(runs: list[dict[str, Any]], path: Path) -> Path | None:
    """Training loss at each rate: the mean over seeds, and their range as a band."""
    if not runs:
        return None
    rates = sorted({run["changes"]["trainer.learning_rate"] for run in runs})
    figure, axes = plt.subplots(1, len(rates), figsize=(9, 2.6), sharey=True, squeeze=False)
    for axis, rate in zip(axes[0], rates, strict=True):
        those = [run for run in runs if run["changes"]["trainer.learning_rate"] == rate]
        for variant, group in by_variant(those).items():
            steps = [step for step, _ in group[0]["loss_curve"]]
            curves = [[loss for _, loss in run["loss_curve"]] for run in group]
            if variant in MAIN and all(loss is not None for curve in curves for loss in curve):
                _band(axis, steps, curves, variant, COLOURS[variant])
        axis.set(title=f"learning rate {rate:g}", xlabel="step")
    axes[0][0].set_ylabel("training loss")
    axes[0][0].legend(frameon=False)
    return _save(figure, path)


def _band(axis: Any, steps: list[int], curves: list[list[float]], label: str, colour: str) -> None:
    columns = list(zip(*curves, strict=True))
    axis.plot(steps, [sum(column) / len(column) for column in columns], color=colour, label=label, linewidth=1.2)
    axis.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.2, lw=0)


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=80, metadata={"Software": None})
    plt.close(figure)
    return path
