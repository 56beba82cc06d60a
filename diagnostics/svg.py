"""Axes, lines and coloured cells as SVG text: what the report's figures are made of.

Colours are CSS classes (`s1` ... for series, `heat0` ... and `gate0` ... for cells), so that one drawing suits light,
dark and printed pages. Every text passes through `text` or `title`, which escape it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float | None]
LEVELS = 32  # steps of a colour scale


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` ... `high` to pixels from `start` ... `end`, linearly or by logarithm.

    With `whole` every tick is a whole number, as for layers.

    Example:
        >>> Axis(1.0, 100.0, 0.0, 200.0, log=True)(10.0)
        100.0
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, self.low)), math.log10(low), math.log10(high)
        return self.start + (self.end - self.start) * (min(max(value, low), high) - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values within the range: powers of ten, or multiples of 1, 2 or 5."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            stride = max(1, math.ceil((last - first + 1) / 8))
            return [10.0**power for power in range(first, last + 1, stride)]
        step = round_step((self.high - self.low) / (12 if self.whole else 6))
        step = max(step, 1.0) if self.whole else step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))


def value_axis(values: Iterable[float | None], start: float, end: float, least: float = 1e-3) -> Axis:
    """A linear axis from 0 to a round number that holds all values."""
    largest = max((value for value in values if value is not None), default=0.0)
    step = round_step(max(largest, least) / 5)
    return Axis(0.0, step * math.ceil(max(largest, least) / step - 1e-9), start, end)


def log_axis(values: Iterable[float | None], start: float, end: float) -> Axis:
    """A logarithmic axis over whole decades that hold all positive values."""
    positive = [value for value in values if value is not None and value > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive)) + 1e-9), math.ceil(math.log10(max(positive)) - 1e-9)
    return Axis(10.0**low, 10.0 ** max(high, low + 1), start, end, log=True)


def drawing(width: float, height: float, label: str, content: str) -> str:
    """One figure that scales with the page; `label` is what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}" '
        f'style="max-width:{width:g}px">{content}</svg>'
    )


def text(x: float, y: float, content: object, anchor: str = "middle", kind: str = "", turned: bool = False) -> str:
    transform = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}{transform}>{escape(str(content))}</text>'


def title(content: str) -> str:
    """What a browser shows when the pointer rests on the element."""
    return f"<title>{escape(content)}</title>"


def frame(x: Axis, y: Axis, x_label: str = "", y_label: str = "", *, percent: bool = False) -> str:
    """Grid lines, tick labels and axis names; y runs upwards, from `y.start` below to `y.end` above."""
    parts = []
    for value in y.ticks():
        place = y(value)
        parts.append(f'<line class="grid" x1="{x.start:g}" x2="{x.end:g}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(text(x.start - 7, place + 4, tick_label(value, percent), "end", "tick"))
    for value in x.ticks():
        parts.append(
            f'<line class="mark" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{y.start:g}" y2="{y.start + 4:g}"/>'
        )
        parts.append(text(x(value), y.start + 17, tick_label(value), kind="tick"))
    parts.append(f'<line class="axis" x1="{x.start:g}" x2="{x.end:g}" y1="{y.start:g}" y2="{y.start:g}"/>')
    if x_label:
        parts.append(text((x.start + x.end) / 2, y.start + 36, x_label, kind="label"))
    if y_label:
        parts.append(text(x.start - 50, (y.start + y.end) / 2, y_label, kind="label", turned=True))
    return "".join(parts)


def tick_label(value: float, percent: bool = False) -> str:
    """A tick's number, short.

    Example:
        >>> [tick_label(v) for v in (0.0, 0.25, 1e-5, 1000.0, 1e6)], tick_label(0.2, percent=True)
        (['0', '0.25', '1e-5', '1k', '1M'], '20 %')
    """
    if percent:
        return f"{100 * value:.6g} %"
    if value == 0:
        return "0"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    if abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.6g}"


def line(
    points: Sequence[Point], x: Axis, y: Axis, kind: str, names: Sequence[str] = (), *, width: float = 2.0
) -> str:
    """A line through the points, broken where a value is None; `names` makes each point a dot that tells its value."""
    runs: list[list[str]] = [[]]
    for place, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{x(place):.1f},{y(value):.1f}")
    stroke = "" if width == 2.0 else f' style="stroke-width:{width:g}"'
    parts = [f'<polyline class="line {kind}"{stroke} points="{" ".join(run)}"/>' for run in runs if len(run) > 1]
    for (place, value), name in zip(points, names, strict=False):
        if value is not None:
            dot = f'<circle class="dot {kind}" cx="{x(place):.1f}" cy="{y(value):.1f}" r="{0.6 + width:g}">'
            parts.append(f"{dot}{title(name)}</circle>")
    return "".join(parts)


def area(points: Sequence[tuple[float, float]], base: float, kind: str, name: str) -> str:
    """A filled outline over a base line, in pixels."""
    corners = [(points[0][0], base), *points, (points[-1][0], base)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return f'<polygon class="area {kind}" points="{path}">{title(name)}</polygon>'


def cell(x: float, y: float, width: float, height: float, share_of_scale: float, scale: str, name: str) -> str:
    """A rectangle in one of a colour scale's `LEVELS`; 0 is the scale's low end and 1 its high end."""
    level = min(LEVELS - 1, max(0, int(share_of_scale * LEVELS)))
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{scale}{level}" {place}>{title(name)}</rect>'


def colour_bar(x: float, y: float, width: float, high: float, scale: str, *, percent: bool = True) -> str:
    """The legend of a colour scale from 0 to `high`."""
    step = width / LEVELS
    cells = "".join(
        f'<rect class="{scale}{level}" x="{x + level * step:.3f}" y="{y:g}" width="{step:.3f}" height="10"/>'
        for level in range(LEVELS)
    )
    marks = "".join(
        text(x + share * width, y + 24, tick_label(round(share * high, 4), percent), kind="tick")
        for share in (0.0, 0.5, 1.0)
    )
    return f'<g class="bar">{cells}</g>{marks}'
