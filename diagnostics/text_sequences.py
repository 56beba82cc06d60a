"""A text as token sequences of one length: nothing is padded, and nothing is cut without being asked."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gated_qwen.configuration.text_file import read_text

BOS_POLICIES = ("auto", "always", "never")


@dataclass(frozen=True)
class TextSequences:
    """Sequences of one length, and where they come from.

    Attributes:
        input_ids: one list of `length` token ids for each sequence, consecutive pieces of the text.
        text: the file's name.
        sha256: of the whole file.
        first_token: what every sequence begins with, in words.
        offset: how many tokens of the text lie before the first sequence.
    """

    input_ids: list[list[int]]
    text: str
    sha256: str
    first_token: str
    offset: int = 0

    @property
    def source(self) -> dict[str, Any]:
        """What a diagnosis says of its text."""
        return {"text": self.text, "sha256": self.sha256, "first_token": self.first_token, "offset": self.offset}


def read_sequences(
    path: str | os.PathLike[str], tokenizer: Any, *, length: int, count: int = 1, offset: int = 0, bos: str = "auto"
) -> TextSequences:
    """Cuts the first `count` sequences of `length` tokens out of a UTF-8 text file.

    Args:
        path: the text.
        tokenizer: of the model that is to read them.
        length: tokens of a sequence, its BOS included.
        count: how many sequences, one after the other.
        offset: how many tokens of the text to leave out first, such as a table of contents.
        bos: whether a sequence begins with the tokenizer's BOS: `"auto"`: if the tokenizer writes one itself;
            `"always"`; `"never"`.

    Raises:
        ValueError: the text is not UTF-8 or has too few tokens, or `"always"` where the tokenizer has no BOS.
        OSError: the file cannot be read.

    Example:
        >>> from transformers import PreTrainedTokenizerFast
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> _ = (tmp / "text.txt").write_text("a b b a a b")
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        >>> read_sequences(tmp / "text.txt", tokenizer, length=2, count=3).input_ids
        [[0, 1], [1, 0], [0, 1]]
    """
    if bos not in BOS_POLICIES:
        raise ValueError(f"bos {bos!r}: choose one of {', '.join(BOS_POLICIES)}")
    if length < 2 or count < 1 or offset < 0:
        raise ValueError(
            f"{count} sequences of {length} tokens from token {offset} on: at least 1 sequence of at least 2 tokens "
            "from token 0 on is needed"
        )
    text, sha256 = read_text(path)
    first = _first_tokens(tokenizer, bos)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    size = length - len(first)
    needed = offset + count * size
    if len(ids) < needed:
        after = f" after {offset:,} left out" if offset else ""
        raise ValueError(
            f"{path}: {len(ids):,} tokens, and {count} sequences of {length:,} tokens{after} need {needed:,}; take a "
            "longer text or a smaller length"
        )
    sequences = [first + ids[place : place + size] for place in range(offset, needed, size)]
    begins = f"BOS {tokenizer.bos_token}" if first else "the text's own token (no BOS)"
    return TextSequences(sequences, Path(path).name, sha256, begins, offset)


def _first_tokens(tokenizer: Any, bos: str) -> list[int]:
    if bos == "never":
        return []
    if bos == "always" and tokenizer.bos_token_id is None:
        raise ValueError("the tokenizer has no BOS token; pass --bos auto or never")
    writes_bos = tokenizer("a", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]
    return [tokenizer.bos_token_id] if bos == "always" or writes_bos else []
