"""Common words and frequent words, after RULER (arXiv 2404.06654, section 3): which words come most often?

RULER takes English words for the first task and shows one worked example; here both tasks have invented words and no
example, so scores are not comparable to published ones.
"""

import math
from random import Random

from gated_qwen.evaluation import vocabulary
from gated_qwen.evaluation.draft import Draft

COMMON_WORDS = 10
# How often a common word and any other come; RULER's numbers, which leave room in a prompt of less than 4096 tokens.
OCCURRENCES, OCCURRENCES_BELOW_4096 = (30, 3), (6, 1)

ZETA_EXPONENT = 2.0
ZETA_OF_TWO = math.pi**2 / 6
FREQUENT_WORDS = 3
FEWEST_CODED_WORDS = 53  # from here on ranks 2, 3, 4 and 5 have different counts
NOISE_WORD = "..."


def common_words(random: Random, length: int) -> Draft:
    """Drafts a numbered list in which ten words come ten times (short: six times) as often as all others.

    Args:
        random: where every choice comes from.
        length: of the prompt and answer, in tokens; below 4096 the words come less often.
    """
    occurrences, others = OCCURRENCES if length >= 4096 else OCCURRENCES_BELOW_4096
    invented = vocabulary.invented_words(random)
    common = [next(invented) for _ in range(COMMON_WORDS)]
    rare: list[str] = []
    order = random.getrandbits(64)

    def question(entries: int, pad: str) -> str:
        while len(rare) < entries:
            rare.extend([next(invented)] * others)
        words = common * occurrences + rare[:entries]
        Random(order).shuffle(words)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))
        return (
            "Below is a numbered list of words. Some words occur more often than others; remember those.\n\n"
            f"{numbered}{pad}\n\nWhich {COMMON_WORDS} words occur most often in the list?"
        )

    return Draft(question, f"The {COMMON_WORDS} words that occur most often are", tuple(common))


def frequent_words(random: Random) -> Draft:
    """Drafts a text of coded words whose frequencies fall with the square of their rank; asked are the three first.

    The word of rank k of n words comes n / (k^2 zeta(2)) times, rounded down. Rank 1 and what rounding leaves over are
    dots, which the prompt says to ignore.
    """
    invented = vocabulary.invented_words(random)
    vocabulary_by_rank: list[str] = []
    frequent = [next(invented) for _ in range(FREQUENT_WORDS)]
    vocabulary_by_rank.extend(frequent)
    order = random.getrandbits(64)

    def question(words: int, pad: str) -> str:
        counts = rank_counts(FEWEST_CODED_WORDS + words)
        while len(vocabulary_by_rank) < len(counts):
            vocabulary_by_rank.append(next(invented))
        coded = [word for word, count in zip(vocabulary_by_rank, counts, strict=False) for _ in range(count)]
        coded += [NOISE_WORD] * (FEWEST_CODED_WORDS + words - len(coded))
        Random(order).shuffle(coded)
        return (
            "Below is a text of coded words. Count how often each word occurs; dots mean nothing.\n\n"
            f"{' '.join(coded)}{pad}\n\nWhich three coded words, dots aside, occur most often?"
        )

    return Draft(question, "The three coded words that occur most often are", tuple(frequent))


def rank_counts(total: int) -> list[int]:
    """How often the words of ranks 2, 3, ... come in a text of `total` words, as long as they come at all.

    Example:
        >>> rank_counts(100)
        [15, 6, 3, 2, 1, 1]
    """
    last = math.isqrt(int(total / ZETA_OF_TWO))
    return [int(total / ZETA_OF_TWO / rank**ZETA_EXPONENT) for rank in range(2, last + 1)]
