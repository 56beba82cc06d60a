"""`gated-qwen inspect`: what a model folder holds."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gated_qwen.cli import console


def inspect(
    path: Annotated[Path, typer.Argument(help="A model folder.")],
    layout_check: Annotated[
        Path | None,
        typer.Option(metavar="TEXT", help="Read this text under every layout of a fused q_proj and print the losses."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Print family, layout, gate, RoPE, parameters and dtype of a model folder; no weights are loaded."""
    if layout_check is not None:
        _check_layouts(path, layout_check, as_json)
        return
    from gated_qwen.conversion.inspection import inspect_checkpoint

    summary = inspect_checkpoint(path)
    if as_json:
        console.print_json({"path": str(path), **summary.to_dict()})
        return
    shape = summary.shape
    share = summary.gate_parameters / summary.parameters if summary.parameters else 0.0
    rows = [
        ("family", summary.model_type),
        ("gate", _gate(summary.gate)),
        ("layout", summary.layout or "no gate"),
        ("RoPE", _rope(summary.rope)),
        (
            "layers x width, FFN",
            f"{shape['num_hidden_layers']} x {shape['hidden_size']}, {shape['intermediate_size'] or 'none'}",
        ),
        *([] if summary.experts is None else [("experts", _experts(summary.experts))]),
        (
            "heads",
            f"{shape['num_attention_heads']} query, {shape['num_key_value_heads']} key/value, of {shape['head_dim']}",
        ),
        ("vocabulary", f"{shape['vocab_size']:,}, {'tied' if shape['tie_word_embeddings'] else 'untied'} head"),
        ("parameters", f"{summary.parameters:,}"),
        *([] if summary.experts is None else [("active for a token", f"{summary.active_parameters:,}")]),
        ("of them in gates", f"{summary.gate_parameters:,} ({share:.2%})"),
        ("dtype", ", ".join(f"{dtype} {count:,}" for dtype, count in summary.dtypes.items())),
        ("weight files", f"{summary.files}, {summary.bytes:,} bytes"),
    ]
    console.print_table(str(path), rows)


def _check_layouts(path: Path, text: Path, as_json: bool) -> None:
    console.quiet_libraries()
    from gated_qwen.configuration.text_file import read_text
    from gated_qwen.conversion.layout_check import check_layouts

    losses = check_layouts(path, read_text(text)[0])
    if as_json:
        console.print_json({"path": str(path), "losses": [vars(entry) for entry in losses]})
        return
    rows = [(f"{entry.layout}, norms are {entry.norms}", f"{entry.loss:.3f}") for entry in losses]
    console.print_table(f"{path}: loss on {text.name} in nats per token, best first", rows)


def _gate(gate: dict[str, Any] | None) -> str:
    if gate is None:
        return "none"
    from gated_qwen.conversion.inspection import GATE_DEFAULTS

    words = [gate["granularity"], "on", ", ".join(gate["positions"])]
    words += [f"{name}={gate[name]}" for name, default in GATE_DEFAULTS.items() if gate.get(name, default) != default]
    return " ".join(words)


def _experts(experts: dict[str, Any]) -> str:
    return (
        f"{experts['num_experts_per_tok']} of {experts['num_experts']}, width {experts['moe_intermediate_size']}, in "
        f"{experts['sparse_layers']} layers{', and a shared one' if experts['shared_expert'] else ''}"
    )


def _rope(rope: dict[str, Any]) -> str:
    text = f"{rope['rope_type']}, base {rope['rope_theta']}, {rope['max_position_embeddings']} positions"
    if rope["factor"] is not None:
        text += f", factor {rope['factor']} over {rope['original_max_position_embeddings']}"
    return text
