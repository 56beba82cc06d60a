"""`gated-qwen new`: a fresh model folder from a preset."""

from pathlib import Path
from typing import Annotated

import typer

from gated_qwen.cli import console
from gated_qwen.cli.assignments import read_assignments


def new(
    preset: Annotated[str, typer.Argument(help="A preset's name; `list` shows them all.")],
    out: Annotated[Path | None, typer.Argument(help="The folder to write.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Set a config field; may be repeated.")
    ] = None,
    match_parameters: Annotated[
        bool, typer.Option("--match-parameters", help="Shrink the FFN to the ungated baseline's total.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="A folder whose tokenizer files are copied.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of a weight file, e.g. 5GB.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a non-empty OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a randomly initialised model folder from a preset."""
    if preset == "list":
        _list_presets(as_json)
        return
    if out is None:
        raise typer.BadParameter("name the folder to write: gated-qwen new PRESET OUT")
    overrides = read_assignments(set_)
    console.quiet_libraries()
    from gated_qwen.conversion.create import create
    from gated_qwen.conversion.inspection import inspect_checkpoint

    with console.counting_bar("drawing") as (begin, progress):
        create(
            preset,
            out,
            overrides=overrides,
            match_parameters=match_parameters,
            dtype=dtype,
            seed=seed,
            tokenizer=tokenizer,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            begin=begin,
            progress=progress,
        )
    summary = inspect_checkpoint(out)
    if as_json:
        console.print_json({"folder": str(out), **summary.to_dict()})
    else:
        active = "" if summary.experts is None else f", {summary.active_parameters:,} active for a token"
        print(f"{out}: {summary.parameters:,} parameters{active}, {summary.gate_parameters:,} of them in gates")


def _list_presets(as_json: bool) -> None:
    from gated_qwen.configuration.presets import preset_names

    names = list(preset_names())
    if as_json:
        console.print_json({"presets": names})
    else:
        print("\n".join(names))
