"""transformers' own model tests: everything that passes for Qwen3 has to pass for the gated models.

Each test item is one test of the library for one model. The item for a gated model compares with Qwen3's outcome of
the same test: it may not fail, and what it skips has to be exactly what Qwen3 skips, for the same reasons.
"""

from collections.abc import Iterator

import pytest
import torch
from cache import offline

import gated_qwen

from .harness import EXPERTS, QWEN3, QWEN3_MOE, Family, Outcome, all_names, reference_of, reference_outcome, run
from .obtain import SuiteUnavailable, mark_names
from .skips import KNOWN_FAILURES

FAMILIES = {
    "qwen3": QWEN3,
    "elementwise": Family(gated_qwen, "GatedQwen"),
    "headwise": Family(gated_qwen, "GatedQwen", (("gate_granularity", "headwise"),)),
    "qwen3_moe": QWEN3_MOE,
    "moe headwise": Family(gated_qwen, "GatedQwenMoe", (*EXPERTS, ("gate_granularity", "headwise"))),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item for each model and test; a single one that tells the reason where the tests cannot be had."""
    if "name" not in metafunc.fixturenames:
        return
    try:
        for mark in mark_names():
            metafunc.config.addinivalue_line("markers", f"{mark}: set by transformers on its own tests")
        items = [
            pytest.param(label, name, id=f"{label}-{name}")
            for label, family in FAMILIES.items()
            # An entry of the list that names no test fails, too.
            for name in sorted({*all_names(family), *KNOWN_FAILURES})
        ]
    except SuiteUnavailable as error:
        marks = [pytest.mark.skip(reason=str(error))] if offline() else []
        items = [pytest.param("qwen3", error, id="unavailable", marks=marks)]
    metafunc.parametrize(("label", "name"), items)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are so small that threads cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_of_transformers(label: str, name: str | SuiteUnavailable) -> None:
    if isinstance(name, SuiteUnavailable):
        pytest.fail(str(name), pytrace=False)
    family = FAMILIES[label]
    expected = reference_outcome(family, name)
    if family is reference_of(family):
        outcome = expected
        check_reference(name, outcome)
    else:
        outcome = run(family, name)
        check_same(name, outcome, expected)
    if name in KNOWN_FAILURES:
        pytest.xfail(KNOWN_FAILURES[name])
    if outcome.skip_reason is not None:
        pytest.skip(outcome.skip_reason)


def check_reference(name: str, outcome: Outcome) -> None:
    """The reference fails exactly the tests that are listed."""
    if outcome.failed and name not in KNOWN_FAILURES:
        pytest.fail(
            f"{name} fails for transformers' own model, so the cause is not the gated model. If it is this harness or "
            f"this version of transformers, list it with the reason in skips.py.\n{outcome.tracebacks}",
            pytrace=False,
        )
    if name in KNOWN_FAILURES and not outcome.failed:
        pytest.fail(
            f"{name} no longer fails for transformers' own model: take it out of KNOWN_FAILURES in skips.py.",
            pytrace=False,
        )


def check_same(name: str, outcome: Outcome, expected: Outcome) -> None:
    """Whatever passes for the reference passes here, and nothing more is skipped."""
    if outcome.failed and not expected.failed:
        pytest.fail(f"{name} passes for transformers' own model and fails here.\n{outcome.tracebacks}", pytrace=False)
    assert outcome.skipped == expected.skipped, "skipped for other reasons than the reference"
    missing = expected.passed - outcome.passed
    assert not missing, f"parts of the test that pass for the reference were not run here: {sorted(missing)}"
