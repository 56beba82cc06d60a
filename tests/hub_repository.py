"""The repositories of the local Hub, kept in memory: commits, branches, tags, pull requests and large files."""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

LARGE_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".png")
LARGE_SIZE = 10 * 2**20


class HubError(Exception):
    """A refusal: an HTTP status, the Hub's code for it if there is one, and its text."""

    def __init__(self, status: int, text: str, code: str | None = None, **fields: Any):
        super().__init__(text)
        self.status, self.text, self.code, self.fields = status, text, code, fields


@dataclass(frozen=True)
class Blob:
    """The content of one file; a large one is known by its sha256, another by git's sha1."""

    content: bytes
    large: bool

    @property
    def oid(self) -> str:
        if self.large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    files: dict[str, Blob]
    parent: "Commit | None"

    def history(self) -> "list[Commit]":
        return [self, *(self.parent.history() if self.parent else [])]


@dataclass
class Repository:
    """One model repository, born with a commit of its own as on the Hub."""

    id: str
    private: bool = False
    branches: dict[str, Commit] = field(default_factory=dict)
    tags: dict[str, Commit] = field(default_factory=dict)
    pull_requests: dict[str, Commit] = field(default_factory=dict)
    large_objects: dict[str, bytes] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        attributes = Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", large=False)
        self.branches["main"] = self._record("initial commit", {".gitattributes": attributes}, None)

    def _record(self, title: str, files: dict[str, Blob], parent: Commit | None) -> Commit:
        tree = sorted((path, blob.oid) for path, blob in files.items())
        made_of = json.dumps([self.id, title, tree, parent.oid if parent else None, len(self.commits)])
        commit = Commit(hashlib.sha1(made_of.encode()).hexdigest(), title, files, parent)
        self.commits[commit.oid] = commit
        return commit

    def commit_of(self, revision: str) -> Commit:
        """The commit that a branch, tag, pull request or sha names."""
        for found in (self.branches, self.tags, self.pull_requests, self.commits):
            if revision in found:
                return found[revision]
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def file(self, revision: str, path: str) -> tuple[Commit, Blob]:
        commit = self.commit_of(revision)
        if path not in commit.files:
            raise HubError(404, "Entry not found", "EntryNotFound", sha=commit.oid)
        return commit, commit.files[path]

    def store(self, oid: str, content: bytes) -> None:
        """Keeps a large file that was sent whole."""
        if hashlib.sha256(content).hexdigest() != oid:
            raise HubError(400, "the content does not have this sha256")
        self.large_objects[oid] = content

    def commit(self, revision: str, lines: list[dict[str, Any]], create_pr: bool) -> tuple[Commit, str | None]:
        """Applies one commit, in full or not at all; returns it, and the name of the pull request if one was made."""
        base = self.branches["main"] if create_pr else self.branches.get(revision) or self.pull_requests.get(revision)
        if base is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, base.oid):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(base.files)
        for line in lines[1:]:
            self._apply(line["key"], line["value"], files)
        commit = self._record(header["summary"], files, base)
        if create_pr:
            name = f"refs/pr/{len(self.pull_requests) + 1}"
            self.pull_requests[name] = commit
            return commit, name
        (self.branches if revision in self.branches else self.pull_requests)[revision] = commit
        return commit, None

    def _apply(self, key: str, value: dict[str, Any], files: dict[str, Blob]) -> None:
        path = value["path"]
        if key == "file":
            files[path] = Blob(base64.b64decode(value["content"]), large=False)
        elif key == "lfsFile":
            if value["oid"] not in self.large_objects:
                raise HubError(400, f"the large file of {path} was never sent")
            files[path] = Blob(self.large_objects[value["oid"]], large=True)
        elif key == "deletedFile":
            if path not in files:
                raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
            del files[path]
        elif key == "deletedFolder":
            inside = [name for name in files if name.startswith(path.rstrip("/") + "/")]
            for name in inside:
                del files[name]
        else:
            raise HubError(400, f"unknown operation {key}")

    def tree(self, revision: str, folder: str, recursive: bool) -> list[dict[str, Any]]:
        """What lies in a folder, sub-folders too where `recursive`."""
        files, prefix = self.commit_of(revision).files, f"{folder}/" if folder else ""
        inside = {path: blob for path, blob in files.items() if path.startswith(prefix)}
        if folder and not inside:
            raise HubError(404, "Entry not found", "EntryNotFound")
        folders = {
            "/".join(parts[:depth])
            for parts in (path.split("/") for path in inside)
            for depth in range(prefix.count("/") + 1, len(parts))
        }
        if not recursive:
            inside = {path: blob for path, blob in inside.items() if "/" not in path[len(prefix) :]}
            folders = {path for path in folders if "/" not in path[len(prefix) :]}
        entries = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(folders)]
        return entries + [describe(path, inside[path]) for path in sorted(inside)]

    def info(self, revision: str) -> dict[str, Any]:
        """What `model_info` returns."""
        commit = self.commit_of(revision)
        card = commit.files.get("README.md", Blob(b"", large=False)).content.decode()
        fields = dict(re.findall(r"^(pipeline_tag|library_name): (\S+)$", card, re.MULTILINE))
        return {
            "_id": "0",
            "id": self.id,
            "modelId": self.id,
            "sha": commit.oid,
            "private": self.private,
            "tags": [],
            "siblings": [{"rfilename": path} for path in sorted(commit.files)],
            **fields,
        }

    def refs(self) -> dict[str, Any]:
        def entries(refs: dict[str, Commit], prefix: str) -> list[dict[str, str]]:
            return [
                {"name": name, "ref": prefix + name, "targetCommit": commit.oid}
                for name, commit in sorted(refs.items())
            ]

        return {
            "branches": entries(self.branches, "refs/heads/"),
            "tags": entries(self.tags, "refs/tags/"),
            "converts": [],
            "pullRequests": entries(self.pull_requests, ""),
        }


def is_large(path: str, size: int) -> bool:
    """Whether a file goes by LFS."""
    return size > 0 and (path.endswith(LARGE_SUFFIXES) or size >= LARGE_SIZE)


def describe(path: str, blob: Blob) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid}
    if blob.large:
        entry["lfs"] = {"oid": blob.oid, "size": len(blob.content), "pointerSize": 130}
    return entry
