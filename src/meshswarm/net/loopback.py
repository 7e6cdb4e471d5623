"""A peer's connection to itself: the same streams, without sockets.

A head that serves layers talks to its own stage through it, so nothing else needs a special case. Frames are delivered
in order by the event loop, in the turn after they were sent, to the handlers of the same endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, PeerUnreachableError
from meshswarm.identity import PeerId
from meshswarm.net.codes import StreamCode, stream_error
from meshswarm.net.connection import Connection, Hold
from meshswarm.net.frames import FrameTooLargeError
from meshswarm.net.lanes import Kinds
from meshswarm.net.stream import Stream


class Loopback(Connection):
    """The connection of `peer_id` to itself."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peer_id: PeerId, agent: str, address: Address, kinds: Kinds
    ) -> None:
        super().__init__()
        self.peer_id = peer_id
        self.agent = agent
        self.remote_address = address
        self.loop = loop
        self.ends: set[_End] = set()
        self._kinds = kinds

    @property
    def rtt_s(self) -> float | None:
        return 0.0

    def open_stream(self, kind: str, *, max_frame_bytes: int) -> Stream:
        near, far = _End(self, kind, max_frame_bytes), _End(self, kind, 0)
        near.far, far.far = far, near
        if self._lost is not None:
            near.stream.end(self._lost)
            return near.stream
        self.ends |= {near, far}
        known = self._kinds.get(kind)
        if known is None:
            far.later(far.abort, StreamCode.UNKNOWN_KIND)
        else:
            far.max_frame_bytes = known.max_frame_bytes
            far.later(far.begin, known.handler)
        return near.stream

    async def measure_rtt(self) -> float:
        return 0.0

    def hold(self) -> Hold:
        return Hold(lambda: None)

    def close(self, reason: str = "") -> None:
        error = PeerUnreachableError(f"this peer stopped{f': {reason}' if reason else ''}", peer=str(self.peer_id))
        ends, self.ends = self.ends, set()
        for end in ends:
            end.is_over = True
            end.stream.end(error)
        self._say_lost(error)


class _End:
    """One end of a stream; what is written on it arrives at `far`."""

    far: _End

    def __init__(self, connection: Loopback, kind: str, max_frame_bytes: int) -> None:
        self.stream = Stream(connection, kind, self)
        self.max_frame_bytes = max_frame_bytes
        self.is_over = False
        self._connection = connection
        self._has_finished = False
        self._has_ended = False  # the other end has finished

    def later(self, call: Callable[..., None], *arguments: Any) -> None:
        self._connection.loop.call_soon(call, *arguments)

    def begin(self, handler: Callable[[Stream], None]) -> None:
        try:
            handler(self.stream)
        except Exception as error:
            self.stream.fail(error)

    # -- Carrier

    def write(self, frame: bytes | bytearray | memoryview, *, finish: bool) -> None:
        if self._has_finished or self.is_over:
            return
        self.later(self.far.arrive, frame if isinstance(frame, bytes) else bytes(frame))
        if finish:
            self.finish()

    def finish(self) -> None:
        if not self._has_finished and not self.is_over:
            self._has_finished = True
            self.later(self.far.arrive_end, None)
            self._forget_if_done()

    def abort(self, code: StreamCode) -> None:
        if not self.is_over:
            self.is_over = True
            self._forget_if_done()
            peer = self._connection.peer_id
            self.later(self.far.arrive_end, stream_error(code, self.stream.kind, f"peer {peer.short}", str(peer)))

    def unacked_bytes(self) -> int:
        return 0

    def taken(self) -> None:
        pass

    # -- from the other end

    def arrive(self, frame: bytes) -> None:
        if self.is_over:
            return
        if len(frame) > self.max_frame_bytes:
            self.stream.fail(FrameTooLargeError(len(frame), self.max_frame_bytes, peer=str(self._connection.peer_id)))
            return
        self.stream.deliver(frame)

    def arrive_end(self, error: MeshswarmError | None) -> None:
        if self.is_over:
            return
        self._has_ended = True
        self.is_over = error is not None
        self._forget_if_done()
        self.stream.end(error)

    def _forget_if_done(self) -> None:
        if self.is_over or (self._has_finished and self._has_ended):
            self._connection.ends.discard(self)
