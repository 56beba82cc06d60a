"""A training run: its folder, its order of steps, and going on where it stopped.

OUT/recipe.json      the recipe as it was read; a run is resumed only with the same one
OUT/tokenizer/       when the recipe trains one
OUT/data/            the rows, as Arrow files
OUT/checkpoints/     the Trainer's
OUT/log.jsonl        what was logged, line by line as it came
OUT/model/           the finished model, written once, whole
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from gated_qwen.conversion.folder import atomic_file, atomic_folder
from gated_qwen.training.checkpoints import STATE, check_resumable, has_ended, last_complete_checkpoint
from gated_qwen.training.recipe import DiagnosticsSection, Recipe

RECIPE, LOG = "recipe.json", "log.jsonl"
LEFT = (RECIPE, LOG, "tokenizer", "data", "checkpoints", "model")  # what a run leaves, and --overwrite deletes
# These change where a run goes or what it says, and not what is trained.
FREE_TO_CHANGE = (
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "report_to",
    "run_name",
    "eval_steps",
    "eval_strategy",
    "per_device_eval_batch_size",
)


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        model: the folder of the finished model.
        steps: optimizer steps.
        tokens: tokens seen, padding included; over all processes.
        train_loss: the last logged training loss, in nats per token.
        evaluation_loss: None without evaluation data.
        seconds: of this call.
        resumed_from: the step of the checkpoint that it went on from.
        speaks: this process is the one of many that reports.
    """

    model: Path
    steps: int
    tokens: int
    train_loss: float | None
    evaluation_loss: float | None
    seconds: float
    resumed_from: int | None
    speaks: bool


def train(
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    start: Callable[[int], None] = lambda steps: None,
    progress: Callable[[int], None] = lambda steps: None,
) -> TrainResult:
    """Runs a recipe, alone or as one of many processes started by `accelerate launch` or `torchrun`.

    Args:
        recipe: what to do.
        out: the run's folder.
        resume: go on from the last complete checkpoint in `out`; without one, from the start.
        overwrite: delete an earlier run in `out`, and nothing else that lies there.
        start, progress: called with the number of steps of the whole run, and of steps done.

    Raises:
        ValueError: what the recipe says cannot be done; the error names the field.
        FileExistsError: `out` is not empty, and neither `resume` nor `overwrite` was said; a run that did not take a
            step is in nobody's way.
        FileNotFoundError: `resume`, and there is no run.
    """
    from accelerate import PartialState

    from gated_qwen.training.data import documents
    from gated_qwen.training.tokenizer import learn_tokenizer

    began = time.monotonic()
    out = Path(out)
    processes = PartialState()
    arguments, tokenizer = _checked(recipe, out)
    with processes.main_process_first():
        if processes.is_main_process:
            _open(out, recipe, resume, overwrite)
        if recipe.tokenizer.train is not None:
            tokenizer = learn_tokenizer(documents(recipe.data.train), recipe.tokenizer.train, out / "tokenizer")
        rows = _rows(recipe, tokenizer, out)
    checkpoint = last_complete_checkpoint(out / "checkpoints") if resume else None
    ended_at, state = _end(checkpoint, arguments)
    if checkpoint is not None and ended_at is None:
        check_resumable(checkpoint, processes.num_processes)
    trainer = _trainer(recipe, arguments, tokenizer, rows, out, ended_at, start, progress)
    if ended_at is not None:
        trainer.state = state
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if trainer.state.global_step == 0:
            raise ValueError("data.train: not one whole batch; give more text, or leave dataloader_drop_last out")
    evaluation_loss = _evaluation_loss(trainer) if rows[1] is not None else None
    _save(trainer, tokenizer, recipe, out / "model")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return TrainResult(
        model=out / "model",
        steps=trainer.state.global_step,
        tokens=int(trainer.state.num_input_tokens_seen),
        train_loss=losses[-1] if losses else None,
        evaluation_loss=evaluation_loss,
        seconds=time.monotonic() - began,
        resumed_from=None if checkpoint is None else int(checkpoint.name.rpartition("-")[2]),
        speaks=processes.is_main_process,
    )


def _checked(recipe: Recipe, out: Path) -> tuple[Any, Any]:
    """The Trainer's arguments, and the tokenizer unless it is yet to be trained: faults show before a text is read."""
    from gated_qwen.training.arguments import training_arguments
    from gated_qwen.training.model import check_model
    from gated_qwen.training.trainer import check_optimizer

    tokenizer = _given_tokenizer(recipe)
    learned = recipe.tokenizer.train
    # Before the arguments, by which transformers knows of DeepSpeed and shards every model.
    model = check_model(recipe, len(tokenizer) if learned is None else learned.vocab_size)
    arguments = training_arguments(recipe, out / "checkpoints")
    if arguments.fsdp and arguments.device.type == "cpu":
        raise ValueError("trainer.fsdp: accelerate shards on accelerators only; on the CPU it would copy the model")
    check_optimizer(arguments, model)
    return arguments, tokenizer


def _end(checkpoint: Path | None, arguments: Any) -> tuple[Path | None, Any]:
    """Weights and state of a run that was killed between its last step and its model; else None and None."""
    from transformers import TrainerState

    if checkpoint is None or not has_ended(checkpoint):
        return None, None
    if arguments.deepspeed_plugin is not None:
        raise ValueError(f"{checkpoint}: the run has ended, and this is its model; DeepSpeed saves no other one")
    state = TrainerState.load_from_json(str(checkpoint / STATE))
    best = state.best_model_checkpoint if arguments.load_best_model_at_end else None
    return checkpoint if best is None else checkpoint.with_name(Path(best).name), state


def _evaluation_loss(trainer: Any) -> float | None:
    """The loss that was logged for the finished weights: those after the last step, or the best ones."""
    state = trainer.state
    best = state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    step = state.global_step if best is None else int(best.rpartition("-")[2])
    found = [entry["eval_loss"] for entry in state.log_history if entry["step"] == step and "eval_loss" in entry]
    return found[-1] if found else None


def _open(out: Path, recipe: Recipe, resume: bool, overwrite: bool) -> None:
    """Makes the run's folder, or checks that the run in it is this one."""
    stored = out / RECIPE
    if resume:
        if not stored.is_file():
            raise FileNotFoundError(f"{out}: there is no run to resume; leave --resume out")
        _check_same(json.loads(stored.read_text(encoding="utf-8")), json.loads(_as_json(recipe)), out)
        return
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        began = any((out / name).exists() for name in (LOG, "checkpoints", "model"))
        if not overwrite and (began or not stored.is_file()):
            raise FileExistsError(f"{out} is not empty; pass --resume to go on with its run, or --overwrite")
        if not stored.is_file():
            raise FileExistsError(
                f"{out} holds no run, and --overwrite would delete what it holds; name another folder"
            )
        for name in LEFT:
            _check_unread(out / name, recipe)
        for name in LEFT:
            path = out / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    with atomic_file(stored) as temporary:
        temporary.write_text(_as_json(recipe), encoding="utf-8")


def _check_unread(path: Path, recipe: Recipe) -> None:
    """Refuses to delete what the recipe reads, such as the model of an earlier run in the same folder."""
    texts = [source.text or source.parquet or source.json for source in recipe.data.train + recipe.data.evaluation]
    for read in (recipe.model.source, recipe.tokenizer.source, *texts):
        if read is not None and Path(read).resolve().is_relative_to(path.resolve()):
            raise FileExistsError(f"{path}: the recipe reads {read}, and the run would delete it; name another --out")


def _check_same(stored: Any, wanted: Any, out: Path, path: str = "") -> None:
    """Refuses a recipe that would not train the same model as the run did so far."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for name in sorted(stored.keys() | wanted.keys()):
            free = ("diagnostics",) if not path else FREE_TO_CHANGE if path == "trainer" else ()
            if name not in free:
                _check_same(stored.get(name), wanted.get(name), out, f"{path}.{name}" if path else name)
    elif stored != wanted:
        raise ValueError(
            f"{path}: the run in {out} has {stored!r}, the recipe {wanted!r}; it cannot be resumed with it"
        )


def _as_json(recipe: Recipe) -> str:
    return json.dumps(recipe.to_dict(), indent=2) + "\n"


def _given_tokenizer(recipe: Recipe) -> Any:
    """The recipe's tokenizer, or None when it is yet to be trained."""
    from gated_qwen.training.tokenizer import load_tokenizer

    wanted = recipe.tokenizer
    if wanted.train is not None:
        return None
    if wanted.source is not None:
        return load_tokenizer(wanted.source, wanted.revision, "tokenizer.source")
    assert recipe.model.source is not None  # the recipe's own check
    return load_tokenizer(recipe.model.source, recipe.model.revision, "model.source")


def _rows(recipe: Recipe, tokenizer: Any, out: Path) -> tuple[Any, Any]:
    from gated_qwen.training.data import evaluation_rows, training_rows

    folder = out / "data"
    evaluation = evaluation_rows(tokenizer, recipe.data, folder / "evaluation.arrow")  # first: a fault shows at once
    return training_rows(tokenizer, recipe.data, folder / "train.arrow"), evaluation


def _trainer(
    recipe: Recipe,
    arguments: Any,
    tokenizer: Any,
    rows: tuple[Any, Any],
    out: Path,
    ended_at: Path | None,
    start: Callable[[int], None],
    progress: Callable[[int], None],
) -> Any:
    from transformers import PrinterCallback

    from gated_qwen.training.callbacks import LastStep, LogFile, Progress
    from gated_qwen.training.data import StreamedRows, collate
    from gated_qwen.training.model import build_model, load_trained
    from gated_qwen.training.trainer import GatedTrainer

    if isinstance(rows[0], StreamedRows) and arguments.max_steps <= 0:
        raise ValueError("trainer.max_steps: a streamed text has no end that is known; say how many steps to take")
    arguments.include_num_input_tokens_seen = "all"
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    if ended_at is None:
        model = build_model(recipe, tokenizer, arguments.seed)
    else:
        model = load_trained(ended_at, recipe, tokenizer)
    trainer = GatedTrainer(
        gate=recipe.gate,
        loss=recipe.loss,
        model=model,
        args=arguments,
        train_dataset=rows[0],
        eval_dataset=rows[1],
        data_collator=partial(collate, pad=pad),
        processing_class=tokenizer,
        callbacks=[LogFile(out / LOG), Progress(start, progress), LastStep(rows[1] is not None)],
    )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not trainer.is_fsdp_enabled:
        raise ValueError(
            "accelerate shards on accelerators only; on the CPU it would copy the model: launch without an FSDP config"
        )
    trainer.remove_callback(PrinterCallback)  # standard output is for the result
    if recipe.diagnostics is not None:
        _attach_diagnostics(trainer, recipe.diagnostics, rows, pad)
    return trainer


def _attach_diagnostics(trainer: Any, wanted: DiagnosticsSection, rows: tuple[Any, Any], pad: int) -> None:
    from gated_qwen.training.data import collate
    from gated_qwen.training.diagnostics_callback import DiagnosticsCallback

    source = rows[0] if rows[1] is None else rows[1]
    batch = collate(list(islice(iter(source), wanted.sequences)), pad)
    DiagnosticsCallback(batch, every=wanted.every).attach(trainer)


def _save(trainer: Any, tokenizer: Any, recipe: Recipe, folder: Path) -> None:
    """Writes the finished model; every process takes part, since sharded weights are gathered, and one writes."""
    import torch
    import transformers

    import gated_qwen
    from gated_qwen.conversion.writer import PROVENANCE_NAME, write_json

    whole = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
    writes = trainer.args.should_save
    with atomic_folder(folder, overwrite=True) if writes else nullcontext(folder) as temporary:
        if whole is None:
            trainer.save_model(str(temporary))
        elif writes:  # the Trainer would write tied weights twice, since gathered ones share no memory
            untied = {
                name: weight for name, weight in whole.items() if name not in trainer.model.all_tied_weights_keys
            }
            trainer.model.save_pretrained(temporary, state_dict=untied)
            tokenizer.save_pretrained(temporary)
        if writes:
            (temporary / "training_args.bin").unlink(missing_ok=True)  # a pickle
            versions = {"gated-qwen": gated_qwen.__version__, "torch": torch.__version__}
            provenance = {
                "format": 1,
                "verb": "train",
                **_source(recipe),
                "recipe": recipe.to_dict(),
                "optimizer_steps": trainer.state.global_step,
                "tokens": int(trainer.state.num_input_tokens_seen),
                "versions": {**versions, "transformers": transformers.__version__},
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }
            write_json(temporary / PROVENANCE_NAME, provenance)


def _source(recipe: Recipe) -> dict[str, Any]:
    """What a continued model was before: its name, its own record and its card's licence, as `convert` keeps them."""
    from gated_qwen.conversion.source_card import source_card
    from gated_qwen.conversion.writer import PROVENANCE_NAME

    name = recipe.model.source
    if name is None:
        return {}
    folder = Path(name)
    if not folder.is_dir():
        return {"source": {"name": name}}
    source: dict[str, Any] = {"name": folder.absolute().name}  # a path means nothing elsewhere
    if (record := folder / PROVENANCE_NAME).is_file():
        source["provenance"] = json.loads(record.read_text(encoding="utf-8"))
    if card := source_card(folder):
        source["card"] = card
    return {"source": source}
