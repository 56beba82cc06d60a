"""`gated-qwen merge`: an adapter and its base model become one model folder."""

from pathlib import Path
from typing import Annotated

import typer

from gated_qwen.cli import console


def merge(
    adapter: Annotated[Path, typer.Argument(help="An adapter folder, as PEFT saves it.")],
    target: Annotated[Path, typer.Argument(help="The model folder to write.")],
    base: Annotated[
        str | None,
        typer.Option(
            help="The model that it was trained on: a folder or a Hub id; default: from adapter_config.json."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: as in the base.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of a weight file, e.g. 5GB.")] = "5GB",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code of a base model that is not of this package.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a non-empty TARGET.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Merge an adapter (LoRA, rsLoRA, DoRA, saved modules) into its base; both stay as they are."""
    console.quiet_libraries()
    from gated_qwen.conversion.merge import merge_adapter

    with console.steps() as step:
        step("merging")
        result = merge_adapter(
            adapter,
            target,
            base=base,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
        )
    if as_json:
        console.print_json(result.to_dict())
        return
    print(
        f"{result.target}: {result.method} merged into {result.base}, {result.parameters:,} parameters, {result.dtype}"
    )
    for note in result.notes:
        print(f"note: {note}")
