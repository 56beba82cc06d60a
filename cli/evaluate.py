"""`gated-qwen evaluate`: long-context tasks and perplexity on a model, and two results side by side."""

from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from gated_qwen.cli import console


def evaluate(
    path: Annotated[str | None, typer.Argument(help="A model folder or a Hub repository id.")] = None,
    tasks: Annotated[str, typer.Option(help="Names with commas between them; `list` shows them all.")] = "niah_single",
    lengths: Annotated[
        str, typer.Option(help="Tokens of prompt and answer together, with commas.")
    ] = "1024,2048,4096",
    depths: Annotated[str, typer.Option(help="Where the needle lies, 0 (first) to 1 (last).")] = "0,0.25,0.5,0.75,1",
    samples: Annotated[int, typer.Option(help="For each task, length and depth; windows of text for perplexity.")] = 5,
    seed: Annotated[int, typer.Option(help="Of all samples.")] = 0,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 file for needles to lie in (else noise), and for perplexity.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="FILE.json: the summary; a .jsonl with every sample and a .csv go beside it.")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Ask with the tokenizer's chat template.")
    ] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="Room for an answer, instead of the task's own.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto (that of the weights), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="As torch names it; else the first GPU, or the CPU.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw scores over length and depth: .png, .svg or .pdf.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in OUT.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in OUT.")] = False,
    beyond_limit: Annotated[
        bool, typer.Option("--beyond-limit", help="Allow lengths over the model's longest context.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that a model of another family brings.")
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="BEFORE AFTER", help="Print two summaries side by side; nothing is run."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure what a model makes of a long context: RULER-like tasks, and perplexity by position. Offline."""
    if compare is not None:
        _compare(*compare, as_json)
        return
    if tasks == "list":
        _list_tasks(as_json)
        return
    if path is None:
        raise typer.BadParameter("name the model: gated-qwen evaluate PATH")
    if resume and (overwrite or out is None):
        raise typer.BadParameter("--resume goes on with an --out, so it needs one and cannot be joined by --overwrite")
    wanted = {
        "tasks": tuple(tasks.split(",")),
        "lengths": _numbers("--lengths", lengths, int),
        "depths": _numbers("--depths", depths, float),
    }
    if out is not None and out.suffix != ".json":
        raise typer.BadParameter(f"--out {out}: its ending must be .json")
    console.quiet_libraries()
    from gated_qwen.configuration.picture import check_plot
    from gated_qwen.evaluation.evaluate import run_plan
    from gated_qwen.evaluation.heat_map import draw_heat_map
    from gated_qwen.evaluation.loading import environment, load_model, model_settings
    from gated_qwen.evaluation.plan import Plan
    from gated_qwen.evaluation.results import check_new, summarize, write_summary

    if plot is not None:
        check_plot(plot)
    plan = Plan(
        **wanted,
        samples=samples,
        seed=seed,
        text=text,
        chat_template=chat_template,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        beyond_limit=beyond_limit,
    )
    records_path = out.with_suffix(".jsonl") if out else None
    if out and records_path:
        check_new(out, records_path, out.with_suffix(".csv"), resume=resume, overwrite=overwrite)
    model, tokenizer = load_model(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    with console.counting_bar("evaluating", "samples") as (start, progress):
        run = run_plan(
            model,
            tokenizer,
            plan,
            path=records_path,
            settings={"model": path, **model_settings(model)},
            resume=resume,
            overwrite=overwrite,
            start=start,
            progress=progress,
        )
    cells = summarize(run.records)
    summary: dict[str, Any] = {
        "settings": {**run.settings, "text_name": text.name if text else None},
        "environment": environment(model),
        "measured": date.today().isoformat(),
        "cells": cells,
    }
    if out is not None:
        write_summary(out, summary)
    if plot is not None:
        draw_heat_map(cells, plot, path)
    if as_json:
        console.print_json(summary)
    else:
        _print(path, cells)


def _numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    """Reads numbers with commas between them."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: write numbers with commas between them") from None


def _list_tasks(as_json: bool) -> None:
    from gated_qwen.evaluation.tasks import TASKS

    names = [*TASKS, "perplexity"]
    if as_json:
        console.print_json({"tasks": names})
    else:
        print("\n".join(names))


def _print(title: str, cells: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    scored = [cell for cell in cells if "score" in cell]
    lengths = sorted({cell["length"] for cell in scored})
    if scored:
        table = Table(
            "task", "depth", *(f"{n:,}" for n in lengths), title=escape(f"{title}: score"), title_justify="left"
        )
        scores = {(cell["task"], cell["depth"], cell["length"]): cell["score"] for cell in scored}
        for task, depth in dict.fromkeys((cell["task"], cell["depth"]) for cell in scored):
            row = [scores.get((task, depth, length)) for length in lengths]
            table.add_row(task, "-" if depth is None else f"{depth:g}", *map(_score, row))
        Console().print(table)
    for cell in cells:
        if "nll" in cell:
            rows = [("perplexity", f"{cell['perplexity']:.3f}"), ("mean NLL, nats per token", f"{cell['nll']:.4f}")]
            rows += [(f"NLL, tokens {first:,} to {last - 1:,}", f"{nll:.4f}") for first, last, nll in cell["buckets"]]
            console.print_table(f"{title}: perplexity over {cell['length']:,} tokens", rows)


def _compare(before: Path, after: Path, as_json: bool) -> None:
    from gated_qwen.evaluation.compare import compare, read_results

    changes = compare(read_results(before), read_results(after))
    if as_json:
        console.print_json({"changes": [vars(change) for change in changes]})
        return
    from rich.console import Console
    from rich.table import Table

    lengths = sorted({change.length for change in changes})
    table = Table("task", "", *(f"{length:,}" for length in lengths))
    for task in dict.fromkeys(change.task for change in changes):
        found = {change.length: change for change in changes if change.task == task}
        for side in ("before", "after"):
            values = [getattr(found[length], side) if length in found else None for length in lengths]
            table.add_row(task if side == "before" else "", side, *map(_score, values))
    Console().print(table)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
