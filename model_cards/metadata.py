"""The front matter of a card in the Hub's names: license, base model, tags, results."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gated_qwen.conversion.source_card import CARD_NAME
from gated_qwen.model_cards.card_rules import as_list, check_license, check_repo_id
from gated_qwen.model_cards.front_matter import Card
from gated_qwen.model_cards.measurements import MEASURED_BY
from gated_qwen.model_cards.subject import Subject

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

TAGS = ("gated-attention", "arxiv:2505.06708")
LIBRARY = "transformers"
NO_BASE = "none"
# What the command decides in the front matter; every other name is the person's own and stays.
OURS = {
    *("license", "license_name", "license_link", "language", "base_model", "base_model_relation", "datasets"),
    *("library_name", "pipeline_tag", "tags", "model-index", "model_name", "eval_results"),
}


def model_metadata(
    subject: Subject,
    old: Card,
    results: list["EvalResult"],
    *,
    license: str | None,
    license_name: str | None,
    license_link: str | None,
    base_model: str | Sequence[str] | None,
    datasets: Sequence[str],
) -> "ModelCardData":
    """The front matter; what is given wins over the card that is there, and that over the source's card.

    Args:
        subject: the folder.
        old: the card that is there, empty when it does not count.
        results: what was measured.
        license, license_name, license_link, base_model, datasets: as in `gated_qwen.model_cards.card.build_card`.

    Raises:
        ValueError: the license or the base model is not known, or is none.
    """
    from huggingface_hub import ModelCardData

    known = {**subject.inherited, **{name: old.data[name] for name in OURS if old.data.get(name)}}
    if license is None:
        license, license_name, license_link = (known.get(n) for n in ("license", "license_name", "license_link"))
    if license is None:
        raise ValueError(
            f"{subject.folder}: the license is not known, since the source's card is not at hand; give it with "
            "--license, e.g. --license apache-2.0 (a derived model has its source's license)"
        )
    check_license(license, license_name)
    bases = _base_models(subject, old, base_model)
    relation = "quantized" if subject.quantised else "finetune"
    results = [*_own_results(old), *results]
    tags = [*TAGS, *(["conversational"] if subject.chat_template else []), *as_list(known.get("tags"))]
    data = ModelCardData(
        license=license,
        license_name=license_name,
        license_link=license_link,
        language=_one_or_more(known.get("language")),
        base_model=_one_or_more(bases),
        base_model_relation=old.data.get("base_model_relation", relation) if bases else None,
        datasets=list(dict.fromkeys([*as_list(known.get("datasets")), *subject.datasets(), *datasets])) or None,
        library_name=old.data.get("library_name", LIBRARY),
        pipeline_tag=old.data.get("pipeline_tag", subject.pipeline),
        tags=list(dict.fromkeys(tags)),
        model_name=subject.name if results else None,
        eval_results=results or None,
    )
    for name, value in old.data.items():
        if name not in OURS:
            data[name] = value
    return data


def _base_models(subject: Subject, old: Card, given: str | Sequence[str] | None) -> list[str]:
    if given is not None:
        bases = [given] if isinstance(given, str) else list(given)
        bases = [] if bases == [NO_BASE] else bases
    elif old.generated is not None:
        bases = as_list(old.data.get("base_model"))  # answered when that card was made
    else:
        bases = subject.base_models()
        if not bases and subject.is_derived():
            raise ValueError(
                f"{subject.folder}: the base model is not known, since the source was a folder; give its repository "
                f"with --base-model OWNER/NAME, or --base-model {NO_BASE} if it is on no Hub"
            )
    for base in bases:
        check_repo_id("base_model", base)
    return bases


def _own_results(old: Card) -> list["EvalResult"]:
    """Results in the old card that the command did not put there."""
    from huggingface_hub.repocard_data import model_index_to_eval_results

    if not old.data.get("model-index"):
        return []
    try:
        results = model_index_to_eval_results(old.data["model-index"])[1]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{CARD_NAME}: model-index cannot be read ({error}); repair or remove it") from error
    return [r for r in results if MEASURED_BY not in str((r.dataset_args or {}).get("measured_by"))]


def _one_or_more(values: Any) -> Any:
    values = as_list(values)
    return values[0] if len(values) == 1 else values or None
