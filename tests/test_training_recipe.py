"""A recipe is read strictly, and its errors name the field."""

import pytest
import yaml

from gated_qwen.training.recipe import SHIPPED, load_recipe, shipped_recipes

GOOD = {
    "model": {"preset": "tiny-headwise"},
    "tokenizer": {"train": {"vocab_size": 400}},
    "data": {"train": [{"text": "corpus.txt"}], "length": 64},
    "trainer": {"max_steps": 3},
}

# A path to set, its value, and what the error must begin with after the file's name.
WRONG = [
    ("modle", {}, "modle: no such field; did you mean model?"),
    ("model", None, "model: write fields and values, found None"),
    ("model.presett", "tiny", "model.presett: no such field; did you mean preset?"),
    ("model.preset", None, "model.preset: name a preset or a source"),
    ("model.source", "folder", "model.preset: name a preset or a source"),
    ("model.dtype", "float16", "model.dtype: choose from float32, bfloat16, found 'float16'"),
    ("tokenizer.train.vocab_size", 100, "tokenizer.train.vocab_size: at least 260"),
    ("tokenizer.train.vocab_size", "many", "tokenizer.train.vocab_size: write a whole number, found 'many'"),
    ("tokenizer.source", "folder", "tokenizer.train: name a source or train one"),
    ("tokenizer.train", None, "tokenizer: a fresh model needs a tokenizer"),
    ("data.train", [], "data.train: name at least one source"),
    ("data.train", "corpus.txt", "data.train: write a list, found 'corpus.txt'"),
    ("data.train.0.text", None, "data.train[0].text: name one of text, parquet, json and hub"),
    ("data.train.0.hub", "a/b", "data.train[0].text: name one of text, parquet, json and hub"),
    ("data.train.0.streaming", "maybe", "data.train[0].streaming: write true or false, found 'maybe'"),
    ("data.length", 64.5, "data.length: write a whole number, found 64.5"),
    ("data.length", True, "data.length: write a whole number, found True"),
    ("data.length", 1, "data.length: at least 2 tokens"),
    ("data.packing", "tight", "data.packing: choose from documents, concatenated, none, found 'tight'"),
    ("loss", {"chunk": 0}, "loss.chunk: at least 1 token"),
    ("diagnostics", {"every": 0}, "diagnostics.every: at least 1 step"),
    ("gate", {"learning_rate": "fast"}, "gate.learning_rate: write a number, found 'fast'"),
    ("trainer.output_dir", "here", "trainer.output_dir: pass --out instead"),
    ("trainer.label_smoothing_factor", 0.1, "trainer.label_smoothing_factor: transformers does not smooth"),
    ("trainer.eval_strategy", "steps", "trainer.eval_strategy: there is nothing to evaluate on; name data.evaluation"),
    ("trainer.eval_on_start", True, "trainer.eval_on_start: there is nothing to evaluate on"),
    (
        "trainer.metric_for_best_model",
        "accuracy",
        "trainer.metric_for_best_model: an evaluation measures the loss only",
    ),
    ("trainer.hub_token", "hf_secret", "trainer.hub_token: a recipe is published with its model"),
    ("trainer.use_liger_kernel", True, "trainer.use_liger_kernel: its kernels do not know gated models"),
    ("trainer.parallelism_config", {"tp_size": 2}, "trainer.parallelism_config: a recipe trains data parallel"),
    ("data.train.0.limit", 0, "data.train[0].limit: at least 1 document"),
    ("data.train.0.config", "en", "data.train[0].config: only a dataset on the Hub"),
    ("data.train.0.revision", "main", "data.train[0].revision: only a dataset on the Hub"),
    ("data.train", [{"json": "a", "sample_by": "line"}], "data.train[0].sample_by: only text files are cut"),
    ("trainer.load_best_model_at_end", True, "trainer.load_best_model_at_end: there is nothing to evaluate on"),
]


@pytest.fixture
def recipe_file(tmp_path):
    def write(values):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def test_a_good_recipe_is_read(recipe_file):
    recipe = load_recipe(recipe_file(GOOD), {"data.length": "32", "gate": {"learning_rate": "1e-3"}})
    assert (recipe.data.length, recipe.gate.learning_rate) == (32, 1e-3)
    assert recipe.data.train[0].text == "corpus.txt"
    assert recipe.trainer == {"max_steps": 3}


def test_numbers_and_no_are_read_as_they_are_meant(tmp_path):
    from gated_qwen.training.arguments import training_arguments

    file = tmp_path / "recipe.yaml"
    file.write_text("""
        model: {preset: tiny-headwise, set: {rms_norm_eps: 1e-5, initializer_range: +.2E-1}}
        tokenizer: {source: 1e}
        data: {train: [{text: corpus.txt}], length: 64}
        trainer:
          lr_scheduler_type: cosine_with_min_lr
          lr_scheduler_kwargs: {min_lr: 3e-5}
          save_strategy: no
        """)
    recipe = load_recipe(file)
    assert recipe.model.set == {"rms_norm_eps": 1e-5, "initializer_range": 0.02}
    assert recipe.tokenizer.source == "1e"
    arguments = training_arguments(recipe, tmp_path)
    assert arguments.lr_scheduler_kwargs == {"min_lr": 3e-5}
    assert arguments.save_strategy == "no"


@pytest.mark.parametrize(("path", "value", "error"), WRONG, ids=[f"{path}={value}" for path, value, _ in WRONG])
def test_a_wrong_recipe_names_the_field(recipe_file, path, value, error):
    file = recipe_file(GOOD)
    with pytest.raises(ValueError) as caught:
        load_recipe(file, {path: value})
    assert str(caught.value).startswith(f"{file}: {error}")


def test_a_required_field_is_missed(recipe_file):
    with pytest.raises(ValueError, match=r"data\.length: this field is required"):
        load_recipe(recipe_file({**GOOD, "data": {"train": [{"text": "corpus.txt"}]}}))


@pytest.mark.parametrize("text", ["a: [1", "just text", "- a list"])
def test_what_is_no_recipe_is_refused(tmp_path, text):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match="recipe.yaml: "):
        load_recipe(file)


def test_an_unknown_name_lists_the_shipped_recipes():
    with pytest.raises(FileNotFoundError, match="paper-in-small"):
        load_recipe("paper-in-big")


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_read_and_its_model_exists(name, tmp_path):
    from gated_qwen.configuration.presets import preset
    from gated_qwen.training.arguments import training_arguments

    recipe = load_recipe(name)
    assert (SHIPPED / f"{name}.yaml").is_file()
    if recipe.model.preset is not None:
        preset(recipe.model.preset, match_parameters=recipe.model.match_parameters, **recipe.model.set)
    recipe.trainer.pop("bf16", None)  # needs a device that has it
    training_arguments(recipe, tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("learning_rat", 1e-3, "trainer.learning_rat: no such field; did you mean learning_rate?"),
        ("learning_rate", "fast", "trainer.learning_rate: write a number, found 'fast'"),
        ("max_steps", 2.5, "trainer.max_steps: write a whole number, found 2.5"),
        ("save_strategy", "sometimes", "trainer: "),
        ("report_to", "paper", "trainer.report_to: paper is not supported"),
        ("max_steps", 0, "trainer.max_steps: nothing would be trained"),
        ("num_train_epochs", 0, "trainer.num_train_epochs: nothing would be trained"),
        ("per_device_train_batch_size", 0, "trainer.per_device_train_batch_size: at least 1, found 0"),
        ("gradient_accumulation_steps", 0, "trainer.gradient_accumulation_steps: at least 1, found 0"),
        ("learning_rate", -1e-3, "trainer.learning_rate: at least 0, found -0.001"),
        ("seed", -1, "trainer.seed: at least 0, found -1"),
        ("lr_scheduler_type", "warmup_stable_decay", "trainer.lr_scheduler_kwargs: warmup_stable_decay does not take"),
    ],
)
def test_a_wrong_trainer_field_is_named(recipe_file, tmp_path, field, value, error):
    from gated_qwen.training.arguments import training_arguments

    steps = {"trainer.max_steps": -1} if field == "num_train_epochs" else {}
    recipe = load_recipe(recipe_file(GOOD), {**steps, f"trainer.{field}": value})
    with pytest.raises(ValueError) as caught:
        training_arguments(recipe, tmp_path)
    assert str(caught.value).startswith(error)
