"""`gated-qwen convert`: from any known family, to any target that can hold it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gated_qwen.cli import console

if TYPE_CHECKING:
    from gated_qwen.conversion.convert import ConversionResult


def convert(
    source: Annotated[str, typer.Argument(help="A folder, a GGUF file or a Hub repository id.")],
    target: Annotated[Path, typer.Argument(help="The folder (or .gguf file) to write.")],
    from_family: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="gated_qwen, official, qwen3_next, qwen3_5, llama, qwen2, qwen3, qwen3_moe; default: config.json's.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(help="gated_qwen (default), official, qwen3_5, qwen3_next, qwen3, or gguf (default for *.gguf)."),
    ] = None,
    gate: Annotated[
        str | None, typer.Option(help="For an ungated source: headwise (default; one score a head) or elementwise.")
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            help="For an ungated source: identity (exact), open (near 1, hardly learns) or random (not exact)."
        ),
    ] = "identity",
    seed: Annotated[int, typer.Option(help="Seed of a random start.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: as in the source.")] = None,
    gguf_type: Annotated[str | None, typer.Option(help="For GGUF: bf16 (default), f32, f16 or q8_0.")] = None,
    identity_layer: Annotated[
        bool,
        typer.Option(
            "--identity-layer",
            help="For qwen3_5 and qwen3_next: append a layer of zeros, which caches need before transformers 5.15.",
        ),
    ] = False,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of a weight file, e.g. 5GB.")] = "5GB",
    verify: Annotated[bool, typer.Option("--verify", help="Compare source and result before finishing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what every tensor would be, no more.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a non-empty TARGET.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert a checkpoint, dense or a mixture; an ungated model is given a gate that does not change its logits."""
    console.quiet_libraries()
    from gated_qwen.conversion.convert import convert as convert_checkpoint

    with console.counting_bar("converting") as (begin, progress):
        result = convert_checkpoint(
            source,
            target,
            from_family=from_family,
            to=to or ("gguf" if target.suffix == ".gguf" else "gated_qwen"),
            gate=gate,
            start=start,
            seed=seed,
            dtype=dtype,
            gguf_type=gguf_type,
            identity_layer=identity_layer,
            max_shard_size=max_shard_size,
            verify=verify,
            dry_run=dry_run,
            overwrite=overwrite,
            begin=begin,
            progress=progress,
        )
    for warning in result.warnings:
        console.note(f"warning: {warning}")
    if as_json:
        console.print_json(result.to_dict())
        return
    if dry_run:
        _print_plan(result)
    gate_share = f", {result.gate_parameters:,} of them in gates" if result.gate_parameters else ""
    would_be = "would be " if dry_run else ""
    print(
        f"{result.target}: {would_be}{result.to} from {result.family}, {result.parameters:,} parameters{gate_share}, "
        f"{result.dtype}"
    )
    for note in result.notes:
        print(f"note: {note}")
    if result.verification is not None:
        print(f"verified: {result.verification}")


def _print_plan(result: "ConversionResult") -> None:
    """One line for each tensor: its name, dtype, shape, rule and sources."""
    for tensor in result.plan:
        sources = ", ".join(dict.fromkeys(tensor.sources)) or "nothing"
        print(f"{tensor.name}  {tensor.dtype} {list(tensor.shape)}  {tensor.rule}  <- {sources}")
