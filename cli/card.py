"""`gated-qwen card`: the model card of a folder, from what the folder and the measurements say."""

from pathlib import Path
from typing import Annotated

import typer

from gated_qwen.cli import console


def card(
    path: Annotated[Path, typer.Argument(help="A model folder.")],
    diagnosis: Annotated[Path | None, typer.Option(help="A file of gated-qwen diagnose --out, of this model.")] = None,
    evaluation: Annotated[
        list[Path] | None, typer.Option(help="A file of gated-qwen evaluate --out, of this model; may be repeated.")
    ] = None,
    perplexity: Annotated[Path | None, typer.Option(help="The same, of perplexity.")] = None,
    license: Annotated[
        str | None, typer.Option(help="As the Hub names it, e.g. apache-2.0; else the source's.")
    ] = None,
    license_name: Annotated[str | None, typer.Option(help="With --license other.")] = None,
    license_link: Annotated[str | None, typer.Option(help="With --license other.")] = None,
    base_model: Annotated[
        list[str] | None, typer.Option(help="OWNER/NAME of the source, else as recorded; `none`: it is on no Hub.")
    ] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="OWNER/NAME of training data; may be repeated.")] = None,
    repo_id: Annotated[str | None, typer.Option(help="OWNER/NAME where the model will be, for the examples.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; else README.md in the folder.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a card that was written or edited by hand.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Check the card that is there; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a model card: metadata for the Hub, the gate, how the model was made, what was measured. Offline."""
    console.quiet_libraries()
    from gated_qwen.model_cards.card import check_card, read_card, write_card

    if check:
        file = out or path / "README.md"
        check_card(read_card(file), path)
    else:
        file = write_card(
            path,
            out=out,
            replace=replace,
            diagnosis=diagnosis,
            evaluations=[*(evaluation or []), *([perplexity] if perplexity else [])],
            license=license,
            license_name=license_name,
            license_link=license_link,
            base_model=base_model,
            datasets=dataset or (),
            repo_id=repo_id,
        )
    if as_json:
        console.print_json({"card": str(file), "checked": True, "written": not check})
    else:
        print(f"{file}: {'in order' if check else 'written and checked'}")
