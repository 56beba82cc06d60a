"""Every command and example in the README, the docs and the docstrings runs as it stands."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from tiny import tiny_model
from training_corpus import write_corpus
from ungated import ungated_folder

from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.smollm2 import smollm2_folder

tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")

ROOT = Path(__file__).parent.parent
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?P<exempt><!-- not run: [^>]+ -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)```", re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """The page's code, in order, neighbours of one language joined; a comment `not run: REASON` exempts a block."""
    found = [(m["language"], m["code"]) for m in BLOCK.finditer(page.read_text()) if not m["exempt"]]
    return [(language, "\n".join(code for _, code in group)) for language, group in groupby(found, lambda b: b[0])]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    modules = str(tmp_path / "modules")
    environment = {**os.environ, "PATH": path, "HF_MODULES_CACHE": modules, "PYTHONWARNINGS": "ignore"}
    ungated_folder(tmp_path / "my-llama", "llama")  # stands for the reader's own model
    tiny_model().save_pretrained(tmp_path / "ungrouped")
    convert(tmp_path / "ungrouped", tmp_path / "official-release", to="official")  # stands for the paper's release
    if page.name in ("diagnostics.md", "evaluation.md"):
        convert(smollm2_folder(), tmp_path / "gated-smollm2-135m")  # as the README's demo makes it
        (tmp_path / "smollm2-135m-instruct").symlink_to(smollm2_folder())
    if page.name == "training.md":
        write_corpus(tmp_path)
        (tmp_path / "train.txt").rename(tmp_path / "corpus.txt")
    for language, code in blocks(page):
        command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert run.returncode == 0, f"{code}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


MODULES = sorted(
    f"{package}.{path.stem}".removesuffix(".__init__")
    for package, folder in PACKAGES.items()
    for path in (ROOT / folder).glob("*.py")
    if path.stem != "__main__"
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name, tmp_path):
    module = importlib.import_module(name)
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    if not tests:
        return
    names = {"tmp": tmp_path, "llama_folder": ungated_folder(tmp_path / "llama", "llama")}
    for test in tests:
        test.globs.update(names)
        report = []
        result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
        assert result.failed == 0, "".join(report)


def test_the_packages_of_pyproject_are_the_folders_of_the_repository():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {p.parent.name for p in ROOT.glob("*/__init__.py") if p.parent.name not in ("tests", "benchmarks")}
    assert set(packages) == set(PACKAGES)
    assert set(PACKAGES.values()) == folders
    for package, folder in PACKAGES.items():
        assert package == ("gated_qwen" if folder == "modeling_gated" else f"gated_qwen.{folder}")
    assert not (ROOT / "gated_qwen").exists(), "it would shadow the installed package"
