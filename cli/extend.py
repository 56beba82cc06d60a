"""`gated-qwen extend`: another RoPE base, or YaRN, with its effect shown and every length in step."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gated_qwen.cli import console

ROWS = (
    ("longest text (tokens)", "max_position_embeddings"),
    ("trained length (tokens)", "original_max_position_embeddings"),
    ("tokenizer's limit (tokens)", "model_max_length"),
    ("RoPE base", "rope_theta"),
    ("scaling", "rope_type"),
    ("factor", "factor"),
    ("attention factor", "attention_factor"),
)


def extend(
    source: Annotated[Path, typer.Argument(help="A model folder.")],
    target: Annotated[Path | None, typer.Argument(help="The folder to write.")] = None,
    rope_theta: Annotated[float | None, typer.Option(help="A new base; needs training.")] = None,
    train_length: Annotated[
        int | None, typer.Option(help="With --rope-theta: the length at which training goes on.")
    ] = None,
    yarn_factor: Annotated[float | None, typer.Option(help="New length over trained length.")] = None,
    to_length: Annotated[int | None, typer.Option(help="New length in tokens, instead of a factor.")] = None,
    original_length: Annotated[
        int | None, typer.Option(help="Trained length in tokens, where the config does not tell.")
    ] = None,
    beta_fast: Annotated[float | None, typer.Option(help="Turns above which a frequency is kept (32).")] = None,
    beta_slow: Annotated[float | None, typer.Option(help="Turns below which a frequency is interpolated (1).")] = None,
    truncate: Annotated[
        bool | None, typer.Option("--truncate/--no-truncate", help="Round the bounds of the blend (yes).")
    ] = None,
    attention_factor: Annotated[
        float | None, typer.Option(help="On cos and sin, instead of 0.1 ln(factor) + 1.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the scaling off.")] = False,
    in_place: Annotated[bool, typer.Option("--in-place", help="Change SOURCE's config files; backups stay.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the frequency ramp: .png, .svg or .pdf.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a non-empty TARGET.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Change a model's RoPE base or extend its context with YaRN; without a change, show how it stands."""
    changes: dict[str, Any] = {
        "rope_theta": rope_theta,
        "train_length": train_length,
        "factor": yarn_factor,
        "to_length": to_length,
        "original_length": original_length,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": truncate,
        "attention_factor": attention_factor,
        "remove": remove or None,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    console.quiet_libraries()
    from gated_qwen.configuration.context import smallest_factors
    from gated_qwen.configuration.engines import NOT_RUN, engine_settings
    from gated_qwen.configuration.picture import check_plot
    from gated_qwen.conversion.checkpoint import read_config
    from gated_qwen.conversion.extend import context_state
    from gated_qwen.conversion.extend import extend as extend_folder
    from gated_qwen.conversion.extend_plot import plot_frequencies

    if plot is not None:
        check_plot(plot)
    before_config = read_config(source)
    report: dict[str, Any]
    if not changes and target is None and not in_place:
        config, folder, state = before_config, source, context_state(source)
        report = {"folder": str(source), "state": state}
        columns = {"now": state}
    else:
        with console.counting_bar("copying weights") as (start, progress):
            result = extend_folder(
                source, target, in_place=in_place, overwrite=overwrite, start=start, progress=progress, **changes
            )
        config, folder = result.config, result.folder
        report = {
            "folder": str(folder),
            "before": result.before,
            "after": result.after,
            "backups": list(result.backups),
            "weights": {"linked": result.linked, "copied": result.copied},
            "warnings": list(result.warnings),
        }
        columns = {"before": result.before, "after": result.after}
    if plot is not None:
        plot_frequencies(before_config, config, plot)
        report["plot"] = str(plot)
    report["smallest_factors"] = {str(length): factor for length, factor in smallest_factors(config).items()}
    report["engines"] = {"status": NOT_RUN, **engine_settings(config, str(folder))}
    for warning in report.get("warnings", []):
        console.note(f"warning: {warning}")
    if as_json:
        console.print_json(report)
    else:
        _print(report, columns)


def _print(report: dict[str, Any], columns: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", *columns, title=escape(report["folder"]), title_justify="left")
    for label, name in ROWS:
        table.add_row(label, *(_value(state[name]) for state in columns.values()))
    scaled = any(state["rope_type"] != "default" for state in columns.values())
    for name in ("kept", "blended", "interpolated") if scaled else ():
        table.add_row(f"frequencies {name}", *(str(state["frequencies"][name]) for state in columns.values()))
    wavelengths = [state["wavelengths"] for state in columns.values()]
    table.add_row("wavelengths (tokens)", *(f"{waves[0]:,.1f} to {waves[-1]:,.0f}" for waves in wavelengths))
    Console().print(table)
    if report["smallest_factors"]:
        enough = ", ".join(f"{int(length):,}: {factor:g}" for length, factor in report["smallest_factors"].items())
        print(f"\nYaRN acts on short texts too: take the smallest factor that is enough ({enough}).")
    if report.get("backups"):
        print(f"\nbackups: {', '.join(report['backups'])}")
    if "plot" in report:
        print(f"\npicture: {report['plot']}")
    _print_engines(report["engines"])


def _print_engines(engines: dict[str, Any]) -> None:
    overrides = any(settings["override"] for name, settings in engines.items() if name != "status")
    hint = "; the second line is for a model without" if overrides else ""
    print(f"\nServing ({engines['status']}). The folder carries its settings{hint}.")
    for name, settings in engines.items():
        if name == "status":
            continue
        print(f"{name}:")
        for line in (settings["folder"], settings["override"], *(f"note: {note}" for note in settings["notes"])):
            if line is not None:
                print(f"  {line}")


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.5g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
