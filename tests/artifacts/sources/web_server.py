"""HTTP servers on loopback for the tests: one that gives files and can misbehave in every way, and one that speaks as
much of the hub's API as its real client asks for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class Quirk:
    """How one answer differs from a good one. Byte counts are of the answer's body, `flips` of the whole file."""

    status: int | None = None
    location: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    cut_after: int | None = None
    stall_after: int | None = None
    bytes_s: int | None = None
    flips: tuple[int, ...] = ()
    is_chunked: bool = False
    claims_length: int | None = None
    claims_range: str | None = None
    extra: bytes = b""
    before: Callable[[], None] | None = None
    """Called before the answer is given."""


GOOD = Quirk()


@dataclass
class WebFile:
    """A file. `quirks` are used up, one an answer; then `always` holds."""

    data: bytes
    etag: str | None = None
    modified: str | None = None
    has_ranges: bool = True
    quirks: deque[Quirk] = field(default_factory=deque)
    always: Quirk = GOOD


@dataclass(frozen=True)
class Seen:
    """A request as it came. `n_sent`: bytes of the body that went out."""

    method: str
    path: str
    headers: dict[str, str]
    n_sent: list[int]

    @property
    def start(self) -> int | None:
        match = re.match(r"bytes=(\d+)-", self.headers.get("range", ""))
        return None if match is None else int(match[1])


class WebServer:
    """Gives `files` by their path. Runs until `close`."""

    def __init__(self, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.files: dict[str, WebFile] = {}
        self.seen: list[Seen] = []
        self.is_over = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner.handle(self)

            def do_HEAD(self) -> None:
                owner.handle(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._connections: set[socket.socket] = set()

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 64

            def process_request(self, request: Any, client_address: Any) -> None:
                owner._connections.add(request)
                super().process_request(request, client_address)

            def shutdown_request(self, request: Any) -> None:
                owner._connections.discard(request)
                super().shutdown_request(request)

            def handle_error(self, *_: Any) -> None:
                """A client that went away is nothing to tell of."""

        self._server = Server((host, 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.host, self.port = host, self._server.server_address[1]
        self.origin = f"{'http' if tls is None else 'https'}://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def put(self, path: str, data: bytes, **settings: Any) -> WebFile:
        """A file with a strong etag, unless settings say otherwise."""
        settings.setdefault("etag", f'"{hashlib.sha256(data).hexdigest()[:20]}"')
        self.files[path] = WebFile(data, **settings)
        return self.files[path]

    def url(self, path: str) -> str:
        return self.origin + path

    def gets(self, path: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == "GET" and urlsplit(seen.path).path == path]

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Seen(request.command, request.path, headers, [])
        self.seen.append(seen)
        self.answer(request, seen)

    def answer(self, request: BaseHTTPRequestHandler, seen: Seen) -> None:
        file = self.files.get(unquote(urlsplit(seen.path).path))
        if file is None:
            self.say(request, 404, {}, b"no such file")
            return
        self.give(request, seen, file)

    def say(self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def give(self, request: BaseHTTPRequestHandler, seen: Seen, file: WebFile) -> None:
        quirk = file.quirks.popleft() if file.quirks and seen.method == "GET" else file.always
        if quirk.before is not None:
            quirk.before()
        if quirk.location is not None or quirk.status is not None:
            headers = {"Location": quirk.location} if quirk.location is not None else {}
            self.say(request, quirk.status or 302, {**headers, **dict(quirk.headers)})
            return
        start, stop, status = 0, len(file.data), 200
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", seen.headers.get("range", ""))
        is_current = seen.headers.get("if-range") in (None, file.etag, file.modified)
        if match is not None and file.has_ranges and is_current:
            start, status = int(match[1]), 206
            stop = min(int(match[2]) + 1, len(file.data)) if match[2] else len(file.data)
            if start >= len(file.data):
                self.say(request, 416, {"Content-Range": f"bytes */{len(file.data)}"})
                return
        request.send_response(status)
        if status == 206:
            said = quirk.claims_range or f"bytes {start}-{stop - 1}/{len(file.data)}"
            request.send_header("Content-Range", said)
        if quirk.is_chunked:
            request.send_header("Transfer-Encoding", "chunked")
        else:
            length = stop - start if quirk.claims_length is None else quirk.claims_length
            request.send_header("Content-Length", str(length))
        marks = {"ETag": file.etag, "Last-Modified": file.modified, **dict(quirk.headers)}
        for name, value in marks.items():
            if value is not None:
                request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            self._send_body(request, seen, file, quirk, start, stop)

    def _send_body(
        self, request: BaseHTTPRequestHandler, seen: Seen, file: WebFile, quirk: Quirk, start: int, stop: int
    ) -> None:
        data = bytearray(file.data[start:stop] + quirk.extra)
        for flip in quirk.flips:
            if start <= flip < stop:
                data[flip - start] ^= 1
        limit = min(len(data), *(n for n in (quirk.cut_after, quirk.stall_after) if n is not None), len(data))
        size = CHUNK_BYTES if quirk.bytes_s is None else max(1, min(CHUNK_BYTES, quirk.bytes_s // 20))
        for at in range(0, limit, size):
            piece = data[at : min(at + size, limit)]
            request.wfile.write(b"%x\r\n%b\r\n" % (len(piece), bytes(piece)) if quirk.is_chunked else piece)
            seen.n_sent.append(len(piece))
            if quirk.bytes_s is not None:
                time.sleep(len(piece) / quirk.bytes_s)
        if quirk.is_chunked and limit == len(data):
            request.wfile.write(b"0\r\n\r\n")
        if quirk.stall_after is not None:
            request.wfile.flush()
            self.is_over.wait(60)
        if limit < len(data) or quirk.claims_length is not None:
            request.close_connection = True


COMMIT = hashlib.sha1(b"a commit").hexdigest()


@dataclass
class Repo:
    """A repository on the hub. `files`: path -> bytes. `allowed`: tokens that may read it, None for everybody."""

    files: dict[str, bytes]
    commit: str = COMMIT
    allowed: frozenset[str] | None = None
    is_gated: bool = False


class HubServer(WebServer):
    """A hub whose large files lie on `cdn`, a server of another origin, under addresses that carry a signature."""

    def __init__(self, cdn: WebServer) -> None:
        super().__init__()
        self.cdn = cdn
        self.repos: dict[str, Repo] = {}

    def put_repo(self, repo_id: str, files: dict[str, bytes], **settings: Any) -> Repo:
        repo = self.repos[repo_id] = Repo(files, **settings)
        for data in files.values():
            self.cdn.put(f"/blob/{hashlib.sha256(data).hexdigest()}", data)
        return repo

    def blob(self, data: bytes) -> WebFile:
        return self.cdn.files[f"/blob/{hashlib.sha256(data).hexdigest()}"]

    def answer(self, request: BaseHTTPRequestHandler, seen: Seen) -> None:
        path = unquote(urlsplit(seen.path).path)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo = self._allowed(request, seen, match[1])
            if repo is not None:
                self._resolve(request, repo, match[2], match[3])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path):
            repo = self._allowed(request, seen, match[1])
            if repo is not None:
                self._api(request, repo, match[1], match[2] or "")
        else:
            self.say(request, 404, {})

    def _allowed(self, request: BaseHTTPRequestHandler, seen: Seen, repo_id: str) -> Repo | None:
        repo = self.repos.get(repo_id)
        token = seen.headers.get("authorization", "").removeprefix("Bearer ")
        if repo is None:
            self.say(request, 404 if token else 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no"})
        elif repo.allowed is not None and token not in repo.allowed:
            code = "GatedRepo" if repo.is_gated else "RepoNotFound"
            self.say(request, 403 if token else 401, {"X-Error-Code": code, "X-Error-Message": "Access is restricted"})
        else:
            return repo
        return None

    def _resolve(self, request: BaseHTTPRequestHandler, repo: Repo, revision: str, path: str) -> None:
        if revision not in ("main", repo.commit):
            self.say(request, 404, {"X-Error-Code": "RevisionNotFound"})
        elif path not in repo.files:
            self.say(request, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
        else:
            data = repo.files[path]
            sha256 = hashlib.sha256(data).hexdigest()
            headers = {
                "Location": self.cdn.url(f"/blob/{sha256}?Signature=secret-of-the-cdn"),
                "X-Repo-Commit": repo.commit,
                "X-Linked-Size": str(len(data)),
                "X-Linked-Etag": f'"{sha256}"',
                "ETag": '"of the redirect"',
            }
            self.say(request, 302, headers)

    def _api(self, request: BaseHTTPRequestHandler, repo: Repo, repo_id: str, rest: str) -> None:
        if rest.startswith("/tree/"):
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in repo.files.items()
            ]
            body = json.dumps(entries)
        else:
            siblings = [{"rfilename": path} for path in repo.files]
            info = {"id": repo_id, "sha": repo.commit, "siblings": siblings, "private": False, "tags": []}
            body = json.dumps({**info, "modelId": repo_id, "gated": "auto" if repo.is_gated else False})
        self.say(request, 200, {"Content-Type": "application/json"}, body.encode())
