"""Needle in a haystack, after RULER (arXiv 2404.06654, section 3): single, multi-key, multi-value, multi-query.

The definitions are RULER's: sentences that tie a number of seven digits to a key lie in a long text, and the prompt
ends with a question about them. Wording, keys and haystacks are our own, so scores are not comparable to published
ones.
"""

from itertools import islice
from random import Random

from gated_qwen.evaluation import vocabulary
from gated_qwen.evaluation.draft import Draft
from gated_qwen.evaluation.haystack import Haystack, hide

NEEDLE = "The secret number for {key} is {value}."


def needles(
    random: Random,
    haystack: Haystack,
    depth: float | None = None,
    *,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Draft:
    """Drafts a prompt with `keys * values` needles of which `queries * values` are asked for.

    Args:
        random: where every choice comes from.
        haystack: what the needles lie in.
        depth: place of the first needle asked for, 0.0 (first) to 1.0 (last); None: random, as all other needles.
        keys: how many keys there are; those not asked for only distract.
        values: how many numbers each key has.
        queries: how many keys are asked for.

    Raises:
        ValueError: `depth` is not in 0 to 1.
    """
    if depth is not None and not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth {depth}: give a number from 0 (first) to 1 (last)")
    names = list(islice(vocabulary.keys(random, haystack.text), keys))
    numbers = list(islice(vocabulary.numbers(random, haystack.text), keys * values))
    pairs = [(name, number) for i, name in enumerate(names) for number in numbers[i * values : (i + 1) * values]]
    depths = [random.random() for _ in pairs]
    if depth is not None:
        depths[0] = depth
    start = haystack.random_start(random)
    sentences = [NEEDLE.format(key=name, value=number) for name, number in pairs]
    asked = names[:queries]
    plural = "s" if queries * values > 1 else ""
    subject = f"secret number{plural} for {_listed(asked)}"
    verb = "are" if plural else "is"

    def question(words: int, pad: str) -> str:
        context = hide(sentences, depths, haystack.take(words, start), pad)
        return (
            "Numbers are hidden in the text below. Remember them: a question about them follows the text.\n\n"
            f"{context}\n\nWhat {verb} the {subject}, according to the text?"
        )

    return Draft(question, f"The {subject} {verb}", tuple(numbers[: queries * values]))


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
