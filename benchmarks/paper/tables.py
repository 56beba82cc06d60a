"""Tables of the results page, as Markdown, drawn from the JSON; a cell shows the mean over seeds and their range."""

from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean
from typing import Any

Runs = list[dict[str, Any]]
NOTHING = "-"
BACKCOPY_COLUMNS = ("loss, copied", "loss, drawn", "BOS share", "highest", "BOS value norm", "max act.", "mean gate")
TEXT_COLUMNS = ("max act.", "max act. / median", "mean gate", "spikes")


def tables(results: dict[str, Any]) -> dict[str, str]:
    """All tables by name; one whose runs are not there says so."""
    makers: dict[str, Callable[[dict[str, Any]], list[list[str]]]] = {
        "backcopy": partial(_backcopy, experiment="backcopy"),
        "backcopy-long": partial(_backcopy, experiment="backcopy-long"),
        "sweep": _sweep,
        "emergence": _emergence,
        "ladder": partial(_ladder, experiment="ladder"),
        "ladder-no-norm": partial(_ladder, experiment="ladder-no-norm"),
        "retrofit-backcopy": partial(_retrofit_backcopy, experiment="retrofit-backcopy"),
        "retrofit-backcopy-long": partial(_retrofit_backcopy, experiment="retrofit-backcopy-long"),
        "retrofit-text": _retrofit_text,
        "context": _context,
    }
    found = {name: maker(results) for name, maker in makers.items()}
    return {name: _markdown(rows) if len(rows) > 1 else "Not run yet." for name, rows in found.items()}


def chosen(results: dict[str, Any], experiment: str) -> Runs:
    """The runs of one experiment that ended without an error."""
    return [run for run in results["runs"] if run["experiment"] == experiment and "error" not in run]


def by_variant(runs: Runs) -> dict[str, Runs]:
    """The runs of each variant, in the order of the file."""
    found: dict[str, Runs] = {}
    for run in runs:
        found.setdefault(run["variant"], []).append(run)
    return found


def spread(values: Iterable[float | None], digits: int = 3) -> str:
    """`mean (least to largest)`, or the value alone where all are the same.

    Example:
        >>> spread([1.0, 2.0], 1), spread([1.0], 1), spread([None])
        ('1.5 (1.0 to 2.0)', '1.0', '-')
    """
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    mean, least, largest = (f"{value:.{digits}f}" for value in (fmean(known), min(known), max(known)))
    return mean if least == largest else f"{mean} ({least} to {largest})"


def gate(measured: dict[str, Any]) -> float | None:
    """The mean gate; a model has at most one kind here."""
    means = measured.get("mean_gate")
    return None if not means else next(iter(means.values()))


def _backcopy(results: dict[str, Any], experiment: str) -> list[list[str]]:
    rows = [["variant", "seeds", *BACKCOPY_COLUMNS]]
    for variant, runs in by_variant(chosen(results, experiment)).items():
        rows.append([variant, str(len(runs)), *_backcopy_cells([run["history"] for run in runs])])
    return rows


def _backcopy_cells(histories: list[Runs]) -> list[str]:
    """The last measurement, and the largest BOS share of all."""
    last = [history[-1] for history in histories]
    return [
        spread(measured["copied"] for measured in last),
        spread(measured["drawn_excess"] for measured in last),
        spread((max(measured["bos_share"]) for measured in last), 2),
        spread((max(max(measured["bos_share"]) for measured in history) for history in histories), 2),
        spread((min(measured["value_norm_ratio"]) for measured in last), 2),
        spread((measured["max_activation"] for measured in last), 1),
        spread((gate(measured) for measured in last), 2),
    ]


def _sweep(results: dict[str, Any]) -> list[list[str]]:
    rows = [["variant", "seeds", "parameters", "loss", "first-token share", *TEXT_COLUMNS]]
    for variant, runs in by_variant(chosen(results, "sweep")).items():
        rows.append([variant, str(len(runs)), f"{runs[0]['parameters']:,}", *_text_cells(runs)])
    return rows


def _emergence(results: dict[str, Any]) -> list[list[str]]:
    """The worst layer's share after training, and the largest that it had at any diagnosis on the way."""
    rows = [["variant", "seeds", "loss", "share, worst layer", "highest", *TEXT_COLUMNS]]
    for variant, runs in by_variant(chosen(results, "emergence")).items():
        highest = (max(found["first_token_share_worst_layer"] for found in run["history"]) for run in runs)
        loss, _, *rest = _text_cells(runs)
        worst = spread((max(run["first_token_share_by_layer"]) for run in runs), 3)
        rows.append([variant, str(len(runs)), loss, worst, spread(highest, 3), *rest])
    return rows


def _text_cells(runs: Runs) -> list[str]:
    return [
        spread(run["evaluation_loss"] for run in runs),
        spread((run.get("first_token_share") for run in runs), 4),
        spread((run.get("max_activation") for run in runs), 1),
        spread((run.get("max_over_median") for run in runs), 0),
        spread((gate(run) for run in runs), 2),
        spread((run["loss_spikes"] for run in runs), 1),
    ]


def _ladder(results: dict[str, Any], experiment: str) -> list[list[str]]:
    runs = chosen(results, experiment)
    rates = sorted({run["changes"]["trainer.learning_rate"] for run in runs})
    rows = [["variant", "seeds", *(f"loss at {rate:g}" for rate in rates), "spikes", "diverged"]]
    for variant, those in by_variant(runs).items():
        at = {rate: [run for run in those if run["changes"]["trainer.learning_rate"] == rate] for rate in rates}
        losses = [spread(run["final_loss"] for run in at[rate]) for rate in rates]
        spikes = " / ".join(spread((run["loss_spikes"] for run in at[rate]), 1) for rate in rates)
        diverged = " / ".join(f"{sum(run['diverged'] for run in at[rate])} of {len(at[rate])}" for rate in rates)
        rows.append([variant, str(len({run["seed"] for run in those})), *losses, spikes, diverged])
    return rows


def _retrofit_backcopy(results: dict[str, Any], experiment: str) -> list[list[str]]:
    rows = [["", "seed", *BACKCOPY_COLUMNS]]
    runs = sorted(chosen(results, experiment), key=lambda run: run["seed"])
    for run in runs:
        if run["variant"] == "none":
            rows.append(["before", str(run["seed"]), *_backcopy_cells([run["history"][:1]])])
        rows.append([f"then {_gate_in_words(run['variant'])}", str(run["seed"]), *_backcopy_cells([run["history"]])])
    return rows


def _retrofit_text(results: dict[str, Any]) -> list[list[str]]:
    runs = by_variant(chosen(results, "retrofit-text"))
    sources = {run["source"] for those in runs.values() for run in those}
    before = [run for run in chosen(results, "sweep") if run["name"] in sources]
    rows = [["", "seeds", "loss", "first-token share", *TEXT_COLUMNS]]
    if before:
        rows.append(["before", str(len(before)), *_text_cells(before)])
    for variant, those in runs.items():
        rows.append([f"then {_gate_in_words(variant)}", str(len(those)), *_text_cells(those)])
    return rows if runs else rows[:1]


def _gate_in_words(variant: str) -> str:
    return "without a gate" if variant == "none" else f"with a gate, {variant}"


def _context(results: dict[str, Any]) -> list[list[str]]:
    stages = {"before": "as trained", "trained": "base 1M, trained at four times", "yarn": "then YaRN x4"}
    rows: list[list[str]] = []
    for variant, runs in by_variant(chosen(results, "context")).items():
        found = [run["nll_by_position"] for run in runs]
        edges = found[0]["edges"]
        ranges = [f"tokens {a} to {b - 1}" for a, b in zip(edges, edges[1:], strict=False)]
        rows = rows or [["variant", "seeds", "model", *ranges, f"needles at {edges[2]:,} / {edges[-1]:,}"]]
        for name, words in stages.items():
            columns = zip(*(nll[name] for nll in found), strict=True)
            scores = zip(*(nll["needles"][name] for nll in found), strict=True)
            needles = " / ".join(spread(score, 0) for score in scores)
            rows.append([variant, str(len(runs)), words, *map(spread, columns), needles])
    return rows


def _markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])
