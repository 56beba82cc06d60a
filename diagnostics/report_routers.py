"""The report's figures of routers: how evenly the experts of each layer are used."""

from collections.abc import Sequence

from gated_qwen.diagnostics import svg
from gated_qwen.diagnostics.report_attention import head_maps, layer_axis
from gated_qwen.diagnostics.report_html import WIDTH, Subject, figure, percent, section


def router_section(subjects: Sequence[Subject]) -> str:
    routed = [subject for subject in subjects if subject["routers"]]
    if not routed:
        return ""
    return section("Which experts are used", _entropy(subjects, routed), _load(subjects, routed))


def _entropy(subjects: Sequence[Subject], routed: Sequence[Subject]) -> str:
    x, y = layer_axis(subjects, WIDTH), svg.Axis(0.0, 1.0, 222, 10)
    parts = [svg.frame(x, y, "layer", "entropy / log E", percent=True)]
    for subject in routed:
        points = [(layer["layer"], layer["entropy"]) for layer in subject["routers"]["layers"]]
        names = [f"{subject.label}, layer {layer}: {percent(value)}" for layer, value in points]
        parts.append(svg.line(points, x, y, subject.series, names, width=subject.width))
    unused = ", ".join(f"{subject.label} {subject['routers']['summary']['unused_experts']:,}" for subject in routed)
    return figure(
        "Entropy of the router by layer",
        svg.drawing(WIDTH, 266, "Entropy of the router by layer", "".join(parts)),
        "The entropy of the router's probabilities, averaged over tokens, as a share of the most that its number of "
        f"experts E allows: at 100 % it has no preference. Experts that no token reached: {unused}.",
        [(subject.series, subject.label) for subject in routed],
    )


def _load(subjects: Sequence[Subject], routed: Sequence[Subject]) -> str:
    maps = [
        (subject.label, subject, {layer["layer"]: layer["load"] for layer in subject["routers"]["layers"]})
        for subject in routed
    ]
    return head_maps(
        "Load by layer and expert",
        subjects,
        maps,
        "The share of a layer's assignments of tokens that goes to each expert; an even load is 1/E everywhere.",
        "heat",
        unit="expert",
    )
