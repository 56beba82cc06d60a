"""The `gated-qwen` command: one file per verb, and nothing heavy before a verb runs."""

import sys
from typing import Annotated

import typer

from gated_qwen.cli import console
from gated_qwen.cli.attention_map import attention_map
from gated_qwen.cli.card import card
from gated_qwen.cli.convert import convert
from gated_qwen.cli.convert_adapter import convert_adapter
from gated_qwen.cli.demo import demo
from gated_qwen.cli.diagnose import diagnose
from gated_qwen.cli.evaluate import evaluate
from gated_qwen.cli.extend import extend
from gated_qwen.cli.inspect import inspect
from gated_qwen.cli.merge import merge
from gated_qwen.cli.new import new
from gated_qwen.cli.push import push
from gated_qwen.cli.serve import PASS_ON, serve
from gated_qwen.cli.train import train

app = typer.Typer(
    help="Build, convert, train, measure, publish and serve Qwen-style decoders with gated attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
VERBS = (
    *(new, inspect, convert, extend),
    *(train, merge, convert_adapter),
    *(diagnose, attention_map, evaluate),
    *(card, push, demo),
)
for verb in VERBS:
    app.command()(verb)
app.command(context_settings=PASS_ON)(serve)


def _version(wanted: bool) -> None:
    if wanted:
        import gated_qwen

        print(gated_qwen.__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    console.debug = debug


def main() -> None:
    """Runs the command. Exit 0: done; 1: refused or failed, with one line on stderr; 2: wrong usage."""
    try:
        app()
    except Exception as error:
        if console.debug:
            raise
        console.fail(error)
        sys.exit(1)
