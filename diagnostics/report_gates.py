"""The report's figures of gates: how far they open, by layer, head and token, and how sparse they make the output."""

from collections.abc import Sequence
from typing import Any

from gated_qwen.diagnostics import svg
from gated_qwen.diagnostics.report_attention import head_maps, layer_axis
from gated_qwen.diagnostics.report_html import (
    LEFT,
    NOTHING,
    RIGHT,
    WIDTH,
    Subject,
    amount,
    figure,
    mean,
    panels,
    ranges,
    section,
    table,
)

PANEL = 472.0  # width of one of two drawings side by side
CLASSES = {"first": "first token", "early": "early tokens", "rest": "the rest"}
OUTPUTS = {
    "pre_gate": "before the gate",
    "mean_scaled": "times the mean gate",
    "norm_matched": "before, at the gated norm",
    "gated": "after the gate",
}
POSITIONS = {
    "attn_output": "attention output (G1)",
    "value": "value (G2)",
    "key": "key (G3)",
    "query": "query (G4)",
    "dense_output": "dense output (G5)",
}
Gate = tuple[Subject, str, list[dict[str, Any]]]  # a subject, a gate position and its layers


def gate_section(subjects: Sequence[Subject]) -> str:
    gates = _gates(subjects)
    if not gates:
        return ""
    return section(
        "What the gates do",
        _histograms(gates),
        _means(subjects, gates),
        _classes(gates),
        _written(subjects, gates),
        _sparsity(gates),
        _idle_heads(gates),
    )


def _gates(subjects: Sequence[Subject]) -> list[Gate]:
    found = []
    for subject in subjects:
        layers = (subject["gates"] or {"layers": []})["layers"]
        for position in dict.fromkeys(layer["position"] for layer in layers):
            found.append((subject, position, [layer for layer in layers if layer["position"] == position]))
    return found


def _name(gate: Gate, gates: Sequence[Gate]) -> str:
    subject, position, _ = gate
    one_each = len({id(s) for s, _, _ in gates}) == len(gates) and len({p for _, p, _ in gates}) == 1
    return subject.label if one_each else f"{subject.label}: {POSITIONS.get(position, position)}"


def _histograms(gates: Sequence[Gate]) -> str:
    drawn = [(_name(gate, gates), _ridges(gate, _width(gates))) for gate in gates]
    return figure(
        "Gate values by layer",
        panels(drawn, columns=_columns(gates)),
        "One histogram for each layer, the first at the top, over all tokens, heads and coordinates; each is drawn to "
        "its own height. The tick marks the layer's mean. A sparse gate leans on 0.",
    )


def _columns(gates: Sequence[Gate]) -> int:
    return min(2, len(gates))


def _width(gates: Sequence[Gate]) -> float:
    """Of one gate's drawing: a single one spans the page."""
    return WIDTH if len(gates) == 1 else PANEL


def _ridges(gate: Gate, width: float) -> str:
    subject, _, layers = gate
    step = max(9.0, min(22.0, 480.0 / len(layers)))
    height = 1.7 * step
    lows = [layer["histogram"]["edges"][0] or 0.0 for layer in layers]
    highs = [layer["histogram"]["edges"][-1] or 0.0 for layer in layers]
    x = svg.Axis(min(lows), max(max(highs), min(lows) + 1e-6), LEFT, width - RIGHT)
    bottom = 8 + height + step * (len(layers) - 1)
    parts = [
        f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="8" y2="{bottom:.1f}"/>'
        + svg.text(x(value), bottom + 16, svg.tick_label(value), kind="tick")
        for value in x.ticks()
    ]
    stride = max(1, int(svg.round_step(len(layers) / 16)))
    for number, layer in enumerate(layers):
        base = 8 + height + number * step
        edges, counts = layer["histogram"]["edges"], layer["histogram"]["counts"]
        densities = [count / max(b - a, 1e-12) for a, b, count in zip(edges, edges[1:], counts, strict=False)]
        top = max(densities, default=0.0) or 1.0
        points = []
        for a, b, density in zip(edges, edges[1:], densities, strict=False):
            level = base - height * density / top
            points += [(x(a), level), (x(b), level)]
        low, middle, high = (amount(layer[name]) for name in ("min", "mean", "max"))
        told = f"layer {layer['layer']}: mean {middle}, from {low} to {high}"
        parts.append(svg.area(points, base, subject.series, told))
        if layer["mean"] is not None:
            place = x(layer["mean"])
            parts.append(
                f'<line class="mean" x1="{place:.1f}" x2="{place:.1f}" y1="{base - step * 0.6:.1f}" y2="{base:.1f}"/>'
            )
        if number % stride == 0:
            parts.append(svg.text(LEFT - 7, base + 3, layer["layer"], "end", "tick"))
    parts.append(svg.text((x.start + x.end) / 2, bottom + 34, "gate value", kind="label"))
    parts.append(svg.text(LEFT - 50, bottom / 2, "layer", kind="label", turned=True))
    return svg.drawing(width, bottom + 42, f"gate values of {subject.label} by layer", "".join(parts))


def _means(subjects: Sequence[Subject], gates: Sequence[Gate]) -> str:
    maps = [
        (_name(gate, gates), gate[0], {layer["layer"]: layer["heads"]["mean"] for layer in gate[2] if layer["heads"]})
        for gate in gates
    ]
    maps = [entry for entry in maps if entry[2]]
    values = [value for _, _, rows in maps for row in rows.values() for value in row if value is not None]
    return head_maps(
        "Mean gate by layer and head",
        subjects,
        maps,
        "How far each head's gate opens on average over tokens (and coordinates); strong colours write, pale "
        "ones hardly do. Key and value gates have one row for each key/value head.",
        "gate",
        high=max([1.0, *values]),
        number=amount,
    )


def _classes(gates: Sequence[Gate]) -> str:
    drawn = []
    width = _width(gates)
    y = svg.value_axis(
        [entry["mean"] for _, _, layers in gates for layer in layers for entry in layer["by_class"].values()], 210, 10
    )
    for gate in gates:
        layers = gate[2]
        x = layer_axis([gate[0]], width)
        parts = [svg.frame(x, y, "layer", "mean gate")]
        for number, name in enumerate(CLASSES):
            points = [(layer["layer"], layer["by_class"].get(name, {}).get("mean")) for layer in layers]
            names = [f"layer {layer:g}, {CLASSES[name]}: {amount(value)}" for layer, value in points]
            parts.append(svg.line(points, x, y, f"c{number + 1}", names))
        drawn.append((_name(gate, gates), svg.drawing(width, 252, "mean gate by token class", "".join(parts))))
    return figure(
        "Mean gate by token class",
        panels(drawn, columns=_columns(gates)),
        "The mean gate of the first token of each document, of the early ones that follow it (as many as the report "
        "leaves out of its skipped numbers) and of the rest.",
        [(f"c{number + 1}", name) for number, name in enumerate(CLASSES.values())],
    )


def _written(subjects: Sequence[Subject], gates: Sequence[Gate]) -> str:
    """Where a head looks, and beside it what it writes of that."""
    maps = []
    for gate in gates:
        subject, _, layers = gate
        written = [(layer["layer"], layer["written"]) for layer in layers if layer["written"]]
        if written:
            maps.append((f"{subject.label}: looks at", subject, {n: w["first_token_share"] for n, w in written}))
            maps.append((f"{subject.label}: writes", subject, {n: w["written_share"] for n, w in written}))
    return head_maps(
        "First-token share: looked at, and written",
        subjects,
        maps,
        "Above, the share that a head puts on the first token; below, the mean of that share times its gate, which is "
        "what reaches the output projection. A head may look at the sink and write nothing of it. One scale.",
        "heat",
    )


def _sparsity(gates: Sequence[Gate]) -> str:
    drawn = []
    width = _width(gates)
    for gate in gates:
        subject, _, layers = gate
        measured = [layer["sparsity"] for layer in layers if layer["sparsity"]]
        thresholds = subject["gates"]["thresholds"]
        if not measured or len(thresholds) < 2:
            continue
        x = svg.Axis(min(thresholds), max(thresholds), LEFT, width - RIGHT, log=True)
        y = svg.Axis(0.0, 1.0, 230, 10)
        parts = [svg.frame(x, y, "threshold τ", "share below τ", percent=True)]
        for number, name in enumerate(OUTPUTS):
            points = [(tau, mean(entry[name][i] for entry in measured)) for i, tau in enumerate(thresholds)]
            names = [f"{OUTPUTS[name]}, τ = {tau:g}: {svg.tick_label(value or 0.0, True)}" for tau, value in points]
            parts.append(svg.line(points, x, y, f"c{number + 1}", names))
        drawn.append((_name(gate, gates), svg.drawing(width, 272, "sparsity by threshold", "".join(parts))))
    if not drawn:
        return ""
    return figure(
        "Sparsity of the attention output, S(τ)",
        panels(drawn, columns=_columns(gates)),
        "The share of output values whose absolute value is below τ, averaged over layers. The gate makes the output "
        "sparser in itself where its curve lies above that of the ungated output scaled to the same norm.",
        [(f"c{number + 1}", name) for number, name in enumerate(OUTPUTS.values())],
    )


def _idle_heads(gates: Sequence[Gate]) -> str:
    rows = []
    for gate in gates:
        for layer in gate[2]:
            heads = layer["heads"] or {"dead": [], "always_open": []}
            if heads["dead"] or heads["always_open"]:
                dead, opened = ranges(heads["dead"]) or NOTHING, ranges(heads["always_open"]) or NOTHING
                rows.append((_name(gate, gates), f"{layer['layer']}", dead, opened))
    below, above = (
        next((amount(s["gates"].get(name)) for s, _, _ in gates if s["gates"].get(name) is not None), NOTHING)
        for name in ("dead_below", "open_above")
    )
    return figure(
        "Heads whose gate never moves",
        table(("model", "layer", "dead heads", "always open"), rows) if rows else "<p>There are none.</p>",
        f"Dead: the gate stays below {below} on every token. Always open: it stays above {above} on every token.",
    )
