"""What a running peer does for a command in its folder, and how far it is: a POST, answered by server-sent events.

The rule this file keeps: the stream ends with a result or an error, never without; who no longer listens has called the
errand off; and only programs on this machine have errands done: a key to ask models is none to fetch files, or to share
one that lies here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from meshswarm.api.body import parse_object, read_body
from meshswarm.api.failure import INTERNAL_FAILURE, Failure, encode, failure_of
from meshswarm.api.guard import failure_response
from meshswarm.errors import MeshswarmError

Tell = Callable[[Mapping[str, Any]], None]
Errand = Callable[[Mapping[str, Any], Tell], Awaitable[Mapping[str, Any]]]
"""Takes the body and whom to tell how far it is; gives the result. Raises MeshswarmError."""

PING_S = 10.0
_MAX_UNREAD = 64


_NOT_FROM_HERE = Failure(403, "only a command on the peer's own machine can ask for this", code="not_from_here")


def is_same_machine(client: str, server: str) -> bool:
    """Whether a connection between these addresses does not leave the machine."""
    try:
        ip = ipaddress.ip_address(client)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_loopback or client == server


def _is_from_here(request: Request) -> bool:
    """False also for what a proxy on this machine passes on."""
    client, server = request.client, request.scope.get("server")
    is_passed_on = any(name in request.headers for name in ("forwarded", "x-forwarded-for", "via"))
    return client is not None and server is not None and not is_passed_on and is_same_machine(client.host, server[0])


def errand_handler(errand: Errand) -> Callable[[Request], Awaitable[Response]]:
    """What answers the path."""

    async def handler(request: Request) -> Response:
        if not _is_from_here(request):
            return failure_response(_NOT_FROM_HERE)
        body = parse_object(await read_body(request))
        return StreamingResponse(_events(errand, body), media_type="text/event-stream")

    return handler


async def _events(errand: Errand, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """The errand's words as they come: {"progress": ...}, at last {"result": ...} or {"error": ...}."""
    words: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue(_MAX_UNREAD)

    def tell(word: Mapping[str, Any]) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # a reader that is slow misses how far it was
            words.put_nowait({"progress": dict(word)})

    doing = asyncio.ensure_future(errand(body, tell))
    waiting: asyncio.Future[Mapping[str, Any]] | None = None
    try:
        while not doing.done() or not words.empty():
            waiting = asyncio.ensure_future(words.get())
            await asyncio.wait({waiting, doing}, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                yield _event(waiting.result())
            else:
                waiting.cancel()
                if not doing.done():
                    yield b": ping\n\n"
        yield _event(_outcome(doing))
    finally:
        if waiting is not None:
            waiting.cancel()
        doing.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await doing


def _outcome(doing: asyncio.Future[Mapping[str, Any]]) -> Mapping[str, Any]:
    if doing.cancelled():
        return INTERNAL_FAILURE.as_object()
    error = doing.exception()
    if error is None:
        return {"result": dict(doing.result())}
    if isinstance(error, MeshswarmError):
        return failure_of(error).as_object()
    return INTERNAL_FAILURE.as_object()


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"
