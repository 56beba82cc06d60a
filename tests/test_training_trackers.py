"""Trackers get the whole run in one piece, and standard output stays with the result."""

import json
import sys
import types

import pytest
import transformers.integrations.integration_utils as integrations
from training_corpus import evaluated, logged, recipe_in
from transformers import TrainerCallback

from gated_qwen.training.run import train


class Tracker(TrainerCallback):
    """Writes down what a tracker would be told, and speaks on standard output as they do."""

    def __init__(self):
        self.told, self.ended = [], False
        Tracker.last = self

    def on_log(self, args, state, control, logs=None, **kwargs):
        print("a line of the tracker's own")
        self.told.append((state.global_step, set(logs), self.ended))

    def on_train_end(self, args, state, control, **kwargs):
        self.ended = True


@pytest.fixture
def tracker(monkeypatch):
    monkeypatch.setitem(integrations.INTEGRATION_TO_CALLBACK, "trackio", Tracker)


@pytest.mark.parametrize("strategy", ["no", "epoch", "steps"])
def test_a_tracker_is_told_everything_before_the_run_ends(tmp_path, tracker, strategy):
    recipe = recipe_in(
        tmp_path,
        data__evaluation=evaluated(tmp_path),
        diagnostics={"every": 4},
        trainer__report_to="trackio",
        trainer__max_steps=4,
        trainer__logging_steps=3,
        trainer__eval_strategy=strategy,
        trainer__save_strategy="no",
    )
    result = train(recipe, tmp_path / "out")
    told = Tracker.last.told
    assert not any(ended for _, _, ended in told), "trackio would begin a second run"
    at_the_end = [names for step, names, _ in told if step == 4]
    assert sum("eval_loss" in names for names in at_the_end) == 1
    assert any("loss" in names for names in at_the_end)
    assert [step for step, names, _ in told if "diagnostics/gate_mean" in names] == [0, 4]
    assert result.evaluation_loss == logged(tmp_path / "out", "eval_loss")[4]
    assert result.train_loss == logged(tmp_path / "out", "loss")[4]


def test_the_result_stands_alone_on_standard_output_and_wandb_is_ended_before_it(
    tmp_path, tracker, run_command, monkeypatch
):
    recipe_in(tmp_path)
    ended = []
    wandb = types.SimpleNamespace(run=object(), finish=lambda exit_code: ended.append(exit_code) or print("wandb"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.chdir(tmp_path)
    options = ("recipe.yaml", "--out", "out", "--set", "trainer.report_to=trackio", "--set", "trainer.max_steps=1")
    code, out, err = run_command("train", *options, "--json")
    assert (code, json.loads(out)["steps"], ended) == (0, 1, [0])
    assert "a line of the tracker's own" in err and "wandb" in err
    code, out, err = run_command("train", *options)
    assert (code, out, ended) == (1, "", [0, 1])
    assert "--resume" in err


def test_a_folder_called_wandb_is_no_tracker(tmp_path, run_command, monkeypatch):
    recipe_in(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    monkeypatch.chdir(tmp_path)
    code, _, err = run_command("train", "recipe.yaml", "--out", "out", "--set", "trainer.max_steps=1")
    assert code == 0, err


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(integrations, "is_wandb_available", lambda: False)
    with pytest.raises(ValueError, match=r"^trainer\.report_to: .*`pip install wandb`"):
        train(recipe_in(tmp_path, trainer__report_to="wandb"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
