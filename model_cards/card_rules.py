"""What must hold for a card before it is published; the Hub is not asked."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gated_qwen.configuration.rope_schema import read_length, read_rope
from gated_qwen.conversion.checkpoint import read_config
from gated_qwen.conversion.writer import PROVENANCE_NAME
from gated_qwen.model_cards.front_matter import digest, parse_card
from gated_qwen.model_cards.local_paths import LOCAL_PATH

REQUIRED = ("license", "library_name", "pipeline_tag", "tags")
RELATIONS = ("adapter", "finetune", "merge", "quantized")
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OLD_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*")
LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual")


def check_card(text: str, folder: str | os.PathLike[str] | None = None) -> None:
    """Refuses a card that must not be published.

    Args:
        text: of the whole README.md.
        folder: the model folder that it belongs to: then a card that was made for another config, or that is silent
            on static YaRN, is refused as well.

    Raises:
        ValueError: one sentence that names the field and the mend.

    Example:
        >>> check_card("# A model")
        Traceback (most recent call last):
        ...
        ValueError: README.md: no front matter; begin the card with `---`, lines like `license: mit`, and `---`
    """
    card = parse_card(text)
    data = card.data
    if not data:
        raise ValueError("README.md: no front matter; begin the card with `---`, lines like `license: mit`, and `---`")
    for place, value in _entries(data):
        _check_value(place, value)
    for name in REQUIRED:
        if name not in data:
            raise ValueError(f"README.md: {name} is missing in the front matter; write the card with gated-qwen card")
    check_license(data["license"], data.get("license_name"))
    for name in ("library_name", "pipeline_tag", "tags"):
        values = data[name] if name == "tags" and isinstance(data[name], list) else [data[name]]
        if wrong := [value for value in values if not isinstance(value, str)]:
            raise ValueError(f"README.md: {name} holds {wrong[0]!r}, which is no text; put it in quotes")
    for name in ("base_model", "datasets"):
        for value in as_list(data.get(name)):
            check_repo_id(name, value)
    if data.get("base_model_relation") not in (None, *RELATIONS):
        raise ValueError(
            f"README.md: base_model_relation is {data['base_model_relation']!r}; the Hub knows {', '.join(RELATIONS)}"
        )
    for value in as_list(data.get("language")):
        if not isinstance(value, str) or not LANGUAGE.fullmatch(value):
            raise ValueError(
                f"README.md: language {value!r} is no language code; write one like en, in quotes for 'no'"
            )
    if "model-index" in data:
        _check_results(data["model-index"])
    if card.generated is not None and (found := LOCAL_PATH.search(card.generated)):
        line = next(line for line in card.generated.splitlines() if found[0] in line)
        raise ValueError(
            f"README.md: a path of this machine stands in {line.strip()!r}; take it out, or run gated-qwen card again"
        )
    if folder is not None:
        _check_against(text, card.subject, Path(folder))


def read_card(file: Path) -> str:
    """The text of a card.

    Raises:
        ValueError: there is none, or it is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{file}: no card; write one with gated-qwen card") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file}: not UTF-8 text; save it as UTF-8") from None


def check_license(license: Any, license_name: Any = None) -> None:
    """Refuses a licence that is no identifier, and `other` without a name.

    Raises:
        ValueError: with the mend.
    """
    for value in as_list(license):
        if not isinstance(value, str) or not LICENSE_ID.fullmatch(value):
            raise ValueError(
                f"README.md: license {value!r} is no identifier of the Hub; write one like apache-2.0, or `other` "
                "with license_name and license_link"
            )
    if license == "other" and not license_name:
        raise ValueError("README.md: license is `other`, which needs a license_name (--license-name) and license_link")


def check_repo_id(field: str, value: Any) -> None:
    """Refuses what is not a repository id.

    Raises:
        ValueError: with the mend.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    known = isinstance(value, str) and (
        REPO_ID.fullmatch(value) or (field == "datasets" and OLD_DATASET_ID.fullmatch(value))
    )
    try:
        validate_repo_id(value if known else "")
    except HFValidationError:
        raise ValueError(
            f"README.md: {field} {value!r} is no repository id of the Hub; write OWNER/NAME, not a path"
        ) from None


def subject_digest(folder: Path) -> str:
    """Changes when config.json or provenance.json of a folder changes."""
    files = [folder / name for name in ("config.json", PROVENANCE_NAME)]
    return digest(b"\0".join(file.read_bytes() for file in files if file.is_file()))


def as_list(value: Any) -> list[Any]:
    """The values of a field that the Hub allows as one value or as a list."""
    return [] if value is None else value if isinstance(value, list) else [value]


def _entries(value: Any, place: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Every value of the front matter with its place, containers before what they hold, and each container once.

    An alias of YAML can name a container many times, or from inside itself.
    """
    seen = set() if seen is None else seen
    if place:
        yield place, value
    if not isinstance(value, (dict, list)) or id(value) in seen:
        return
    seen.add(id(value))
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        inside = f"{place}[{name}]" if isinstance(value, list) else f"{place}.{name}" if place else str(name)
        yield from _entries(inner, inside, seen)


def _check_value(place: str, value: Any) -> None:
    if value is None or value == [] or value == {} or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"README.md: {place} is empty in the front matter; give it a value, or leave the line out")
    if isinstance(value, str) and LOCAL_PATH.search(value):
        raise ValueError(f"README.md: {place} is a path of this machine ({value}); name the repository instead")


def _check_results(index: Any) -> None:
    from huggingface_hub.repocard_data import model_index_to_eval_results

    try:
        _, results = model_index_to_eval_results(index)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(
            f"README.md: model-index cannot be read ({type(error).__name__}: {error}); every result needs task.type, "
            "dataset.name, dataset.type and metrics of type and value"
        ) from error
    for result in results:
        what = f"README.md: model-index: {result.metric_type} on {result.dataset_name}"
        value = result.metric_value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{what} is {value!r}; a metric's value is a number")
        for name in ("task_type", "dataset_name", "dataset_type", "metric_type"):
            if not isinstance(getattr(result, name), str):
                raise ValueError(f"{what}: {name} is {getattr(result, name)!r}; write a text")


def _check_against(text: str, subject: str | None, folder: Path) -> None:
    config = read_config(folder)
    if subject is not None and subject != subject_digest(folder):
        raise ValueError(
            f"{folder / 'README.md'}: the card was made for another config.json or provenance.json than now lie in "
            "the folder; run gated-qwen card again"
        )
    rope = read_rope(config)
    if rope["rope_type"] == "yarn" and rope["factor"] > 1 and "yarn" not in text.lower():
        raise ValueError(
            f"{folder / 'README.md'}: config.json extends the context with static YaRN (factor {rope['factor']:g}, to "
            f"{read_length(config):,} tokens), which acts on short texts too, and the card does not say so; run "
            "gated-qwen card again"
        )
