"""What needles lie in: a few sentences over and over, or a local text file; and how sentences are put into it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from gated_qwen.configuration.text_file import read_text

NOISE = (
    "The street is empty. The lamps are lit. A cat walks along the wall. Rain is on its way. "
    "Somebody closes a door, and it is quiet again."
)
SENTENCE_ENDS = (".", "!", "?", '."', ".)")
LONGEST_WORD = 32  # characters
LONGEST_SENTENCE = 80  # words; where no sentence ends within so many, a needle splits one


@dataclass(frozen=True)
class Haystack:
    """Text as words, read as an endless ring.

    Attributes:
        words: the words of one round.
        name: `noise`, or `sha256:...` of the file, so that results tell what they were measured on.
    """

    words: tuple[str, ...]
    name: str

    @classmethod
    def noise(cls) -> "Haystack":
        """A few sentences that say nothing, over and over (RULER's repeated-sentence haystack)."""
        return cls(tuple(NOISE.split()), "noise")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Haystack":
        """The words of a UTF-8 text file, with every run of white space as one space.

        Lines drawn with dashes and the like are left out, and what is longer than `LONGEST_WORD` characters (URLs,
        text of a language that writes no spaces) is split, so that a prompt's length can be met word by word.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not UTF-8, or holds no word.

        Example:
            >>> path = tmp / "text.txt"
            >>> _ = path.write_text("One word.  Another  word.")
            >>> Haystack.from_file(path).words
            ('One', 'word.', 'Another', 'word.')
        """
        text, digest = read_text(path)
        words = [word for word in text.split() if any(map(str.isalnum, word))]
        if not words:
            raise ValueError(f"{path}: no words to make a haystack of")
        pieces = [word[i : i + LONGEST_WORD] for word in words for i in range(0, len(word), LONGEST_WORD)]
        return cls(tuple(pieces), f"sha256:{digest}")

    @property
    def text(self) -> str:
        """One round of the ring, and its first words again, so that a match across the seam is found."""
        return " ".join(self.words + self.words[:20])

    def random_start(self, random: Random) -> int:
        """The index of a random word that begins a sentence (0 when the text has no sentences)."""
        return sentence_start(self.words, random.randrange(len(self.words))) % len(self.words)

    def take(self, count: int, start: int = 0) -> list[str]:
        """The `count` words from `start` on, round the ring as often as needed.

        Example:
            >>> Haystack(("a", "b", "c"), "example").take(5, start=2)
            ['c', 'a', 'b', 'c', 'a']
        """
        rounds = (start + count) // len(self.words) + 1
        return list((self.words * rounds)[start : start + count])


def sentence_start(words: Sequence[str], index: int) -> int:
    """The first place from `index` on where a sentence begins, or `index` itself where none is near.

    Example:
        >>> sentence_start(["It", "rains.", "It", "pours."], 1)
        2
    """
    for place in range(index, min(index + LONGEST_SENTENCE, len(words)) + 1):
        if place == 0 or place == len(words) or words[place - 1].endswith(SENTENCE_ENDS):
            return place
    return index


def hide(sentences: Sequence[str], depths: Sequence[float], words: Sequence[str], pad: str = "") -> str:
    """Puts sentences between the sentences of a haystack.

    Args:
        sentences: what to hide.
        depths: for each of them, where: 0.0 before the first word, 1.0 after the last. Of two at one place, the
            one named first comes first.
        words: the haystack.
        pad: text that follows the last word.

    Example:
        >>> hide(["NEEDLE."], [0.5], "It rains. It pours. It ends.".split())
        'It rains. It pours. NEEDLE. It ends.'
    """
    places = [sentence_start(words, round(depth * len(words))) for depth in depths]
    filler = [*words[:-1], words[-1] + pad] if words else []
    parts, last = [], 0
    for place, sentence in sorted(zip(places, sentences, strict=True), key=lambda pair: pair[0]):
        parts += [*filler[last:place], sentence]
        last = place
    return " ".join(parts + filler[last:]) + ("" if words else pad)
