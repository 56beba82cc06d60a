"""A run that goes on is the run that did not stop, in every epoch and mode; what cannot be the same is refused."""

import json
import shutil

import pytest
from safetensors.torch import load_file
from training_corpus import evaluated, losses, recipe_in

import gated_qwen.training.callbacks
from gated_qwen.training.run import train

STEPS = {"trainer__max_steps": 8, "trainer__save_steps": 1}
RUNS = {
    "shuffled epochs with evaluation, diagnostics and dropout": {
        "trainer__eval_strategy": "steps",
        "trainer__eval_steps": 2,
        "diagnostics": {"every": 2},
        "model__set": {"attention_dropout": 0.2},
        "data__evaluation": True,
    },
    "the end of an epoch while accumulating": {
        "trainer__gradient_accumulation_steps": 3,
        "trainer__per_device_train_batch_size": 2,
    },
    "a stream that begins again": {"data__train__0__streaming": True},
    "bf16, checkpointed, in chunks, with WSD": {
        "trainer__bf16": True,
        "trainer__gradient_checkpointing": True,
        "trainer__lr_scheduler_type": "warmup_stable_decay",
        "trainer__lr_scheduler_kwargs": {"num_decay_steps": 3},
        "trainer__warmup_steps": 2,
        "loss": {"chunk": 9},
    },
}


def short_recipe(folder, **changes):
    """A recipe whose text is an epoch of three steps."""
    recipe_in(folder)
    (folder / "train.txt").write_text("".join((folder / "train.txt").read_text().splitlines(True)[:12]))
    if changes.get("data__evaluation"):
        changes["data__evaluation"] = evaluated(folder)
    return recipe_in(folder, **{"tokenizer__train__vocab_size": 270, **STEPS, **changes})


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_exactly(tmp_path, name):
    recipe = short_recipe(tmp_path, **RUNS[name])
    whole = train(recipe, tmp_path / "whole")
    expected = load_file(whole.model / "model.safetensors")
    for stopped in (2, 3, 7):
        out = tmp_path / f"stopped-{stopped}"
        shutil.copytree(tmp_path / "whole", out)
        shutil.rmtree(out / "model")
        for step in range(stopped + 1, 9):
            shutil.rmtree(out / "checkpoints" / f"checkpoint-{step}")
        resumed = train(recipe, out, resume=True)
        assert (resumed.resumed_from, resumed.tokens) == (stopped, whole.tokens)
        assert losses(out) == pytest.approx(losses(tmp_path / "whole"), abs=1e-6)
        for tensor, found in load_file(resumed.model / "model.safetensors").items():
            assert (found - expected[tensor]).abs().max() <= 1e-6, (stopped, tensor)


def test_the_best_model_is_kept_also_by_a_run_that_was_killed_at_its_end(tmp_path):
    changes = {
        "data__evaluation": True,
        "trainer__greater_is_better": True,  # of the loss, which falls: the best is the first
        "trainer__save_steps": 2,
        "trainer__eval_strategy": "steps",
        "trainer__eval_steps": 2,
        "trainer__load_best_model_at_end": True,
        "trainer__max_steps": 6,
    }
    recipe = short_recipe(tmp_path, **changes)
    result = train(recipe, tmp_path / "out")
    checkpoints = tmp_path / "out" / "checkpoints"
    state = json.loads((checkpoints / "checkpoint-6" / "trainer_state.json").read_text())
    best = checkpoints / state["best_model_checkpoint"].rpartition("/")[2]
    assert best.name == "checkpoint-2"
    expected = load_file(best / "model.safetensors")

    def is_the_best(folder):
        return all((expected[name] == found).all() for name, found in load_file(folder / "model.safetensors").items())

    assert is_the_best(result.model)
    shutil.copytree(tmp_path / "out", tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "model")
    again = train(recipe, tmp_path / "moved", resume=True)
    assert is_the_best(again.model)
    assert again.evaluation_loss == pytest.approx(result.evaluation_loss)


def test_a_checkpoint_that_cannot_be_gone_on_with_is_refused(tmp_path):
    recipe = short_recipe(tmp_path, trainer__save_only_model=True)
    train(recipe, tmp_path / "out")
    for step in range(4, 9):
        shutil.rmtree(tmp_path / "out" / "checkpoints" / f"checkpoint-{step}")
    with pytest.raises(ValueError, match=r"checkpoint-3: no state of the optimizer .*save_only_model"):
        train(recipe, tmp_path / "out", resume=True)


def test_another_number_of_processes_is_refused(tmp_path):
    recipe = short_recipe(tmp_path)
    train(recipe, tmp_path / "out")
    for step in range(4, 9):
        shutil.rmtree(tmp_path / "out" / "checkpoints" / f"checkpoint-{step}")
    last = tmp_path / "out" / "checkpoints" / "checkpoint-3"
    (last / "rng_state.pth").rename(last / "rng_state_0.pth")
    shutil.copy(last / "rng_state_0.pth", last / "rng_state_1.pth")
    with pytest.raises(ValueError, match=r"written by 2 process\(es\), and now there are 1"):
        train(recipe, tmp_path / "out", resume=True)


def test_a_full_disk_loses_neither_the_log_nor_the_checkpoints_before_it(tmp_path, monkeypatch):
    import transformers.modeling_utils

    def no_space(tensors, file, metadata=None):
        if "checkpoint-6" in str(file):
            open(file, "wb").write(b"half")
            raise OSError(28, "No space left on device", str(file))
        return save(tensors, file, metadata=metadata)

    recipe = short_recipe(tmp_path)
    save = transformers.modeling_utils.safe_save_file
    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", no_space)
    with pytest.raises(OSError, match="No space left"):
        train(recipe, tmp_path / "out")
    assert sorted(losses(tmp_path / "out")) == [1, 2, 3, 4, 5, 6]
    monkeypatch.undo()

    def no_log(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gated_qwen.training.callbacks.json, "dumps", no_log)  # while the log is shortened
    with pytest.raises(OSError, match="No space left"):
        train(recipe, tmp_path / "out", resume=True)
    monkeypatch.undo()
    assert sorted(losses(tmp_path / "out")) == [1, 2, 3, 4, 5, 6]
    assert train(recipe, tmp_path / "out", resume=True).resumed_from == 5
    assert sorted(losses(tmp_path / "out")) == list(range(1, 9))


def test_a_run_that_failed_before_its_first_step_is_in_nobodys_way(tmp_path):
    with pytest.raises(ValueError, match="vocab_size: the text gives only"):
        train(short_recipe(tmp_path, tokenizer__train__vocab_size=9000), tmp_path / "out")
    assert train(short_recipe(tmp_path, trainer__max_steps=1), tmp_path / "out").steps == 1


def test_overwriting_deletes_the_run_and_nothing_that_is_read_or_of_others(tmp_path):
    out = tmp_path / "out"
    first = train(short_recipe(tmp_path, trainer__max_steps=1), out)
    (out / "notes.txt").write_text("the seed was a good one")
    continued = {"model": {"source": str(first.model)}, "tokenizer": {}, "trainer__max_steps": 1}
    with pytest.raises(FileExistsError, match=r"out/model: the recipe reads .*out/model"):
        train(short_recipe(tmp_path, **continued), out, overwrite=True)
    assert (first.model / "model.safetensors").is_file()
    train(short_recipe(tmp_path, trainer__max_steps=2), out, overwrite=True)
    assert (out / "notes.txt").read_text() == "the seed was a good one"
    assert not (out / "checkpoints" / "checkpoint-8").exists()
    assert list(losses(out)) == [1, 2]
