"""`gated-qwen diagnose` and `attention-map`: numbers against full maps, files, and one line for every refusal."""

import json
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from probe_models import PROBE_MODELS, probe_model
from small_tokenizers import tokenizer_of
from tiny import EVERY_POSITION, randomize, tiny_config, tiny_model, tokens
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from ungated import ungated_model

from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.smollm2 import smollm2_folder
from gated_qwen.diagnostics.attention_map import LONGEST_PROMPT, attention_maps, draw_attention_maps
from gated_qwen.diagnostics.diagnose import Probes, ProbeSettings, chunk_size, diagnose
from gated_qwen.diagnostics.diagnosis import check_diagnosis, finite, read_diagnoses
from gated_qwen.diagnostics.report import report_html
from gated_qwen.diagnostics.text_sequences import read_sequences

TEXT = "The street is empty. A cat walks along the wall, and somebody closes a door. " * 20


@pytest.fixture
def run(run_command):
    """Runs `gated-qwen diagnose`; returns exit code, stdout and stderr."""
    return partial(run_command, "diagnose")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A gated folder, the official layout of it, and an ungated one, each with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = tokenizer_of("Unigram")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(root / "gated")
    llama = ungated_model("llama")
    llama.resize_token_embeddings(len(tokenizer))
    llama.save_pretrained(root / "llama")
    for name in ("gated", "llama"):
        tokenizer.save_pretrained(root / name)
    convert(root / "gated", root / "official", to="official")
    (root / "text.txt").write_text(TEXT)
    return root


def full_maps(model, input_ids):
    """(layers, batch, heads, T, T) of an eager copy."""
    eager = type(model)(model.config).eval()
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack(eager(input_ids, output_attentions=True).attentions).double()


@pytest.mark.parametrize("gated", [True, False])
def test_the_numbers_are_those_of_full_maps(gated):
    model = tiny_model() if gated else ungated_model("llama")
    ids = tokens(3, 40)
    found = diagnose(model, ids, settings=ProbeSettings(skip_queries=8, head_keys=3, columns="all"), batch_size=2)
    maps = full_maps(model, ids)
    first = maps[..., 0]
    attention = found["attention"]
    assert attention["mean"]["first_token_share"] == pytest.approx(first.mean().item(), abs=1e-6)
    assert attention["mean"]["first_token_share_skipped"] == pytest.approx(first[..., 8:].mean().item(), abs=1e-6)
    assert attention["mean"]["uniform"] == pytest.approx(sum(1 / n for n in range(1, 41)) / 40, abs=1e-6)
    assert attention["mean"]["head_share"] == pytest.approx(maps[..., :3].sum(-1).mean().item(), abs=1e-6)
    assert found["input"]["tokens"] == 120 and found["input"]["sequences"] == 3
    for layer in attention["layers"]:
        wanted = first[layer["layer"]].mean((0, 2)).tolist()
        assert layer["heads"]["first_token_share"] == pytest.approx(wanted, abs=1e-6)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    for index in range(len(hidden) - 1):  # the library's last one is after the final norm
        wanted = hidden[index].abs().max().item()
        assert found["activations"]["residual"][index]["max"] == pytest.approx(wanted, rel=1e-6)
    assert (found["gates"] is not None) == gated
    if gated:
        assert found["model"]["gate"]["positions"] == ["attn_output"]


def test_chunks_and_one_pass_agree():
    model, ids = tiny_model(), tokens(2, 64)
    whole, chunked = (diagnose(model, ids, chunk=chunk) for chunk in (64, 24))
    assert whole["input"]["chunk"] is None and chunked["input"]["chunk"] == 24

    def numbers(value, path=""):
        if isinstance(value, dict):
            for name, entry in value.items():
                yield from numbers(entry, f"{path}.{name}")
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                yield from numbers(entry, f"{path}[{index}]")
        elif isinstance(value, (int, float)) and "quantiles" not in path:
            yield path, value

    for section in ("attention", "activations", "gates"):
        one, other = (dict(numbers(found[section])) for found in (whole, chunked))
        assert one.keys() == other.keys()
        assert all(other[path] == pytest.approx(value, rel=2e-5, abs=2e-6) for path, value in one.items())


def test_a_long_document_is_read_in_chunks_unless_attention_is_linear():
    model = tiny_model()
    assert (
        chunk_size(model, 4096) == 4096 and chunk_size(model, 32768) == 2048 and chunk_size(model, 32768, 512) == 512
    )
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert chunk_size(model, 32768) == 32768


def test_the_model_is_left_as_it_was():
    model = tiny_model().train()
    model.model.layers[1].mlp.eval()
    modes = [module.training for module in model.modules()]
    ids = tokens(1, 24)
    before = model(ids).logits
    diagnose(model, ids)
    with pytest.raises(ZeroDivisionError):
        diagnose(model, ids, progress=lambda tokens: 1 // 0)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, before) and before.requires_grad
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "name",
    ["every gate position", "experts", "linear attention", "gates of an unknown kind", "gpt2", "gemma2 soft-capped"],
)
def test_any_model_ends_in_a_diagnosis_that_is_drawn(name, monkeypatch):
    if name == "every gate position":
        model = tiny_model(gate_positions=EVERY_POSITION)
    elif name == "experts":
        fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        model = randomize(Qwen3MoeForCausalLM(tiny_config(Qwen3MoeConfig, **fields))).eval()
    elif name == "linear attention":
        model = probe_model("qwen3_next hybrid")
    elif name in PROBE_MODELS:
        model = probe_model(name)
    else:
        model = tiny_model()

        def refuse(model):
            raise ValueError("TinyModel gates its attention in an unknown way")

        monkeypatch.setattr("gated_qwen.diagnostics.gate_probe.gate_sites", refuse)
    found = finite(diagnose(model, tokens(2, 24), name=name))
    check_diagnosis(found, name)
    page = report_html([found])
    assert ("What the gates do" in page) == (name in ("every gate position", "linear attention"))
    assert ("Which experts are used" in page) == (found["routers"] is not None)
    assert (found["routers"] is not None) or name != "experts"
    if name == "every gate position":
        assert found["model"]["gate"]["positions"] == list(found["gates"]["summary"])
        assert {"key (G3)", "dense output (G5)"} <= set(re.findall(r"<h4>every gate position: (.*?)</h4>", page))
    if name == "linear attention":
        kinds = model.config.layer_types
        assert [layer["layer"] for layer in found["attention"]["layers"]] == [
            index for index, kind in enumerate(kinds) if kind == "full_attention"
        ]
    if name == "gates of an unknown kind":
        assert found["gates"] is None and "TinyModel gates its attention in an unknown way" in page


def test_a_token_that_decodes_to_nothing_goes_by_its_name():
    class Mute:
        def decode(self, ids):
            return "" if ids[0] % 2 else f"text {ids[0]}"

        def convert_ids_to_tokens(self, token_id):
            return f"name {token_id}"

    found = diagnose(tiny_model(), tokens(1, 24), tokenizer=Mute())
    tops = [top for block in found["activations"]["residual"] for top in block["top"]]
    assert {top["token_id"] % 2 for top in tops} == {0, 1}
    assert all(top["token"] == f"{'name' if top['token_id'] % 2 else 'text'} {top['token_id']}" for top in tops)


def test_sequences_of_different_lengths_are_refused():
    for wrong in ([[1, 2], [1]], [], [[]]):
        with pytest.raises(ValueError, match="one length of at least 1 token"):
            diagnose(tiny_model(), wrong)


def test_a_run_prints_a_table_and_writes_a_diagnosis_and_a_report(run, folders, tmp_path):
    out, html = tmp_path / "results" / "d.json", tmp_path / "d.html"
    common = ("--text", folders / "text.txt", "--length", 64, "--sequences", 2, "--skip-queries", 8)
    code, printed, err = run(folders / "gated", folders / "llama", *common, "--out", out, "--html", html)
    assert code == 0 and "F-Attn" in printed and "gated" in printed and "llama" in printed and "128/128" in err
    gated, llama = read_diagnoses(out)
    assert gated["gates"]["summary"]["attn_output"]["mean"] > 0 and llama["gates"] is None
    assert gated["input"]["first_token"] == "BOS <s>" and gated["input"]["text"] == "text.txt"
    assert gated["activations"]["residual"][1]["top"][0]["token"]
    assert html.read_text().startswith("<!doctype html>") and "llama" in html.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.html", "results"]

    # Drawing again from the file gives the same page; what is there is not replaced unasked.
    assert run("--from-json", out, "--html", html)[0] == 1
    again = tmp_path / "again.html"
    code, printed_again, _ = run("--from-json", out, "--html", again)
    assert code == 0 and printed_again == printed and again.read_text() == html.read_text()

    code, printed, _ = run(folders / "gated", *common, "--json", "--columns", "off", "--bos", "never", "--offset", 7)
    (only,) = json.loads(printed)["diagnoses"]
    check_diagnosis(only, "printed")
    assert only["input"]["first_token"] == "the text's own token (no BOS)" and only["input"]["offset"] == 7
    assert only["attention"]["layers"][0]["columns"] is None


def test_the_official_layout_is_read_by_way_of_a_copy(run, folders, tmp_path):
    common = ("--text", folders / "text.txt", "--length", 48, "--json", "--skip-queries", 8)
    ours, official = (json.loads(run(folders / name, *common)[1])["diagnoses"][0] for name in ("gated", "official"))
    assert official["model"]["name"] == "official"
    assert official["attention"] == ours["attention"] and official["gates"] == ours["gates"]


def test_drawing_again_loads_no_torch(folders, tmp_path, run):
    out = tmp_path / "d.json"
    run(folders / "gated", "--text", folders / "text.txt", "--length", 32, "--out", out)
    program = (
        "import sys; sys.argv = ['gated-qwen', 'diagnose', '--from-json', sys.argv[1], '--html', sys.argv[2]]\n"
        "import gated_qwen.cli; gated_qwen.cli.app(standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    # The package registers its classes unless the command imports it, which it tells by the program's name.
    script = tmp_path / "gated-qwen"
    script.write_text(program)
    result = subprocess.run([sys.executable, script, out, tmp_path / "d.html"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "d.html").exists()


REFUSALS = {
    "missing folder": (("{tmp}/nowhere", "--text", "{root}/text.txt"), "nowhere: no such folder"),
    "missing text": (("{root}/gated", "--text", "{tmp}/nothing"), "nothing: No such file"),
    "binary text": (("{root}/gated", "--text", "{tmp}/binary", "--length", "32"), "binary: not UTF-8 text"),
    "short text": (
        ("{root}/gated", "--text", "{tmp}/short", "--length", "64"),
        "short: 1 tokens, and 1 sequences of 64 tokens need 63",
    ),
    "over the limit": (
        ("{root}/gated", "--text", "{root}/text.txt", "--length", "600"),
        "length 600 is over the model's longest context of 512 tokens",
    ),
    "no bos policy": (
        ("{root}/gated", "--text", "{root}/text.txt", "--length", "32", "--bos", "yes"),
        "bos 'yes': choose one of auto",
    ),
    "columns": (("{root}/gated", "--text", "{root}/text.txt", "--length", "32", "--columns", "some"), "'some'"),
    "dtype": (("{root}/gated", "--text", "{root}/text.txt", "--dtype", "int8"), "dtype 'int8': choose from auto"),
    "out is there": (("{root}/gated", "--text", "{root}/text.txt", "--out", "{tmp}/there.json"), "there.json exists"),
    "not a diagnosis": (("--from-json", "{tmp}/there.json"), 'there.json: not a diagnosis: its "schema" is not'),
    "no JSON": (("--from-json", "{tmp}/short"), "short: not a diagnosis, since it is no JSON"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_one_line_exit_1_and_nothing_written(case, run, folders, tmp_path):
    (tmp_path / "short").write_text("a")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "there.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    arguments, message = REFUSALS[case]
    code, out, err = run(*(argument.format(tmp=tmp_path, root=folders) for argument in arguments))
    assert code == 1 and out == ""
    assert err.startswith("gated-qwen: ") and err.count("\n") == 1 and message in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [(), ("folder",), ("folder", "--text", "t", "--out", "d.txt"), ("folder", "--text", "t", "--keys", "first")],
)
def test_wrong_usage_exits_2(arguments, run):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and "Error" in err


def test_sequences_follow_each_other_and_begin_as_asked(tmp_path):
    tokenizer = tokenizer_of("Unigram")
    (tmp_path / "text.txt").write_text(TEXT)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    auto = read_sequences(tmp_path / "text.txt", tokenizer, length=10, count=2, offset=5)
    bos = tokenizer.bos_token_id
    assert auto.input_ids == [[bos, *ids[5:14]], [bos, *ids[14:23]]]
    never = read_sequences(tmp_path / "text.txt", tokenizer, length=10, count=2, bos="never")
    assert never.input_ids == [ids[:10], ids[10:20]]
    plain = read_sequences(tmp_path / "text.txt", tokenizer_of("byte-level BPE"), length=10)
    assert plain.first_token.startswith("the text's own") and len(plain.input_ids[0]) == 10
    always = read_sequences(tmp_path / "text.txt", tokenizer_of("byte-level BPE"), length=10, bos="always")
    assert always.input_ids[0][0] == bos and len(always.input_ids[0]) == 10


@pytest.mark.parametrize("name", ["gated", "llama", "sliding window"])
def test_attention_maps_are_the_eager_ones(name):
    model = {
        "gated": tiny_model,
        "llama": lambda: ungated_model("llama"),
        "sliding window": lambda: ungated_model("qwen2 sliding"),
    }[name]()
    ids = tokens(1, 24)
    maps = attention_maps(model, ids[0])
    wanted = full_maps(model, ids)[:, 0]
    assert sorted(maps) == [0, 1]
    for layer, found in maps.items():
        assert found.dtype == torch.float32
        assert torch.allclose(found.double(), wanted[layer], rtol=0.0, atol=2e-6)
    assert attention_maps(model, ids[0], [1]).keys() == {1}
    with pytest.raises(ValueError, match="layer 7 has no softmax attention; those that do: 0, 1"):
        attention_maps(model, ids[0], [7])
    with pytest.raises(ValueError, match="513 tokens; maps are drawn for 1 to 512"):
        attention_maps(model, [1] * (LONGEST_PROMPT + 1))


def test_attention_map_draws_a_prompt(run_command, folders, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "map.png"
    prompt = ("--prompt", "A cat $walks$ along_the wall.\nTwice.")
    code, printed, err = run_command("attention-map", folders / "gated", *prompt, "--out", out)
    assert code == 0, err
    assert "layers 0, 1" in printed and out.read_bytes().startswith(b"\x89PNG")
    chosen = ("--layers", "1", "--heads", "0,3", "--overwrite", "--out", out)
    assert run_command("attention-map", folders / "gated", *prompt, *chosen)[0] == 0
    text = ("--text", folders / "text.txt", "--length", 100, "--out", tmp_path / "map.svg")
    assert run_command("attention-map", folders / "llama", *text)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.png", "map.svg"]


MAP_REFUSALS = {
    "too long": (("--text", "{root}/text.txt", "--length", "513"), "513 tokens; maps are drawn for 1 to 512"),
    "empty": (("--prompt", ""), "the prompt has 0 tokens"),
    "head": (("--prompt", "a cat", "--heads", "4"), "head 4: layer 0 has heads 0 to 3"),
    "layer": (("--prompt", "a cat", "--layers", "2"), "layer 2 has no softmax attention; those that do: 0, 1"),
}


@pytest.mark.parametrize("case", MAP_REFUSALS)
def test_attention_map_refuses_in_one_line(case, run_command, folders, tmp_path):
    pytest.importorskip("matplotlib")
    arguments, message = MAP_REFUSALS[case]
    arguments = [argument.format(root=folders) for argument in arguments]
    where = ("--out", tmp_path / "m.png")
    folder = folders / ("llama" if case != "empty" else "no-bos")
    if case == "empty":
        tiny_model(vocab_size=400).save_pretrained(folder)
        tokenizer_of("byte-level BPE").save_pretrained(folder)
    code, out, err = run_command("attention-map", folder, *arguments, *where)
    assert code == 1 and out == "" and err.count("\n") == 1 and message in err
    assert list(tmp_path.iterdir()) == []


def test_too_many_panels_are_refused(tmp_path):
    pytest.importorskip("matplotlib")
    maps = {layer: torch.eye(2).repeat(9, 1, 1) for layer in range(8)}
    with pytest.raises(ValueError, match="72 panels of layers and heads; 1 to 64 fit"):
        draw_attention_maps(maps, ["a", "b"], tmp_path / "m.png", "title", heads=range(9))


@pytest.mark.slow
def test_a_real_model_agrees_with_its_full_maps(tmp_path):
    """SmolLM2-135M on 384 tokens of prose: this package's documentation."""
    folder = smollm2_folder()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer((TEXT + "It is quiet again. ") * 2, return_tensors="pt")["input_ids"][:, :384]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert isinstance(model, LlamaForCausalLM) and ids.shape[1] == 384
    with Probes(model) as probes, torch.no_grad():
        model.model(ids, use_cache=False)
    found = probes.summary()["attention"]
    wanted = full_maps(model, ids)[:, 0, :, :, 0].mean(2)
    assert found["mean"]["first_token_share"] == pytest.approx(wanted.mean().item(), abs=1e-6)
    for layer in found["layers"]:
        assert layer["heads"]["first_token_share"] == pytest.approx(wanted[layer["layer"]].tolist(), abs=2e-6)
    assert probes.summary()["activations"]["summary"]["residual"]["max_over_layers"] > 1e4
