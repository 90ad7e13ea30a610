"""A stand-in for the Hugging Face Hub on 127.0.0.1, for tests of downloads and of everything that can go wrong.

    with LoopbackHub({"owner/name": folder}) as hub:
        subprocess.run([...], env=os.environ | hub.environment(home))

It answers what huggingface_hub asks for: a model's commit and files, HEAD and GET of a file with its commit, ETag and
ranges, and the Hub's error codes.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

_API = re.compile(r"^/api/models/(?P<name>[^/]+(?:/[^/]+)?)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?$")
_FILE = re.compile(r"^/(?P<name>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<path>.+)$")


@dataclass(frozen=True)
class Request:
    """What was asked and answered; ``range`` is the Range header."""

    method: str
    path: str
    range: str | None
    status: int


class LoopbackHub:
    """Serves folders as models, from ``__enter__`` to ``__exit__``.

    Args:
        models: Hub name -> folder.
        token: the one token that is valid; others are refused as the Hub refuses them.
        private: names that are only there for ``token``.
        gated: names whose files are for nobody, with or without ``token``: access was not granted.
        cut_after: the connection breaks after that many bytes of a file, ``cuts`` times in all.
        cuts: how often; -1 for always.

    Attributes:
        requests: all that was asked, in order.
    """

    def __init__(
        self,
        models: Mapping[str, Path],
        *,
        token: str | None = None,
        private: Collection[str] = (),
        gated: Collection[str] = (),
        cut_after: int | None = None,
        cuts: int = 1,
    ) -> None:
        self.requests: list[Request] = []
        self._models = {name: Path(folder) for name, folder in models.items()}
        self._token, self._private, self._gated = token, frozenset(private), frozenset(gated)
        self._cut_after, self._cuts = cut_after, cuts
        self._lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            def do_HEAD(self) -> None:
                hub._answer(self)

            def do_GET(self) -> None:
                hub._answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """``http://127.0.0.1:PORT``, for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, home: Path, *, token: str | None = None, offline: bool = False) -> dict[str, str]:
        """Variables that send a process here, and nowhere else.

        Args:
            home: the process's HF_HOME, so that its cache is its own.
            token: HF_TOKEN.
            offline: sets HF_HUB_OFFLINE.
        """
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN": token or "",
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def commit(self, name: str) -> str:
        """The commit that every revision of a model stands for: a digest of its files."""
        content = hashlib.sha1(usedforsecurity=False)
        for path, file in sorted(self._files(name).items()):
            content.update(path.encode() + hashlib.sha256(file.read_bytes()).digest())
        return content.hexdigest()

    def _files(self, name: str) -> dict[str, Path]:
        folder = self._models[name]
        return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}

    def _answer(self, handler: _Handler) -> None:
        target = urlsplit(unquote(handler.path)).path
        if found := _API.match(target):
            status = self._refuse(handler, found["name"], found["revision"], is_file=False)
            if not status:
                status = handler.send(200, {}, json.dumps(self._listing(found["name"], found["what"])).encode())
        elif found := _FILE.match(target):
            status = self._refuse(handler, found["name"], found["revision"], is_file=True)
            status = status or self._send_file(handler, found["name"], found["path"])
        else:
            status = handler.send(404, {}, b"{}")
        with self._lock:
            self.requests.append(Request(handler.command, target, handler.headers.get("Range"), status))

    def _refuse(self, handler: _Handler, name: str, revision: str | None, is_file: bool) -> int:
        """The status of the refusal that was sent, or 0."""
        given = (handler.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        if given is not None and given != self._token:
            return handler.refuse(401, "", "Invalid credentials in Authorization header")
        if name not in self._models or (name in self._private and given is None):
            return handler.refuse(404 if given else 401, "RepoNotFound" if given else "", "Repository not found")
        if revision not in (None, "main", self.commit(name)):
            return handler.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if is_file and name in self._gated:
            return handler.refuse(403 if given else 401, "GatedRepo", f"Access to model {name} is restricted")
        return 0

    def _listing(self, name: str, what: str | None) -> Any:
        files = self._files(name)
        if what == "tree":
            return [
                {"type": "file", "path": path, "size": file.stat().st_size, "oid": _etag(file)}
                for path, file in files.items()
            ]
        return {
            "id": name,
            "modelId": name,
            "sha": self.commit(name),
            "private": name in self._private,
            "gated": "manual" if name in self._gated else False,
            "tags": [],
            "siblings": [{"rfilename": path} for path in files],
        }

    def _send_file(self, handler: _Handler, name: str, path: str) -> int:
        file = self._files(name).get(path)
        headers = {"X-Repo-Commit": self.commit(name)}
        if file is None:
            return handler.refuse(404, "EntryNotFound", "Entry not found", headers)
        content, start = file.read_bytes(), 0
        headers |= {"ETag": f'"{_etag(file)}"', "Accept-Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or ""):
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return handler.send(206 if start else 200, headers, content[start:], self._cut(handler, len(content) - start))

    def _cut(self, handler: _Handler, size: int) -> int | None:
        """Number of bytes to break off after, or None to send them all."""
        with self._lock:
            if handler.command == "HEAD" or self._cut_after is None or self._cuts == 0 or size <= self._cut_after:
                return None
            self._cuts -= 1
            return self._cut_after


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def send(self, status: int, headers: Mapping[str, str], content: bytes, cut: int | None = None) -> int:
        """Send an answer, whole or cut off; the length announced is the whole one."""
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")  # so that no thread outlives the test
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        return status

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> int:
        """Send an error as the Hub words it."""
        named = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
        return self.send(status, named, json.dumps({"error": message}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: tests read ``LoopbackHub.requests``."""


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
