"""RULER's two scores (arXiv 2404.06654): the share of the answers that the prediction contains."""

from collections.abc import Sequence


def match_all(prediction: str, answers: Sequence[str]) -> float:
    """The share of `answers` that occur in `prediction`, whatever the case; RULER's score of all synthetic tasks.

    Args:
        prediction: what the model wrote.
        answers: the strings that it should have written, in any order; at least one.

    Returns:
        0.0 to 1.0. RULER reports the mean over samples as a percentage.

    Raises:
        ValueError: `answers` is empty.

    Example:
        >>> match_all("They are 12, 34 and 99.", ["12", "34", "56", "78"])
        0.5
    """
    return sum(_found(prediction, answers)) / len(answers)


def match_part(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if any of `answers` occurs in `prediction`, else 0.0; RULER's score where each answer is a wording of one.

    Args, raises: as `match_all`.

    Example:
        >>> match_part("In PARIS, I think.", ["Paris", "the capital of France"])
        1.0
    """
    return float(any(_found(prediction, answers)))


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    if isinstance(answers, str) or not answers:
        raise ValueError("answers: give a list of at least one string")
    return [answer.lower() in prediction.lower() for answer in answers]
