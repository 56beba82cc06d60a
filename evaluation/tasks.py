"""The tasks by name, and samples of an exact length from a seed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from gated_qwen.evaluation.draft import Draft
from gated_qwen.evaluation.exact_length import PromptEncoder, TooShort, fit
from gated_qwen.evaluation.haystack import Haystack
from gated_qwen.evaluation.needles import needles
from gated_qwen.evaluation.variable_tracking import variable_tracking
from gated_qwen.evaluation.word_lists import common_words, frequent_words


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        max_new_tokens: room for the answer, in tokens (RULER's numbers; variable tracking twice its 30, since a name
            of five letters may be five tokens).
        draft: takes a random generator, a haystack, a depth and a length in tokens.
        takes_depth: whether one needle is asked for, whose depth can be chosen.
    """

    max_new_tokens: int
    draft: Callable[[Random, Haystack, float | None, int], Draft]
    takes_depth: bool = False


def _needles(**numbers: int) -> Callable[[Random, Haystack, float | None, int], Draft]:
    return lambda random, haystack, depth, length: needles(random, haystack, depth, **numbers)


TASKS = {
    "niah_single": Task(128, _needles(), takes_depth=True),
    "niah_multikey": Task(128, _needles(keys=4), takes_depth=True),
    "niah_multivalue": Task(128, _needles(values=4)),
    "niah_multiquery": Task(128, _needles(keys=4, queries=4)),
    "variable_tracking": Task(60, lambda random, haystack, depth, length: variable_tracking(random, haystack)),
    "common_words": Task(120, lambda random, haystack, depth, length: common_words(random, length)),
    "frequent_words": Task(50, lambda random, haystack, depth, length: frequent_words(random)),
}


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer.

    Attributes:
        prompt: text; `input_ids` are what the tokenizer makes of it.
        answers: the strings that a right answer contains.
        max_new_tokens: room for the answer, in tokens.
    """

    prompt: str = field(repr=False)
    input_ids: list[int] = field(repr=False)
    answers: tuple[str, ...]
    max_new_tokens: int


def make_sample(
    task: str,
    encoder: PromptEncoder | Any,
    length: int,
    *,
    depth: float | None = None,
    index: int = 0,
    seed: int = 0,
    haystack: Haystack | None = None,
    max_new_tokens: int | None = None,
) -> Sample:
    """Makes a sample; the same arguments give the same bytes on every machine.

    Samples that differ in length alone ask for the same thing.

    Args:
        task: a key of `TASKS`.
        encoder: a tokenizer, or a `PromptEncoder` for a chat template.
        length: of prompt and answer together, in tokens; the prompt has exactly `length - max_new_tokens`, special
            tokens counted.
        depth: of the needle, 0.0 to 1.0; only where the task takes one. None: random.
        index: another index, another sample.
        seed: of all choices.
        haystack: None: noise. The word tasks have none.
        max_new_tokens: None: the task's own.

    Raises:
        ValueError: an unknown task, a depth that the task does not take or that is outside 0 to 1, a length that is
            too small (the message states the least), or one that this tokenizer cannot make exactly.
    """
    found = find_task(task)
    if depth is not None and not found.takes_depth:
        raise ValueError(f"{task}: its needles lie at random places; give no depth")
    if not isinstance(encoder, PromptEncoder):
        encoder = PromptEncoder(encoder)
    room = found.max_new_tokens if max_new_tokens is None else max_new_tokens
    draft = found.draft(Random(f"{seed} {task} {depth} {index}"), haystack or Haystack.noise(), depth, length)

    def prompt(words: int, pad: str) -> str:
        return encoder.text(draft.question(words, pad), draft.answer_prefix)

    try:
        text, ids = fit(prompt, encoder.ids, length - room)
    except TooShort as short:
        raise ValueError(
            f"{task}: length {length} is too small; the least is {short.least + room} tokens, "
            f"{short.least} of prompt and {room} for the answer"
        ) from None
    return Sample(text, ids, draft.answers, room)


def find_task(name: str) -> Task:
    """Returns a task by its name.

    Raises:
        ValueError: there is none of this name; the message lists them.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r} is not known; choose from {', '.join(TASKS)}, perplexity")
    return TASKS[name]
