"""The Hub's side of a push: what is there, what must go, one commit, a tag."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gated_qwen.model_cards.checks import ADAPTER_CONFIG, CARD_NAME, Publication
from gated_qwen.model_cards.remote_code import every_code_file

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# Weights as transformers names them, pickled ones too; other files of the same kind may be the owner's own.
WEIGHTS = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.json"
)


@dataclass(frozen=True)
class Destination:
    """Where a publication goes; the fields are arguments of `push`."""

    repo_id: str
    private: bool | None
    revision: str | None
    tag: str | None
    create_pr: bool
    replace_card: bool
    replace_tag: bool


@dataclass(frozen=True)
class Upload:
    """What came of it: `sent` and `deleted` are paths in the repository, `commit` is a sha."""

    repo_id: str
    url: str
    commit: str
    pull_request: str | None
    sent: list[str]
    deleted: list[str]
    notes: list[str]


def upload(
    publication: Publication, destination: Destination, message: str, *, token: str | None, endpoint: str | None
) -> Upload:
    """Sends a checked publication in one commit with `message`; the other arguments and the errors are `push`'s."""
    from huggingface_hub import HfApi, constants, get_token

    if constants.is_offline_mode():
        raise RuntimeError("HF_HUB_OFFLINE is set, so nothing can be sent; unset it, or pass --dry-run")
    token = token or get_token()
    if token is None:
        raise RuntimeError("no token for the Hub: log in with hf auth login, or set HF_TOKEN")
    api = HfApi(endpoint=endpoint, token=token)
    with one_line_errors(destination.repo_id, token):
        validate_card(api, publication.card)
        repo_id = open_repository(api, destination)
        parent = prepare_branch(api, repo_id, destination)
        made = commit_files(api, repo_id, publication, destination, message, parent)
        if destination.tag:
            set_tag(api, repo_id, destination.tag, made.commit)
        return made


def validate_card(api: "HfApi", card: str) -> None:
    """Asks the Hub itself about the front matter, before there is a repository.

    Raises:
        ValueError: what the Hub has against it.
    """
    from huggingface_hub import get_session
    from huggingface_hub.utils import hf_raise_for_status

    response = get_session().post(f"{api.endpoint}/api/validate-yaml", json={"content": card, "repoType": "model"})
    if response.status_code == 400:
        reasons = "; ".join(str(error.get("message")) for error in response.json().get("errors", []))
        raise ValueError(f"{CARD_NAME}: the Hub does not take the front matter ({reasons})")
    hf_raise_for_status(response)


def open_repository(api: "HfApi", destination: Destination) -> str:
    """Creates the repository, or finds it; returns its full id.

    Raises:
        ValueError: it is public and shall be private, or the reverse.
    """
    repo_id = destination.repo_id
    if destination.create_pr:
        repo_id = repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"
    else:
        repo_id = api.create_repo(repo_id, private=destination.private, exist_ok=True).repo_id
    private = bool(api.model_info(repo_id).private)
    if destination.private not in (None, private):
        there, wanted = ("private", "--public") if private else ("public", "--private")
        raise ValueError(
            f"{repo_id}: the repository is there and {there}; change that in its settings on the Hub, or leave out "
            f"{wanted}"
        )
    return repo_id


def prepare_branch(api: "HfApi", repo_id: str, destination: Destination) -> str:
    """Creates the branch when it is missing and looks whether the tag is free; returns the sha that the branch is at.

    Raises:
        ValueError: the revision is a tag, or the tag a branch.
        FileExistsError: the tag is taken.
    """
    refs = api.list_repo_refs(repo_id)
    tags, branches = {ref.name for ref in refs.tags}, {ref.name for ref in refs.branches}
    if destination.tag in branches:
        raise ValueError(f"{repo_id}: {destination.tag} is a branch; choose another name for the tag")
    if destination.tag in tags and not destination.replace_tag:
        raise FileExistsError(
            f"{repo_id}: tag {destination.tag} is taken; choose another, or pass --replace-tag to move it"
        )
    revision = destination.revision or "main"
    if revision in tags:
        raise ValueError(f"{repo_id}: {revision} is a tag, and a commit goes on a branch; name a branch")
    if revision not in branches and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    sha = api.model_info(repo_id, revision=revision).sha
    assert sha is not None
    return sha


def stale_files(there: set[str], sent: set[str]) -> list[str]:
    """Weights, their index and code of an earlier push, which this one does not overwrite; never anything else.

    Example:
        >>> there = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "photo.png"}
        >>> stale_files(there, {"model.safetensors", "config.json"})
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    code = every_code_file()
    if not any(name.startswith("configuration_gated_qwen") for name in there):
        code = set()  # a file that is called like one of ours
    return sorted(name for name in there - sent if WEIGHTS.fullmatch(name) or name in code)


def commit_files(
    api: "HfApi", repo_id: str, publication: Publication, destination: Destination, message: str, parent: str
) -> Upload:
    """One commit on top of `parent`, or none where nothing differs; large files that are there are not sent again."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.hf_api import RepoFile

    tree = api.list_repo_tree(repo_id, recursive=True, revision=parent)
    there = {entry.path: entry.blob_id for entry in tree if isinstance(entry, RepoFile)}
    if ADAPTER_CONFIG in there:
        raise ValueError(
            f"{repo_id}: an adapter lies there ({ADAPTER_CONFIG}), and where PEFT is installed, transformers loads "
            "the adapter's base instead of these weights; delete it there, or push to another repository"
        )
    files, notes = publication.files, []
    [card] = [file.source.read_bytes() for file in files if file.path == CARD_NAME]
    if there.get(CARD_NAME, oid := _git_oid(card)) != oid and not destination.replace_card:
        files = [file for file in files if file.path != CARD_NAME]
        notes.append(f"the {CARD_NAME} that is there was kept; pass --replace-card to send yours")
    stale = stale_files(set(there), {file.path for file in publication.files})
    operations: list[Any] = [CommitOperationAdd(file.path, file.source) for file in files]
    operations += [CommitOperationDelete(name) for name in stale]
    commit = api.create_commit(
        repo_id,
        operations,
        commit_message=message,
        revision=destination.revision,
        create_pr=destination.create_pr,
        parent_commit=parent,
    )
    if commit.oid == parent:
        notes.append("the repository holds all of this already, so there is no new commit")
    sent = [file.path for file in files]
    return Upload(repo_id, f"{api.endpoint}/{repo_id}", commit.oid, commit.pr_url, sent, stale, notes)


def set_tag(api: "HfApi", repo_id: str, tag: str, commit: str) -> None:
    """Names a commit; a tag that is there moves."""
    there = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id).tags}
    if there.get(tag) == commit:
        return
    if tag in there:
        api.delete_tag(repo_id, tag=tag)
    api.create_tag(repo_id, tag=tag, revision=commit)


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def one_line_errors(repo_id: str, token: str) -> Iterator[None]:
    """Turns what the client raises into one line that says what to do, and keeps the token out of it."""
    try:
        yield
    except (ValueError, FileExistsError) as error:
        if token in str(error):
            raise ValueError(str(error).replace(token, "***")) from None
        raise
    except Exception as error:  # the client's own classes, and those of the HTTP library below it
        line = _explain(error, repo_id).replace(token, "***")
        raise RuntimeError(line) from (None if token in _chain(error) else error)


def _explain(error: Exception, repo_id: str) -> str:
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error  # of a large file
    status = getattr(getattr(cause, "response", None), "status_code", None)
    said = " ".join((getattr(cause, "server_message", None) or str(cause)).split())
    if status == 401:  # with a token the Hub answers 404 for what the token may not see
        return f"{repo_id}: the Hub does not know this token; log in again with hf auth login, or set HF_TOKEN"
    if isinstance(cause, RepositoryNotFoundError):
        return f"{repo_id}: no such repository, or one that this token may not see"
    if status == 403:
        return f"{repo_id}: this token may not write there ({said}); check the owner's name and the token's role"
    if status == 412:
        return f"{repo_id}: somebody else has committed in the meantime; look at it, then run the same command again"
    if status == 429 or (status is not None and status >= 500):
        return f"{repo_id}: the Hub answered {status}; wait a little and run the same command again"
    if isinstance(cause, HfHubHTTPError):
        return f"{repo_id}: the Hub refused ({said})"
    if isinstance(cause, OSError) and cause.filename:
        return f"{cause.filename}: {cause.strerror}"
    return (
        f"{repo_id}: the connection to the Hub broke ({type(cause).__name__}: {said}); run the same command again, "
        "what has arrived is not sent twice"
    )


def _chain(error: BaseException | None) -> str:
    """The texts of an error and of all that it came from."""
    return "" if error is None else f"{error}{_chain(error.__cause__ or error.__context__)}"
