"""Records what a test and its subtests did, in a form that can be compared between models."""

import traceback
import unittest
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """What one test did. Its parts (subtests) are named by their description, the test as a whole by ''."""

    passed: set[str] = field(default_factory=set)
    skipped: set[tuple[str, str]] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def skip_reason(self) -> str | None:
        """Why the test as a whole was skipped, if it was."""
        return dict(self.skipped).get("")

    @property
    def tracebacks(self) -> str:
        return "\n".join(f"--- {part or 'the test itself'} ---\n{text}" for part, text in self.failed.items())


class Recorder(unittest.TestResult):
    """Fills an `Outcome`; `neutral` takes the names of the model out of what the tests say."""

    def __init__(self, neutral: Callable[[str], str]):
        super().__init__()
        self.neutral, self.outcome = neutral, Outcome()

    def _part(self, test: Any) -> str:
        whole = getattr(test, "test_case", None)  # only a subtest has one
        return self.neutral(str(test).removeprefix(str(whole)).strip()) if whole else ""

    def addSuccess(self, test: Any) -> None:
        self.outcome.passed.add("")

    def addSkip(self, test: Any, reason: str) -> None:
        self.outcome.skipped.add((self._part(test), self.neutral(reason)))

    def addFailure(self, test: Any, err: Any) -> None:
        self.outcome.failed[self._part(test)] = "".join(traceback.format_exception(*err))

    addError = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is None:
            self.outcome.passed.add(self._part(subtest))
        else:
            self.addFailure(subtest, err)
