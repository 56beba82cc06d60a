"""The pieces that the report's sections share: its subjects, figures, tables and the way that it writes numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gated_qwen.diagnostics.diagnosis import Diagnosis

WIDTH = 960.0  # of a figure that spans the page, in its own pixels
LEFT, RIGHT = 66.0, 16.0
NOTHING = "–"


@dataclass(frozen=True)
class Subject:
    """One diagnosed model.

    Attributes:
        label: how the report calls it.
        series: the class (`s1`, `s2` ...) that carries its colour.
        width: of its lines; each is a little wider than those drawn over it, so that equal ones are both seen.
    """

    label: str
    series: str
    width: float
    diagnosis: Diagnosis

    def __getitem__(self, section: str) -> Any:
        return self.diagnosis[section]


def subjects(diagnoses: Sequence[Diagnosis]) -> list[Subject]:
    """Names and colours; models of one name are numbered."""
    names = [diagnosis["model"]["name"] for diagnosis in diagnoses]
    labels = [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]
    step = min(2.6, 7.0 / max(len(labels) - 1, 1))
    return [
        Subject(label, f"s{index + 1}", 2.0 + step * (len(labels) - 1 - index), diagnosis)
        for index, (label, diagnosis) in enumerate(zip(labels, diagnoses, strict=True))
    ]


def section(title: str, *parts: str) -> str:
    body = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def figure(title: str, body: str, caption: str, legend: Sequence[tuple[str, str]] = ()) -> str:
    """A figure with its heading, a legend of (class, name) entries, and one sentence on how to read it."""
    keys = "".join(f'<li><i class="key {kind}"></i>{escape(name)}</li>' for kind, name in legend)
    keys = f'<ul class="legend">{keys}</ul>' if keys else ""
    return f"<figure><h3>{escape(title)}</h3>{keys}{body}<figcaption>{escape(caption)}</figcaption></figure>"


def panels(parts: Sequence[tuple[str, str]], columns: int) -> str:
    """Drawings side by side, each under its name; narrow pages stack them."""
    inner = "".join(f'<div class="panel"><h4>{escape(name)}</h4>{body}</div>' for name, body in parts)
    return f'<div class="panels" style="--columns:{columns}">{inner}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numeric_from: int = 1) -> str:
    """A table of texts; columns from `numeric_from` on are set flush right."""

    def line(tag: str, entries: Sequence[str]) -> str:
        cells = (
            f"<{tag}{' class=n' if index >= numeric_from else ''}>{escape(entry)}</{tag}>"
            for index, entry in enumerate(entries)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>'


def percent(value: float | None) -> str:
    """A share, with as many digits as it deserves.

    Example:
        >>> percent(0.3123), percent(0.00217), percent(0.0), percent(None)
        ('31.2 %', '0.217 %', '0 %', '–')
    """
    if value is None:
        return NOTHING
    if value == 0:
        return "0 %"
    return f"{100 * value:.1f} %" if abs(value) >= 0.01 else f"{100 * value:.3g} %"


def amount(value: float | None) -> str:
    """A number of any size.

    Example:
        >>> amount(23406.4), amount(94.13), amount(0.01234), amount(1.5e-7), amount(None)
        ('23,406', '94.1', '0.0123', '1.5e-07', '–')
    """
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def times(value: float | None) -> str:
    return NOTHING if value is None else f"{amount(value)} ×"


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are there, None without any."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers, with runs of them drawn together.

    Example:
        >>> ranges([0, 2, 3, 4, 9])
        '0, 2-4, 9'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
