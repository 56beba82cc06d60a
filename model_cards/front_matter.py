"""The YAML block at the head of a model card, and the part of its body that the command writes."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from gated_qwen.conversion.source_card import FRONT_MATTER, INHERITED

BEGIN = re.compile(
    r"^<!-- gated-qwen card: begin, (?P<digest>[0-9a-f]{16}), of (?P<subject>[0-9a-f]{16})\.[^>]*-->$", re.M
)
END = "<!-- gated-qwen card: end -->"


@dataclass(frozen=True)
class Card:
    """A card in parts: front matter, and a body of the person's own text around what the command wrote.

    Attributes:
        data: the front matter; empty when there is none.
        before, generated, after: the body; `generated` is None for a card that the command did not write.
        subject: digest of the files that the generated part describes.
        edited: whether the generated part was changed by hand.
    """

    data: dict[str, Any]
    before: str
    generated: str | None
    after: str
    subject: str | None = None
    edited: bool = False


def parse_card(text: str) -> Card:
    """Takes a card apart.

    Raises:
        ValueError: the front matter is not a YAML mapping.

    Example:
        >>> parse_card("---\\nlicense: mit\\n---\\n# Mine\\n")
        Card(data={'license': 'mit'}, before='# Mine\\n', generated=None, after='', subject=None, edited=False)
    """
    import yaml

    data: Any = {}
    body = text
    if match := FRONT_MATTER.match(text):
        try:
            data = yaml.safe_load(match["yaml"]) or {}
        except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
            reason = " ".join(str(error).split())
            raise ValueError(f"README.md: the front matter is not valid YAML ({reason}); repair it") from error
        body = text[match.end() :]
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ValueError(
            "README.md: the front matter is no mapping of names to values; write lines like `license: mit`"
        )
    begin = BEGIN.search(body)
    end = body.find(END, begin.end()) if begin else -1
    if begin is None or end < 0:
        return Card(data, body, None, "")
    generated = body[begin.end() : end].strip("\n") + "\n"
    edited = digest(generated) != begin["digest"]
    return Card(data, body[: begin.start()], generated, body[end + len(END) :], begin["subject"], edited)


def compose_card(data: Any, before: str, generated: str, after: str, subject: str) -> str:
    """The text of a card; the counterpart of `parse_card`.

    Args:
        data: a `huggingface_hub.ModelCardData`.
        before, generated, after: the body, as in `Card`.
        subject: digest of the files that it describes.
    """
    note = "Your own text goes above or below this part, and stays when the card is made again."
    mark = f"<!-- gated-qwen card: begin, {digest(generated)}, of {subject}. {note} -->"
    before = before.strip("\n") + "\n\n" if before.strip() else ""
    after = "\n" + after.lstrip("\n") if after.strip() else ""
    return f"---\n{data.to_yaml(original_order=list(INHERITED))}\n---\n\n{before}{mark}\n\n{generated}\n{END}\n{after}"


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:16]
