"""One question, one answer: a request is a stream with one frame each way.

The reply's first byte says how it went. The rule this file keeps: an error travels as a sentence only when it was made
for the other side to read (RefusedError, RemoteProtocolError); anything else that goes wrong while answering is logged
here and told there as a failure without details.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgpack

from meshswarm.errors import MeshswarmError, PeerUnreachableError, RefusedError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.stream import Stream, StreamEndedError

if TYPE_CHECKING:
    from meshswarm.net.connection import Connection

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1024 * 1024
MAX_SENDING_BYTES = 256 * 1024 * 1024
MAX_SENDING_TO_ONE_BYTES = 16 * 1024 * 1024
"""Of long answers that have not arrived: a peer that asks many times and reads nothing keeps no more than this in
memory here. One answer may always be on its way, however long, and the end of another."""
_LONG_BYTES = 64 * 1024
_BUSY_FOR_S = 2.0
_MAX_ERROR_CHARS = 400
_MAX_RETRY_S = 3600.0
_MAX_ERROR_BYTES = 2048

Answerer = Callable[[PeerId, bytes], Awaitable[bytes]]
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Status(IntEnum):
    OK = 0
    REFUSED = 1
    PROTOCOL = 2


async def ask(connection: Connection, kind: str, payload: bytes, *, timeout_s: float, max_reply_bytes: int) -> bytes:
    """See `Connection.request`."""
    stream = connection.open_stream(kind, max_frame_bytes=max(max_reply_bytes, _MAX_ERROR_BYTES) + 1)
    stream.send(payload, finish=True)
    peer = connection.peer_id
    try:
        reply = await stream.receive(timeout_s=timeout_s)
    except PeerUnreachableError as error:
        if connection.closed:
            raise
        raise PeerUnreachableError(
            f"peer {peer.short} at {connection.remote_address} gave no answer to a {kind!r} request in {timeout_s:g} s",
            peer=str(peer),
        ) from error
    except StreamEndedError as error:
        raise RemoteProtocolError(
            f"peer {peer.short} ended a {kind!r} request without an answer", peer=str(peer)
        ) from error
    finally:
        stream.reset()
    return _open_reply(reply, kind, peer, max_reply_bytes)


def _open_reply(reply: bytes, kind: str, peer: PeerId, max_reply_bytes: int) -> bytes:
    if reply[:1] == bytes([Status.OK]) and len(reply) <= max_reply_bytes + 1:
        return reply[1:]
    try:
        status = Status(reply[0])
        message, retry_after_s = msgpack.unpackb(reply[1:])
        if status is Status.OK or not isinstance(message, str) or not isinstance(retry_after_s, float | None):
            raise ValueError
        if retry_after_s is not None:
            if not math.isfinite(retry_after_s):
                raise ValueError
            retry_after_s = min(max(0.0, retry_after_s), _MAX_RETRY_S)
    except (IndexError, ValueError, TypeError, msgpack.UnpackException):
        raise RemoteProtocolError(f"peer {peer.short} sent a malformed reply to {kind!r}", peer=str(peer)) from None
    sentence = f"peer {peer.short} answered a {kind!r} request: {message[:_MAX_ERROR_CHARS]}"
    if status is Status.REFUSED:
        raise RefusedError(sentence, peer=str(peer), retry_after_s=retry_after_s)
    raise RemoteProtocolError(sentence, peer=str(peer))


class RequestHandler:
    """A stream handler that answers each stream's one frame by what `answer` returns, in a task of its own."""

    def __init__(self, answer: Answerer, max_reply_bytes: int, spawn: Spawn) -> None:
        self._answer = answer
        self._max_reply_bytes = max_reply_bytes
        self._spawn = spawn
        self._sending: list[Stream] = []

    def __call__(self, stream: Stream) -> None:
        task: asyncio.Task[None] | None = None

        def on_frame(payload: bytes) -> None:
            nonlocal task
            if task is not None:
                raise RemoteProtocolError("a request is one frame", peer=str(stream.peer_id))
            task = self._spawn(self._reply(stream, payload))
            stream.when_abandoned(task.cancel)

        def on_end(error: MeshswarmError | None) -> None:
            if error is not None and task is not None:
                task.cancel()  # nobody waits for the answer any more
            elif error is None and task is None:
                stream.reset()

        stream.receive_with(on_frame, on_end)

    async def _reply(self, stream: Stream, payload: bytes) -> None:
        try:
            reply = await self._answer(stream.peer_id, payload)
            if len(reply) > self._max_reply_bytes:
                raise MeshswarmError(f"a reply of {len(reply)} bytes is above its limit of {self._max_reply_bytes}")
            if len(reply) >= _LONG_BYTES:
                self._take_room(stream, len(reply))
        except RefusedError as error:
            reply = _error_reply(Status.REFUSED, error)
        except RemoteProtocolError as error:
            reply = _error_reply(Status.PROTOCOL, error)
        except Exception as error:
            stream.fail(error)
            return
        else:
            reply = bytes([Status.OK]) + reply
        stream.send(reply, finish=True)

    def _take_room(self, stream: Stream, n_bytes: int) -> None:
        """For one more long answer. Raises RefusedError."""
        self._sending = [each for each in self._sending if each.unacked_bytes]
        to_one = sum(each.unacked_bytes for each in self._sending if each.peer_id == stream.peer_id)
        to_all = sum(each.unacked_bytes for each in self._sending)
        if (to_one > MAX_REPLY_BYTES and to_one + n_bytes > MAX_SENDING_TO_ONE_BYTES) or (
            to_all > MAX_REPLY_BYTES and to_all + n_bytes > MAX_SENDING_BYTES
        ):
            raise RefusedError("too many long answers are on their way from here", retry_after_s=_BUSY_FOR_S)
        self._sending.append(stream)


def _error_reply(status: Status, error: MeshswarmError) -> bytes:
    retry_after_s = None if error.retry_after_s is None else float(error.retry_after_s)
    packed: bytes = msgpack.packb([str(error)[:_MAX_ERROR_CHARS], retry_after_s])
    return bytes([status]) + packed
