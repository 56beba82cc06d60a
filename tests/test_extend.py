"""`gated-qwen extend`: whole folders that load silently and compute what they say, or one line and nothing written."""

import hashlib
import json
import math
import os
import sys
from functools import partial

import pytest
import torch
from fresh_process import BLOCKED, FreshProcess
from tiny import TINY_FIELDS, randomize, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3NextForCausalLM,
    logging,
)
from ungated import ungated_folder

from gated_qwen.configuration.frequencies import rope_frequencies
from gated_qwen.conversion import extend as module
from gated_qwen.conversion.checkpoint import CheckpointError
from gated_qwen.conversion.extend import context_state, extend

BASE = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.fixture
def run(run_command):
    """Runs `gated-qwen extend`; returns exit code, stdout and stderr."""
    return partial(run_command, "extend")


@pytest.fixture
def warnings_of_the_library(caplog):
    """The library's log records from here on; its logger does not propagate by itself."""
    logging.enable_propagation()
    caplog.set_level("WARNING")
    yield caplog.records
    logging.disable_propagation()


def tokenizer_files(folder, length):
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", model_max_length=length).save_pretrained(
        folder
    )


def ours(folder, length=32768, head_dim=8):
    """One of our folders, with a tokenizer, fp32."""
    model = tiny_model(max_position_embeddings=length, rope_parameters=BASE, head_dim=head_dim)
    model.save_pretrained(folder)
    tokenizer_files(folder, length)
    (folder / "provenance.json").write_text(json.dumps({"format": 1, "verb": "new", "seed": 0}))
    return folder


def hybrid(folder, kind):
    """A Qwen family whose RoPE rotates a quarter of the head; qwen3_5 has its settings in text_config."""
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    fields = {**TINY_FIELDS, **linear, "head_dim": 32, "max_position_embeddings": 32768}
    fields["layer_types"] = ["linear_attention", "full_attention"]
    rope = {**BASE, "partial_rotary_factor": 0.25}
    if kind == "qwen3_next":
        cls, fields = Qwen3NextForCausalLM, {**fields, "rope_parameters": rope}
        fields |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        fields |= {"shared_expert_intermediate_size": 16}
    else:
        cls = Qwen3_5ForCausalLM if kind == "qwen3_5_text" else Qwen3_5ForConditionalGeneration
        fields["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    if kind == "qwen3_5":
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
        fields = {"text_config": fields, "vision_config": vision}
    randomize(cls(cls.config_class(**fields))).save_pretrained(folder)
    return folder


def saved(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


# A new folder


def test_32k_to_128k_in_one_command(run, tmp_path):
    source = ours(tmp_path / "source")
    before = digests(source)
    code, out, err = run(source, tmp_path / "long", "--to-length", "131072", "--json")
    assert code == 0, err
    config = saved(tmp_path / "long")
    assert config["rope_parameters"] == {**YARN, "rope_theta": 1e6} and config["rope_scaling"] == YARN
    assert (config["rope_theta"], config["max_position_embeddings"]) == (1e6, 131072)
    assert saved(tmp_path / "long", "tokenizer_config.json")["model_max_length"] == 131072
    assert AutoTokenizer.from_pretrained(tmp_path / "long", trust_remote_code=True).model_max_length == 131072
    report = json.loads(out)
    assert report["before"]["max_position_embeddings"] == report["before"]["model_max_length"] == 32768
    assert report["after"]["factor"] == 4.0 and report["after"]["attention_factor"] == pytest.approx(1.13863, abs=5e-6)
    assert report["smallest_factors"] == {"65536": 2.0, "131072": 4.0}
    assert report["engines"]["vLLM"]["folder"].endswith("--max-model-len 131072 --trust-remote-code")
    assert digests(source) == before
    # All that was there is there, bit for bit but for the three files that change.
    changed = {"config.json", "tokenizer_config.json", "provenance.json"}
    after = digests(tmp_path / "long")
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == changed
    step = saved(tmp_path / "long", "provenance.json")
    assert (step["verb"], step["seed"]) == ("new", 0)
    assert step["steps"][0]["verb"] == "extend" and step["steps"][0]["changes"] == {"to_length": 131072}
    assert step["steps"][0]["after"]["rope_parameters"]["factor"] == 4.0


def test_an_extended_folder_loads_elsewhere_without_a_warning_and_keeps_its_positions_in_bf16(tmp_path):
    """In a fresh process without our package; at 0, 32767 and 131071, cos and sin are within 1e-2 of float64."""
    source = ours(tmp_path / "source", head_dim=128)
    for name, options in (("rounded", {}), ("exact", {"truncate": False})):
        extend(source, tmp_path / name, factor=4.0, **options)
    positions = [0, 32767, 131071]
    with FreshProcess(tmp_path / "process", blocked=BLOCKED) as process:
        for name in ("rounded", "exact"):
            answer = process.call(_cos_sin_and_inv_freq, str(tmp_path / name), positions)
            frequencies = rope_frequencies(saved(tmp_path / name))
            assert answer["inv_freq"] == pytest.approx(frequencies.inv_freq, rel=1e-6)
            angles = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(
                frequencies.inv_freq * 2, dtype=torch.float64
            )
            for part, expected in (("cos", angles.cos()), ("sin", angles.sin())):
                expected = expected * (0.1 * math.log(4.0) + 1)
                assert (torch.tensor(answer[part], dtype=torch.float64) - expected).abs().max() < 1e-2
            assert saved(tmp_path / name)["rope_parameters"].get("truncate", True) is (name == "rounded")
        for word in ("arning", "Unrecognized", "does not match", "deprecated"):
            assert word not in process.output, process.output


def _cos_sin_and_inv_freq(folder, positions):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    rotary = model.model.rotary_emb
    cos, sin = rotary(torch.zeros(1, 1, dtype=torch.bfloat16), torch.tensor([positions]))
    assert cos.dtype == torch.bfloat16
    return {"cos": cos[0].tolist(), "sin": sin[0].tolist(), "inv_freq": rotary.inv_freq.tolist()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5"])
def test_native_families_load_silently_with_the_frequencies_shown(family, tmp_path, warnings_of_the_library):
    if family in ("llama", "qwen2", "qwen3"):
        source = ungated_folder(tmp_path / "source", family)
    else:
        source = hybrid(tmp_path / "source", family)
    original = context_state(source)["max_position_embeddings"]
    result = extend(source, tmp_path / "long", factor=4.0)
    assert result.linked + result.copied == 1
    warnings_of_the_library.clear()
    config = AutoConfig.from_pretrained(tmp_path / "long")
    text = config.get_text_config()
    assert text.max_position_embeddings == 4 * original
    assert text.rope_parameters["original_max_position_embeddings"] == original
    cls = Qwen3_5ForConditionalGeneration if family == "qwen3_5" else AutoModelForCausalLM
    model = cls.from_pretrained(tmp_path / "long")
    assert not [record.getMessage() for record in warnings_of_the_library]
    rotary = [m for name, m in model.named_modules() if name.endswith("rotary_emb") and "visual" not in name][0]
    shown = rope_frequencies(saved(tmp_path / "long"))
    assert rotary.inv_freq.tolist() == pytest.approx(shown.inv_freq, rel=1e-6)
    assert rotary.attention_scaling == pytest.approx(shown.attention_factor)
    block = saved(tmp_path / "long").get("text_config") or saved(tmp_path / "long")
    assert block["rope_scaling"] == {k: v for k, v in block["rope_parameters"].items() if k != "rope_theta"}
    # Taken off again, the model is the one before, to the bit.
    extend(tmp_path / "long", tmp_path / "back", remove=True)
    if family != "qwen3_5":
        tokens = torch.arange(1, 17)[None]
        logits = [AutoModelForCausalLM.from_pretrained(f)(tokens).logits for f in (source, tmp_path / "back")]
        assert torch.equal(*logits)


def test_weights_are_shared_where_the_file_may_be(tmp_path):
    source = ours(tmp_path / "source")
    weights = source / "model.safetensors"
    umask = os.umask(0)
    os.umask(umask)
    weights.chmod(0o666 & ~umask)
    result = extend(source, tmp_path / "long", factor=2.0)
    assert (result.linked, result.copied) == (1, 0)
    assert os.path.samefile(weights, tmp_path / "long" / "model.safetensors")
    assert not os.path.samefile(source / "tokenizer.json", tmp_path / "long" / "tokenizer.json")


def _cut(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])


def _index_that_leads_outside(folder):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _folder_for_weights(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("spoil", [_cut, _index_that_leads_outside, _folder_for_weights])
def test_a_folder_whose_weights_no_tool_could_load_is_refused(tmp_path, spoil, in_place):
    source = ours(tmp_path / "source")
    spoil(source)
    config = (source / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"safetensors"):
        extend(source, None if in_place else tmp_path / "long", in_place=in_place, factor=2.0)
    assert not (tmp_path / "long").exists() and (source / "config.json").read_bytes() == config


def test_weights_are_copied_where_links_do_not_go(tmp_path, monkeypatch):
    source = ours(tmp_path / "source")
    monkeypatch.setattr(module.os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    copied = []
    result = extend(source, tmp_path / "long", factor=2.0, start=copied.append, progress=copied.append)
    assert (result.linked, result.copied) == (0, 1)
    assert copied[0] == sum(copied[1:]) == (source / "model.safetensors").stat().st_size
    assert (tmp_path / "long" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_sources_file_modes_stay(tmp_path):
    source = ours(tmp_path / "source")
    (source / "model.safetensors").chmod(0o400)
    extend(source, tmp_path / "long", factor=2.0)
    assert (source / "model.safetensors").stat().st_mode & 0o777 == 0o400


def test_links_into_a_cache_become_files(tmp_path):
    source = ours(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in source.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    extend(tmp_path / "snapshot", tmp_path / "long", factor=2.0)
    assert not any(path.is_symlink() for path in (tmp_path / "long").iterdir())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "long").config.max_position_embeddings == 65536


def test_shards_folders_and_foreign_files_travel_and_hidden_ones_do_not(tmp_path):
    tiny_model(max_position_embeddings=512).save_pretrained(tmp_path / "source", max_shard_size="20KB")
    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ 1 }}")
    (source / "README.md").write_text("mine")
    (source / ".git").mkdir()
    (source / "config.json.bak").write_text("old")
    shards = len(list(source.glob("*.safetensors")))
    result = extend(source, tmp_path / "long", factor=4.0)
    assert result.linked + result.copied == shards > 1
    assert (tmp_path / "long" / "additional_chat_templates" / "tool.jinja").read_text() == "{{ 1 }}"
    assert (tmp_path / "long" / "README.md").read_text() == "mine"
    assert not {".git", "config.json.bak"} & {path.name for path in (tmp_path / "long").iterdir()}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "long").config.max_position_embeddings == 2048


def test_an_interrupted_copy_leaves_nothing(tmp_path, monkeypatch):
    source = ours(tmp_path / "source")
    monkeypatch.setattr(module, "_json_bytes", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        extend(source, tmp_path / "long", factor=2.0)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# In place


def test_in_place_changes_config_files_only_and_keeps_every_backup(run, tmp_path):
    folder = ours(tmp_path / "m")
    original, before = digests(folder), (folder / "config.json").read_bytes()
    code, out, _ = run(folder, "--in-place", "--yarn-factor", "4", "--json")
    assert code == 0
    assert json.loads(out)["backups"] == ["tokenizer_config.json.bak", "config.json.bak"]
    after = digests(folder)
    changed = {name for name in original if after[name] != original[name]}
    assert changed == {"config.json", "tokenizer_config.json", "provenance.json"}
    assert (folder / "config.json.bak").read_bytes() == before
    code, out, _ = run(folder, "--in-place", "--yarn-factor", "2", "--original-length", "32768")
    assert code == 0 and "config.json.bak1" in out
    assert (folder / "config.json.bak").read_bytes() == before
    assert saved(folder, "config.json.bak1")["rope_parameters"]["factor"] == 4.0
    assert saved(folder)["max_position_embeddings"] == 65536
    assert [step["after"]["max_position_embeddings"] for step in saved(folder, "provenance.json")["steps"]] == [
        131072,
        65536,
    ]
    assert {p.name for p in folder.iterdir()} - original.keys() == {
        f"{name}.bak{number}" for name in ("config.json", "tokenizer_config.json") for number in ("", "1")
    }


@pytest.mark.parametrize("stop_at", range(5))
def test_in_place_interrupted_leaves_the_old_config_or_the_new(stop_at, tmp_path, monkeypatch):
    """Killed before, at or between any of the replacements; the same command then finishes the work."""
    folder = ours(tmp_path / "m")
    old = saved(folder)
    calls = []

    def stop(real):
        def replacement(*arguments):
            if len(calls) == stop_at:
                raise KeyboardInterrupt
            calls.append(arguments)
            return real(*arguments)

        return replacement

    with monkeypatch.context() as patch:
        patch.setattr("gated_qwen.conversion.replace.os.replace", stop(os.replace))
        patch.setattr("gated_qwen.conversion.replace.os.link", stop(os.link))
        with pytest.raises(KeyboardInterrupt):
            extend(folder, in_place=True, factor=4.0)
    assert saved(folder) == old
    saved(folder, "tokenizer_config.json")
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    extend(folder, in_place=True, factor=4.0)
    assert saved(folder)["rope_scaling"] == YARN
    assert saved(folder, "tokenizer_config.json")["model_max_length"] == 131072


def test_backups_work_without_hard_links(tmp_path, monkeypatch):
    folder = ungated_folder(tmp_path / "m", "llama")
    monkeypatch.setattr(
        "gated_qwen.conversion.replace.os.link", lambda *_: (_ for _ in ()).throw(OSError("no links here"))
    )
    for number, factor in enumerate((2.0, 4.0)):
        extend(folder, in_place=True, factor=factor, original_length=512)
        assert saved(folder, f"config.json.bak{number or ''}")["max_position_embeddings"] == (512, 1024)[number]
    assert "provenance.json" not in digests(folder)


# Base, tokenizer, warnings


def test_a_base_change_leaves_length_and_tokenizer_and_says_that_it_needs_training(run, tmp_path):
    source = ours(tmp_path / "source", length=4096)
    tokenizer = (source / "tokenizer_config.json").read_bytes()
    code, _, err = run(source, tmp_path / "a", "--rope-theta", "5e6")
    assert code == 0 and "must go on training" in err
    assert saved(tmp_path / "a")["rope_scaling"] is None and saved(tmp_path / "a")["rope_theta"] == 5e6
    assert json.loads(tokenizer) == saved(tmp_path / "a", "tokenizer_config.json")
    code, _, _ = run(source, tmp_path / "b", "--rope-theta", "5e6", "--train-length", "32768")
    assert code == 0 and saved(tmp_path / "b")["max_position_embeddings"] == 32768
    assert saved(tmp_path / "b", "tokenizer_config.json")["model_max_length"] == 32768


def test_a_generation_limit_below_the_new_length_is_pointed_out(tmp_path):
    source = ungated_folder(tmp_path / "source", "qwen3")
    (source / "generation_config.json").write_text(json.dumps({"max_length": 512}))
    assert "max_length 512" in extend(source, tmp_path / "long", factor=2.0).warnings[0]


# What is printed


def test_without_a_change_the_state_is_shown_and_nothing_written(run, tmp_path):
    folder = ours(tmp_path / "m")
    before = digests(folder)
    code, out, err = run(folder)
    assert code == 0 and err == "" and digests(folder) == before
    assert "32,768" in out and "1,000,000" in out and "not run here" in out and "vllm serve" in out
    code, out, _ = run(folder, "--json")
    assert json.loads(out)["state"]["frequencies"] == {"kept": 4, "blended": 0, "interpolated": 0}


def test_the_table_shows_before_and_after_and_the_cost_of_static_yarn(run, tmp_path):
    source = ours(tmp_path / "source", head_dim=128)
    code, out, _ = run(source, tmp_path / "long", "--yarn-factor", "4", "--no-truncate", "--attention-factor", "1.0")
    assert code == 0
    rows = {line.split("│")[1].strip(): line.split("│")[2:4] for line in out.splitlines() if line.count("│") == 4}
    rows = {name: [value.strip() for value in values] for name, values in rows.items()}
    assert rows["longest text (tokens)"] == ["32,768", "131,072"]
    assert rows["attention factor"] == ["1", "1"]
    kept, blended, interpolated = (rows[f"frequencies {name}"] for name in ("kept", "blended", "interpolated"))
    assert kept[0] == "64" and sum(int(value[1]) for value in (kept, blended, interpolated)) == 64
    assert "smallest factor that is enough (65,536: 2, 131,072: 4)" in out
    assert "--rope-scale 4 --yarn-orig-ctx 32768 --rope-freq-base 1000000" in out


def test_the_plot_is_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    source = ours(tmp_path / "source")
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        code, out, err = run(
            source, tmp_path / "long", "--yarn-factor", 4, "--overwrite", "--plot", f"{source}{ending}"
        )
        assert code == 0, err
        assert (tmp_path / f"source{ending}").read_bytes().startswith(magic) and "picture" in out


REFUSALS = {
    "missing folder": (("{tmp}/nowhere", "{tmp}/out", "--yarn-factor", "2"), "nowhere: no such folder"),
    "no config": (("{tmp}/empty", "{tmp}/out", "--yarn-factor", "2"), "config.json: no such file"),
    "no target": (("{tmp}/m", "--yarn-factor", "2"), "--in-place"),
    "two targets": (("{tmp}/m", "{tmp}/out", "--in-place", "--yarn-factor", "2"), "one place"),
    "no change": (("{tmp}/m", "{tmp}/out"), "nothing to change"),
    "no change in place": (("{tmp}/m", "--in-place"), "nothing to change"),
    "target not empty": (("{tmp}/m", "{tmp}/full", "--yarn-factor", "2"), "not empty"),
    "target is source": (("{tmp}/m", "{tmp}/m", "--yarn-factor", "2"), "lie in each other"),
    "target in source": (("{tmp}/m", "{tmp}/m/out", "--yarn-factor", "2"), "lie in each other"),
    "factor": (("{tmp}/m", "{tmp}/out", "--yarn-factor", "0.5"), "factor=0.5"),
    "factor and length": (("{tmp}/m", "{tmp}/out", "--yarn-factor", "2", "--to-length", "3072"), "disagree"),
    "nothing to remove": (("{tmp}/m", "--in-place", "--remove"), "nothing to remove"),
    "already scaled": (("{tmp}/scaled", "{tmp}/out", "--yarn-factor", "2"), "--original-length 512"),
    "remove and more": (("{tmp}/scaled", "{tmp}/out", "--remove", "--rope-theta", "1e6"), "no other change"),
    "picture": (("{tmp}/m", "{tmp}/out", "--yarn-factor", "2", "--plot", "{tmp}/p.bmp"), "ending must be one of"),
    "picture nowhere": (("{tmp}/m", "{tmp}/out", "--yarn-factor", "2", "--plot", "{tmp}/x/p.png"), "no such folder"),
    "tokenizer": (("{tmp}/broken", "{tmp}/out", "--yarn-factor", "2"), "tokenizer_config.json: not readable as JSON"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("refusals")
    for name in ("m", "scaled", "broken"):
        ungated_folder(tmp / name, "llama")
    extend(tmp / "scaled", in_place=True, factor=4.0)
    (tmp / "broken" / "tokenizer_config.json").write_text("{")
    (tmp / "empty").mkdir()
    (tmp / "full").mkdir()
    (tmp / "full" / "mine").write_text("")
    return tmp


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_one_line_exit_1_and_nothing_written(case, run, folders):
    before = {path: path.stat().st_mtime_ns for path in folders.rglob("*")}
    arguments, message = REFUSALS[case]
    code, out, err = run(*(argument.format(tmp=folders) for argument in arguments))
    assert code == 1 and out == ""
    assert err.startswith("gated-qwen: ") and err.count("\n") == 1 and message in err
    assert {path: path.stat().st_mtime_ns for path in folders.rglob("*")} == before


def test_a_missing_matplotlib_is_named(run, folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(folders / "m", "--plot", folders / "p.png")
    assert code == 1 and "pip install matplotlib" in err and not (folders / "p.png").exists()
