"""A training run does what its recipe says, goes on where it stopped, and leaves a model that loads anywhere."""

import json
import shutil

import pytest
import torch
from fresh_process import FreshProcess
from safetensors.torch import load_file
from tiny import tiny_model
from training_corpus import evaluated, logged, losses, recipe_in
from transformers import AutoModelForCausalLM, AutoTokenizer

from gated_qwen.training.checkpoints import last_complete_checkpoint
from gated_qwen.training.run import train


def weights(folder):
    return load_file(folder / "model.safetensors")


def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 8 steps with checkpoints after 4 and 8, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    recipe = recipe_in(folder, data__evaluation=evaluated(folder), gate={"learning_rate": 2e-2})
    return recipe, train(recipe, folder / "out"), folder / "out"


def test_a_run_learns_and_says_what_it_did(finished):
    recipe, result, out = finished
    found = losses(out)
    assert list(found) == list(range(1, 9))
    assert result.train_loss == pytest.approx(found[8])
    assert found[8] < found[1] - 0.5
    assert (result.steps, result.tokens, result.resumed_from) == (8, 8 * 4 * 32, None)
    assert result.evaluation_loss == pytest.approx(logged(out, "eval_loss")[8])
    assert json.loads((result.model / "provenance.json").read_text())["recipe"] == recipe.to_dict()


def test_the_model_of_a_run_is_complete_and_loads(finished):
    _, result, _ = finished
    model = AutoModelForCausalLM.from_pretrained(result.model)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    assert model.config.vocab_size == len(tokenizer) == 300
    assert model.config.bos_token_id == tokenizer.bos_token_id
    names = {path.name for path in result.model.iterdir()}
    assert {"config.json", "generation_config.json", "modeling_gated_qwen.py", "tokenizer.json"} <= names
    assert not any(name.endswith(".bin") for name in names), "a pickle"
    ids = tokenizer("the golden", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, ids.shape[1] + 3)


def test_a_stopped_run_goes_on_as_if_it_had_not(finished, tmp_path):
    recipe, result, out = finished
    shutil.copytree(out, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "model")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "checkpoint-8")
    resumed = train(recipe, tmp_path / "out", resume=True)
    assert resumed.resumed_from == 4
    expected, found = weights(result.model), weights(resumed.model)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=0.0, msg=name)
    assert losses(tmp_path / "out") == pytest.approx(losses(out), abs=1e-6)  # the same data came, and no line twice
    assert resumed.tokens == result.tokens


def test_accumulation_stops_and_resumes_too(finished, tmp_path):
    folder = tmp_path / "whole"
    folder.mkdir()
    changes = {
        "trainer__gradient_accumulation_steps": 2,
        "trainer__per_device_train_batch_size": 2,
        "data__evaluation": evaluated(folder),
        "gate": {"learning_rate": 2e-2},
    }
    recipe = recipe_in(folder, **changes)
    whole = train(recipe, folder / "out")
    assert losses(folder / "out") == pytest.approx(losses(finished[2]), abs=1e-4)  # 2 x 2 rows are a batch of 4
    shutil.rmtree(folder / "out" / "checkpoints" / "checkpoint-8")
    expected = weights(whole.model)
    train(recipe, folder / "out", resume=True)
    for name, tensor in weights(whole.model).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0.0, msg=name)


def test_an_ended_run_takes_no_step_more(finished, tmp_path):
    recipe, result, out = finished
    shutil.copytree(out, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "model")
    again = train(recipe, tmp_path / "out", resume=True)
    assert (again.steps, again.tokens, again.resumed_from) == (result.steps, result.tokens, 8)
    assert again.evaluation_loss == pytest.approx(result.evaluation_loss, abs=1e-6)
    assert again.train_loss == pytest.approx(result.train_loss)
    assert all(torch.equal(tensor, weights(result.model)[name]) for name, tensor in weights(again.model).items())


DAMAGED = {
    "the trainer's state is missing": lambda folder: (folder / "trainer_state.json").unlink(),
    "the trainer's state is cut": lambda folder: cut(folder / "trainer_state.json"),
    "the weights are cut": lambda folder: cut(folder / "model.safetensors"),
    "it belongs to another step": lambda folder: folder.rename(folder.with_name("checkpoint-9")),
}


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_checkpoint_that_was_cut_short_is_passed_over(finished, tmp_path, damage):
    shutil.copytree(finished[2] / "checkpoints", tmp_path / "checkpoints")
    assert last_complete_checkpoint(tmp_path / "checkpoints").name == "checkpoint-8"
    DAMAGED[damage](tmp_path / "checkpoints" / "checkpoint-8")
    assert last_complete_checkpoint(tmp_path / "checkpoints").name == "checkpoint-4"


def test_another_recipe_cannot_resume_a_run(finished):
    recipe, _, out = finished
    recipe_file = json.loads((out / "recipe.json").read_text())
    changed = recipe_in(out.parent, data__evaluation=evaluated(out.parent), gate={"learning_rate": 1e-2})
    with pytest.raises(ValueError, match=r"gate\.learning_rate: the run in .* has 0\.02, the recipe 0\.01"):
        train(changed, out, resume=True)
    assert json.loads((out / "recipe.json").read_text()) == recipe_file


def test_what_is_in_the_way_is_not_overwritten(finished, tmp_path):
    recipe, _, out = finished
    with pytest.raises(FileExistsError, match="--resume"):
        train(recipe, out)
    (tmp_path / "thesis.txt").write_text("ten years")
    with pytest.raises(FileExistsError, match="holds no run"):
        train(recipe, tmp_path, overwrite=True)
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        train(recipe, tmp_path, resume=True)
    assert (tmp_path / "thesis.txt").read_text() == "ten years"


def test_the_loss_in_chunks_trains_the_same_model(finished, tmp_path):
    _, result, out = finished
    recipe = recipe_in(tmp_path, data__evaluation=evaluated(tmp_path), gate={"learning_rate": 2e-2}, loss={"chunk": 7})
    chunked = train(recipe, tmp_path / "out")
    assert losses(tmp_path / "out") == pytest.approx(losses(out), abs=1e-4)
    assert chunked.evaluation_loss == pytest.approx(result.evaluation_loss, abs=1e-4)


def test_a_streamed_text_gives_the_rows_of_a_stored_one_and_resumes(tmp_path):
    options = {"trainer__max_steps": 6, "trainer__save_steps": 3, "trainer__train_sampling_strategy": "sequential"}
    stored = train(recipe_in(tmp_path, **options), tmp_path / "stored")
    streamed = {**options, "data__train__0__streaming": True}
    result = train(recipe_in(tmp_path, **streamed), tmp_path / "streamed")
    assert losses(tmp_path / "streamed") == pytest.approx(losses(tmp_path / "stored"), abs=1e-6)
    shutil.rmtree(tmp_path / "streamed" / "checkpoints" / "checkpoint-6")
    resumed = train(recipe_in(tmp_path, **streamed), tmp_path / "streamed", resume=True)
    assert resumed.resumed_from == 3
    for name, tensor in weights(stored.model).items():
        torch.testing.assert_close(weights(result.model)[name], tensor, atol=1e-6, rtol=0.0, msg=name)


def test_only_the_gates_are_trained_when_asked(tmp_path):
    recipe = recipe_in(tmp_path, gate={"train_only": True}, trainer__max_steps=2, trainer__save_strategy="no")
    result = train(recipe, tmp_path / "out")
    torch.manual_seed(42)  # the Trainer's default seed, with which a fresh model starts
    from gated_qwen.training.model import build_model

    start = build_model(recipe, AutoTokenizer.from_pretrained(result.model), seed=42).state_dict()
    moved = {name for name, tensor in weights(result.model).items() if not torch.equal(tensor, start[name])}
    assert moved == {f"model.layers.{layer}.self_attn.g_proj.weight" for layer in range(2)}


def test_training_goes_on_from_a_model_with_its_tokenizer(finished, tmp_path):
    _, first, _ = finished
    recipe = recipe_in(
        tmp_path, model={"source": str(first.model)}, tokenizer={}, trainer__max_steps=2, trainer__save_strategy="no"
    )
    second = train(recipe, tmp_path / "out")
    assert losses(tmp_path / "out")[1] < losses(first.model.parent)[1] - 0.5  # it starts where the first one ended
    assert len(AutoTokenizer.from_pretrained(second.model)) == 300
    record = json.loads((second.model / "provenance.json").read_text())
    assert record["source"]["provenance"]["recipe"] == finished[0].to_dict()


REFUSED = {
    "rows that are longer than the model": ({"data__length": 512}, r"data\.length: rows of 512 .*256"),
    "a file that is not there": ({"data__train__0__text": "nowhere.txt"}, r"data\.train\[0\]\.text: nowhere\.txt"),
    "a column that is not there": ({"data__train__0__column": "words"}, r"data\.train\[0\]\.column: .*'words'"),
    "a preset that is not there": ({"model__preset": "tiny-headless"}, "model: .*tiny-headwise"),
    "a config field that is not there": ({"model__set": {"gate_postions": []}}, "model: .*gate_postions"),
    "a vocabulary that is too small": ({"model__set": {"vocab_size": 200}}, r"model\.set\.vocab_size: .*200.*300"),
    "an attention implementation that is not there": (
        {"model__attention": "flash_attention_9"},
        r"model\.attention: .*flash_attention_9",
    ),
    "a rate of gates for a model without": (
        {"model__set": {"gate_positions": []}, "gate__learning_rate": 1e-2},
        r"gate\.learning_rate: the model has no gate",
    ),
    "an optimizer that is not installed": (
        {"trainer__optim": "grokadamw"},
        r"trainer\.optim: .*pip install grokadamw",
    ),
    "an optimizer with a wrong option": ({"trainer__adam_beta1": 2.0}, r"trainer\.optim: Invalid beta"),
    "more tokens than the text gives": (
        {"tokenizer__train__vocab_size": 9000},
        r"tokenizer\.train\.vocab_size: the text",
    ),
    "a stream without an end": (
        {"data__train__0__streaming": True, "trainer__max_steps": -1},
        r"trainer\.max_steps: a streamed text",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_by_its_field(tmp_path, case):
    changes, error = REFUSED[case]
    with pytest.raises(ValueError, match=error):
        train(recipe_in(tmp_path, **changes), tmp_path / "out")
    assert not (tmp_path / "out" / "data" / "train.arrow").exists(), "hours of tokenising for nothing"


def test_a_run_that_takes_no_step_leaves_no_model(tmp_path):
    options = {"trainer__dataloader_drop_last": True, "trainer__per_device_train_batch_size": 5000}
    with pytest.raises(ValueError, match=r"data\.train: not one whole batch"):
        train(recipe_in(tmp_path, **options), tmp_path / "out")
    assert not (tmp_path / "out" / "model").exists()


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def as_adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")


SOURCES = {
    "in the official layout": (
        lambda folder: change_config(folder, model_type="qwen3", headwise_attn_output_gate=True),
        {},
        r"model\.source: .* official layout; run `gated-qwen convert",
    ),
    "an adapter": (as_adapter, {}, r"model\.source: .* is an adapter; run `gated-qwen merge"),
    "an empty folder": (lambda folder: (folder / "config.json").unlink(), {}, "holds no config.json"),
    "no folder": (shutil.rmtree, {}, r"model\.source: .*no such folder"),
    "with code of its own": (
        lambda folder: change_config(folder, model_type="other", auto_map={"AutoConfig": "configuration_other.Other"}),
        {},
        r"model\.source: .* needs code of its own, which is not run here",
    ),
    "of no known family": (
        lambda folder: change_config(folder, model_type="other", auto_map={}),
        {},
        r"model\.source: .*`other`",
    ),
    "of a deeper model": (
        lambda folder: change_config(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3),
        {},
        r"model\.source: model\.layers\.2\..* is missing and would start at random",
    ),
    "without its gates": (
        lambda folder: None,
        {"gate_positions": []},
        r"model\.source: model\.layers\.0\.self_attn\.g_proj\.weight .*would be left out",
    ),
    "with a gate that does not exist": (
        lambda folder: None,
        {"gate_activation": "sigmod"},
        r"model\.set: .*gate_activation='sigmod'",
    ),
    "with another base": (lambda folder: None, {"rope_theta": 1e6}, "has no such config field|gated-qwen extend"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_source_that_would_be_trained_wrongly_is_refused(finished, tmp_path, case):
    damage, changes, error = SOURCES[case]
    source = tmp_path / "source"
    shutil.copytree(finished[1].model, source)
    damage(source)
    recipe = recipe_in(
        tmp_path, model={"source": str(source), "set": changes}, tokenizer={"source": str(finished[1].model)}
    )
    with pytest.raises(ValueError, match=error):
        train(recipe, tmp_path / "out")
    assert not (tmp_path / "out" / "model").exists()


def train_as_remote_code(source, out, steps, checkpoint):
    """Trains a folder as remote code and returns the losses and the sums of all tensors."""
    import random

    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    choose = random.Random(0)
    rows = [[choose.randrange(64) for _ in range(12)] for _ in range(40)]
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True, dtype=torch.float32)
    assert type(model).__module__.startswith("transformers_modules")
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=steps,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = {str(entry["step"]): entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return losses, {name: tensor.double().sum().item() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
def test_a_checkpoint_of_a_remote_code_model_resumes_elsewhere_with_its_source_gone(tmp_path):
    tiny_model(gate_granularity="headwise").save_pretrained(tmp_path / "source")
    first = tmp_path / "first"
    blocked = ("gated_qwen", "gguf", "peft")  # the Trainer needs accelerate
    with FreshProcess(tmp_path / "one", blocked=blocked) as process:
        expected = process.call(train_as_remote_code, str(tmp_path / "source"), str(first), 6, None)
    moved = tmp_path / "moved" / "checkpoint-3"
    shutil.copytree(first / "checkpoint-3", moved)
    shutil.rmtree(tmp_path / "source")
    shutil.rmtree(first)
    with FreshProcess(tmp_path / "two", blocked=blocked) as process:
        losses, sums = process.call(train_as_remote_code, str(moved), str(tmp_path / "second"), 6, str(moved))
    assert losses == pytest.approx(expected[0], abs=1e-6)
    assert sums == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(finished, tmp_path):
    recipe, result, out = finished
    shutil.copytree(out, tmp_path / "out")
    for left in ("model", "checkpoints", "log.jsonl"):
        path = tmp_path / "out" / left
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with FreshProcess(tmp_path / "process", blocked=()) as process:
        process.start(train_until_killed, str(tmp_path / "out"))
        with pytest.raises(AssertionError, match="ended without an answer"):
            process.result()
    assert last_complete_checkpoint(tmp_path / "out" / "checkpoints").name == "checkpoint-4"
    assert not (tmp_path / "out" / "model").exists()
    resumed = train(recipe, tmp_path / "out", resume=True)
    assert resumed.resumed_from == 4
    for name, tensor in weights(resumed.model).items():
        torch.testing.assert_close(tensor, weights(result.model)[name], atol=1e-6, rtol=0.0, msg=name)


def train_until_killed(out):
    """Resumes a run without a checkpoint and dies, as by a power cut, while the checkpoint of step 8 is written."""
    import json
    import os
    from pathlib import Path

    import safetensors.torch
    import transformers.modeling_utils

    from gated_qwen.training.recipe import Recipe
    from gated_qwen.training.run import train
    from gated_qwen.training.schema import read_section

    save_file = safetensors.torch.save_file

    def save_half(tensors, file, metadata=None):
        save_file(tensors, file, metadata=metadata)
        if "checkpoint-8" in str(file):
            content = Path(file).read_bytes()
            Path(file).write_bytes(content[: len(content) // 2])
            os._exit(1)

    transformers.modeling_utils.safe_save_file = save_half
    stored = json.loads((Path(out) / "recipe.json").read_text())
    train(read_section(Recipe, stored), out, resume=True)
