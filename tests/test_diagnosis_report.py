"""The diagnosis file and its report: what is refused, what is drawn, and the page in a real browser."""

import copy
import json
import re

import pytest
from browser import open_page
from diagnosis_sample import diagnosis_sample

from gated_qwen.diagnostics.diagnosis import check_diagnosis, read_diagnoses, write_diagnoses
from gated_qwen.diagnostics.report import MOST_MODELS, report_html, write_report
from gated_qwen.diagnostics.svg import Axis, log_axis, value_axis

GATED_FIGURES = [
    "Gate values by layer",
    "Mean gate by layer and head",
    "Mean gate by token class",
    "First-token share: looked at, and written",
    "Sparsity of the attention output, S(τ)",
    "Heads whose gate never moves",
]
FIGURES = [
    "First-token share by layer",
    "First-token share by query position",
    "First-token share by layer and head",
    "Sink set: every key position that gathers attention",
    "Largest and median absolute value by layer",
    "The largest single values",
]


def headings(page):
    return re.findall(r"<figure><h3>(.*?)</h3>", page)


def test_a_diagnosis_survives_its_file(tmp_path):
    one, two = diagnosis_sample("one"), diagnosis_sample("two", gated=False)
    write_diagnoses(tmp_path / "one.json", [one])
    write_diagnoses(tmp_path / "both.json", [one, two])
    assert read_diagnoses(tmp_path / "one.json") == [one]
    assert read_diagnoses(tmp_path / "both.json") == [one, two]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both.json", "one.json"]


def test_what_is_not_finite_becomes_null(tmp_path):
    diagnosis = diagnosis_sample()
    diagnosis["activations"]["residual"][2]["max"] = float("inf")
    diagnosis["attention"]["mean"]["boost"] = float("nan")
    write_diagnoses(tmp_path / "d.json", [diagnosis])
    (read,) = read_diagnoses(tmp_path / "d.json")
    assert read["activations"]["residual"][2]["max"] is None and read["attention"]["mean"]["boost"] is None
    assert "Largest and median" in report_html([read])


def _without(*path):
    def fault(diagnosis):
        *above, last = path
        for step in above:
            diagnosis = diagnosis[step]
        del diagnosis[last]

    return fault


def _with(value, *path):
    def fault(diagnosis):
        *above, last = path
        for step in above:
            diagnosis = diagnosis[step]
        diagnosis[last] = value

    return fault


FAULTS = {
    "another schema": (_with("x", "schema"), 'its "schema" is not "gated-qwen/diagnosis"'),
    "a later version": (_with(2, "schema_version"), "schema_version is 2, and this release reads 1"),
    "no section": (_without("activations"), "d.json: activations is missing"),
    "no field": (_without("attention", "layers", 1, "boost"), "attention.layers[1].boost is missing"),
    "no gate field": (_without("gates", "layers", 0, "histogram"), "gates.layers[0].histogram is missing"),
    "a text for a number": (_with("1", "model", "layers"), 'model.layers is "1"; an integer is expected'),
    "a flag for a number": (_with(True, "attention", "mean", "boost"), "attention.mean.boost is true; a number"),
    "a number for a list": (_with(1, "gates", "layers"), "gates.layers is 1; a list is expected"),
    "too few heads": (
        _with([0.5], "attention", "layers", 0, "heads", "first_token_share"),
        "attention.layers[0].heads.first_token_share has 1 entries; 4 are expected",
    ),
    "too few bins": (_with([1], "gates", "layers", 0, "histogram", "counts"), "histogram.counts has 1 entries; 50"),
    "too few thresholds": (_with([0.1], "gates", "thresholds"), "gates.layers[0].sparsity.pre_gate has 5 entries; 1"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_wrong_diagnosis_is_refused_by_file_and_field(case, tmp_path):
    fault, message = FAULTS[case]
    diagnosis = copy.deepcopy(diagnosis_sample())
    fault(diagnosis)
    (tmp_path / "d.json").write_text(json.dumps(diagnosis))
    with pytest.raises(ValueError, match=r"d\.json") as refusal:
        read_diagnoses(tmp_path / "d.json")
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"value": NaN}', "[" * 100_000, '{"a": 1e999}'])
def test_what_is_no_diagnosis_at_all_is_refused(content, tmp_path):
    (tmp_path / "d.json").write_text(content)
    with pytest.raises(ValueError, match=r"d\.json"):
        read_diagnoses(tmp_path / "d.json")


def test_a_report_has_every_figure_and_leaves_out_what_a_model_lacks():
    assert headings(report_html([diagnosis_sample()])) == FIGURES + GATED_FIGURES
    experts = report_html([diagnosis_sample(experts=128), diagnosis_sample(gated=False)])
    assert headings(experts)[-2:] == ["Entropy of the router by layer", "Load by layer and expert"]
    assert "layer 5, expert 127:" in experts
    for shown in (["mixture", "dense"], ["dense", "mixture"]):  # only one has experts, whichever comes first
        samples = [diagnosis_sample(name, experts=8 if name == "mixture" else 0) for name in shown]
        (row,) = re.findall(r"<tr><td>unused experts</td>(.*?)</tr>", report_html(samples))
        cells = dict(zip(shown, re.findall(r">([^<]*)</td>", row), strict=True))
        assert cells == {"mixture": "0", "dense": "–"}
    ungated = diagnosis_sample(gated=False)
    for layer in ungated["attention"]["layers"]:
        layer["columns"] = None
    assert headings(report_html([ungated])) == [name for name in FIGURES if not name.startswith("Sink set")]


def test_models_stand_side_by_side_on_common_axes():
    page = report_html([diagnosis_sample("ungated", gated=False), diagnosis_sample("gated", gated=True)])
    assert headings(page) == FIGURES + GATED_FIGURES
    head = re.search(r'<table class="headline"><thead>(.*?)</thead>', page).group(1)
    assert re.findall(r"</i>(.*?)</th>", head) == ["ungated", "gated"]
    (figure,) = re.findall(r"<figure><h3>First-token share by layer and head</h3>.*?</figure>", page)
    assert re.findall(r"<h4>(.*?)</h4>", figure) == ["ungated", "gated"]
    assert figure.count('aria-label="colour scale"') == 1
    (lines,) = re.findall(r"<figure><h3>First-token share by layer</h3>.*?</figure>", page)
    assert lines.count("<svg") == 1 and {"line s1", "line s2"} <= set(re.findall(r'"(line s\d)"', lines))


def test_models_of_one_name_are_numbered_and_too_many_are_refused():
    assert "same (1)" in report_html([diagnosis_sample("same")] * 2)
    for count in (0, MOST_MODELS + 1):
        with pytest.raises(ValueError, match=f"1 to {MOST_MODELS} diagnoses, not {count}"):
            report_html([diagnosis_sample()] * count)


def test_every_text_is_escaped():
    evil = '<script>alert(1)</script>" onload="x'
    diagnosis = diagnosis_sample(evil)
    for place in ("text", "sha256", "first_token", "mask_policy", "averaging"):
        diagnosis["input"][place] = evil
    diagnosis["versions"] = {evil: evil}
    diagnosis["settings"] = {evil: [evil]}
    diagnosis["measured"] = diagnosis["model"]["model_type"] = diagnosis["model"]["dtype"] = evil
    diagnosis["model"]["gate"] = {evil: evil}
    diagnosis["gates"]["summary"] = {evil: diagnosis["gates"]["summary"]["attn_output"]}
    for layer in diagnosis["gates"]["layers"]:
        layer["position"] = evil
    for kind in ("residual", "attention_output", "ffn_output"):
        for block in diagnosis["activations"][kind]:
            for top in block["top"]:
                top["token"] = evil
    check_diagnosis(diagnosis, "evil")
    page = report_html([diagnosis, diagnosis])
    assert "<script" not in page and 'onload="' not in page and "&lt;script&gt;" in page


def test_a_report_needs_no_network_and_no_script():
    page = report_html([diagnosis_sample(), diagnosis_sample(gated=False)])
    assert "default-src 'none'" in page
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link|<img|src=|href=", page)


def test_a_large_model_stays_readable():
    page = report_html([diagnosis_sample(layers=48, heads=32)])
    (figure,) = re.findall(r"<figure><h3>First-token share by layer and head</h3>.*?</figure>", page)
    cells = re.findall(
        r'<rect class="heat\d+" x="[\d.]+" y="[\d.]+" width="([\d.]+)" height="([\d.]+)"><title>', figure
    )
    assert len(cells) == 48 * 32
    assert min(float(width) for width, _ in cells) > 15 and min(float(height) for _, height in cells) > 7
    assert len(page) < 1_500_000


def test_layers_without_softmax_attention_are_gaps():
    hybrid = diagnosis_sample(layers=8, gated=False)
    hybrid["attention"]["layers"] = hybrid["attention"]["layers"][3::4]
    page = report_html([hybrid])
    told = re.findall(r"<title>layer (\d+), head 0:", page)
    assert told == ["3", "7"]


def test_a_token_of_white_space_is_seen():
    diagnosis = diagnosis_sample()
    for block in diagnosis["activations"]["residual"]:
        block["top"][0]["token"] = " \n"
    assert "<td>&#x27; \\n&#x27;</td>" in report_html([diagnosis])


def test_axes_end_at_round_numbers():
    assert value_axis([0.37, None], 0, 1).high == pytest.approx(0.4)
    axis = log_axis([0.03, 23406.0, 0.0, None], 100, 0)
    assert (axis.low, axis.high) == (0.01, 1e5) and axis(0.01) == 100 and axis(1e5) == 0 and axis(0.0) == 100
    assert axis.ticks() == pytest.approx([1e-2, 1e-1, 1, 1e1, 1e2, 1e3, 1e4, 1e5])
    assert Axis(-0.5, 1.5, 0, 1, whole=True).ticks() == [0.0, 1.0]


@pytest.mark.slow
def test_the_report_opens_in_a_real_browser(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow, which matplotlib brings, reads the screenshot")
    page, shot = tmp_path / "report.html", tmp_path / "shot.png"
    write_report(page, [diagnosis_sample("ungated", gated=False), diagnosis_sample("gated")])
    document, messages = open_page(page, "--dump-dom", f"--screenshot={shot}", "--window-size=1120,5000")
    assert messages == []
    assert document.count("<svg") == page.read_text().count("<svg") >= 14
    assert all(title in document for title in FIGURES + GATED_FIGURES)
    if not shot.exists():  # older browsers do one thing at a time
        open_page(page, f"--screenshot={shot}", "--window-size=1120,5000")
    colours = {colour: count for count, colour in image.open(shot).convert("RGB").getcolors(1 << 24)}
    line, area, dark_cell = (0x1F, 0x6F, 0xB4), (0xD1, 0x57, 0x0B), (0x2A, 0x0F, 0x3F)
    assert all(colours.get(colour, 0) > 50 for colour in (line, area, dark_cell)), "the figures are not painted"


@pytest.mark.slow
def test_the_browser_tells_of_what_a_page_may_not_load(tmp_path):
    """The test above can fail: a page that asks for something is heard of."""
    (tmp_path / "page.html").write_text(
        report_html([diagnosis_sample()]).replace("<main>", '<main><img src="https://example.invalid/x.png">')
    )
    _, messages = open_page(tmp_path / "page.html", "--dump-dom")
    assert any("Content Security Policy" in message for message in messages)
