import doctest
import importlib
import json
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gated_qwen.training.recipe import load_recipe

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "paper"
RESULTS = ROOT / "benchmarks" / "results" / "paper.json"
PAGE = ROOT / "docs" / "paper-in-small.md"
TABLES = (
    "backcopy",
    "backcopy-long",
    "sweep",
    "emergence",
    "ladder",
    "ladder-no-norm",
    "retrofit-backcopy",
    "retrofit-backcopy-long",
    "retrofit-text",
    "context",
)
pytest.importorskip("datasets")


@pytest.fixture(scope="module", autouse=True)
def modules_of_the_benchmark():
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.mark.slow
def test_the_whole_chain_runs_on_a_toy_corpus(tmp_path, capfd, run_command, monkeypatch):
    pytest.importorskip("matplotlib")
    import paper

    page, results, images = tmp_path / "page.md", tmp_path / "paper.json", tmp_path / "images"
    page.write_text("".join(f"<!-- table: {name} -->\n<!-- end of table -->\n" for name in TABLES))
    only = [
        "backcopy-baseline",
        "backcopy-long-baseline",
        "retrofit",
        "sweep-baseline",
        "emergence-b",
        "ladder-baseline-lr0.004",
        "ladder-no-norm-baseline-lr0.004",
        "context-b",
    ]
    chosen = ["--out", str(tmp_path / "out"), "--more-seeds", "1", "--only", *only]
    toy = ["--steps", "2", "--characters", "500000"]
    paper.main(["train", *chosen, *toy])
    names = [line.split(":")[0] for line in capfd.readouterr().out.splitlines() if line.endswith(": done")]
    assert len(names) == 16 and {"sweep-baseline-0", "retrofit-text-headwise-0", "context-baseline-0"} < set(names)
    paper.main(["train", *chosen, *toy])
    assert ": done" not in capfd.readouterr().out, "a finished run was repeated"

    paper.main(["measure", *chosen, "--results", str(results)])
    found = json.loads(results.read_text())
    assert [run["name"] for run in found["runs"]] == names and found["not_run"] == []
    assert not any("error" in run for run in found["runs"])
    runs = {run["name"]: run for run in found["runs"]}
    assert 5 < runs["sweep-baseline-0"]["evaluation_loss"] < math.log(1024) + 0.5
    assert [found["step"] for found in runs["emergence-baseline-0"]["history"]] == [0]
    assert runs["retrofit-text-elementwise-0"]["mean_gate"]["attn_output"] == pytest.approx(0.5, abs=0.05)
    assert (
        found["settings"]["recipe"]["trainer"]["learning_rate"] == 4e-3
        and len(found["corpus"]["train"]["sha256"]) == 64
    )

    monkeypatch.chdir(tmp_path / "out")
    for name in ("retrofit-text-headwise-0", "context-baseline-0"):
        for line in runs[name]["commands"][:-1]:  # what made the model that the run went on with
            assert run_command(*shlex.split(line)[1:])[0] == 0, line

    paper.main(["report", "--results", str(results), "--page", str(page), "--images", str(images)])
    assert page.read_text().count("| baseline |") == 9 and "Not run yet" not in page.read_text()
    assert {path.name for path in images.iterdir()} == {
        f"paper-{name}.png" for name in ("backcopy", "retrofit", "emergence", "ladder")
    }


def test_every_run_of_the_sweep_is_a_recipe_that_the_command_takes(tmp_path):
    from experiments import runs
    from text_runs import commands, recipe_changes

    from gated_qwen.cli.assignments import read_assignments

    for run in runs(2, 3):
        if "backcopy" in run.experiment:
            continue
        words = shlex.split(commands(run)[-1])
        assert words[:3] == ["gated-qwen", "train", "paper-in-small"]
        changes = read_assignments(words[6::2])
        assert changes == recipe_changes(run, Path("."))
        load_recipe("paper-in-small", changes)


@pytest.mark.parametrize("module", ["measure", "report", "tables"])
def test_the_examples_of_the_benchmark_run(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_the_names_of_runs_are_unique():
    from experiments import runs

    names = [run.name for run in runs(2, 3)]
    assert len(names) == len(set(names))


def test_a_trigger_is_followed_by_the_token_before_it():
    from backcopy import BOS, TRIGGERS, Backcopy

    tokens = Backcopy(32).sample(200, torch.Generator().manual_seed(0))
    assert (tokens[:, 0] == BOS).all() and (tokens[:, 1:] != BOS).all()
    after = torch.isin(tokens[:, 2:-1], torch.tensor(TRIGGERS))
    assert after.sum() > 100
    assert (tokens[:, 3:] == tokens[:, 1:-2])[after].all()


def test_the_chain_itself_has_no_excess_loss():
    from backcopy import Backcopy

    task = Backcopy(32)
    tokens = task.sample(2000, torch.Generator().manual_seed(0))
    found = task.losses(task.transitions[tokens].clamp_min(1e-30).log(), tokens)
    assert found["drawn_excess"] == pytest.approx(0.0, abs=0.02)
    assert found["copied"] > 2, "the chain does not know what is copied"


def test_a_retrofit_on_backcopy_starts_at_the_same_function(tmp_path):
    from backcopy import Setting, train_backcopy
    from experiments import GATES, runs

    setting = replace(Setting(), steps=2)
    wanted = {run.name: run for run in runs(1, 1)}
    before = train_backcopy(wanted["backcopy-baseline-0"], tmp_path, setting)["history"][-1]
    for gate in GATES:
        start = train_backcopy(wanted[f"retrofit-backcopy-{gate or 'none'}-0"], tmp_path, setting)["history"][0]
        assert start["copied"] == before["copied"] and start["bos_share"] == before["bos_share"]
        assert start["mean_gate"] == (None if gate is None else {"attn_output": 0.5})


def test_a_loss_that_rises_again_is_a_divergence():
    from measure import stability

    calm = [3.0 + 0.01 * (step % 7) for step in range(60)]
    assert stability(calm) == {"loss_spikes": 0, "final_loss": pytest.approx(3.03, abs=0.01), "diverged": False}
    spiked = stability([*calm[:30], 9.0, *calm[31:]])
    assert spiked["loss_spikes"] == 1 and not spiked["diverged"]
    assert stability([*calm, *[4.0] * 10])["diverged"]
    assert stability([*calm, None])["diverged"] and stability([*calm, None])["final_loss"] is None


def test_a_spread_names_the_range_of_the_seeds():
    from tables import spread

    assert spread([1.0, 2.0, 6.0], 1) == "3.0 (1.0 to 6.0)"
    assert spread([0.25], 2) == "0.25"
    assert spread([None, None]) == "-"


def test_a_place_for_a_table_that_does_not_exist_is_refused():
    from report import with_tables

    with pytest.raises(ValueError, match="no table typo; there are sweep"):
        with_tables("<!-- table: typo -->\n<!-- end of table -->", {"sweep": ""})


def test_the_page_shows_the_tables_of_the_published_results():
    from report import with_tables
    from tables import tables

    text = PAGE.read_text()
    assert with_tables(text, tables(json.loads(RESULTS.read_text()))) == text, "run paper.py report"
    assert all(f"<!-- table: {name} -->" in text for name in TABLES)
