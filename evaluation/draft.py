"""What a task hands over: a prompt that still lacks its length."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Draft:
    """A question whose context can be of any length, and its answer.

    Attributes:
        question: takes a number of filler words (or list entries) and a pad that ends them; returns the question.
        answer_prefix: the first words of the answer, which end the prompt.
        answers: the strings that a right answer contains; each occurs in the prompt for this one reason only.
    """

    question: Callable[[int, str], str]
    answer_prefix: str
    answers: tuple[str, ...]
