"""A small corpus and the recipe that the training tests share."""

import json
import random
from pathlib import Path
from typing import Any

import yaml

from gated_qwen.evaluation.vocabulary import ADJECTIVES, NOUNS
from gated_qwen.training.recipe import Recipe, load_recipe

VALUES: dict[str, Any] = {
    "model": {"preset": "tiny-headwise"},
    "tokenizer": {"train": {"vocab_size": 300}},
    "data": {"train": [{"text": "train.txt", "sample_by": "line"}], "length": 32},
    "trainer": {
        "max_steps": 8,
        "learning_rate": 5e-3,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_steps": 4,
        "use_cpu": True,
    },
}


def write_corpus(folder: Path, lines: int = 300) -> None:
    """Writes `train.txt` and `evaluation.txt`, one short document a line."""
    choose = random.Random(0)
    for name, count in (("train", lines), ("evaluation", 12)):
        words = [[choose.choice(ADJECTIVES), choose.choice(NOUNS)] * choose.randint(1, 5) for _ in range(count)]
        (folder / f"{name}.txt").write_text("".join(" ".join(line) + "\n" for line in words))


def recipe_in(folder: Path, **changes: Any) -> Recipe:
    """The shared recipe on the corpus in `folder`; `changes` are fields by their path, with `__` for the dots."""
    file = folder / "recipe.yaml"
    if not file.exists():
        write_corpus(folder)
        file.write_text(yaml.safe_dump(VALUES))
    fields = {name.replace("__", "."): value for name, value in changes.items()}
    return load_recipe(file, {"data.train.0.text": str(folder / "train.txt"), **fields})


def evaluated(folder: Path) -> list[dict[str, Any]]:
    """The `data.evaluation` that goes with it."""
    return [{"text": str(folder / "evaluation.txt"), "sample_by": "line"}]


def losses(out: Path) -> dict[int, float]:
    """The training losses that a run logged, by step."""
    return logged(out, "loss")


def logged(out: Path, name: str) -> dict[int, float]:
    """The values of one name that a run logged, by step."""
    entries = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return {entry["step"]: entry[name] for entry in entries if name in entry}
