"""The report's figures of activations: maxima and medians by layer on a logarithmic axis, and the largest values."""

from collections.abc import Sequence
from typing import Any

from gated_qwen.diagnostics import svg
from gated_qwen.diagnostics.diagnosis import KINDS
from gated_qwen.diagnostics.report_html import NOTHING, Subject, amount, figure, panels, ranges, section, table

NAMES = {"residual": "residual stream", "attention_output": "attention output", "ffn_output": "FFN output"}
PANEL = 316.0
TOP_ROWS = 8


def activation_section(subjects: Sequence[Subject]) -> str:
    return section("Massive activations", _maxima(subjects), _largest(subjects))


def _maxima(subjects: Sequence[Subject]) -> str:
    blocks = [block for subject in subjects for kind in KINDS for block in subject["activations"][kind]]
    y = svg.log_axis([block[name] for block in blocks for name in ("max", "median")], 240, 10)
    drawn = [(NAMES[kind], _panel(subjects, kind, y)) for kind in KINDS]
    legend = [(subject.series, f"{subject.label}: maximum") for subject in subjects]
    return figure(
        "Largest and median absolute value by layer",
        panels(drawn, columns=3),
        "Solid: the largest absolute value over all tokens and channels; dashed: the median. The axis is logarithmic. "
        "Residual index 0 is the embedding and index i the raw stream after layer i - 1, never after the final norm.",
        [*legend, ("uniform", "dashed: median")],
    )


def _panel(subjects: Sequence[Subject], kind: str, y: svg.Axis) -> str:
    last = max((block["index"] for subject in subjects for block in subject["activations"][kind]), default=0)
    x = svg.Axis(-0.5, last + 0.5, 44, PANEL - 8, whole=True)
    parts = [svg.frame(x, y, "index" if kind == "residual" else "layer")]
    for subject in subjects:
        blocks = subject["activations"][kind]
        names = [f"{subject.label}, {block['index']}: {amount(block['max'])}" for block in blocks]
        medians = [(block["index"], block["median"] or None) for block in blocks]
        parts.append(svg.line(medians, x, y, f"{subject.series} dashed"))
        maxima = [(block["index"], block["max"] or None) for block in blocks]
        parts.append(svg.line(maxima, x, y, subject.series, names, width=subject.width))
    return svg.drawing(PANEL, 284, f"{NAMES[kind]}, maximum by layer", "".join(parts))


def _largest(subjects: Sequence[Subject]) -> str:
    """One row for each place (kind, position, channel), which the residual stream carries through many layers."""
    rows = []
    for subject in subjects:
        places: dict[tuple[str, int, int], list[tuple[int, dict[str, Any]]]] = {}
        for kind in KINDS:
            for block in subject["activations"][kind]:
                for top in block["top"]:
                    places.setdefault((kind, top["position"], top["channel"]), []).append((block["index"], top))
        largest = {place: max(entries, key=_size) for place, entries in places.items()}
        for place in sorted(places, key=lambda place: -_size(largest[place]))[:TOP_ROWS]:
            kind, position, channel = place
            index, top = largest[place]
            token = top.get("token") or (NOTHING if top["token_id"] is None else f"id {top['token_id']}")
            token = token if token.strip() else repr(token)  # white space is to be seen
            where = (f"{position:,}", f"{channel:,}", ranges({entry for entry, _ in places[place]}), f"{index}")
            rows.append((subject.label, NAMES[kind], token, *where, amount(top["value"])))
    head = ("model", "where", "token", "position", "channel", "among the largest at", "largest at", "value")
    return figure(
        "The largest single values",
        table(head, rows, numeric_from=3),
        "Massive activations sit in a few channels of a few tokens, mostly the first; values keep their sign, and the "
        "position counts from the start of the token's own document. Layers are counted as in the figure above.",
    )


def _size(entry: tuple[int, dict[str, Any]]) -> float:
    return abs(entry[1]["value"] or 0.0)
