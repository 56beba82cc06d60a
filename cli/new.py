"""`gated-qwen new`: a fresh model folder from a preset."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gated_qwen.cli import console


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
    overrides = dict(_assignment(text) for text in set_ or [])
    console.quiet_libraries()
    from gated_qwen.conversion.create import create
    from gated_qwen.conversion.inspection import inspect_checkpoint

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
    )
    summary = inspect_checkpoint(out)
    if as_json:
        console.print_json({"folder": str(out), **summary.to_dict()})
    else:
        print(f"{out}: {summary.parameters:,} parameters, {summary.gate_parameters:,} of them in gates")


def _list_presets(as_json: bool) -> None:
    from gated_qwen.configuration.presets import preset_names

    names = list(preset_names())
    if as_json:
        console.print_json({"presets": names})
    else:
        print("\n".join(names))


def _assignment(text: str) -> tuple[str, Any]:
    """Reads FIELD=VALUE; the value is JSON, or else a plain string."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--set {text}: write FIELD=VALUE, e.g. --set num_hidden_layers=4")
    value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
