"""`gated-qwen convert-adapter`: an adapter follows its base model into another layout."""

from pathlib import Path
from typing import Annotated

import typer

from gated_qwen.cli import console


def convert_adapter(
    adapter: Annotated[Path, typer.Argument(help="An adapter folder, as PEFT saves it.")],
    target: Annotated[Path, typer.Argument(help="The adapter folder to write.")],
    base: Annotated[str, typer.Option(help="The model that it was trained on: a folder, a GGUF file or a Hub id.")],
    to: Annotated[str, typer.Option(help="gated_qwen, official, qwen3_5 or qwen3_next.")] = "gated_qwen",
    from_family: Annotated[
        str | None, typer.Option("--from", help="The base's family; default: from its config.json.")
    ] = None,
    gate: Annotated[
        str | None, typer.Option(help="For an ungated base: the granularity that it was converted with.")
    ] = None,
    start: Annotated[
        str, typer.Option(help="For an ungated base: the start that it was converted with.")
    ] = "identity",
    new_base: Annotated[
        str | None, typer.Option(help="What the adapter shall name as its base, e.g. a Hub id; default: nothing.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a non-empty TARGET.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Rewrite a LoRA adapter for what `convert BASE ... --to ...` makes of its base."""
    console.quiet_libraries()
    from gated_qwen.conversion.adapters import convert_adapter as convert

    result = convert(
        adapter,
        target,
        base=base,
        to=to,
        from_family=from_family,
        gate=gate,
        start=start,
        new_base=new_base,
        overwrite=overwrite,
    )
    if as_json:
        console.print_json({**vars(result), "target": str(result.target)})
        return
    print(
        f"{result.target}: adapter of {result.modules} modules, {result.parameters:,} parameters, for {result.to} "
        f"from {result.family}"
    )
