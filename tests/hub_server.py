"""A Hub on the loopback interface: what `huggingface_hub` and `kernels` ask of a kernel repository.

Keeps repositories in memory as commits with branches. Differs from the real Hub in one way that a
client can notice: every file is a plain git blob, none goes through LFS or Xet storage.

    with HubServer() as hub:
        HfApi(endpoint=hub.url, token="any").create_repo("org/name", repo_type="kernel")
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Repository:
    """Snapshots by commit id, and the commit that each branch points to."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        parent = self.branches.get(branch, "")
        digest = hashlib.sha1(f"{branch} {parent}".encode())
        for path, content in sorted(files.items()):
            digest.update(path.encode() + b"\0" + content)
        self.commits[digest.hexdigest()] = files
        self.branches[branch] = digest.hexdigest()
        return digest.hexdigest()

    def resolve(self, revision: str) -> str | None:
        commit = self.branches.get(revision.removeprefix("refs/heads/"), revision)
        return commit if commit in self.commits else None


class HubServer:
    """Serves until the block is left.

    Attributes:
        url: what HF_ENDPOINT and HfApi(endpoint=...) take.
        trusted: publishers with the Hub's trusted mark.
        requests: method and path of every request, in order.
        corrupt: maps a file's path and content to what a download delivers instead.
    """

    def __init__(self, trusted: tuple[str, ...] = ()) -> None:
        self.trusted = set(trusted)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.corrupt: Callable[[str, bytes], bytes] = lambda path, content: content

    def __enter__(self) -> HubServer:
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def blob_id(content: bytes) -> str:
    """git's id of a file, which the client caches it under."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class _Refusal(Exception):
    """An error that the client tells apart by the Hub's X-Error-Code."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(
        self, body: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        raw = isinstance(body, bytes)
        content = body if raw else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if raw else "application/json")
        headers = {"Content-Length": str(len(content)), **(headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def repository(self, name: str) -> Repository:
        if name not in self.server_hub.repositories:
            raise _Refusal(404, "RepoNotFound", f"Repository {name} not found")
        return self.server_hub.repositories[name]

    def snapshot(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repository = self.repository(name)
        commit = repository.resolve(revision)
        if commit is None:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def dispatch(self) -> None:
        url = urlsplit(self.path)
        self.server_hub.requests.append(f"{self.command} {url.path}")
        # Revisions and folders come percent-encoded, so the split is made before decoding.
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        request = self.body() if self.command in ("POST", "PUT") else b""
        try:
            self.route(parts, parse_qs(url.query), request)
        except _Refusal as refusal:
            headers = {"X-Error-Message": str(refusal)}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
            self.answer({"error": str(refusal)}, refusal.status, headers)

    do_GET = do_HEAD = do_POST = dispatch

    def route(self, parts: list[str], query: dict[str, list[str]], request: bytes) -> None:
        match self.command, parts:
            case "GET", ["api", "organizations", name, "overview"]:
                trusted = name in self.server_hub.trusted
                self.answer({"name": name, "trustedKernelPublisher": trusted})
            case "POST", ["api", "validate-yaml"]:
                self.answer({"errors": [], "warnings": []})
            case "POST", ["api", "repos", "create"]:
                self.create_repository(json.loads(request))
            case "GET", ["api", "kernels", owner, name]:
                self.describe(f"{owner}/{name}", "main")
            case "GET", ["api", "kernels", owner, name, "revision", revision]:
                self.describe(f"{owner}/{name}", revision)
            case "GET", ["api", "kernels", owner, name, "refs"]:
                self.list_refs(self.repository(f"{owner}/{name}"))
            case "GET", ["api", "kernels", owner, name, "tree", revision, *folder]:
                recursive = query.get("recursive", ["false"])[0].lower() == "true"
                _, files = self.snapshot(f"{owner}/{name}", revision)
                self.answer(tree(files, "/".join(folder), recursive))
            case "POST", ["api", "kernels", owner, name, "branch", branch]:
                self.create_branch(self.repository(f"{owner}/{name}"), branch, request)
            case "POST", ["api", "kernels", owner, name, "preupload", revision]:
                _, files = self.snapshot(f"{owner}/{name}", revision)
                self.answer({"files": [mode(file, files) for file in json.loads(request)["files"]]})
            case "POST", ["api", "kernels", owner, name, "commit", revision]:
                self.commit(f"{owner}/{name}", revision, request)
            case "GET" | "HEAD", ["kernels", owner, name, "resolve", revision, *path]:
                self.download(f"{owner}/{name}", revision, "/".join(path))
            case _:
                raise _Refusal(501, None, f"the stand-in has no {self.command} {self.path}")

    def create_repository(self, request: dict) -> None:
        name = f"{request['organization']}/{request['name']}"
        if request.get("type") != "kernel":
            raise _Refusal(400, None, f"the stand-in keeps kernels, not {request.get('type')}")
        url = {"url": f"{self.server_hub.url}/kernels/{name}", "name": name}
        if name in self.server_hub.repositories:
            self.answer({**url, "error": "You already created this kernel repo"}, 409)
            return
        repository = self.server_hub.repositories[name] = Repository()
        repository.commit("main", {".gitattributes": b""})
        self.answer(url)

    def describe(self, name: str, revision: str) -> None:
        commit, _ = self.snapshot(name, revision)
        self.answer({"id": name, "author": name.split("/")[0], "sha": commit, "private": False})

    def list_refs(self, repository: Repository) -> None:
        branches = [
            {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": commit}
            for branch, commit in repository.branches.items()
        ]
        self.answer({"branches": branches, "converts": [], "tags": []})

    def create_branch(self, repository: Repository, branch: str, request: bytes) -> None:
        if branch in repository.branches:
            raise _Refusal(409, None, f"Reference {branch} already exists")
        start = json.loads(request or b"{}").get("startingPoint", "main")
        repository.branches[branch] = repository.resolve(start)
        self.answer({})

    def commit(self, name: str, branch: str, request: bytes) -> None:
        repository = self.repository(name)
        if branch not in repository.branches:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        files = dict(repository.commits[repository.branches[branch]])
        for line in request.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "deletedFile":
                    files.pop(value["path"])
                case "deletedFolder":
                    prefix = value["path"].rstrip("/") + "/"
                    files = {p: c for p, c in files.items() if not p.startswith(prefix)}
        commit = repository.commit(branch, files)
        url = f"{self.server_hub.url}/kernels/{name}/commit/{commit}"
        self.answer({"commitUrl": url, "commitOid": commit})

    def download(self, name: str, revision: str, path: str) -> None:
        commit, files = self.snapshot(name, revision)
        if path not in files:
            raise _Refusal(404, "EntryNotFound", f"{path} is not in {name} at {revision}")
        content = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob_id(content)}"'}
        if self.command == "GET":
            content = self.server_hub.corrupt(path, content)
        self.answer(content, headers=headers)


def tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict]:
    """Entries of a folder as the Hub lists them: files, and the folders on the way to them."""
    prefix = f"{folder}/" if folder else ""
    entries = {}
    for path, content in files.items():
        if not path.startswith(prefix):
            continue
        steps = path[len(prefix) :].split("/")
        if recursive or len(steps) == 1:
            entries[path] = {"type": "file", "path": path, "size": len(content)}
            entries[path]["oid"] = blob_id(content)
        for depth in range(1, len(steps) if recursive else min(len(steps), 2)):
            above = prefix + "/".join(steps[:depth])
            entries[above] = {"type": "directory", "path": above, "size": 0, "oid": "0" * 40}
    if folder and not entries:
        raise _Refusal(404, "EntryNotFound", f"{folder} does not exist")
    return [entries[path] for path in sorted(entries)]


def mode(file: dict, files: dict[str, bytes]) -> dict:
    """How a file is to be uploaded, and its id if the repository has it already."""
    path = file["path"]
    known = {"oid": blob_id(files[path])} if path in files else {}
    return {"path": path, "uploadMode": "regular", "shouldIgnore": False, **known}
