"""`gated-qwen diagnose`: where attention goes, how large activations grow, and what the gates do, in one report."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gated_qwen.cli import console


def diagnose(
    paths: Annotated[
        list[str] | None,
        typer.Argument(help="Model folders, GGUF files or Hub repository ids; with --from-json: diagnosis files."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 file to read, as long as the tokens that are asked for.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a sequence, which is one document.")] = 1024,
    sequences: Annotated[int, typer.Option(help="How many sequences, one after the other in the text.")] = 1,
    offset: Annotated[int, typer.Option(help="Tokens of the text to leave out first.")] = 0,
    bos: Annotated[
        str, typer.Option(help="Begin sequences with BOS: auto (as the tokenizer does), always or never.")
    ] = "auto",
    out: Annotated[Path | None, typer.Option(help="FILE.json: write the diagnosis.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="FILE.html: write the report, one page that needs no network.")
    ] = None,
    from_json: Annotated[
        bool, typer.Option("--from-json", help="PATHS are diagnosis files: show them again; no model is loaded.")
    ] = False,
    skip_queries: Annotated[int, typer.Option(help="Queries at the start that the 'without' numbers leave out.")] = 64,
    head_keys: Annotated[int, typer.Option(help="How many of the first visible keys are summed up as the head.")] = 4,
    keys: Annotated[str, typer.Option(help="Key positions whose share is measured, with commas.")] = "0,1,2,3",
    columns: Annotated[
        str, typer.Option(help="Share of every key position: sample (of the queries), all (exact, slower) or off.")
    ] = "sample",
    chunk: Annotated[
        int | None, typer.Option(help="Prefill in chunks of so many tokens; default: 2048 beyond 4096 tokens.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto (that of the weights), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="As torch names it; else the first GPU, or the CPU.")] = None,
    beyond_limit: Annotated[
        bool, typer.Option("--beyond-limit", help="Allow lengths over the model's longest context.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that a model of another family brings.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT and HTML.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
) -> None:
    """Diagnose attention sinks, massive activations and gates of any causal LM on a text, at any length."""
    if not paths:
        raise typer.BadParameter("name a model: gated-qwen diagnose PATH --text FILE (or --from-json FILE)")
    if not from_json and text is None:
        raise typer.BadParameter("--text FILE: name the text to read")
    for option, file, ending in (("--out", out, ".json"), ("--html", html, ".html")):
        if file is not None and file.suffix != ending:
            raise typer.BadParameter(f"{option} {file}: its ending must be {ending}")
    check_new(out, html, overwrite=overwrite)
    if from_json:
        from gated_qwen.diagnostics.diagnosis import read_diagnoses

        diagnoses = [diagnosis for path in paths for diagnosis in read_diagnoses(path)]
    else:
        key_positions = whole_numbers("--keys", keys)
        assert text is not None
        text.stat()  # a missing text is told before a model is loaded
        console.quiet_libraries()
        from gated_qwen.diagnostics.diagnose import ProbeSettings

        diagnoses = [
            _measure(
                path,
                text=text,
                cut={"length": length, "count": sequences, "offset": offset, "bos": bos},
                run={
                    "settings": ProbeSettings(
                        skip_queries=skip_queries, head_keys=head_keys, keys=key_positions, columns=columns
                    ),
                    "chunk": chunk,
                    "batch_size": batch_size,
                },
                load={"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code},
                beyond_limit=beyond_limit,
            )
            for path in paths
        ]
    _show(diagnoses, out, html, as_json)


def _measure(
    path: str,
    *,
    text: Path | None,
    cut: dict[str, Any],
    run: dict[str, Any],
    load: dict[str, Any],
    beyond_limit: bool,
) -> dict[str, Any]:
    """Loads one model, measures it, and lets go of it."""
    from gated_qwen.cli.loading import display_name, loaded_model
    from gated_qwen.diagnostics.diagnose import diagnose as measure
    from gated_qwen.diagnostics.text_sequences import read_sequences
    from gated_qwen.evaluation.plan import longest_context

    with loaded_model(path, **load) as (model, tokenizer):
        limit = longest_context(model.config)
        if limit is not None and cut["length"] > limit and not beyond_limit:
            raise ValueError(
                f"{path}: length {cut['length']} is over the model's longest context of {limit} tokens; take a "
                "smaller one, extend the model, or pass --beyond-limit to see what happens there"
            )
        assert text is not None
        found = read_sequences(text, tokenizer, **cut)
        name = display_name(path)
        with console.counting_bar(f"diagnosing {name}", "tokens") as (start, progress):
            return measure(
                model,
                found.input_ids,
                name=name,
                source=found.source,
                tokenizer=tokenizer,
                start=start,
                progress=progress,
                **run,
            )


def _show(diagnoses: list[dict[str, Any]], out: Path | None, html: Path | None, as_json: bool) -> None:
    from gated_qwen.diagnostics.diagnosis import write_diagnoses
    from gated_qwen.diagnostics.report import write_report

    if out is not None:
        write_diagnoses(out, diagnoses)
    if html is not None:
        write_report(html, diagnoses)
    if as_json:
        console.print_json({"diagnoses": diagnoses})
        return
    _print(diagnoses)
    for file in (out, html):
        if file is not None:
            console.note(f"wrote {file}")


def _print(diagnoses: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from gated_qwen.diagnostics.headline import headline
    from gated_qwen.diagnostics.report_html import NOTHING, subjects

    columns = [(subject.label, headline(subject.diagnosis)) for subject in subjects(diagnoses)]
    table = Table(title="gated-qwen diagnose", title_justify="left")
    table.add_column("")
    for label, _ in columns:
        table.add_column(escape(label), justify="right")
    for name in dict.fromkeys(name for _, column in columns for name in column):
        table.add_row(name, *(escape(column.get(name, NOTHING)) for _, column in columns))
    Console().print(table)


def check_new(*files: Path | None, overwrite: bool) -> None:
    """Refuses to replace a file, before any work is done."""
    for file in files:
        if file is not None and file.exists() and not overwrite:
            raise FileExistsError(f"{file} exists; name another file, or pass --overwrite to replace it")


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Reads numbers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: write whole numbers with commas between them") from None
