"""`gated-qwen push`: check a model folder and publish it on the Hub."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gated_qwen.cli import console

if TYPE_CHECKING:
    from gated_qwen.model_cards.push import PushResult


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A model folder with a card (README.md).")],
    repo_id: Annotated[str, typer.Argument(help="NAME, or OWNER/NAME.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, list the files and show the card; no network.")
    ] = False,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository; an old one must agree.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, created when missing; default: main.")] = None,
    tag: Annotated[str | None, typer.Option(help="A name for the commit.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    replace_card: Annotated[
        bool, typer.Option("--replace-card", help="Overwrite a card that is there and differs; else it is kept.")
    ] = False,
    replace_tag: Annotated[bool, typer.Option("--replace-tag", help="Move TAG if it is taken.")] = False,
    refresh_code: Annotated[
        bool, typer.Option("--refresh-code", help="First bring the code in DIR to this version of the package.")
    ] = False,
    include: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Send what would stay here as a leftover; repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Do not send these files; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Publish a model folder on the Hub: checks first, then one commit. The token is that of `hf auth login`."""
    if not dry_run and sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0")  # the client draws the bars of an upload
        os.environ.setdefault("TQDM_DISABLE", "")
    console.quiet_libraries()
    from gated_qwen.model_cards.push import push as push_folder

    result = push_folder(
        folder,
        repo_id,
        private=private,
        revision=revision,
        tag=tag,
        create_pr=create_pr,
        commit_message=message,
        replace_card=replace_card,
        replace_tag=replace_tag,
        refresh_code=refresh_code,
        include=include or (),
        exclude=exclude or (),
        dry_run=dry_run,
    )
    for note in result.notes:
        console.note(f"note: {note}")
    if as_json:
        console.print_json({**result.to_dict(), "bytes": result.bytes})
    elif dry_run:
        _print_plan(result)
    else:
        _print_result(result)


def _print_plan(result: "PushResult") -> None:
    for path, size in result.files.items():
        print(f"{size:>15,}  {path}")
    for entry in result.left_out:
        print(f"{'stays here':>15}  {entry.path} ({entry.reason})")
    print(f"{result.bytes:>15,}  bytes in {len(result.files)} files, would go to {result.repo_id}\n")
    print(result.card, end="" if result.card.endswith("\n") else "\n")


def _print_result(result: "PushResult") -> None:
    print(f"{result.pull_request or result.url}: {len(result.files)} files, {result.bytes:,} bytes")
    if result.deleted:
        print(f"deleted there: {', '.join(result.deleted)}")
    print(f"commit {result.commit}{f', tagged {result.tag}' if result.tag else ''}; load it with")
    print(f"    {result.load}")
