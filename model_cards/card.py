"""The model card of a folder: what the gate is, how the model was made, and what was measured, nothing else."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gated_qwen.conversion.families import official_gate_flags
from gated_qwen.conversion.folder import atomic_file
from gated_qwen.conversion.source_card import CARD_NAME
from gated_qwen.model_cards.card_rules import as_list, check_card, check_repo_id, read_card, subject_digest
from gated_qwen.model_cards.front_matter import Card, compose_card, parse_card
from gated_qwen.model_cards.markdown import Markdown, render
from gated_qwen.model_cards.measurements import Measurements, read_measurements
from gated_qwen.model_cards.metadata import model_metadata
from gated_qwen.model_cards.subject import POSITIONS, Subject, gate_formula, read_subject

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

__all__ = ["build_card", "check_card", "read_card", "write_card"]

UNTRAINED = ("new", "convert", "extend")  # after these, weights drawn at random are what they were
PathLike = str | os.PathLike[str]


def build_card(
    folder: PathLike,
    *,
    diagnosis: PathLike | None = None,
    evaluations: Sequence[PathLike] = (),
    license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
    base_model: str | Sequence[str] | None = None,
    datasets: Sequence[str] = (),
    repo_id: str | None = None,
    existing: str | None = None,
    replace: bool = False,
) -> str:
    """The text of a model card for a folder: YAML front matter and Markdown.

    Licence, base model and languages come from the source's card, as the provenance record keeps it. What nobody knows
    is asked for by an error, and what was not measured is not mentioned.

    Args:
        folder: a model folder: ours, or one that was exported to another family.
        diagnosis: a file of `gated-qwen diagnose --out`, measured on this model.
        evaluations: files of `gated-qwen evaluate --out`, measured on this model.
        license: an identifier of the Hub, e.g. `"apache-2.0"`; None: that of the source.
        license_name, license_link: for the license `"other"`.
        base_model: repository ids; `"none"` for a model whose source is on no Hub; None: that of the source.
        datasets: repository ids of what it was trained on.
        repo_id: where the model will be, for the examples; None: a name to be filled in.
        existing: the text of a card that is there; its own sections and its other metadata stay.
        replace: replace an `existing` card that was not written here, or whose generated part was edited by hand.

    Returns:
        str: a card that `check_card` accepts.

    Raises:
        ValueError: no known license or base model, a file measured on another model, or an `existing` card that only
            `replace` may replace.
        CheckpointError: the folder is missing or broken.

    Example:
        >>> from gated_qwen.conversion.convert import convert
        >>> _ = convert(llama_folder, tmp / "gated")
        >>> card = build_card(tmp / "gated", license="mit", base_model="owner/llama")
        >>> card.splitlines()[:2]
        ['---', 'license: mit']
    """
    subject = read_subject(Path(folder))
    old = _keepable(existing, replace)
    measured = read_measurements(subject.config, subject.summary.parameters, diagnosis, tuple(evaluations))
    data = model_metadata(
        subject,
        old,
        measured.results,
        license=license,
        license_name=license_name,
        license_link=license_link,
        base_model=base_model,
        datasets=datasets,
    )
    if repo_id is not None:
        check_repo_id("repo_id", repo_id)
    generated = render("template.md", _values(subject, measured, data, repo_id or f"OWNER/{subject.name}"))
    before, after = (old.before, old.after) if old.generated is not None else ("", "")
    text = compose_card(data, before, generated, after, subject_digest(subject.folder))
    check_card(text, subject.folder)
    return text


def write_card(folder: PathLike, *, out: PathLike | None = None, replace: bool = False, **options: Any) -> Path:
    """Writes the card of a folder, at once; a card that is there is kept unless it may be made again.

    Args:
        folder: a model folder.
        out: the file to write; None: the folder's README.md.
        replace: as in `build_card`.
        options: its other arguments.

    Returns:
        Path: the file.

    Raises:
        ValueError: as `build_card`; `out` is a folder or a link.
    """
    path = Path(out) if out is not None else Path(folder) / CARD_NAME
    if path.is_symlink() or path.is_dir():
        raise ValueError(
            f"{path} is {'a link' if path.is_symlink() else 'a folder'}; name a file to write the card to"
        )
    existing = read_card(path) if path.exists() else None
    text = build_card(folder, existing=existing, replace=replace, **options)
    with atomic_file(path) as file:
        file.write_text(text, encoding="utf-8")
    return path


def _keepable(existing: str | None, replace: bool) -> Card:
    """The old card in parts, of which the person's own are kept."""
    old = parse_card(existing or "")
    if not existing or not existing.strip():
        return old
    if old.generated is None:
        if replace:
            return Card({}, "", None, "")
        raise ValueError(
            f"{CARD_NAME}: this card was not written by gated-qwen card and would be lost; pass --replace to replace "
            "it, or --out to write elsewhere"
        )
    if old.edited and not replace:
        raise ValueError(
            f"{CARD_NAME}: the generated part was changed by hand; move your text above or below it, or pass "
            "--replace to lose the changes"
        )
    return old


def _values(subject: Subject, measured: Measurements, data: "ModelCardData", repo_id: str) -> dict[str, Any]:
    """What the template names."""
    steps = subject.steps()
    starts = [start for step in steps if isinstance(step.get("gate"), dict) and (start := step["gate"].get("start"))]
    return {
        "title": subject.name,
        "summary": subject.summary,
        "shape": subject.summary.shape,
        "context": subject.context(),
        "gate": subject.gate,
        "positions": {name: Markdown(words) for name, words in POSITIONS.items()},
        "formula": Markdown(gate_formula(subject.gate)) if subject.gate else "",
        "base_models": as_list(data.get("base_model")),
        "steps": [_step_values(step) for step in steps],
        "provenance": subject.provenance,
        "datasets": as_list(data.get("datasets")),
        "diagnosis": measured.diagnosis,
        "evaluations": measured.evaluations,
        "shortest": measured.shortest(),
        "retrofit": starts[-1] if starts else None,
        "fresh": bool(steps) and all(step.get("verb") in UNTRAINED for step in steps) and not subject.is_derived(),
        "inherits": bool(data.get("base_model")),
        "remote_code": subject.remote_code,
        "quantised": subject.quantised,
        "auto_class": subject.auto_class,
        "pipeline": subject.pipeline,
        "kind": "A causal language model" if subject.pipeline == "text-generation" else "A model",
        "other_changes": subject.other_changes,
        "tokenizer": subject.tokenizer,
        "loadable": not official_gate_flags(subject.config),
        "chat_template": subject.chat_template,
        "repo_id": repo_id,
    }


def _step_values(step: dict[str, Any]) -> dict[str, Any]:
    source, gate, versions = (step.get(name) for name in ("source", "gate", "versions"))
    recipe = step.get("recipe")
    model = recipe.get("model") if isinstance(recipe, dict) else None
    return {
        "verb": step.get("verb", "unknown"),
        "preset": step.get("preset") or (model.get("preset") if isinstance(model, dict) else None),
        "optimizer_steps": step.get("optimizer_steps"),
        "tokens": step.get("tokens"),
        "from_name": source.get("name") if isinstance(source, dict) else None,
        "to": step.get("to"),
        "start": gate.get("start") if isinstance(gate, dict) else None,
        "created": str(step.get("created") or "")[:10],
        "versions": versions if isinstance(versions, dict) else {},
    }
