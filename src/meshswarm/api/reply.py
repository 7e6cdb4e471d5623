"""Writes the events of one answer to an HTTP response: as a stream of server-sent events, or whole at the end.

The rule this file keeps: an error that comes before the first byte is an HTTP status. A stream therefore answers 200
only when the generation has started, or after `Pace.commit_s` without a word of it, when the client must see a sign of
life; from then on comments bridge silences, and an error is an event of the stream, after which it ends without
`[DONE]`.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Message, Send

from meshswarm.api.failure import INTERNAL_FAILURE, Failure, encode
from meshswarm.api.shape import Shape
from meshswarm.errors import MeshswarmError
from meshswarm.head.request import Event, Finished, Queued, Started, TextDelta

_PING = b": ping\n\n"
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a stream may wait for its start before it answers 200, the silence after which it sends a comment, and
    how long a client may leave what it was sent unread."""

    commit_s: float = 2.0
    ping_s: float = 10.0
    stall_s: float = 60.0


class ClientStalledError(MeshswarmError):
    """The client does not read what it is sent."""


class Reply(ABC):
    """One HTTP response in the making. Every method may raise ClientStalledError."""

    def __init__(self, send: Send, shape: Shape, pace: Pace) -> None:
        self._asgi_send = send
        self._shape = shape
        self._pace = pace
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._queued: Queued | None = None  # where the request stands in line, until it has started
        self._ended = False

    async def write(self, event: Event) -> None:
        match event:
            case Queued():
                self._queued = event
                await self._wait()
            case Started():
                self._queued = None
                self._started = event
                await self._open(event)
            case TextDelta(text=text):
                if text:
                    await self._add(self._begun(), text)
            case Finished():
                self._finished = event

    async def finish(self) -> None:
        """The events are over: send what remains, or say that they ended too early."""
        if self._finished is None:
            await self.fail(INTERNAL_FAILURE)
        else:
            await self._close(self._begun(), self._finished)

    async def fail(self, failure: Failure) -> None:
        """End the response with `failure`, unless it has ended already. Whoever stood in line is told where."""
        if self._queued is not None and failure.status == 503:
            failure = replace(failure, message=f"{failure.message} (in line: {_standing(self._queued)})")
        await self._fail(failure)

    @abstractmethod
    async def keep_alive(self) -> None:
        """Show signs of life until cancelled."""

    @abstractmethod
    async def _fail(self, failure: Failure) -> None: ...
    @abstractmethod
    async def _wait(self) -> None: ...
    @abstractmethod
    async def _open(self, started: Started) -> None: ...
    @abstractmethod
    async def _add(self, started: Started, text: str) -> None: ...
    @abstractmethod
    async def _close(self, started: Started, finished: Finished) -> None: ...

    def _begun(self) -> Started:
        if self._started is None:
            raise AssertionError("the generator sent text before it said that it had started")
        return self._started

    async def _send_json(self, status: int, headers: dict[str, str], body: bytes) -> None:
        raw = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        raw += [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        self._ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._pace.stall_s):
                await self._asgi_send(message)
        except TimeoutError:
            raise ClientStalledError(
                f"a client read nothing for {self._pace.stall_s:.0f} s, so its answer was given up"
            ) from None


class WholeReply(Reply):
    """One JSON body when everything is known."""

    def __init__(self, send: Send, shape: Shape, pace: Pace) -> None:
        super().__init__(send, shape, pace)
        self._text: list[str] = []

    async def _fail(self, failure: Failure) -> None:
        if not self._ended:
            await self._send_json(failure.status, failure.headers(), encode(failure.as_object()))

    async def keep_alive(self) -> None:
        """Nothing can be sent before the status is known."""

    async def _wait(self) -> None:
        pass

    async def _open(self, started: Started) -> None:
        pass

    async def _add(self, started: Started, text: str) -> None:
        self._text.append(text)

    async def _close(self, started: Started, finished: Finished) -> None:
        await self._send_json(200, {}, encode(self._shape.whole(started, "".join(self._text), finished)))


class StreamReply(Reply):
    """Server-sent events. The lock keeps the two tasks that write, events and comments, apart."""

    def __init__(self, send: Send, shape: Shape, pace: Pace) -> None:
        super().__init__(send, shape, pace)
        self._lock = asyncio.Lock()
        self._committed = False
        self._sent_at_s = 0.0  # the loop's clock

    async def _fail(self, failure: Failure) -> None:
        async with self._lock:
            if self._ended:
                return
            if self._committed:
                await self._send_piece(_event(failure.as_object()), last=True)
            else:
                await self._send_json(failure.status, failure.headers(), encode(failure.as_object()))

    async def keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._pace.commit_s)
        async with self._lock:
            if not self._committed:
                await self._send_piece(self._sign_of_life)
        while True:
            await asyncio.sleep(max(0.0, self._sent_at_s + self._pace.ping_s - loop.time()))
            async with self._lock:
                if loop.time() >= self._sent_at_s + self._pace.ping_s:
                    await self._send_piece(self._sign_of_life)

    @property
    def _sign_of_life(self) -> bytes:
        return _PING if self._queued is None else f": queued, {_standing(self._queued)}\n\n".encode()

    async def _wait(self) -> None:
        """A stream that has begun tells at once; before, the first sign of life does."""
        async with self._lock:
            if self._committed:
                await self._send_piece(self._sign_of_life)

    async def _open(self, started: Started) -> None:
        await self._send_events(self._shape.opening(started))

    async def _add(self, started: Started, text: str) -> None:
        await self._send_events([self._shape.delta(started, text)])

    async def _close(self, started: Started, finished: Finished) -> None:
        async with self._lock:
            chunks = self._shape.closing(started, finished)
            await self._send_piece(b"".join(map(_event, chunks)) + _DONE, last=True)

    async def _send_events(self, chunks: list[dict[str, Any]]) -> None:
        async with self._lock:
            await self._send_piece(b"".join(map(_event, chunks)))

    async def _send_piece(self, piece: bytes, *, last: bool = False) -> None:
        """Sends `piece`, after the status and headers when it is the first. The caller holds the lock."""
        if not self._committed:
            self._committed = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        self._sent_at_s = asyncio.get_running_loop().time()
        self._ended = last
        await self._send({"type": "http.response.body", "body": piece, "more_body": not last})


def _standing(queued: Queued) -> str:
    return f"place {queued.place}, about {math.ceil(queued.estimate_s)} s"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"
