"""What a model must be like before anything of it is sent to the Hub: weights, config, tokenizer, card, code."""

import json
import shutil
import socket

import pytest
import transformers
from publishable import CARD, publishable_folder, refusal, word_tokenizer
from safetensors.torch import load_file, save_file
from tiny import TINY_FIELDS, tiny_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import gated_qwen
from gated_qwen.conversion.convert import convert
from gated_qwen.model_cards.checks import check_publication
from gated_qwen.model_cards.push import push
from gated_qwen.model_cards.remote_code import every_code_file, remote_code


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return publishable_folder(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def folder(published, tmp_path):
    return shutil.copytree(published, tmp_path / "model")


# What passes.


def test_a_whole_folder_passes(folder):
    publication = check_publication(folder)
    assert [file.path for file in publication.files] == sorted(path.name for path in folder.iterdir())
    assert publication.auto_class == "AutoModelForCausalLM" and publication.remote_code
    assert publication.notes == [] and publication.left_out == []


def test_a_dry_run_opens_no_connection_and_shows_files_and_card(run_command, folder, monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (folder / "optimizer.pt").write_bytes(b"")
    code, out, err = run_command("push", folder, "me/model", "--dry-run")
    assert (code, err) == (0, "")
    assert f"{(folder / 'model.safetensors').stat().st_size:,}  model.safetensors" in out
    assert "optimizer.pt (state of a training run)" in out
    assert out.endswith(CARD)
    code, out, err = run_command("push", folder, "me/model", "--dry-run", "--json")
    result = json.loads(out)
    assert result["dry_run"] and result["commit"] is None and result["card"] == CARD
    assert result["bytes"] == sum(result["files"].values())


MODELS = {
    "sharded": ({}, {"max_shard_size": "20kB"}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "every gate": ({"gate_positions": ["query", "key", "value", "attn_output", "dense_output"]}, {}),
    "sequence classifier": ({"cls": gated_qwen.GatedQwenForSequenceClassification, "pad_token_id": 0}, {}),
    "body": ({"cls": gated_qwen.GatedQwenModel}, {}),
    "experts": (
        {
            "cls": gated_qwen.GatedQwenMoeForCausalLM,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        {"max_shard_size": "40kB"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_passes(tmp_path, name):
    fields, save = MODELS[name]
    model = tiny_model(**fields)
    publication = check_publication(publishable_folder(tmp_path / "m", model, **save))
    assert publication.remote_code
    auto_class = {"sequence classifier": "AutoModelForSequenceClassification", "body": "AutoModel"}
    assert publication.auto_class == auto_class.get(name, "AutoModelForCausalLM")


@pytest.mark.parametrize("to", ["qwen3_5", "qwen3_next"])
def test_an_export_to_a_native_layout_passes_without_remote_code(tmp_path, published, to):
    convert(published, tmp_path / "export", to=to)
    (tmp_path / "export" / "README.md").write_text(CARD)
    assert not check_publication(tmp_path / "export").remote_code


def test_experts_that_are_saved_one_by_one_pass(tmp_path):
    fields = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    folder = publishable_folder(tmp_path / "m", Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY_FIELDS, **fields)))
    check_publication(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "missing" in refusal(folder)


# Weights, config, tokenizer, card.


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != "drop"}))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_tensor_is_named(folder):
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.g_proj.weight"))
    assert "tensor model.layers.1.self_attn.g_proj.weight is missing" in refusal(folder)


def test_a_tensor_of_another_shape_is_named(folder):
    change_config(folder, gate_granularity="elementwise")
    said = refusal(folder)
    assert "model.layers.0.self_attn.g_proj.weight has shape [4, 32], and config.json asks for [32, 32]" in said


def test_a_tensor_that_nobody_would_load_is_named(folder):
    change_config(folder, gate_positions=[])
    assert "model.layers.0.self_attn.g_proj.weight is not part of GatedQwenForCausalLM" in refusal(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = publishable_folder(tmp_path / "m", max_shard_size="20kB")
    shard = sorted(folder.glob("model-*.safetensors"))[2]
    shard.unlink()
    assert shard.name in refusal(folder)


def test_a_stale_shard_is_not_sent(tmp_path):
    folder = publishable_folder(tmp_path / "m", max_shard_size="20kB")
    index = folder / "model.safetensors.index.json"
    shutil.copy(sorted(folder.glob("model-*.safetensors"))[0], folder / "model-00009-of-00009.safetensors")
    assert "model-00009-of-00009.safetensors: holds no tensor of the model" in refusal(folder)
    left = check_publication(folder, exclude=["model-00009-*"]).left_out
    assert [(entry.path, entry.reason) for entry in left] == [("model-00009-of-00009.safetensors", "excluded")]
    index.unlink()
    assert "restore the index" in refusal(folder)


def test_weights_that_nobody_would_find_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "rename the file" in refusal(folder)


def test_an_adapter_is_refused_with_the_mend(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "gated-qwen merge it first" in refusal(tmp_path)


def test_an_adapter_beside_the_model_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    assert "an adapter beside a model" in refusal(folder)
    check_publication(folder, exclude=["adapter_*"])


def test_the_official_layout_is_refused_with_the_mend(tmp_path):
    tiny_model().save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "official", to="official")
    assert "convert it with gated-qwen convert" in refusal(tmp_path / "official")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": "drop"}, "architectures is missing"),
        ({"architectures": "GatedQwenForCausalLM"}, "architectures is missing"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "names LlamaForCausalLM, and its model_type has GatedQwenForCausalLM",
        ),
        ({"model_type": "unheard_of"}, "'unheard_of' is not known"),
        ({"gate_activation": "tanh"}, "gate_activation='tanh' is not allowed"),
    ],
)
def test_a_config_that_cannot_be_loaded_is_refused(folder, fields, said):
    change_config(folder, **fields)
    assert said in refusal(folder)


def test_code_in_the_folder_is_not_run(folder):
    (folder / "foreign.py").write_text("raise SystemExit('it ran')")
    change_config(folder, model_type="foreign", auto_map={"AutoConfig": "foreign.Config"})
    assert "'foreign' is not known" in refusal(folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "foreign.Tokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert "'foreign' is not known" in refusal(folder)


def test_a_tokenizer_with_too_many_tokens_is_refused(folder):
    word_tokenizer(65).save_pretrained(folder)
    assert "65 tokens and the model a vocabulary of 64" in refusal(folder)


def test_a_folder_without_a_tokenizer_is_noted(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "no tokenizer" in check_publication(folder).notes[0]


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (None, "write one with gated-qwen card"),
        ("# no front matter", "front matter"),
        (CARD.replace("license: apache-2.0\n", ""), "license"),
        (CARD.replace("tags:\n", "base_model: /home/me/model\ntags:\n"), "base_model"),
    ],
)
def test_a_bad_card_is_refused(folder, card, said):
    (folder / "README.md").unlink() if card is None else (folder / "README.md").write_text(card)
    assert said in refusal(folder)


# Remote code.


def test_the_code_files_follow_from_the_config_class(folder):
    auto_map, files = remote_code(gated_qwen.GatedQwenConfig)
    assert set(files) == {path.name for path in folder.glob("*.py")}
    assert auto_map == json.loads((folder / "config.json").read_text())["auto_map"]
    assert set(files) <= every_code_file()
    assert "class GatedQwenConfig" in files["configuration_gated_qwen.py"].read_text()


def test_code_of_another_version_is_refused_and_can_be_refreshed(folder):
    code = (folder / "modeling_gated_qwen.py").read_bytes()
    (folder / "modeling_gated_qwen.py").write_bytes(code + b"# of an older version\n")
    assert "modeling_gated_qwen.py: not the code of this version" in refusal(folder)
    (folder / "configuration_gated_qwen.py").unlink()
    assert "configuration_gated_qwen.py: missing" in refusal(folder)
    check_publication(folder, refresh_code=True)
    assert (folder / "modeling_gated_qwen.py").read_bytes() == code
    check_publication(folder)


@pytest.mark.parametrize("auto_map", ["drop", {"AutoConfig": "configuration_gated_qwen.GatedQwenConfig"}])
def test_an_incomplete_auto_map_is_refused_and_can_be_refreshed(folder, auto_map):
    before = json.loads((folder / "config.json").read_text())
    change_config(folder, auto_map=auto_map)
    assert "auto_map has None for Auto" in refusal(folder)
    check_publication(folder, refresh_code=True)
    assert json.loads((folder / "config.json").read_text()) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"repo_id": "me/my/model"}, "'me/my/model' is no id of a model repository"),
        ({"create_pr": True, "tag": "v1"}, "pull request"),
        ({"create_pr": True, "revision": "dev"}, "pull request"),
        ({"revision": "0123456789" * 4}, "--revision '0123456789.*no name"),
        ({"revision": ""}, "--revision ''"),
        ({"tag": "my tag"}, "--tag 'my tag'"),
        ({"tag": "v1..2"}, "no name that a branch or tag can have"),
    ],
)
def test_arguments_are_checked_in_a_dry_run_too(folder, options, said):
    with pytest.raises(ValueError, match=said):
        push(folder, **{"repo_id": "me/model", "dry_run": True, **options})


@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification"])
def test_a_plain_model_of_transformers_passes(tmp_path, head):
    model = tiny_model(getattr(transformers, f"Qwen3For{head}"), pad_token_id=0)
    publication = check_publication(publishable_folder(tmp_path / "m", model))
    assert (publication.auto_class, publication.remote_code) == (f"AutoModelFor{head}", False)
