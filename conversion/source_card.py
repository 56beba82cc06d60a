"""What a source's model card says that goes along with its weights: licence, languages, data sets, base model."""

import re
from pathlib import Path
from typing import Any

from gated_qwen.conversion.checkpoint import CheckpointError

CARD_NAME = "README.md"
# The rest of a card describes the source itself (its results, its tags, its widget) and stays with it.
INHERITED = ("license", "license_name", "license_link", "language", "datasets", "base_model")
LISTS = ("language", "datasets", "base_model")
FRONT_MATTER = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(?P<yaml>.*?)^---[ \t]*$\r?\n?", re.DOTALL | re.MULTILINE)
GGUF_FIELDS = {
    "license": "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
    "language": "general.languages",
}
REPO_URL = re.compile(r"https://huggingface\.co/(?:datasets/)?(?P<repo>[\w.-]+/[\w.-]+)/?")


def source_card(folder: Path) -> dict[str, Any]:
    """Reads the inherited fields of a folder's README.md.

    Args:
        folder: a model folder.

    Returns:
        dict: those of `INHERITED` that are there: texts, and lists of texts for language, datasets and base_model.
            Empty without a card or front matter.

    Raises:
        CheckpointError: the front matter is not valid YAML.

    Example:
        >>> _ = (tmp / "README.md").write_text("---\\nlicense: mit\\nlanguage: no\\ntags: [x]\\n---\\n# A model\\n")
        >>> source_card(tmp)
        {'license': 'mit', 'language': ['no']}
    """
    import yaml

    path = folder / CARD_NAME
    if not path.is_file():
        return {}
    match = FRONT_MATTER.match(path.read_text(encoding="utf-8", errors="replace"))
    try:
        # Every scalar as the text that it is: Norwegian, `no`, is not a truth value.
        values = yaml.load(match["yaml"], Loader=yaml.BaseLoader) if match else {}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: the front matter is not valid YAML ({reason}); repair or remove it") from error
    return inherited_fields(values if isinstance(values, dict) else {})


def gguf_card(file: Path) -> dict[str, Any]:
    """Reads the same fields from the `general.*` metadata of a GGUF file.

    Raises:
        CheckpointError: the file cannot be read, or the `gguf` package is missing.
    """
    try:
        from gguf import GGUFReader

        fields = GGUFReader(file).fields
    except ImportError as error:
        raise CheckpointError(f"{file}: reading GGUF metadata needs the package gguf: pip install gguf") from error
    except Exception as error:  # the reader raises whatever a broken file brings about
        raise CheckpointError(f"{file}: cannot be read as GGUF ({' '.join(str(error).split())})") from error
    values = {name: fields[key].contents() for name, key in GGUF_FIELDS.items() if key in fields}
    for name, kind in (("base_model", "base_model"), ("datasets", "dataset")):
        urls = [
            str(field.contents())
            for key, field in fields.items()
            if re.fullmatch(rf"general\.{kind}\.\d+\.repo_url", key)
        ]
        values[name] = [match["repo"] for url in urls if (match := REPO_URL.fullmatch(url))]
    return inherited_fields(values)


def card_text(fields: dict[str, Any]) -> str:
    """A README.md that says no more than these fields, for a folder made of a GGUF file; empty without fields.

    Example:
        >>> print(card_text({"license": "mit"}))
        ---
        license: mit
        ---
        <BLANKLINE>
    """
    import yaml

    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n" if fields else ""


def inherited_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields worth keeping, as texts and lists of texts; a value of another kind says nothing and is left out."""
    fields: dict[str, Any] = {}
    for name in INHERITED:
        value = values.get(name)
        if name in LISTS:
            texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
            texts = [text for text in texts if isinstance(text, str) and text.strip()]
            if texts:
                fields[name] = texts
        elif isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
            fields[name] = value[0]
        elif isinstance(value, str) and value.strip():
            fields[name] = value
    return fields
