"""`gated-qwen evaluate`: files, tables, and one line for every refusal."""

import csv
import json
from functools import partial

import pytest
from small_tokenizers import tokenizer_of
from tiny import tiny_model

QUICK = ("--lengths", "450,500", "--depths", "0,1", "--samples", "1", "--max-new-tokens", "3")


@pytest.fixture
def run(run_command):
    """Runs `gated-qwen evaluate`; returns exit code, stdout and stderr."""
    return partial(run_command, "evaluate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = tokenizer_of("byte-level BPE")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory, folder):
    """A model that loads only with code of its own, which says that it ran."""
    foreign = tmp_path_factory.mktemp("models") / "foreign"
    foreign.mkdir()
    for file in folder.iterdir():
        (foreign / file.name).write_bytes(file.read_bytes())
    config = json.loads((foreign / "config.json").read_text())
    config |= {"model_type": "foreign", "architectures": ["ForeignForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "foreign.ForeignConfig", "AutoModelForCausalLM": "foreign.ForeignForCausalLM"}
    (foreign / "config.json").write_text(json.dumps(config))
    (foreign / "foreign.py").write_text("raise RuntimeError('foreign code ran')\n")
    return foreign


def test_a_run_writes_summary_table_samples_and_picture(run, folder, tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "results" / "r.json", tmp_path / "r.png"
    tasks = "niah_single,frequent_words"
    code, printed, err = run(folder, *QUICK, "--tasks", tasks, "--out", out, "--plot", picture, "--batch-size", 2)
    assert code == 0 and "niah_single" in printed and "450" in printed and "6/6" in err
    summary = json.loads(out.read_text())
    assert [(c["task"], c["length"], c["depth"]) for c in summary["cells"]] == [
        (task, length, depth)
        for length in (450, 500)
        for task, depth in (("niah_single", 0.0), ("niah_single", 1.0), ("frequent_words", None))
    ]
    assert summary["settings"]["max_position_embeddings"] == 512 and summary["settings"]["dtype"] == "float32"
    assert {"torch", "transformers", "gated_qwen", "device"} <= set(summary["environment"])
    with out.with_suffix(".csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [float(row["score"]) for row in rows] == [cell["score"] for cell in summary["cells"]]
    assert len(out.with_suffix(".jsonl").read_text().splitlines()) == 7
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.parent.iterdir()) == ["r.csv", "r.json", "r.jsonl"]

    # Going on with what is complete runs nothing, and gives the same.
    before = {path: path.read_bytes() for path in out.parent.iterdir()}
    assert run(folder, *QUICK, "--tasks", tasks, "--out", out, "--batch-size", 2)[0] == 1
    code, _, err = run(folder, *QUICK, "--tasks", tasks, "--out", out, "--batch-size", 2, "--resume")
    assert code == 0 and {path: path.read_bytes() for path in out.parent.iterdir()} == before

    code, printed, _ = run("--compare", out, out)
    assert code == 0 and "before" in printed and "mean" in printed
    code, printed, _ = run("--compare", out, out, "--json")
    assert {change["task"] for change in json.loads(printed)["changes"]} == {"niah_single", "frequent_words", "mean"}


def test_perplexity_of_a_text(run, folder, tmp_path):
    (tmp_path / "text.txt").write_text("The street is empty. A cat walks along the wall. " * 20)
    code, out, _ = run(
        folder, "--tasks", "perplexity", "--lengths", "64", "--samples", 2, "--text", tmp_path / "text.txt"
    )
    shown = " ".join(out.split())  # a title with a long path is broken into lines
    assert code == 0 and "perplexity over 64 tokens" in shown and "NLL, tokens 1 to 8" in shown
    code, out, _ = run(
        folder, "--tasks", "perplexity", "--lengths", "64", "--samples", 2, "--text", tmp_path / "text.txt", "--json"
    )
    (cell,) = json.loads(out)["cells"]
    assert cell["samples"] == 2 and cell["perplexity"] > 1 and len(cell["buckets"]) == 8


def test_it_lists_the_tasks(run):
    code, out, _ = run("--tasks", "list")
    assert code == 0 and {"niah_multiquery", "variable_tracking", "common_words", "perplexity"} <= set(out.split())


REFUSALS = {
    "missing folder": (("{tmp}/nowhere",), "nowhere: no such folder"),
    "unknown task": (("{folder}", "--tasks", "niah"), "choose from niah_single"),
    "too long": (("{folder}", "--lengths", "4096"), "length 4096 is over the model's longest context of 512 tokens"),
    "too short": (("{folder}", "--lengths", "64"), "length 64 is too small; the least is"),
    "depth": (("{folder}", "--depths", "50"), "depth 50.0"),
    "no text": (("{folder}", "--tasks", "perplexity"), "--text"),
    "missing text": (("{folder}", "--lengths", "512", "--text", "{tmp}/nothing"), "nothing: No such file"),
    "short text": (
        ("{folder}", "--tasks", "perplexity", "--lengths", "512", "--text", "{tmp}/short"),
        "short: 1 tokens, and the perplexity windows need 2560",
    ),
    "no chat template": (("{folder}", "--lengths", "512", "--chat-template"), "no chat template"),
    "dtype": (("{folder}", "--lengths", "512", "--dtype", "int8"), "dtype 'int8': choose from auto"),
    "picture": (("{folder}", "--lengths", "512", "--plot", "{tmp}/map.bmp"), "map.bmp: the picture's ending"),
    "foreign code": (("{foreign}", "--lengths", "512"), "foreign: runs code of its own; pass --trust-remote-code"),
    "not a summary": (("--compare", "{tmp}/short", "{tmp}/short"), "short: not a summary"),
    "out is there": (("{folder}", "--out", "{tmp}/there.json"), "there.json exists; pass --resume"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_one_line_exit_1_and_nothing_written(case, run, folder, foreign, tmp_path):
    (tmp_path / "short").write_text("a")
    (tmp_path / "there.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    arguments, message = REFUSALS[case]
    code, out, err = run(*(argument.format(tmp=tmp_path, folder=folder, foreign=foreign) for argument in arguments))
    assert code == 1 and out == ""
    assert err.startswith("gated-qwen: ") and err.count("\n") == 1 and message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_foreign_code_runs_when_it_is_trusted(run, foreign):
    code, _, err = run(foreign, "--lengths", "512", "--trust-remote-code")
    assert code == 1 and err == "gated-qwen: foreign code ran\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("folder", "--lengths", "long"),
        ("folder", "--resume"),
        ("folder", "--out", "r.csv"),
        ("--compare", "only-one.json"),
    ],
)
def test_wrong_usage_exits_2(arguments, run):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and "Error" in err
