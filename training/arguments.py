"""The `trainer` section of a recipe becomes transformers' TrainingArguments."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from gated_qwen.training.recipe import Recipe
from gated_qwen.training.schema import check_name, read_value

# Where TrainingArguments' own default is not what a run of ours does; a recipe may set any of them.
DEFAULTS: dict[str, Any] = {
    "logging_steps": 10,
    "logging_nan_inf_filter": False,  # a run that diverges must say so
    "report_to": "none",
    "dataloader_pin_memory": False,
}
# Rows hold what the model takes, and the whole vocabulary's logits of an evaluation are never wanted.
FIXED: dict[str, Any] = {"remove_unused_columns": False, "prediction_loss_only": True, "disable_tqdm": True}
# The least that makes sense, where TrainingArguments takes anything and the run would fail late or do nothing.
LEAST: dict[str, float] = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0,
    "weight_decay": 0,
    "seed": 0,
    "data_seed": 0,
}
NUMBERS = {int, float, bool, type(None)}


def training_arguments(recipe: Recipe, checkpoints: Path) -> TrainingArguments:
    """Checks every field of the `trainer` section and builds the arguments.

    Args:
        recipe: a recipe.
        checkpoints: where the checkpoints go.

    Raises:
        ValueError: an unknown field, a value of another type, or what TrainingArguments itself refuses.
    """
    fields = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    hints = typing.get_type_hints(TrainingArguments)
    values: dict[str, Any] = {}
    for name, value in recipe.trainer.items():
        check_name(name, fields, "trainer")
        is_number = _kinds(hints[name]) <= NUMBERS
        values[name] = read_value(hints[name], value, f"trainer.{name}") if is_number else value
        if name in LEAST and values[name] is not None and values[name] < LEAST[name]:
            raise ValueError(f"trainer.{name}: at least {LEAST[name]}, found {value!r}")
        if name == "report_to" and value is None:
            values[name] = "none"
        if value is False and name.endswith("_strategy"):
            values[name] = "no"  # as YAML reads a plain no
    try:
        # Absolute, since a checkpoint's state names the best one by this path.
        arguments = TrainingArguments(output_dir=str(checkpoints.absolute()), **{**DEFAULTS, **values, **FIXED})
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        raise ValueError(f"trainer: {' '.join(str(error).split())}") from error
    if arguments.max_steps == 0 or (arguments.max_steps < 0 and arguments.num_train_epochs <= 0):
        name = "num_train_epochs" if arguments.max_steps < 0 else "max_steps"
        raise ValueError(f"trainer.{name}: nothing would be trained; write a number above 0")
    _check_trackers(arguments)
    _check_schedule(arguments)
    return arguments


def _check_trackers(arguments: TrainingArguments) -> None:
    """Makes each tracker's callback once: one that is not installed says there what to install."""
    try:
        for callback in get_reporting_integration_callbacks(arguments.report_to):
            callback()
    except (ValueError, RuntimeError, ImportError) as error:
        raise ValueError(f"trainer.report_to: {' '.join(str(error).split())}") from error


def _check_schedule(arguments: TrainingArguments) -> None:
    """Makes the schedule once with an optimizer of nothing: the Trainer would make it after the data were read."""
    options: Any = arguments.lr_scheduler_kwargs or {}
    steps = max(arguments.max_steps, 100)
    optimizer = torch.optim.SGD([torch.zeros(1)])
    try:
        get_scheduler(arguments.lr_scheduler_type, optimizer, arguments.get_warmup_steps(steps), steps, dict(options))
    except (TypeError, ValueError) as error:
        kind = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
        raise ValueError(f"trainer.lr_scheduler_kwargs: {kind} does not take {options} ({error})") from error


def _kinds(hint: Any) -> set[Any]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return set(typing.get_args(hint)) if is_union else {hint}
