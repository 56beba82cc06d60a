"""The pictures of the results page, drawn from the JSON."""

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tables import Runs, by_variant, chosen

COLOURS = {"baseline": "#444444", "G1 elementwise": "#1f77b4", "G1 headwise": "#2ca02c", "G2 value": "#ff7f0e"}
Reader = Callable[[dict[str, Any]], float | None]  # a value of one measurement
RETROFIT_COLOURS = {"none": "#444444", "headwise": "#2ca02c", "elementwise": "#1f77b4"}


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draws what there are runs for and returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "0"})
    found = [
        _backcopy(chosen(results, "backcopy-long"), folder / "paper-backcopy.png", COLOURS),
        _backcopy(chosen(results, "retrofit-backcopy-long"), folder / "paper-retrofit.png", RETROFIT_COLOURS),
        _emergence(chosen(results, "emergence"), folder / "paper-emergence.png"),
        _ladders(
            {"q/k norms": chosen(results, "ladder"), "no q/k norms": chosen(results, "ladder-no-norm")},
            folder / "paper-ladder.png",
        ),
    ]
    return [path for path in found if path is not None]


def _backcopy(runs: Runs, path: Path, colours: dict[str, str]) -> Path | None:
    """BOS share, norm of its values and loss at copied tokens over training."""
    panels: dict[str, Reader] = {
        "BOS share": lambda measured: max(measured["bos_share"]),
        "norm of BOS's value / mean of the others'": lambda measured: min(measured["value_norm_ratio"]),
        "loss at copied tokens": lambda measured: measured["copied"],
    }
    return _history(runs, path, colours, panels)


def _emergence(runs: Runs, path: Path) -> Path | None:
    """First-token share, largest activation and mean gate on text over training."""
    panels: dict[str, Reader] = {
        "first-token share, worst layer": lambda measured: measured["first_token_share_worst_layer"],
        "mean gate": lambda measured: measured.get("gate_mean"),
        "largest activation": lambda measured: measured["max_activation"],
    }
    return _history(runs, path, COLOURS, panels)


def _history(runs: Runs, path: Path, colours: dict[str, str], panels: dict[str, Reader]) -> Path | None:
    """One panel for each reading, the last one logarithmic; one line a run, since seeds differ too much for a mean."""
    if not runs:
        return None
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 2.6))
    for axis, (title, read) in zip(axes, panels.items(), strict=True):
        for variant, those in by_variant(runs).items():
            for number, run in enumerate(those if variant in colours else []):
                points = [(measured["step"], read(measured)) for measured in run["history"]]
                known = [point for point in points if point[1] is not None]
                if known:
                    label = variant if number == 0 else None
                    axis.plot(*zip(*known, strict=True), color=colours[variant], label=label, linewidth=1.0)
        axis.set(title=title, xlabel="step")
    axes[-1].set(yscale="log")
    axes[-1].legend(frameon=False)
    return _save(figure, path)


def _ladders(ladders: dict[str, Runs], path: Path) -> Path | None:
    """Training loss at each rate, a row for each ladder: the mean over seeds, and their range as a band."""
    ladders = {name: runs for name, runs in ladders.items() if runs}
    rates = sorted({run["changes"]["trainer.learning_rate"] for runs in ladders.values() for run in runs})
    if not rates:
        return None
    size = (9, 0.4 + 2.2 * len(ladders))
    figure, axes = plt.subplots(len(ladders), len(rates), figsize=size, sharex=True, sharey=True, squeeze=False)
    for row, (name, runs) in zip(axes, ladders.items(), strict=True):
        for axis, rate in zip(row, rates, strict=True):
            those = [run for run in runs if run["changes"]["trainer.learning_rate"] == rate]
            for variant, group in by_variant(those).items():
                _band(axis, [run["loss_curve"] for run in group], variant, COLOURS[variant])
            axis.set(title=f"{name}, rate {rate:g}")
        row[0].set_ylabel("training loss")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    axes[0][0].legend(frameon=False)
    return _save(figure, path)


def _band(axis: Any, curves: list[list[list[float | None]]], label: str, colour: str) -> None:
    """Points (step, loss) of each run; drawn up to the first step whose loss is no number in one of them."""
    known = list(takewhile(lambda points: all(loss is not None for _, loss in points), zip(*curves, strict=True)))
    steps, losses = [points[0][0] for points in known], [[loss for _, loss in points] for points in known]
    axis.plot(steps, [sum(column) / len(column) for column in losses], color=colour, label=label, linewidth=1.2)
    axis.fill_between(steps, [min(c) for c in losses], [max(c) for c in losses], color=colour, alpha=0.2, lw=0)


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=80, metadata={"Software": None})
    plt.close(figure)
    return path
