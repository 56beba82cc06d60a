"""`gated-qwen convert`: an ungated model becomes a gated one that computes the same function."""

from pathlib import Path
from typing import Annotated

import typer

from gated_qwen.cli import console


def convert(
    source: Annotated[str, typer.Argument(help="A folder, a GGUF file or a Hub repository id (Llama, Qwen2, Qwen3).")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    gate: Annotated[
        str, typer.Option(help="headwise (one score a head) or elementwise (one a coordinate).")
    ] = "headwise",
    max_shard_size: Annotated[str, typer.Option(help="Of the weight files, e.g. 5GB.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a non-empty TARGET.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Add a gate to an ungated model without changing its logits: zero gates, o_proj doubled."""
    console.quiet_libraries()
    from gated_qwen.conversion.convert import convert as convert_checkpoint

    with console.bytes_bar("converting") as (start, progress):
        result = convert_checkpoint(
            source,
            target,
            gate=gate,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            start=start,
            progress=progress,
        )
    for warning in result.warnings:
        console.note(f"warning: {warning}")
    if as_json:
        console.print_json({**vars(result), "folder": str(result.folder)})
        return
    print(
        f"{result.folder}: {result.family}, {gate} gate, {result.parameters:,} parameters, "
        f"{result.gate_parameters:,} of them in gates, {result.dtype}"
    )
