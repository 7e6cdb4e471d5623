"""A stream: frames both ways between two peers, in order, opened by kind.

`receive_with` is the fast way: frames are handed over in the very call that read them from the network. `receive` is
the convenient one. The rule this file keeps: what goes wrong on a stream ends the stream and is said once, to `on_end`;
the connection and its other streams go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from meshswarm.errors import MeshswarmError, PeerUnreachableError, RemoteError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.codes import StreamCode

if TYPE_CHECKING:
    from meshswarm.net.connection import Connection

logger = logging.getLogger(__name__)

OnFrame = Callable[[bytes], None]
OnEnd = Callable[[MeshswarmError | None], None]


class StreamEndedError(RemoteError):
    """The other side ended a stream in good order, and somebody still waited for a frame."""


class Carrier(Protocol):
    """What moves a stream's frames: a QUIC stream, or the loopback of a peer that talks to itself."""

    def write(self, frame: bytes | bytearray | memoryview, *, finish: bool) -> None: ...
    def finish(self) -> None: ...
    def abort(self, code: StreamCode) -> None: ...
    def unacked_bytes(self) -> int: ...
    def taken(self) -> None:
        """Frames that were queued for the stream's reader have been taken."""


class Stream:
    """One stream. `kind` says what is spoken on it; `peer_id` is who speaks on the other side."""

    def __init__(self, connection: Connection, kind: str, carrier: Carrier) -> None:
        self.kind = kind
        self.connection = connection
        self.queued_bytes = 0
        """Bytes of frames that arrived and that nobody has taken."""
        self._carrier = carrier
        self._queue: deque[bytes] = deque()
        self._on_frame: OnFrame | None = None
        self._on_end: OnEnd | None = None
        self._on_abandoned: Callable[[], object] | None = None
        self._end: tuple[MeshswarmError | None] | None = None  # how reading ended, once it has
        self._is_over = False  # reset here or lost: nothing is delivered or sent any more
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Stream {self.kind!r} with {self.peer_id!r}>"

    @property
    def peer_id(self) -> PeerId:
        return self.connection.peer_id

    @property
    def unacked_bytes(self) -> int:
        """Bytes sent here that the other side has not acknowledged: what a sender that wants to go easy looks at."""
        return self._carrier.unacked_bytes()

    # -- receiving

    def receive_with(self, on_frame: OnFrame, on_end: OnEnd) -> None:
        """Hand every frame to `on_frame`, those that came before this call first, and the end to `on_end`, once.

        `on_end(None)` is a clean end; otherwise it gets what went wrong. When `on_frame` raises, the stream is reset
        and `on_end` gets the error. After `reset` nothing is called any more.
        """
        self._on_frame, self._on_end = on_frame, on_end
        while self._queue and not self._is_over:
            self._hand_over(self._take())
        if self._end is not None:
            self._report_end()

    def when_abandoned(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the other side, after having sent its clean end, does not want our answer any more."""
        self._on_abandoned = callback

    async def receive(self, *, timeout_s: float) -> bytes:
        """The next frame.

        Raises StreamEndedError after a clean end, PeerUnreachableError after `timeout_s` of silence, or what ended the
        stream.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._queue and self._end is None and not self._is_over:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        except TimeoutError:
            raise PeerUnreachableError(
                f"peer {self.peer_id.short} sent nothing on a {self.kind!r} stream for {timeout_s:g} s",
                peer=str(self.peer_id),
            ) from None
        finally:
            self._waiter = None
        if self._queue:
            return self._take()
        raise (self._end[0] if self._end is not None else None) or StreamEndedError(
            f"peer {self.peer_id.short} ended a {self.kind!r} stream", peer=str(self.peer_id)
        )

    def _take(self) -> bytes:
        frame = self._queue.popleft()
        self.queued_bytes -= len(frame)
        self._carrier.taken()
        return frame

    # -- sending

    def send(self, frame: bytes | bytearray | memoryview, *, finish: bool = False) -> None:
        """Send one frame, and end this direction with it when `finish` is set. Never waits.

        The frame is copied before this returns. On a stream that has ended with an error it does nothing: the reason
        goes to `on_end`.
        """
        if not self._is_over:
            self._carrier.write(frame, finish=finish)

    def finish(self) -> None:
        """Nothing more will be sent from here; receiving goes on."""
        if not self._is_over:
            self._carrier.finish()

    def reset(self) -> None:
        """Give the stream up in both directions, without waiting for anything."""
        if not self._is_over:
            self._is_over = True
            self._carrier.abort(StreamCode.CANCELLED)
            self._drop()

    # -- for carriers

    def deliver(self, frame: bytes) -> None:
        """A frame came from the other side."""
        if self._is_over:
            return
        if self._on_frame is not None:
            self._hand_over(frame)
            return
        self._queue.append(frame)
        self.queued_bytes += len(frame)
        self._wake()

    def end(self, error: MeshswarmError | None) -> None:
        """Nothing more will come: None is a clean end, an error ends both directions."""
        abandoned = self._end is not None and error is not None and not self._is_over
        self._is_over = self._is_over or error is not None
        if self._end is None:
            self._end = (error,)
            self._wake()
            if self._on_end is not None:
                self._report_end()
        elif abandoned and self._on_abandoned is not None:
            self._on_abandoned()

    def fail(self, error: Exception) -> None:
        """Something here went wrong while handling the stream: reset it, and say so to `on_end`."""
        if isinstance(error, MeshswarmError):
            why = error
        else:
            logger.exception("a %r stream with peer %s broke here", self.kind, self.peer_id.short, exc_info=error)
            why = MeshswarmError(f"a {self.kind!r} stream with peer {self.peer_id.short} broke here: {error!r}")
        if not self._is_over:
            protocol = isinstance(why, RemoteProtocolError)
            self._carrier.abort(StreamCode.PROTOCOL if protocol else StreamCode.HANDLER_FAILED)
        self.end(why)

    def _hand_over(self, frame: bytes) -> None:
        assert self._on_frame is not None
        try:
            self._on_frame(frame)
        except Exception as error:
            self.fail(error)

    def _report_end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is None or self._end is None:
            return
        try:
            on_end(self._end[0])
        except Exception:
            logger.exception("the end of a %r stream with peer %s was not handled", self.kind, self.peer_id.short)

    def _drop(self) -> None:
        self._queue.clear()
        self.queued_bytes = 0
        self._on_end = self._on_abandoned = None
        self._carrier.taken()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
