"""The local Hub answers the real client as the Hub would, so that what passes here means something."""

import pytest
from hub_server import OTHER_TOKEN, READ_TOKEN, TOKEN, Fault
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from publishable import connected


@pytest.fixture
def hub(monkeypatch):
    with connected(monkeypatch) as hub:
        yield hub


@pytest.fixture
def api(hub):
    api = HfApi()
    api.create_repo("me/model")
    return api


def add(api, *paths, content=b"text", **options):
    operations = [CommitOperationAdd(path, content) for path in paths]
    return api.create_commit("me/model", operations, commit_message="add", **options).oid


def test_who_is_asking(hub):
    assert HfApi().whoami()["name"] == "me" and HfApi(token=OTHER_TOKEN).whoami()["name"] == "someone"
    with pytest.raises(HfHubHTTPError) as error:
        HfApi(token="hf_unknown").whoami()
    assert error.value.response.status_code == 401


def test_commits_branches_and_tags(hub, api):
    first = add(api, "a.txt", "folder/b.txt", "folder/deep/c.safetensors")
    api.create_tag("me/model", tag="v1")
    api.create_branch("me/model", branch="side/branch")
    operations = [CommitOperationDelete("folder/"), CommitOperationAdd("a.txt", b"other")]
    second = api.create_commit("me/model", operations, commit_message="change").oid
    assert hub.files("me/model") == {"a.txt": b"other"} and set(hub.files("me/model", "v1")) == {
        "a.txt",
        "folder/b.txt",
        "folder/deep/c.safetensors",
    }
    assert [commit.commit_id for commit in api.list_repo_commits("me/model")][:2] == [second, first]
    refs = api.list_repo_refs("me/model")
    assert {ref.name: ref.target_commit for ref in refs.branches} == {"main": second, "side/branch": first}
    assert {ref.name: ref.target_commit for ref in refs.tags} == {"v1": first}
    assert api.model_info("me/model", revision="v1").sha == first
    paths = [entry.path for entry in api.list_repo_tree("me/model", revision="side/branch")]
    assert paths == ["folder", ".gitattributes", "a.txt"]
    paths = [entry.path for entry in api.list_repo_tree("me/model", "folder", recursive=True, revision="v1")]
    assert paths == ["folder/deep", "folder/b.txt", "folder/deep/c.safetensors"]
    [info] = api.get_paths_info("me/model", ["folder/deep/c.safetensors", "none"], revision=first)
    assert info.lfs.size == 4
    api.delete_tag("me/model", tag="v1")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("me/model", revision="v1")


def test_a_commit_on_top_of_another_than_expected_is_refused(hub, api):
    old = api.model_info("me/model").sha
    add(api, "a.txt")
    with pytest.raises(HfHubHTTPError, match="412"):
        add(api, "b.txt", parent_commit=old)
    with pytest.raises(EntryNotFoundError):
        api.create_commit("me/model", [CommitOperationDelete("none")], commit_message="x")


def test_downloads(hub, api, tmp_path):
    sha = add(api, "a.txt", "sub/b.safetensors", content=b"0123456789")
    folder = snapshot_download("me/model", cache_dir=tmp_path)
    assert folder.endswith(sha)
    path = hf_hub_download("me/model", "sub/b.safetensors", cache_dir=tmp_path, revision=sha)
    assert open(path, "rb").read() == b"0123456789"
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("me/model", "none", cache_dir=tmp_path)


def test_what_has_arrived_is_not_sent_twice(hub, api):
    add(api, "a.safetensors")
    add(api, "b.safetensors")
    assert len(hub.requests("^PUT")) == 1
    log = len(hub.log)
    add(api, "a.safetensors")  # nothing differs, so there is no commit
    assert not [line for line in hub.log[log:] if "commit" in line]


def test_rights(hub, api):
    api.create_repo("me/hidden", private=True)
    for token in (OTHER_TOKEN, False):
        with pytest.raises(RepositoryNotFoundError):
            api.model_info("me/hidden", token=token)
    assert api.model_info("me/hidden", token=READ_TOKEN).private
    for token in (READ_TOKEN, OTHER_TOKEN):
        with pytest.raises(HfHubHTTPError, match="403"):
            add(api, "a.txt", token=token)
    with pytest.raises(HfHubHTTPError, match="403"):
        api.create_repo("someone/model")
    api.create_repo("team/model")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo("me/model")


def test_pull_requests(hub, api):
    made = api.create_commit(
        "me/model", [CommitOperationAdd("a.txt", b"x")], commit_message="x", create_pr=True, token=OTHER_TOKEN
    )
    assert made.pr_url == f"{hub.endpoint}/me/model/discussions/1"
    assert hub.files("me/model") == {} and hub.files("me/model", "refs/pr/1") == {"a.txt": b"x"}


def test_faults_happen_as_ordered(hub, api):
    hub.faults += [Fault("^PUT", "cut"), Fault("^PUT", 500), Fault("^POST .*batch", 429)]
    add(api, "a.safetensors")  # the client tries again by itself
    assert len(hub.requests("^PUT")) == 3 and len(hub.requests("batch")) == 2
    hub.faults.append(Fault("^PUT", "cut", times=100))
    with pytest.raises(Exception, match="b.safetensors"):
        add(api, "b.safetensors", content=b"other" * 1000)
    assert TOKEN not in "".join(hub.log)
