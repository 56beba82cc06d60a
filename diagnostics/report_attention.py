"""The report's figures of attention: shares by layer, by query position, by head, and where else attention gathers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from gated_qwen.diagnostics import svg
from gated_qwen.diagnostics.report_html import (
    LEFT,
    RIGHT,
    WIDTH,
    Subject,
    figure,
    mean,
    panels,
    percent,
    ranges,
    section,
    table,
)

Rows = dict[int, list[float | None]]  # layer -> one value for each head


def attention_section(subjects: Sequence[Subject]) -> str:
    return section(
        "Where attention goes",
        _by_layer(subjects),
        _by_query(subjects),
        _by_head(subjects),
        _sink_set(subjects),
    )


def layer_axis(subjects: Sequence[Subject], width: float = WIDTH, extra: int = 0) -> svg.Axis:
    """The axis that all figures over layers share, so that layers stand below each other."""
    layers = max(subject["model"]["layers"] for subject in subjects) + extra
    return svg.Axis(-0.5, layers - 0.5, LEFT, width - RIGHT, whole=True)


def _by_layer(subjects: Sequence[Subject]) -> str:
    layers = [layer for subject in subjects for layer in subject["attention"]["layers"]]
    x = layer_axis(subjects)
    y = svg.value_axis([layer["first_token_share"] for layer in layers], 262, 10, least=0.05)
    parts = [svg.frame(x, y, "layer", "share of attention", percent=True)]
    legend = []
    for subject, baseline in zip(subjects, _baselines(subjects), strict=True):
        found = subject["attention"]["layers"]
        if baseline:
            parts.append(svg.line([(layer["layer"], layer["uniform"]) for layer in found], x, y, baseline))
        names = [_layer_name(subject, layer) for layer in found]
        points = [(layer["layer"], layer["first_token_share"]) for layer in found]
        parts.append(svg.line(points, x, y, subject.series, names, width=subject.width))
        legend.append((subject.series, subject.label))
    legend += _baseline_legend(subjects)
    return figure(
        "First-token share by layer",
        svg.drawing(WIDTH, 306, "First-token share by layer", "".join(parts)),
        "The mass that queries put on the first token, averaged over queries and heads. The dashed line is what "
        "uniform attention would put there, the mean of 1/n over queries that see n keys: only what lies above is a "
        "sink.",
        legend,
    )


def _by_query(subjects: Sequence[Subject]) -> str:
    curves = [(subject, _query_curve(subject, "first_token_share")) for subject in subjects]
    uniform = [_query_curve(subject, "uniform") for subject in subjects]
    longest = max((place for curve in uniform for place, _ in curve), default=10.0)
    x = svg.Axis(1.0, max(longest, 10.0), LEFT, WIDTH - RIGHT, log=True)
    y = svg.Axis(0.0, 1.0, 262, 10)
    parts = [svg.frame(x, y, "query position (tokens, logarithmic)", "share of attention", percent=True)]
    for curve, kind in zip(uniform, _baselines(subjects), strict=True):
        parts.append(svg.line(curve, x, y, kind) if kind else "")
    for subject, curve in curves:
        names = [f"{subject.label}, query {place:,.0f}: {percent(value)}" for place, value in curve]
        parts.append(svg.line(curve, x, y, subject.series, names, width=subject.width))
    legend = [(subject.series, subject.label) for subject in subjects] + _baseline_legend(subjects)
    return figure(
        "First-token share by query position",
        svg.drawing(WIDTH, 306, "First-token share by query position", "".join(parts)),
        "The same share by where the query stands in its document, averaged over layers and heads: uniform attention "
        "falls as 1/n, a sink does not. The first query sees one key, so its share is 100 %.",
        legend,
    )


def _query_curve(subject: Subject, name: str) -> list[tuple[float, float | None]]:
    """(position of the bin's middle counted from 1, mean over layers); bins without queries are left out."""
    layers = [layer["by_query"] for layer in subject["attention"]["layers"]]
    if not layers:
        return []
    edges = layers[0]["edges"]
    alike = [layer for layer in layers if layer["edges"] == edges]
    return [
        (math.sqrt((edges[i] + 1) * edges[i + 1]), mean(layer[name][i] for layer in alike))
        for i in range(len(edges) - 1)
        if layers[0]["queries"][i]
    ]


def _by_head(subjects: Sequence[Subject]) -> str:
    maps = [(subject, head_rows(subject, "first_token_share")) for subject in subjects]
    return head_maps(
        "First-token share by layer and head",
        subjects,
        [(subject.label, subject, rows) for subject, rows in maps],
        "Each cell is one query head: the mean over its queries of the mass on the first token. Rest the pointer on a "
        "cell to read it. All maps share one scale.",
        "heat",
    )


def head_rows(subject: Subject, name: str) -> Rows:
    return {layer["layer"]: layer["heads"][name] for layer in subject["attention"]["layers"]}


def head_maps(
    title: str,
    subjects: Sequence[Subject],
    maps: Sequence[tuple[str, Subject, Rows]],
    caption: str,
    scale: str,
    *,
    high: float | None = None,
    number: Callable[[float | None], str] = percent,
    unit: str = "head",
) -> str:
    """Maps of layers (across) and heads (down), one below the other, with one colour scale from 0 to `high`.

    `number` writes a cell's value, and `unit` says what the rows are.
    """
    if not maps:
        return ""
    if high is None:
        values = [value for _, _, rows in maps for row in rows.values() for value in row if value is not None]
        high = svg.value_axis(values, 0, 1, least=0.01).high
    x = layer_axis(subjects)
    bar = svg.drawing(
        WIDTH, 30, "colour scale", svg.colour_bar(WIDTH - RIGHT - 240, 2, 220, high, scale, percent=number is percent)
    )
    drawn = [(name, _head_map(name, rows, x, high, scale, number, unit)) for name, _, rows in maps]
    return figure(title, panels(drawn, columns=1) + bar, caption)


def _head_map(
    name: str, rows: Rows, x: svg.Axis, high: float, scale: str, number: Callable[[float | None], str], unit: str
) -> str:
    heads = max((len(row) for row in rows.values()), default=1)
    size = max(4.0, min(18.0, 300.0 / heads))  # pixels for a head
    gap = 0.0 if heads > 24 else 1.0
    width = x(1) - x(0)
    bottom = 4 + heads * size
    parts = []
    for layer, row in rows.items():
        for head, value in enumerate(row):
            if value is not None:
                told = f"layer {layer}, {unit} {head}: {number(value)}"
                place = (x(layer) - width / 2 + gap / 2, 4 + head * size)
                parts.append(svg.cell(*place, width - gap, size - gap, value / high, scale, told))
    stride = max(1, int(svg.round_step(heads / 10)))
    parts += [svg.text(LEFT - 7, 4 + (head + 0.5) * size + 4, head, "end", "tick") for head in range(0, heads, stride)]
    parts.append(svg.text(LEFT - 50, 4 + heads * size / 2, unit, kind="label", turned=True))
    parts += [svg.text(x(layer), bottom + 16, f"{layer:g}", kind="tick") for layer in x.ticks()]
    parts.append(svg.text((x.start + x.end) / 2, bottom + 34, "layer", kind="label"))
    return svg.drawing(WIDTH, bottom + 42, f"{name}, layers by {unit}s", "".join(parts))


def _sink_set(subjects: Sequence[Subject]) -> str:
    """The keys that gather attention anywhere, over all layers of a model."""
    rows = []
    notes = set()
    for subject in subjects:
        for position, found in _sinks(subject).items():
            layers = [layer for layer, _ in found]
            share, heads = max(sink["share"] or 0.0 for _, sink in found), sum(sink["heads"] for _, sink in found)
            rows.append(
                (subject.label, f"{position:,}", f"{len(layers)}", ranges(layers), f"{heads:,}", percent(share))
            )
        notes |= {_columns_note(layer["columns"]) for layer in subject["attention"]["layers"] if layer["columns"]}
    if not notes:
        return ""
    head = ("model", "key position", "layers", "which", "heads, all layers", "largest layer mean")
    body = table(head, rows) if rows else "<p>No key of any layer is in the sink set.</p>"
    return figure(
        "Sink set: every key position that gathers attention",
        body,
        "A key is in a layer's sink set when, in at least one head, the queries that can see it give it more than the "
        f"threshold on average. {' '.join(sorted(notes))}",
    )


def _sinks(subject: Subject) -> dict[int, list[tuple[int, dict[str, Any]]]]:
    found: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for layer in subject["attention"]["layers"]:
        for sink in (layer["columns"] or {"sink_set": []})["sink_set"]:
            found.setdefault(sink["position"], []).append((layer["layer"], sink))
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))[:12]
    return dict(ordered)


def _columns_note(columns: dict[str, Any]) -> str:
    how = "from all" if columns["exact"] else "estimated from"
    return f"Threshold {percent(columns['threshold'])}, {how} {columns['queries_used']:,} queries."


def _layer_name(subject: Subject, layer: dict[str, Any]) -> str:
    window = f", window of {layer['sliding_window']:,}" if layer["sliding_window"] else ""
    share, uniform = percent(layer["first_token_share"]), percent(layer["uniform"])
    return f"{subject.label}, layer {layer['layer']}{window}: {share} (uniform {uniform})"


def _baselines(subjects: Sequence[Subject]) -> list[str]:
    """The class of each subject's dashed baseline; where all are alike, one grey line and none for the others."""
    uniform: Callable[[Subject], list[Any]] = lambda subject: [  # noqa: E731
        round(layer["uniform"] or 0.0, 6) for layer in subject["attention"]["layers"]
    ]
    if all(uniform(subject) == uniform(subjects[0]) for subject in subjects):
        return ["uniform"] + [""] * (len(subjects) - 1)
    return [f"{subject.series} dashed" for subject in subjects]


def _baseline_legend(subjects: Sequence[Subject]) -> list[tuple[str, str]]:
    one = _baselines(subjects)[0] == "uniform"
    return [("uniform", "uniform attention" if one else "dashed: uniform attention")]
