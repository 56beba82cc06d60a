"""`gated-qwen push` and its Python call against a local Hub, through the real client."""

import hashlib
import json
import shutil
import traceback

import pytest
from hub_server import OTHER_TOKEN, READ_TOKEN, TOKEN, Fault
from huggingface_hub import CommitOperationAdd, HfApi
from publishable import CARD, connected, publishable_folder, word_tokenizer
from tiny import tiny_model

from gated_qwen.model_cards import upload
from gated_qwen.model_cards.push import push
from gated_qwen.model_cards.upload import stale_files

SHARDED = {"max_shard_size": "20kB"}
UNKNOWN_TOKEN = "hf_" + "unknownUNKNOWN0123456789abcdefghij"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return publishable_folder(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def folder(published, tmp_path):
    return shutil.copytree(published, tmp_path / "model")


@pytest.fixture
def hub(monkeypatch):
    with connected(monkeypatch) as hub:
        yield hub


def here(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(error_class, said, *arguments, **options):
    """`push` raises one line that holds `said` and, like its traceback, no token."""
    with pytest.raises(error_class) as error:
        push(*arguments, **options)
    text = str(error.value)
    assert said in text and "\n" not in text
    printed = "".join(traceback.format_exception(error.value))
    for token in (TOKEN, READ_TOKEN, OTHER_TOKEN, UNKNOWN_TOKEN):
        assert token not in printed
    return text


# What arrives.


def test_the_repository_holds_the_folder_byte_for_byte_in_one_commit(hub, folder):
    result = push(folder, "me/model")
    assert hub.files("me/model") == here(folder)
    assert len(hub.requests("^POST .*/commit/")) == 1
    assert result.commit == HfApi().model_info("me/model").sha
    assert result.url == f"{hub.endpoint}/me/model"
    assert result.load == (
        f'AutoModelForCausalLM.from_pretrained("me/model", revision="{result.commit}", trust_remote_code=True)'
    )
    assert result.files == {name: len(content) for name, content in here(folder).items()}


def test_the_command_prints_where_it_went_and_never_the_token(hub, folder, run_command):
    code, out, err = run_command("push", folder, "me/model", "--tag", "v1", "--private")
    assert code == 0 and err == ""
    commit = hub.repositories["me/model"].commit_of("v1").oid
    assert f"{hub.endpoint}/me/model: {len(here(folder))} files" in out
    assert f"commit {commit}, tagged v1" in out and f'revision="{commit}"' in out
    code, out, err = run_command("push", folder, "me/other", "--json", "--message", "first")
    result = json.loads(out)
    assert code == 0 and result["commit"] == hub.repositories["me/other"].commit_of("main").oid
    assert hub.repositories["me/other"].commit_of("main").title == "first"
    assert TOKEN not in out + err


def test_a_name_alone_is_the_users_own(hub, folder):
    assert push(folder, "model").repo_id == "me/model"
    assert push(folder, "team/model").repo_id == "team/model"


@pytest.mark.parametrize("steps", [(SHARDED, {}, {"max_shard_size": "40kB"}), ({}, SHARDED, {})])
def test_no_stale_shard_remains_and_nothing_else_is_deleted(hub, folder, tmp_path, steps):
    extra = {
        "photo.png": b"png",
        "notes/deep.md": b"text",
        "lora/adapter_model.safetensors": b"x",
        "other.safetensors": b"y",
    }
    for number, save in enumerate(steps):
        model = publishable_folder(tmp_path / str(number), **save)
        result = push(model, "me/model")
        assert hub.files("me/model") == {**here(model), **(extra if number else {})}
        assert bool(result.deleted) == bool(number)
        if number == 0:
            operations = [CommitOperationAdd(path, content) for path, content in extra.items()]
            HfApi().create_commit("me/model", operations, commit_message="extra")


def test_pickled_weights_and_code_of_an_earlier_push_go(hub, folder):
    HfApi().create_repo("me/model")
    old = ("pytorch_model.bin", "modeling_gated_qwen_moe.py", "configuration_gated_qwen_moe.py", "my_own.py")
    operations = [CommitOperationAdd(name, b"old") for name in old]
    HfApi().create_commit("me/model", operations, commit_message="old")
    result = push(folder, "me/model")
    assert result.deleted == ["configuration_gated_qwen_moe.py", "modeling_gated_qwen_moe.py", "pytorch_model.bin"]
    assert set(hub.files("me/model")) == {*here(folder), "my_own.py"}


def test_a_file_that_is_only_called_like_our_code_stays():
    assert stale_files({"modeling_gated_qwen_moe.py"}, set()) == []


# The card.


def test_a_card_that_is_there_is_kept_without_consent(hub, folder):
    push(folder, "me/model")
    assert push(folder, "me/model").notes == ["the repository holds all of this already, so there is no new commit"]
    (folder / "README.md").write_bytes(CARD.replace("\n", "\r\n").encode())
    push(folder, "me/crlf")
    assert "already" in push(folder, "me/crlf").notes[0]
    (folder / "README.md").write_text(CARD + "\nNew.\n")
    result = push(folder, "me/model")
    assert "kept" in result.notes[0] and "README.md" not in result.files
    assert hub.files("me/model")["README.md"].decode() == CARD
    push(folder, "me/model", replace_card=True)
    assert hub.files("me/model")["README.md"].decode() == CARD + "\nNew.\n"


def test_a_bad_card_is_refused_before_anything_is_asked(hub, folder):
    (folder / "README.md").write_text(CARD.replace("license: apache-2.0", "license:"))
    refused(ValueError, "license", folder, "me/model")
    assert hub.log == []


def test_a_card_that_only_the_hub_refuses_stops_the_push_before_there_is_a_repository(hub, folder, monkeypatch):
    monkeypatch.setattr("gated_qwen.model_cards.checks.check_card", lambda text, folder: None)
    (folder / "README.md").write_text(CARD.replace("- gated-attention", "- 5"))
    refused(ValueError, '"tags" must be a string or a list of strings', folder, "me/model")
    assert hub.log == ["POST /api/validate-yaml"] and hub.repositories == {}


# Branches, tags, pull requests, visibility.


def test_a_branch_is_created_and_main_is_left_alone(hub, folder):
    push(folder, "me/model")
    (folder / "NEW").write_text("x")
    result = push(folder, "me/model", revision="exp/1", tag="v2")
    assert "NEW" not in hub.files("me/model")
    assert hub.files("me/model", "exp/1") == hub.files("me/model", "v2") == here(folder)
    assert hub.repositories["me/model"].tags["v2"].oid == result.commit
    push(folder, "me/model", revision="exp/1")


def test_a_tag_that_is_taken_is_refused_before_anything_is_sent(hub, folder):
    first = push(folder, "me/model", tag="v1").commit
    (folder / "NEW").write_text("x")
    sends = len(hub.requests("^PUT|/commit/"))
    refused(FileExistsError, "tag v1 is taken", folder, "me/model", tag="v1")
    assert len(hub.requests("^PUT|/commit/")) == sends
    assert hub.repositories["me/model"].tags["v1"].oid == first
    result = push(folder, "me/model", tag="v1", replace_tag=True)
    assert hub.repositories["me/model"].tags["v1"].oid == result.commit != first
    refused(ValueError, "v1 is a tag", folder, "me/model", revision="v1")


def test_a_push_whose_tag_failed_is_finished_by_running_it_again(hub, folder):
    hub.faults.append(Fault("^POST .*/tag/", 500))
    refused(RuntimeError, "run the same command again", folder, "me/model", tag="v1")
    result = push(folder, "me/model", tag="v1")
    assert hub.repositories["me/model"].tags["v1"].oid == result.commit
    assert len(hub.requests("/commit/")) == 1


def test_a_pull_request_leaves_main_alone(hub, folder):
    refused(RuntimeError, "no such repository", folder, "me/model", create_pr=True)
    HfApi().create_repo("me/model")
    result = push(folder, "me/model", create_pr=True, token=OTHER_TOKEN)
    assert result.pull_request == f"{hub.endpoint}/me/model/discussions/1"
    assert hub.files("me/model") == {} and hub.files("me/model", "refs/pr/1") == here(folder)
    (folder / "NEW").write_text("x")
    push(folder, "me/model", revision="refs/pr/1")
    assert hub.files("me/model", "refs/pr/1") == here(folder)
    assert push(folder, "model", create_pr=True).repo_id == "me/model"


def test_a_tag_cannot_be_called_like_a_branch(hub, folder):
    refused(ValueError, "main is a branch", folder, "me/model", tag="main")
    assert not hub.requests("/commit/")


def test_an_adapter_on_the_other_side_would_be_loaded_instead_and_is_refused(hub, folder):
    HfApi().create_repo("me/model")
    operations = [CommitOperationAdd("adapter_config.json", b"{}")]
    HfApi().create_commit("me/model", operations, commit_message="adapter")
    refused(ValueError, "an adapter lies there", folder, "me/model")
    assert set(hub.files("me/model")) == {"adapter_config.json"} and not hub.requests("^PUT")


def test_private_means_private(hub, folder):
    push(folder, "me/hidden", private=True)
    assert hub.repositories["me/hidden"].private
    push(folder, "me/hidden")
    push(folder, "me/open")
    assert not hub.repositories["me/open"].private
    before = len(hub.requests("/commit/"))
    refused(ValueError, "is there and public", folder, "me/open", private=True)
    refused(ValueError, "is there and private", folder, "me/hidden", private=False)
    assert len(hub.requests("/commit/")) == before


# Refusals and faults.


def test_a_folder_that_does_not_pass_sends_nothing(hub, folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-4])
    refused(ValueError, "model.safetensors: truncated", folder, "me/model")
    assert hub.log == []


def test_without_a_token_or_with_an_unknown_one(hub, folder, monkeypatch, run_command):
    refused(RuntimeError, "the Hub does not know this token", folder, "me/model", token=UNKNOWN_TOKEN)
    monkeypatch.setenv("HF_TOKEN", UNKNOWN_TOKEN)
    code, out, err = run_command("push", folder, "me/model", "--json")
    assert (code, out, err.count("\n")) == (1, "", 1) and "hf auth login" in err and UNKNOWN_TOKEN not in err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    refused(RuntimeError, "no token", folder, "me/model")
    assert hub.repositories == {} and not hub.requests("^PUT")


def test_a_token_that_may_not_write(hub, folder):
    refused(RuntimeError, "may not write there", folder, "me/model", token=READ_TOKEN)
    refused(RuntimeError, 'under the namespace "someone"', folder, "someone/model")
    push(folder, "me/model")
    (folder / "NEW").write_text("x")
    for token in (READ_TOKEN, OTHER_TOKEN):
        refused(RuntimeError, "may not write there", folder, "me/model", token=token)
    assert len(hub.requests("^PUT")) == 1


def test_offline_is_said_and_not_tried(hub, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(RuntimeError, "HF_HUB_OFFLINE", folder, "me/model")
    assert hub.log == []


def test_a_token_that_the_hub_repeats_is_not_printed(hub, folder, monkeypatch):
    def leak(*_, **__):
        raise OSError(f"refused Bearer {TOKEN}")

    monkeypatch.setattr(HfApi, "create_repo", leak)
    refused(RuntimeError, "refused Bearer ***", folder, "me/model")


@pytest.mark.parametrize("kind", ["cut", 500])
def test_an_upload_that_broke_off_goes_on_where_it_was(hub, tmp_path, kind):
    """Some shards arrive, one never does: nothing is committed; the second run sends only what is missing."""
    folder = publishable_folder(tmp_path / "m", **SHARDED)
    shards = sorted(folder.glob("model-*.safetensors"))
    oid = hashlib.sha256(shards[2].read_bytes()).hexdigest()
    hub.faults.append(Fault(f"^PUT .*{oid}", kind, times=6))  # the client tries that often
    refused(RuntimeError, "run the same command again", folder, "me/model")
    arrived = len(hub.repositories["me/model"].large_objects)
    assert hub.files("me/model") == {} and 0 < arrived < len(shards)
    hub.faults.clear()
    log = len(hub.log)
    push(folder, "me/model")
    assert hub.files("me/model") == here(folder)
    assert len([line for line in hub.log[log:] if line.startswith("PUT")]) == len(shards) - arrived


def test_a_commit_that_was_lost_leaves_the_old_files_whole(hub, tmp_path):
    first, second = publishable_folder(tmp_path / "1"), publishable_folder(tmp_path / "2", **SHARDED)
    push(first, "me/model")
    hub.faults.append(Fault("^POST .*/commit/", "cut"))
    refused(RuntimeError, "the connection to the Hub broke", second, "me/model")
    assert hub.files("me/model") == here(first)
    log = len(hub.log)
    push(second, "me/model")
    assert hub.files("me/model") == here(second)
    assert not [line for line in hub.log[log:] if line.startswith("PUT")]


def test_a_commit_of_somebody_else_in_the_meantime_is_not_run_over(hub, folder, monkeypatch):
    def meanwhile(api, repo_id, destination):
        parent = prepare(api, repo_id, destination)
        HfApi().create_commit(repo_id, [CommitOperationAdd("theirs", b"x")], commit_message="theirs")
        return parent

    prepare = upload.prepare_branch
    monkeypatch.setattr(upload, "prepare_branch", meanwhile)
    refused(RuntimeError, "somebody else has committed", folder, "me/model")
    assert set(hub.files("me/model")) == {"theirs"}


@pytest.mark.parametrize("status", [429, 500])
def test_one_bad_answer_is_outlived(hub, folder, status):
    hub.faults += [Fault("preupload", status), Fault("^PUT", status)]
    push(folder, "me/model")
    assert hub.files("me/model") == here(folder)


# push_to_hub of transformers.


def test_push_to_hub_of_transformers_gives_a_whole_repository(hub, tmp_path):
    model = tiny_model(gate_granularity="headwise")
    model.push_to_hub("me/model")
    word_tokenizer().push_to_hub("me/model")
    model.save_pretrained(tmp_path / "m")
    word_tokenizer().save_pretrained(tmp_path / "m")
    files = hub.files("me/model")
    card = files.pop("README.md").decode()
    assert files == here(tmp_path / "m")
    assert "license" not in card.split("---")[1]  # a card of transformers' own, which `push` would refuse
    model.config.push_to_hub("me/config")
    assert {name for name in hub.files("me/config") if not name.startswith("rope")} == {
        "README.md",
        "config.json",
        "configuration_gated_qwen.py",
    }


def test_push_to_hub_of_transformers_leaves_stale_shards_and_push_cleans_up(hub, folder):
    model = tiny_model(gate_granularity="headwise")
    model.push_to_hub("me/model", **SHARDED)
    model.push_to_hub("me/model")
    assert {"model.safetensors", "model.safetensors.index.json"} <= set(hub.files("me/model"))
    push(folder, "me/model", replace_card=True)
    assert hub.files("me/model") == here(folder)
