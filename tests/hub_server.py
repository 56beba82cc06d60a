"""A Hub on this machine, with all that the client needs to create, push, tag and download; it forgets when closed.

It keeps a log of what it was asked, and faults can be ordered: a status instead of an answer, or a connection that is
cut in the middle of an upload. Answers follow the real Hub as far as `huggingface_hub` can tell.
"""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from hub_repository import HubError, Repository, describe, is_large

TOKEN, READ_TOKEN, OTHER_TOKEN = "hf_test_write", "hf_test_read", "hf_test_other"


@dataclass(frozen=True)
class User:
    name: str
    organizations: tuple[str, ...] = ()
    may_write: bool = True


@dataclass
class Fault:
    """What happens, `times` times, to requests whose `METHOD path` matches: a status, or `"cut"`."""

    pattern: str
    kind: int | str
    times: int = 1


@dataclass
class Request:
    """What a handler is given."""

    parts: tuple[str, ...]
    query: dict[str, list[str]]
    body: bytes
    user: User | None
    headers: Any

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"{}")


@dataclass
class Answer:
    body: bytes = b"{}"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


def as_json(content: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(content).encode(), status, {"Content-Type": "application/json"})


class LocalHub:
    """The server, running in a thread of this process from `with` to its end.

    Attributes:
        endpoint: for `HF_ENDPOINT`.
        repositories: by their id.
        log: `METHOD path` of every request, in order.
        faults: those still to happen.

    Example:
        >>> with LocalHub() as hub:
        ...     HfApi(endpoint=hub.endpoint, token=TOKEN).create_repo("me/model")
    """

    def __init__(self) -> None:
        self.users = {
            TOKEN: User("me", ("team",)),
            READ_TOKEN: User("me", ("team",), may_write=False),
            OTHER_TOKEN: User("someone"),
        }
        self.repositories: dict[str, Repository] = {}
        self.log: list[str] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "LocalHub":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a repository, by path, without the one that it was born with."""
        files = self.repositories[repo_id].commit_of(revision).files
        return {path: blob.content for path, blob in files.items() if path != ".gitattributes"}

    def requests(self, pattern: str) -> list[str]:
        """The requests so far whose `METHOD path` matches."""
        return [line for line in self.log if re.search(pattern, line)]

    def fault_for(self, line: str) -> Fault | None:
        with self._lock:
            self.log.append(line)
            for fault in self.faults:
                if fault.times and re.search(fault.pattern, line):
                    fault.times -= 1
                    return fault
        return None

    def answer(self, method: str, path: str, request: Request) -> Answer:
        authorization = request.headers.get("Authorization")
        if authorization is not None:
            request.user = self.users.get(authorization.removeprefix("Bearer "))
            if request.user is None:
                raise HubError(401, "Invalid credentials in Authorization header")
        with self._lock:
            for methods, pattern, handler in ROUTES:
                if method in methods and (match := re.fullmatch(pattern, path)):
                    request.parts = tuple(unquote(part or "") for part in match.groups())
                    return handler(self, request)
        raise HubError(404, f"no such route: {method} {path}")

    def repository(self, request: Request, write: bool = False) -> Repository:
        """The repository of a request, if its user may read (write) it."""
        repository = self.repositories.get(request.parts[0])
        owner = request.parts[0].split("/")[0]
        member = request.user is not None and owner in (request.user.name, *request.user.organizations)
        if repository is None or (repository.private and not member):
            raise HubError(401 if request.user is None else 404, "Repository not found", "RepoNotFound")
        if write and request.user is None:
            raise HubError(401, "Invalid username or password.")
        if write and not (member and request.user and request.user.may_write):
            raise HubError(403, "Forbidden: you don't have the rights to write to this repository")
        return repository


# One function for each call of the client.


def whoami(hub: LocalHub, request: Request) -> Answer:
    if request.user is None:
        raise HubError(401, "Invalid username or password.")
    organizations = [{"name": name, "type": "org"} for name in request.user.organizations]
    return as_json({"type": "user", "name": request.user.name, "orgs": organizations})


def create_repo(hub: LocalHub, request: Request) -> Answer:
    if request.user is None:
        raise HubError(401, "Invalid username or password.")
    payload = request.json
    owner = payload.get("organization") or request.user.name
    if owner not in (request.user.name, *request.user.organizations) or not request.user.may_write:
        raise HubError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
    name = f"{owner}/{payload['name']}"
    url = f"{hub.endpoint}/{name}"
    if name in hub.repositories:
        raise HubError(409, "You already created this model repo", url=url)
    private = payload.get("private") or payload.get("visibility") == "private"
    hub.repositories[name] = Repository(name, private=bool(private))
    return as_json({"url": url, "name": name})


def validate_yaml(hub: LocalHub, request: Request) -> Answer:
    """The Hub's own check of a card's front matter, in part."""
    front = re.match(r"---\r?\n(.*?)\n---\r?(\n|$)", request.json["content"], re.DOTALL)
    if front is None:
        return as_json({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
    try:
        fields = yaml.safe_load(front[1])
    except yaml.YAMLError as error:
        return as_json({"errors": [{"message": f"bad yaml: {error}"}], "warnings": []}, 400)
    errors = [{"message": "the front matter is not a mapping"}] if not isinstance(fields, dict) else []
    for name in ("license", "base_model", "tags", "datasets", "language") if not errors else ():
        values = fields.get(name, [])
        if not all(isinstance(value, str) for value in (values if isinstance(values, list) else [values])):
            errors.append({"message": f'"{name}" must be a string or a list of strings'})
    return as_json({"errors": errors, "warnings": []}, 400 if errors else 200)


def preupload(hub: LocalHub, request: Request) -> Answer:
    create_pr = "create_pr" in request.query
    files = hub.repository(request, write=not create_pr).commit_of(request.parts[1]).files
    answer = []
    for file in request.json["files"]:
        path = file["path"]
        mode = "lfs" if is_large(path, file["size"]) else "regular"
        there = {"oid": files[path].oid} if path in files else {}
        answer.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **there})
    return as_json({"files": answer})


def lfs_batch(hub: LocalHub, request: Request) -> Answer:
    repository = hub.repository(request)
    objects = []
    for wanted in request.json["objects"]:
        entry = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] not in repository.large_objects:
            href = f"{hub.endpoint}/large-files/{repository.id}/{wanted['oid']}"
            entry["actions"] = {"upload": {"href": href, "header": {}}}
        objects.append(entry)
    return as_json({"transfer": "basic", "objects": objects})


def receive_large_file(hub: LocalHub, request: Request) -> Answer:
    hub.repositories[request.parts[0]].store(request.parts[1], request.body)
    return Answer(b"")


def commit(hub: LocalHub, request: Request) -> Answer:
    create_pr = "create_pr" in request.query
    repository = hub.repository(request, write=not create_pr)
    lines = [json.loads(line) for line in request.body.splitlines()]
    made, pull_request = repository.commit(request.parts[1], lines, create_pr)
    url = f"{hub.endpoint}/{repository.id}"
    answer = {"success": True, "commitOid": made.oid, "commitUrl": f"{url}/commit/{made.oid}"}
    if pull_request:
        answer["pullRequestUrl"] = f"{url}/discussions/{pull_request.split('/')[-1]}"
    return as_json(answer)


def model_info(hub: LocalHub, request: Request) -> Answer:
    return as_json(hub.repository(request).info(request.parts[1] if len(request.parts) > 1 else "main"))


def tree(hub: LocalHub, request: Request) -> Answer:
    _, revision, folder = request.parts
    recursive = request.query.get("recursive", ["false"])[0].lower() in ("true", "1")
    return as_json(hub.repository(request).tree(revision, folder, recursive))


def paths_info(hub: LocalHub, request: Request) -> Answer:
    files = hub.repository(request).commit_of(request.parts[1]).files
    wanted = parse_qs(request.body.decode())["paths"]
    return as_json([describe(path, files[path]) for path in wanted if path in files])


def refs(hub: LocalHub, request: Request) -> Answer:
    return as_json(hub.repository(request).refs())


def commits(hub: LocalHub, request: Request) -> Answer:
    history = hub.repository(request).commit_of(request.parts[1]).history()
    date = "2026-01-01T00:00:00.000Z"
    return as_json(
        [{"id": each.oid, "title": each.title, "message": "", "authors": [], "date": date} for each in history]
    )


def create_branch(hub: LocalHub, request: Request) -> Answer:
    repository, name = hub.repository(request, write=True), request.parts[1]
    if name in repository.branches:
        raise HubError(409, f"Reference already exists: {name}")
    repository.branches[name] = repository.commit_of(request.json.get("startingPoint", "main"))
    return as_json({})


def create_tag(hub: LocalHub, request: Request) -> Answer:
    repository, name = hub.repository(request, write=True), request.json["tag"]
    if name in repository.tags:
        raise HubError(409, f"Tag reference exists already: {name}")
    repository.tags[name] = repository.commit_of(request.parts[1])
    return as_json({})


def delete_tag(hub: LocalHub, request: Request) -> Answer:
    if hub.repository(request, write=True).tags.pop(request.parts[1], None) is None:
        raise HubError(404, "no such tag", "RevisionNotFound")
    return as_json({})


def resolve(hub: LocalHub, request: Request) -> Answer:
    """A file's content, answered directly: a redirect to the same origin would lose `X-Repo-Commit`."""
    _, revision, path = request.parts
    found, blob = hub.repository(request).file(revision, path)
    headers = {"X-Repo-Commit": found.oid, "ETag": f'"{blob.oid}"', "Content-Type": "application/octet-stream"}
    if blob.large:
        headers |= {"X-Linked-ETag": f'"{blob.oid}"', "X-Linked-Size": str(len(blob.content))}
    if start := re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", "")):
        content = blob.content[int(start[1]) :]
        headers["Content-Range"] = f"bytes {start[1]}-{len(blob.content) - 1}/{len(blob.content)}"
        return Answer(content, 206, headers)
    return Answer(blob.content, 200, headers)


ID = "([^/]+/[^/]+)"
MODEL = f"/api/models/{ID}"
ROUTES: tuple[tuple[str, str, Callable[[LocalHub, Request], Answer]], ...] = (
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create_repo),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("POST", f"{MODEL}/preupload/([^/]+)", preupload),
    ("POST", f"/{ID}\\.git/info/lfs/objects/batch", lfs_batch),
    ("PUT", f"/large-files/{ID}/([0-9a-f]+)", receive_large_file),
    ("POST", f"{MODEL}/commit/([^/]+)", commit),
    ("GET", MODEL, model_info),
    ("GET", f"{MODEL}/revision/([^/]+)", model_info),
    ("GET", f"{MODEL}/tree/([^/]+)(?:/(.*))?", tree),
    ("POST", f"{MODEL}/paths-info/([^/]+)", paths_info),
    ("GET", f"{MODEL}/refs", refs),
    ("GET", f"{MODEL}/commits/([^/]+)", commits),
    ("POST", f"{MODEL}/branch/(.+)", create_branch),
    ("POST", f"{MODEL}/tag/([^/]+)", create_tag),
    ("DELETE", f"{MODEL}/tag/([^/]+)", delete_tag),
    ("GET HEAD", f"/{ID}/resolve/([^/]+)/(.+)", resolve),
)


class _Handler(BaseHTTPRequestHandler):
    """HTTP around `LocalHub.answer`."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one piece, or each answer waits for an acknowledgement
    disable_nagle_algorithm = True

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        fault = self.hub.fault_for(f"{self.command} {unquote(url.path)}")
        if fault and fault.kind == "cut":
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self.close_connection = True
            self.connection.close()
            return
        request = Request((), parse_qs(url.query), self._body(), None, self.headers)
        try:
            if fault:
                raise HubError(int(fault.kind), "ordered by the test")
            answer = self.hub.answer(self.command, url.path, request)
        except HubError as error:
            answer = as_json({"error": error.text, **error.fields}, error.status)
            answer.headers["X-Error-Message"] = error.text
            if error.code:
                answer.headers["X-Error-Code"] = error.code
            if "sha" in error.fields:
                answer.headers["X-Repo-Commit"] = error.fields["sha"]
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *_: object) -> None:
        pass
