"""One file on one HTTP server, read in parts.

The rule this file keeps: every byte handed on is one that was asked for, at its place in a file that has not changed
since it was first described. Where a stranger named the URL, the address that is dialled is the one that was checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

import httpx

from meshswarm import __version__
from meshswarm.artifacts.sources.answers import REDIRECTS, Answer, Question, RemoteFile, read_answer
from meshswarm.artifacts.sources.faults import PassingError, SourceError, StalledError
from meshswarm.artifacts.sources.pace import StallWatch
from meshswarm.artifacts.sources.url_rules import Hop, UrlRules, check_addresses, first_hop, next_hop, shown

_GONE = frozenset({400, 401, 403, 404, 410})
"""What a signed address answers when its time is over."""
_MAX_CONNECTIONS = 8
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)  # they would log signed addresses, which are keys


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server may take: to be reached, and for every `min_bytes` that it sends."""

    connect_s: float = 10.0
    stall_s: float = 30.0
    min_bytes: int = 64 << 10


class Body:
    """The bytes of one answer, in order."""

    def __init__(self, answer: Answer, response: httpx.Response, where: str, patience: Patience) -> None:
        self.file = answer.file
        self.start = answer.start
        self.stop = answer.stop
        self._response = response
        self._where = where
        self._patience = patience

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """All of them, in pieces of any size. Raises PassingError when they end early or cease to come, SourceError
        when there are more than were announced."""
        now = asyncio.get_running_loop().time
        watch = StallWatch(self._patience.stall_s, self._patience.min_bytes)
        watch.start(now())
        raw = aiter(self._response.aiter_raw())
        left = self.stop - self.start
        while True:
            try:
                async with asyncio.timeout_at(watch.deadline):
                    chunk = await anext(raw, b"")
            except TimeoutError:
                raise StalledError(f"{self._where} sends next to nothing any more") from None
            except httpx.TransportError:
                raise PassingError(f"the connection to {self._where} broke {left} bytes before the end") from None
            if len(chunk) > left:
                raise SourceError(f"{self._where} sends more bytes than it announced")
            if not chunk and left:
                raise PassingError(f"{self._where} ended {left} bytes early")
            if not chunk:
                return
            left -= len(chunk)
            watch.feed(len(chunk), now())
            handed_over = now()
            yield chunk
            watch.deadline += now() - handed_over  # the server has no part in how long that took


class HttpSource:
    """A file at `url`. `headers` go to the server named there and to no other; `version` is what the file is called by
    whoever named the URL, if he knows.

    Raises SourceError at once for a URL that is against `rules`. Belongs to one event loop until `close`.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        rules: UrlRules | None = None,
        version: str | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.url = url
        self.rules = rules or UrlRules()
        self.version = version
        self.where = shown(url)
        self.patience = patience or Patience()
        self._first = first_hop(url, self.rules)
        self._secrets = dict(headers or {})
        self._shortcut: Hop | None = None
        self._client: httpx.AsyncClient | None = None

    def __repr__(self) -> str:
        return f"HttpSource({self.where})"

    async def __aenter__(self) -> HttpSource:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def probe(self) -> RemoteFile:
        """What the server says of the file. Raises SourceError."""
        async with self.open(0, 1) as body:
            return body.file

    async def read(self, start: int, stop: int, known: RemoteFile | None = None) -> bytes:
        """Exactly the bytes [start, stop). Raises SourceError."""
        data = bytearray()
        async with self.open(start, stop, known) as body, contextlib.aclosing(body.chunks()) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) > stop - start:
                    raise SourceError(f"{self.where} does not give parts of a file, only all of it")
        if len(data) != stop - start:
            raise SourceError(f"{self.where} gives {len(data)} bytes where {stop - start} were asked for")
        return bytes(data)

    @asynccontextmanager
    async def open(self, start: int, stop: int | None = None, known: RemoteFile | None = None) -> AsyncIterator[Body]:
        """An answer with the bytes [start, stop), or to the end; of a server without ranges with all, for `start` 0.

        Raises SourceError: PassingError when asking again may help, ChangedError when the file is not `known` any more.
        """
        question = Question(self.where, start, stop, known, self.version)
        response, hop = await self._ask(question)
        try:
            headers = {name.lower(): value for name, value in response.headers.items()}
            answer = read_answer(question, response.status_code, headers, shown(hop.url))
            yield Body(answer, response, self.where, self.patience)
        finally:
            await response.aclose()

    async def _ask(self, question: Question) -> tuple[httpx.Response, Hop]:
        """The last answer of a chain of redirects, and where it came from."""
        if self._shortcut is not None:
            hop, self._shortcut = self._shortcut, None
            response, hop = await self._follow(hop, question)
            if response.status_code in (200, 206):
                self._shortcut = hop
            if response.status_code not in _GONE:
                return response, hop
            await response.aclose()
        response, hop = await self._follow(self._first, question)
        if response.status_code in (200, 206) and hop.n_redirects:
            self._shortcut = hop
        return response, hop

    async def _follow(self, hop: Hop, question: Question) -> tuple[httpx.Response, Hop]:
        while True:
            response, was_public = await self._send(hop, question)
            if response.status_code not in REDIRECTS:
                return response, hop
            location = response.headers.get("location")
            await response.aclose()
            if location is None:
                raise SourceError(f"{shown(hop.url)} sends on to nowhere (HTTP {response.status_code})")
            hop = next_hop(hop, location, self.rules, was_public=was_public)

    async def _send(self, hop: Hop, question: Question) -> tuple[httpx.Response, bool]:
        """An answer whose body waits to be read, and whether it came from a public address (False: not looked at)."""
        headers = {"user-agent": f"meshswarm/{__version__}", **question.headers()}
        if hop.is_first_origin:
            headers |= self._secrets
        try:
            async with asyncio.timeout(self.patience.connect_s + self.patience.stall_s):
                if not self.rules.is_strangers:
                    return await self._request(hop.url, headers), False
                addresses = await _resolve(hop)
                was_public = check_addresses(hop, addresses)
                return await self._request_at(hop, addresses, headers), was_public
        except TimeoutError:
            raise StalledError(f"{shown(hop.url)} does not answer") from None
        except httpx.InvalidURL:
            raise SourceError(f"{shown(hop.url)} is not a URL") from None
        except httpx.TimeoutException:
            raise StalledError(f"{shown(hop.url)} does not answer") from None
        except httpx.TransportError as error:
            raise _unreachable(hop, error) from None

    async def _request(self, url: str, headers: Mapping[str, str], sni: str | None = None) -> httpx.Response:
        if self._client is None:
            self._client = httpx.AsyncClient(
                follow_redirects=False,
                timeout=httpx.Timeout(self.patience.stall_s, connect=self.patience.connect_s, pool=None),
                limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, keepalive_expiry=30.0),
            )
        extensions = {} if sni is None else {"sni_hostname": sni}
        request = self._client.build_request("GET", url, headers=dict(headers), extensions=extensions)
        return await self._client.send(request, stream=True)

    async def _request_at(self, hop: Hop, addresses: list[str], headers: Mapping[str, str]) -> httpx.Response:
        """Ask at one of the addresses themselves, so that no second look-up can lead elsewhere."""
        parts = urlsplit(hop.url)
        named = {**headers, "host": parts.netloc.rpartition("@")[2]}
        failure: httpx.TransportError | None = None
        for address in addresses:
            host = f"[{address}]" if ":" in address else address
            url = parts._replace(netloc=f"{host}:{hop.port}").geturl()
            try:
                return await self._request(url, named, sni=hop.host)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure


async def _resolve(hop: Hop) -> list[str]:
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(hop.host))]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(hop.host, hop.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PassingError(f"the name {hop.host} is not found: {error.strerror or error}") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))[:4]


def _unreachable(hop: Hop, error: Exception) -> SourceError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return SourceError(f"{shown(hop.url)} cannot prove that it is {hop.host}: {cause.verify_message}")
        cause = cause.__cause__ or cause.__context__
    return PassingError(f"{shown(hop.url)} cannot be reached: {str(error) or type(error).__name__}")
