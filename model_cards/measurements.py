"""What was measured on a model, from the files of `gated-qwen diagnose` and `evaluate`: for tables and metadata."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gated_qwen.configuration.rope_schema import read_length, read_rope, text_block
from gated_qwen.diagnostics.diagnosis import read_diagnoses
from gated_qwen.evaluation.compare import read_results
from gated_qwen.model_cards.local_paths import mask_paths

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TASK = ("text-generation", "Text generation")
MEASURED_BY = "gated-qwen"


@dataclass(frozen=True)
class Measurements:
    """For the template: `diagnosis` and `evaluations`; for the front matter: `results`.

    Attributes:
        diagnosis: the JSON of `gated-qwen diagnose`, or None.
        evaluations: of each summary of `gated-qwen evaluate` its data, dtype, seed, date and versions, and `rows`:
            task, length, samples and the score or the perplexity, in the mean over depths.
        results: each with its data named and a number.
    """

    diagnosis: dict[str, Any] | None = None
    evaluations: tuple[dict[str, Any], ...] = ()
    results: list["EvalResult"] = field(default_factory=list)

    def shortest(self) -> int | None:
        """The shortest length at which tasks or perplexity were measured, in tokens."""
        return min((row["length"] for each in self.evaluations for row in each["rows"]), default=None)


def read_measurements(
    config: dict[str, Any],
    parameters: int,
    diagnosis: str | os.PathLike[str] | None = None,
    evaluations: tuple[str | os.PathLike[str], ...] = (),
) -> Measurements:
    """Reads the files, and refuses those that were measured on another model.

    Args:
        config: the content of the folder's config.json.
        parameters: of the folder's weights.
        diagnosis: a file of `gated-qwen diagnose`, with one model.
        evaluations: files of `gated-qwen evaluate --out`.

    Raises:
        ValueError: a file that is something else, of another model, or of a number that was not measured.
        OSError: a file that cannot be read.
    """
    results: list[EvalResult] = []
    found, summaries = None, []
    if diagnosis is not None:
        found = _read_diagnosis(Path(diagnosis), config, parameters)
        results += _diagnosis_results(found)
    for path in evaluations:
        summary = read_results(Path(path))
        _check_settings(Path(path), summary, config)
        settings = summary["settings"]
        evaluation = {
            "data": _data_name(settings),
            **{name: settings.get(name) for name in ("dtype", "seed")},
            "measured": summary.get("measured"),
            "versions": summary.get("environment") or {},
            "rows": _rows(Path(path), summary),
        }
        summaries.append(evaluation)
        results += [_row_result(evaluation, row) for row in evaluation["rows"]]
    return Measurements(found, tuple(summaries), results)


def _read_diagnosis(path: Path, config: dict[str, Any], parameters: int) -> dict[str, Any]:
    found = read_diagnoses(path)
    if len(found) != 1:
        raise ValueError(f"{path}: holds {len(found)} models; write a file of this one with gated-qwen diagnose --out")
    model, block = found[0]["model"], text_block(config)
    wanted = {
        "model_type": block.get("model_type"),
        "layers": block.get("num_hidden_layers"),
        "hidden_size": block.get("hidden_size"),
        "parameters": parameters,
    }
    for name, value in wanted.items():
        if model[name] != value:
            raise ValueError(
                f"{path}: {name} of the model that was diagnosed is {model[name]!r}, and of this folder {value!r}; "
                "diagnose this folder"
            )
    return found[0]


def _diagnosis_results(diagnosis: dict[str, Any]) -> list["EvalResult"]:
    mean, activations = diagnosis["attention"]["mean"], diagnosis["activations"]["summary"]["residual"]
    values = {
        "first_token_attention_share": (mean["first_token_share"], "Attention on the first token, mean, 0 to 1"),
        "max_activation": (activations["max_over_layers"], "Largest activation of the residual stream"),
    }
    for position, gate in ((diagnosis["gates"] or {}).get("summary") or {}).items():
        values[f"mean_gate_{position}"] = (gate["mean"], f"Mean gate score, {position}")
    data = diagnosis["input"]
    arguments = {"sequences": data["sequences"], "length": data["length"], "sha256": data["sha256"]}
    versions, date = diagnosis["versions"], diagnosis["measured"]
    config = f"diagnosis, {data['sequences']} x {data['length']} tokens of {data['text']}"
    return [
        _result(kind, value, name, (data["text"], config), {**arguments, "measured": date}, versions)
        for kind, (value, name) in values.items()
        if value is not None
    ]


def _check_settings(path: Path, summary: dict[str, Any], config: dict[str, Any]) -> None:
    settings, block = summary["settings"], text_block(config)
    wanted = {"model_type": block.get("model_type"), "max_position_embeddings": read_length(config)}
    found = {name: settings.get(name) for name in wanted}
    if isinstance(settings.get("rope_parameters"), dict):
        rope, measured = read_rope(config), read_rope(settings)
        names = ("rope_type", "rope_theta", "factor")
        wanted |= {name: rope.get(name) for name in names}
        found |= {name: measured.get(name) for name in names}
    for name, value in wanted.items():
        if found[name] != value:
            raise ValueError(
                f"{path}: {name} of the model that was evaluated is {found[name]!r}, and of this folder {value!r}; "
                "evaluate this folder"
            )


def _rows(path: Path, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Task by task and length by length, in the mean over depths: samples, and the score or the perplexity."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    try:
        for cell in summary["cells"]:
            kind = "perplexity" if cell["task"] == "perplexity" else "score"
            new: dict[str, Any] = {"task": str(cell["task"]), "length": int(cell["length"]), "kind": kind}
            row = rows.setdefault((cell["task"], cell["length"]), {**new, "samples": 0, "values": []})
            row["samples"] += int(cell["samples"])
            row["values"].append(float(cell[kind]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: a cell lacks a number ({error}); evaluate again") from error
    for row in rows.values():
        values = row.pop("values")
        row["value"] = sum(values) / len(values)
    return list(rows.values())


def _row_result(evaluation: dict[str, Any], row: dict[str, Any]) -> "EvalResult":
    data = {"length": row["length"], "samples": row["samples"], **{n: evaluation[n] for n in ("seed", "measured")}}
    config = f"{row['length']} tokens, {evaluation['dtype']}, seed {evaluation['seed']}, {evaluation['data']}"
    if row["kind"] == "perplexity":
        named = (evaluation["data"], config)
        return _result("perplexity", row["value"], "Perplexity", named, data, evaluation["versions"])
    dataset = f"{row['task']} (synthetic, RULER's rules), {row['length']:,} tokens, in {evaluation['data']}"
    name = f"{row['task']}, 0 to 100"
    return _result("score", row["value"], name, (dataset, config), data, evaluation["versions"], kind=row["task"])


def _data_name(settings: dict[str, Any]) -> str:
    """What tasks lie in and perplexity is measured on, by the name or by the digest that the settings hold."""
    text = str(settings.get("text") or "noise")
    name, digest = settings.get("text_name"), text.removeprefix("sha256:")
    if name:
        return str(name)
    return text if digest == text else f"a text with sha256 {digest[:12]}"


def _result(
    metric: str,
    value: float,
    name: str,
    dataset: tuple[str, str],
    arguments: dict[str, Any],
    versions: dict[str, str],
    kind: str = "text",
) -> "EvalResult":
    from huggingface_hub import EvalResult

    version = versions.get("gated_qwen") or versions.get("gated-qwen")
    arguments = {**arguments, "measured_by": f"{MEASURED_BY} {version}" if version else MEASURED_BY}
    return EvalResult(
        task_type=TASK[0],
        task_name=TASK[1],
        dataset_type=kind,
        dataset_name=mask_paths(dataset[0]),
        dataset_config=mask_paths(dataset[1]),  # the Hub's format joins results that differ in nothing but their args
        dataset_args={key: entry for key, entry in arguments.items() if entry is not None},
        metric_type=metric,
        metric_value=round(value, 6),
        metric_name=name,
    )
