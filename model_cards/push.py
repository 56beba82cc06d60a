"""Publishing a model folder on the Hub: checks first, then one commit."""

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gated_qwen.model_cards.checks import Publication, check_publication
from gated_qwen.model_cards.published_files import LeftOut
from gated_qwen.model_cards.upload import Destination, upload

# A name as git takes it (git check-ref-format), and no sha: that names a commit, and not a place for one.
REF = re.compile(
    r"""(?![0-9a-f]{40}$) (?!.*(\.\.|//|@\{|\.lock$)) [^\s~^:?*\[\\/.-] [^\s~^:?*\[\\]* (?<![/.])""",
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True)
class PushResult:
    """What was sent, or in a dry run would be, and where it lies now.

    `files` holds every file with its size in bytes, `deleted` what was stale on the other side, `card` the text of
    README.md. `commit` is a sha, and `load` the line that loads that commit.
    """

    repo_id: str
    files: dict[str, int]
    left_out: list[LeftOut]
    card: str
    notes: list[str]
    dry_run: bool
    url: str | None = None
    commit: str | None = None
    pull_request: str | None = None
    revision: str | None = None
    tag: str | None = None
    deleted: list[str] = field(default_factory=list)
    load: str | None = None

    @property
    def bytes(self) -> int:
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def push(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    tag: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    token: str | None = None,
    replace_card: bool = False,
    replace_tag: bool = False,
    refresh_code: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    endpoint: str | None = None,
    dry_run: bool = False,
) -> PushResult:
    """Checks a model folder and publishes it in one commit.

    Nothing is sent before the folder has passed: its weights are complete and fit the config, its code is this
    package's, its card is valid, and it holds no pickle, no secret and no link that leads out of it. Weights and code
    of an earlier push that are not part of this one are deleted on the other side in the same commit; nothing else is.
    After an interruption, call it again: large files that arrived are not sent twice.

    Args:
        folder: the model folder.
        repo_id: `NAME` or `OWNER/NAME`; the repository is created when missing.
        private: of a repository that is created; an existing one must agree.
        revision: the branch, created from main when missing; default main.
        tag: a name for the commit.
        create_pr: open a pull request against main instead; the repository must exist.
        commit_message: default `Upload FOLDER with gated-qwen`.
        token: default: that of `hf auth login` or `HF_TOKEN`.
        replace_card: overwrite a different README.md on the other side, which is kept otherwise.
        replace_tag: move `tag` if it exists.
        refresh_code: first write this package's current code and auto_map into the folder.
        include, exclude: patterns of files; see `gated_qwen.model_cards.published_files.list_files`.
        endpoint: default `HF_ENDPOINT`, or the public Hub.
        dry_run: check and list only, without network.

    Raises:
        ValueError: the folder, or an argument, does not pass.
        FileExistsError: the tag is taken.
        RuntimeError: the Hub refused, or the connection broke; one line with the mend, never with the token.

    Example:
        >>> from gated_qwen.conversion.create import create
        >>> from gated_qwen.model_cards.card import build_card
        >>> folder = create("tiny-headwise", tmp / "mine")
        >>> _ = (folder / "README.md").write_text(build_card(folder, license="apache-2.0"))
        >>> result = push(folder, "me/mine", dry_run=True)
        >>> "model.safetensors" in result.files, result.commit
        (True, None)
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise ValueError(
            f"{repo_id!r} is no id of a model repository; write NAME or OWNER/NAME, not an address"
        ) from None
    if create_pr and (tag or revision):
        raise ValueError("a pull request goes against main and is not tagged; leave out --revision and --tag")
    for option, name in (("--revision", revision), ("--tag", tag)):
        if name is not None and not REF.fullmatch(name):
            raise ValueError(
                f"{option} {name!r} is no name that a branch or tag can have; write one like main or v1.0"
            )
    publication = check_publication(folder, include=include, exclude=exclude, refresh_code=refresh_code)
    result = PushResult(
        repo_id=repo_id,
        files={file.path: file.size for file in publication.files},
        left_out=publication.left_out,
        card=publication.card,
        notes=publication.notes,
        dry_run=dry_run,
        revision=revision,
        tag=tag,
    )
    if dry_run:
        return result
    destination = Destination(repo_id, private, revision, tag, create_pr, replace_card, replace_tag)
    message = commit_message or f"Upload {Path(folder).resolve().name} with gated-qwen"
    made = upload(publication, destination, message, token=token, endpoint=endpoint)
    return replace(
        result,
        repo_id=made.repo_id,
        files={path: size for path, size in result.files.items() if path in made.sent},
        notes=[*result.notes, *made.notes],
        url=made.url,
        commit=made.commit,
        pull_request=made.pull_request,
        deleted=made.deleted,
        load=loading_line(publication, made.repo_id, made.commit),
    )


def loading_line(publication: Publication, repo_id: str, commit: str) -> str:
    """The Python line that loads a commit, code included, and nothing that is pushed later."""
    trust = ", trust_remote_code=True" if publication.remote_code else ""
    return f'{publication.auto_class}.from_pretrained("{repo_id}", revision="{commit}"{trust})'
