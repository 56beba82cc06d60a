"""Variable tracking, after RULER (arXiv 2404.06654, section 3): follow assignments through a long text.

`VAR A = 12345`, later `VAR B = VAR A`, and so on: which variables hold 12345? RULER shows one worked example first;
here there is none, and the wording is our own, so scores are not comparable to published ones.
"""

from itertools import islice
from random import Random

from gated_qwen.evaluation import vocabulary
from gated_qwen.evaluation.draft import Draft
from gated_qwen.evaluation.haystack import Haystack, hide


def variable_tracking(random: Random, haystack: Haystack, *, hops: int = 4) -> Draft:
    """Drafts a prompt with one chain of `hops` + 1 variables, its statements in order at random places.

    Args:
        random: where every choice comes from.
        haystack: what the statements lie in.
        hops: how many variables take their value from the one before.
    """
    value = next(vocabulary.numbers(random, haystack.text, digits=5))
    names = list(islice(vocabulary.variable_names(random, haystack.text), hops + 1))
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    statements = [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=True)]
    depths = sorted(random.random() for _ in statements)
    start = haystack.random_start(random)

    def question(words: int, pad: str) -> str:
        context = hide(statements, depths, haystack.take(words, start), pad)
        return (
            "Values are assigned to variables in the text below, and passed on from one variable to the next. Keep "
            f"track of them.\n\n{context}\n\n"
            f"Which {len(names)} variables hold the value {value} at the end of the text?"
        )

    return Draft(question, f"The {len(names)} variables that hold the value {value} are VAR", tuple(names))
