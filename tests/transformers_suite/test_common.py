"""transformers' own model tests: everything that passes for Qwen3 has to pass for the gated models.

Each test item is one test of the library for one model. The item for a gated model compares with Qwen3's outcome of
the same test: it may not fail, and what it skips has to be exactly what Qwen3 skips, for the same reasons.
"""

from collections.abc import Iterator

import pytest
import torch
from cache import offline

import gated_qwen

from .harness import QWEN3, Family, Outcome, all_names, reference, run
from .obtain import SuiteUnavailable, mark_names
from .skips import KNOWN_FAILURES

FAMILIES = {
    "qwen3": QWEN3,
    "elementwise": Family(gated_qwen, "GatedQwen"),
    "headwise": Family(gated_qwen, "GatedQwen", (("gate_granularity", "headwise"),)),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item for each model and test; a single one that tells the reason where the tests cannot be had."""
    if "name" not in metafunc.fixturenames:
        return
    try:
        for mark in mark_names():
            metafunc.config.addinivalue_line("markers", f"{mark}: set by transformers on its own tests")
        names = sorted({*all_names(), *KNOWN_FAILURES})  # an entry of the list that names no test fails, too
        items = [pytest.param(label, name, id=f"{label}-{name}") for label in FAMILIES for name in names]
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
    expected = reference(name)
    if label == "qwen3":
        outcome = expected
        check_reference(name, outcome)
    else:
        outcome = run(FAMILIES[label], name)
        check_same(name, outcome, expected)
    if name in KNOWN_FAILURES:
        pytest.xfail(KNOWN_FAILURES[name])
    if outcome.skip_reason is not None:
        pytest.skip(outcome.skip_reason)


def check_reference(name: str, outcome: Outcome) -> None:
    """Qwen3 fails exactly the tests that are listed."""
    if outcome.failed and name not in KNOWN_FAILURES:
        pytest.fail(
            f"{name} fails for Qwen3, so the cause is not the gated model. If it is this harness or this version of "
            f"transformers, list it with the reason in skips.py.\n{outcome.tracebacks}",
            pytrace=False,
        )
    if name in KNOWN_FAILURES and not outcome.failed:
        pytest.fail(f"{name} no longer fails for Qwen3: take it out of KNOWN_FAILURES in skips.py.", pytrace=False)


def check_same(name: str, outcome: Outcome, expected: Outcome) -> None:
    """Whatever passes for Qwen3 passes here, and nothing more is skipped."""
    if outcome.failed and not expected.failed:
        pytest.fail(f"{name} passes for Qwen3 and fails here.\n{outcome.tracebacks}", pytrace=False)
    assert outcome.skipped == expected.skipped, "skipped for other reasons than Qwen3"
    missing = expected.passed - outcome.passed
    assert not missing, f"parts of the test that pass for Qwen3 were not run here: {sorted(missing)}"
