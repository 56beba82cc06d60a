"""`gated-qwen train`: a training run from a recipe."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from gated_qwen.cli import console
from gated_qwen.cli.assignments import read_assignments


def train(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped recipe; `list` shows them.")],
    out: Annotated[
        Path | None, typer.Option(help="The run's folder: checkpoints, log, and the finished model.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Change a field, e.g. trainer.max_steps=10; may be repeated."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint in OUT.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run in OUT.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe as it was read, and train nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Train a model from a recipe: fresh or continued, on one process or many (start it with `accelerate launch`)."""
    from gated_qwen.training.recipe import load_recipe, shipped_recipes

    if recipe == "list":
        console.print_json({"recipes": shipped_recipes()}) if as_json else print("\n".join(shipped_recipes()))
        return
    read = load_recipe(recipe, read_assignments(set_))
    if show:
        console.print_json(read.to_dict())
        return
    if out is None:
        raise typer.BadParameter("name the run's folder: gated-qwen train RECIPE --out FOLDER")
    if resume and overwrite:
        raise typer.BadParameter("--resume goes on with a run and --overwrite deletes it; choose one")
    console.quiet_libraries()
    from gated_qwen import register_auto_classes
    from gated_qwen.training.run import train as run

    register_auto_classes()
    with _trackers_on_stderr(), console.counting_bar("training", "steps") as (start, progress):
        try:
            result = run(read, out, resume=resume, overwrite=overwrite, start=start, progress=progress)
        except KeyboardInterrupt:
            console.note(f"stopped; --resume goes on from the last complete checkpoint in {out}")
            raise
    if not result.speaks:
        return
    if as_json:
        shown = {name: value for name, value in vars(result).items() if name != "speaks"}
        console.print_json({**shown, "model": str(result.model)})
        return
    rows = [
        ("model", str(result.model)),
        ("steps", f"{result.steps:,}" + (f", resumed from {result.resumed_from:,}" if result.resumed_from else "")),
        ("tokens", f"{result.tokens:,}"),
        ("training loss", _loss(result.train_loss)),
        ("evaluation loss", _loss(result.evaluation_loss)),
        ("time", f"{result.seconds:.1f} s"),
    ]
    console.print_table("gated-qwen train", rows)


@contextmanager
def _trackers_on_stderr() -> Iterator[None]:
    """Keeps stdout for the result: trackers print there, and W&B would once more when the process ends."""
    failed = True
    with redirect_stdout(sys.stderr):
        try:
            yield
            failed = False
        finally:
            wandb: Any = sys.modules.get("wandb")  # maybe only a folder of that name, which it leaves behind
            if getattr(wandb, "run", None) is not None:
                wandb.finish(exit_code=int(failed))


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f} nats per token"
