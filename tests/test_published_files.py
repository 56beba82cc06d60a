"""What must not be sent to the Hub and is not: pickles, secrets, links, leftovers."""

import gzip
import io
import json
import os
import pickle
import shutil
import tarfile
import traceback
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from publishable import CARD, publishable_folder, refusal
from safetensors.torch import save_file

from gated_qwen.model_cards.checks import check_publication
from gated_qwen.model_cards.unsafe_content import find_secret, holds_pickle

# Made of parts, so that nobody who searches this repository for secrets stops here.
SECRETS = {
    "a Hugging Face token": "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
    "an API key": "sk-" + "proj-a1B2c3D4e5F6g7H8i9J0k1L2m3",
    "a GitHub token": "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8",
    "an AWS key": "AKIA" + "Q3EGRT5WZX7YUV2B",
    "a Slack token": "xoxb-" + "123456789012-abcdefGHIJKL",
    "a private key": "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return publishable_folder(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def folder(published, tmp_path):
    return shutil.copytree(published, tmp_path / "model")


def pickled(path):
    path.write_bytes(pickle.dumps({"a": 1}))


def torch_saved(path):
    torch.save({"a": torch.zeros(1)}, path)


def numpy_objects(path):
    with path.open("wb") as file:
        np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def numpy_archive(path):
    with path.open("wb") as file:
        np.savez(file, a=np.array([{"a": 1}], dtype=object))


def old_torch_archive(path):
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        info = tarfile.TarInfo("storages.pkl")
        archive.addfile(info, io.BytesIO(b""))


def zipped(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inside/data", pickle.dumps([1], protocol=2))


def squeezed(path):
    path.write_bytes(gzip.compress(pickle.dumps([1])))


def tarred(path, mode="w"):
    content = pickle.dumps([1])
    with tarfile.open(path, mode) as archive:
        info = tarfile.TarInfo("inside/data")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))


def tarred_and_squeezed(path):
    tarred(path, "w:xz")


@pytest.mark.parametrize("name", ["innocent.txt", "deep/inside/data"])
@pytest.mark.parametrize(
    "write",
    [
        pickled,
        torch_saved,
        numpy_objects,
        numpy_archive,
        old_torch_archive,
        zipped,
        squeezed,
        tarred,
        tarred_and_squeezed,
    ],
)
def test_a_pickle_is_known_by_its_content(folder, name, write):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    write(folder / name)
    assert "pickled" in refusal(folder)
    assert "pickled" in refusal(folder, include=["*"])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.PT", "x.pth", "x.pkl", "x.ckpt"])
def test_a_pickle_is_known_by_its_name(folder, name):
    (folder / name).write_bytes(b"anything")
    assert name in refusal(folder)
    check_publication(folder, exclude=[name])


def test_what_only_looks_like_a_pickle_passes(tmp_path):
    """A safetensors file whose header is 0x0280 bytes long begins like a pickle of protocol 2."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(0x0280)
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    np.save(tmp_path / "numbers.npy", np.arange(3))
    assert not holds_pickle(tmp_path / "x.safetensors") and not holds_pickle(tmp_path / "numbers.npy")


@pytest.mark.parametrize(
    "key",
    [
        "sk-" + "0123456789abcdef" * 2,
        "sk-" + "ant-api03-a_B-c1D-e2F_g3H-i4J-k5L",
        "sk_" + "live_a1B2c3D4e5F6g7H8i9J0k1L2m3",
        "github_pat_" + "11ABCDEFG0aBcDeFgHiJkL_" * 3,
        "glpat-" + "a1B2c3D4e5F6g7H8i9J0",
        "AIza" + "SyA1B2C3D4E5F6G7H8I9J0K1L2M3N4O5P6Q",
    ],
)
def test_other_shapes_of_keys_are_known(tmp_path, key):
    (tmp_path / "text.md").write_text(f"one\ntwo={key}\n")
    found = find_secret(tmp_path / "text.md")
    assert found is not None and found[0] == 2


@pytest.mark.parametrize("kind", SECRETS)
@pytest.mark.parametrize("name", ["notes.md", "deep/run.sh", "provenance.json"])
def test_a_secret_is_named_by_file_and_line_and_never_printed(run_command, folder, kind, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"first line\nkey = '{SECRETS[kind]}'\n")
    code, out, err = run_command("push", folder, "me/model", "--dry-run", "--json")
    assert (code, out, err.count("\n")) == (1, "", 1)
    with pytest.raises(ValueError) as error:
        check_publication(folder)
    assert f"{name}: line 2 holds {kind}" in err and f"line 2 holds {kind}" in str(error.value)
    for text in (err, "".join(traceback.format_exception(error.value))):
        assert SECRETS[kind] not in text


def test_a_secret_in_the_card_or_in_the_header_of_weights_is_found(folder):
    save_file({"x": torch.zeros(1)}, folder / "x.safetensors", {"token": SECRETS["a Hugging Face token"]})
    assert find_secret(folder / "x.safetensors") == (1, "a Hugging Face token")
    (folder / "x.safetensors").unlink()
    (folder / "README.md").write_text(CARD + SECRETS["a Hugging Face token"])
    assert "README.md: line 10 holds a Hugging Face token" in refusal(folder)


def test_a_secret_in_other_encodings_in_binary_files_and_in_names_is_found(folder):
    token = SECRETS["a Hugging Face token"]
    for content in (f"one\n{token}".encode("utf-16"), b"GGUF\0\0one\n" + token.encode() + b"\0" * 9):
        (folder / "x").write_bytes(content)
        assert "x: line 2 holds a Hugging Face token" in refusal(folder)
    (folder / "x").unlink()
    (folder / f"run-{token}.txt").write_text("x")
    said = refusal(folder)
    assert "the name of a file in it holds a Hugging Face token" in said and token not in said


def test_a_broken_archive_is_an_ordinary_file(folder):
    zipped(folder / "a.zip")
    archive = bytearray((folder / "a.zip").read_bytes())
    archive[20:60] = b"\xff" * 40
    (folder / "a.zip").write_bytes(archive)
    (folder / "a.tar").write_bytes(b"a" * 257 + b"ustar" + b"\xff" * 700)
    (folder / "a.gz").write_bytes(gzip.compress(b"text" * 99)[:20])
    check_publication(folder)


@pytest.mark.parametrize("name", [".env", ".env.local", "id_rsa", ".netrc", "server.pem", "sub/.npmrc"])
def test_files_that_usually_hold_secrets_are_refused(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    assert name in refusal(folder, include=["*"])


@pytest.mark.parametrize(
    "text",
    [
        "hf_hub_download(repo_id)",
        "hf_" + "x" * 34,
        "a task-Specific-instruction-of-2-parts-and-more",
        "sk-short1",
        "sk-lower-case-words-and-a-2-in-between",
    ],
)
def test_words_that_only_begin_like_a_secret_pass(tmp_path, text):
    (tmp_path / "text.md").write_text(text)
    assert find_secret(tmp_path / "text.md") is None


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("private")
    (folder / "innocent.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    assert "innocent.txt: a link to" in refusal(folder, include=["*"])
    (folder / "innocent.txt").unlink()
    (folder / "sub").symlink_to(tmp_path / "outside", target_is_directory=True)
    assert "sub: a link to" in refusal(folder)
    (folder / "sub").unlink()
    (folder / "nowhere").symlink_to(tmp_path / "nothing")
    assert "leads nowhere" in refusal(folder)
    (folder / "nowhere").unlink()
    os.mkfifo(folder / "pipe")
    assert "neither a file nor a folder" in refusal(folder)


def test_a_link_inside_the_folder_is_sent_as_the_file(folder):
    (folder / "LICENSE").write_text("text")
    (folder / "COPYING").symlink_to("LICENSE")
    assert {"COPYING", "LICENSE"} <= {file.path for file in check_publication(folder).files}


def test_leftovers_of_training_and_of_this_machine_stay_here(folder):
    for name in ("checkpoint-10/model.safetensors", "runs/events.out", "__pycache__/x.pyc", ".git/config", ".cache/x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    for name in ("optimizer.pt", "training_args.bin", "trainer_state.json", ".gitattributes"):
        (folder / name).write_bytes(b"x")
    publication = check_publication(folder)
    left = {entry.path for entry in publication.left_out}
    assert left == {
        *("checkpoint-10", "runs", "__pycache__", ".git", ".cache"),
        *("optimizer.pt", "training_args.bin", "trainer_state.json", ".gitattributes"),
    }
    sent = check_publication(folder, include=["trainer_state.json"]).files
    assert "trainer_state.json" in {file.path for file in sent}


@pytest.mark.parametrize(
    "name", ["deep/.README.md.partial-12ab34cd", "notes.md~", ".notes.swp", "events.out.tfevents.1"]
)
def test_what_a_killed_command_or_an_editor_leaves_stays_here(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("half a fi")
    publication = check_publication(folder)
    assert [entry.path for entry in publication.left_out] == [name]


@pytest.mark.parametrize("name", [b"a\nb.txt", b"a\\b.txt", b"\xff.txt", b"a\x1b[31m.txt"])
def test_a_name_that_other_systems_cannot_hold_is_refused(folder, name):
    Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text("x")
    said = refusal(folder)
    assert "not portable" in said and said.isprintable()


def test_a_name_with_brackets_can_be_left_out(folder):
    save_file({"x": torch.zeros(1)}, folder / "a[1].safetensors")
    assert "--exclude a[1].safetensors" in refusal(folder)
    check_publication(folder, exclude=["a[1].safetensors"])


def test_a_huge_file_that_is_not_the_model_must_be_asked_for(folder, monkeypatch):
    monkeypatch.setattr("gated_qwen.model_cards.published_files.LARGE_LEFTOVER", 1000)
    (folder / "recording.wav").write_bytes(b"RIFF" + bytes(2000))
    said = refusal(folder, include=["tokenizer.json", "*.py", "config.json"])
    assert "recording.wav" in said and "--include recording.wav" in said
    check_publication(folder, include=["*.wav", "*.json", "*.py"])


def test_patterns_cannot_take_the_model_away(folder):
    for pattern in ("*.safetensors", "README.md", "config.json"):
        assert "the model needs it" in refusal(folder, exclude=[pattern])
