"""The report: one HTML page that needs no network and no script, drawn from diagnoses alone."""

import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from gated_qwen.conversion.folder import atomic_file
from gated_qwen.diagnostics.diagnosis import Diagnosis
from gated_qwen.diagnostics.headline import headline
from gated_qwen.diagnostics.palette import scale_css
from gated_qwen.diagnostics.report_activations import activation_section
from gated_qwen.diagnostics.report_attention import attention_section
from gated_qwen.diagnostics.report_gates import gate_section
from gated_qwen.diagnostics.report_html import NOTHING, Subject, amount, percent, section, subjects, table
from gated_qwen.diagnostics.report_routers import router_section

MOST_MODELS = 6  # as many colours tell lines apart


def write_report(path: str | os.PathLike[str], diagnoses: Sequence[Diagnosis]) -> None:
    """Writes the page at once.

    Args:
        path: the file; what is there is replaced.
        diagnoses: as `diagnose` or `read_diagnoses` return them, 1 to `MOST_MODELS`.

    Raises:
        ValueError: none, or too many to tell apart.
    """
    page = report_html(diagnoses)
    with atomic_file(Path(path)) as file:
        file.write_text(page, encoding="utf-8")


def report_html(diagnoses: Sequence[Diagnosis]) -> str:
    """The page as text; arguments and errors as `write_report`."""
    if not 1 <= len(diagnoses) <= MOST_MODELS:
        raise ValueError(f"a report shows 1 to {MOST_MODELS} diagnoses, not {len(diagnoses)}")
    shown = subjects(diagnoses)
    folder = files("gated_qwen.diagnostics")
    style = folder.joinpath("report.css").read_text(encoding="utf-8")
    sections = (
        _headline_section(shown),
        attention_section(shown),
        activation_section(shown),
        gate_section(shown),
        router_section(shown),
        _source_section(shown),
    )
    return Template(folder.joinpath("report.html").read_text(encoding="utf-8")).substitute(
        title=escape(" and ".join(subject.label for subject in shown)),
        style=style.replace("/* light scales */", scale_css("light")).replace("/* dark scales */", scale_css("dark")),
        body="\n".join(part for part in sections if part),
    )


def _headline_section(shown: Sequence[Subject]) -> str:
    names = "".join(f'<th class="n"><i class="key {s.series}"></i>{escape(s.label)}</th>' for s in shown)
    columns = [headline(subject.diagnosis) for subject in shown]
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(_cell(column.get(name, NOTHING)) for column in columns)}</tr>"
        for name in dict.fromkeys(name for column in columns for name in column)
    )
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in _sentences(shown))
    body = f'<div class="scroll"><table class="headline"><thead><tr><th></th>{names}</tr></thead>'
    return f'<section class="lead">{sentences}{body}<tbody>{rows}</tbody></table></div></section>'


def _cell(text: str) -> str:
    return f"<td class=n>{escape(text)}</td>"


def _sentences(shown: Sequence[Subject]) -> list[str]:
    """What was found, in words; models that read the same are told in one paragraph."""
    told: dict[str, list[str]] = {}
    for subject in shown:
        given, attention = subject["input"], subject["attention"]
        mean, worst = attention["mean"], attention["worst_layer"]
        key = (
            f"On {given['text']} ({given['sequences']:,} × {given['length']:,} tokens), uniform attention would put "
            f"{percent(mean['uniform'])} of its mass on the first token. "
        )
        told.setdefault(key, []).append(
            f"{subject.label} puts {percent(mean['first_token_share'])} there"
            + (f", and {percent(worst['first_token_share'])} in layer {worst['layer']}." if worst else ".")
        )
    return [opening + " ".join(rest) for opening, rest in told.items()]


def _source_section(shown: Sequence[Subject]) -> str:
    """How it was measured, side by side, so that a number can be repeated."""
    columns = [_source(subject) for subject in shown]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, *(column.get(name, NOTHING) for column in columns)) for name in names]
    return section("How it was measured", table(("", *(subject.label for subject in shown)), rows, numeric_from=99))


def _source(subject: Subject) -> dict[str, str]:
    model, given, cost = subject["model"], subject["input"], subject["cost"]
    peak = cost["peak_bytes"]
    return {
        "model": f"{model['model_type']}, {model['parameters']:,} parameters, {model['dtype']}",
        "shape": f"{model['layers']} layers, {model['query_heads']} query and {model['key_value_heads']} key/value "
        f"heads of {model['head_dim']}, width {model['hidden_size']:,}",
        "gate": _told(model["gate"]) if model["gate"] else "none",
        "text": given["text"],
        "sha256 of the text": given["sha256"],
        "tokens": f"{given['tokens']:,} in {given['sequences']:,} sequences of {given['length']:,}, from token "
        f"{given['offset']:,} of the text on",
        "prefill in chunks of": f"{given['chunk']:,}" if given["chunk"] else "one pass",
        "first token": given["first_token"],
        "mask": given["mask_policy"],
        "averages": given["averaging"],
        "settings": _told(subject["settings"]),
        "versions": ", ".join(f"{name} {version}" for name, version in subject["versions"].items()),
        "measured": subject["measured"],
        "cost": f"{amount(cost['seconds'])} s" + (f", peak memory {peak / 1e9:.2f} GB" if peak else ""),
    }


def _told(content: dict[str, Any]) -> str:
    return ", ".join(f"{name} {' '.join(map(str, v)) if isinstance(v, list) else v}" for name, v in content.items())
