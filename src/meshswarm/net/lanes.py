"""The streams of one QUIC connection: which ids carry which streams, opened by kind, cut into frames.

A lane is one QUIC stream. Its opener's first frame is the kind. The rule this file keeps: whatever arrives on a lane
costs at most that lane, and what one peer can make us hold (incomplete frames, frames that nobody takes) has one limit
for all of its lanes together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshswarm.errors import MeshswarmError, RefusedError, RemoteProtocolError
from meshswarm.net.codes import StreamCode, stream_error
from meshswarm.net.connection import Connection
from meshswarm.net.frames import LENGTH_BYTES, FrameDecoder, frame_header
from meshswarm.net.quic import PeerConnection
from meshswarm.net.stream import Stream

MAX_KIND_BYTES = 64
MAX_HELD_BYTES = 64 * 1024 * 1024
MAX_UNACKED_BYTES = 128 * 1024 * 1024  # of one stream: a reader this far behind is not reading
_JOIN_BELOW_BYTES = 16 * 1024  # writing header and body in one piece is cheaper than two writes


@dataclass(frozen=True, slots=True)
class Kind:
    """What is spoken on streams of one kind: `handler` gets each new stream, frames are at most `max_frame_bytes`."""

    handler: Callable[[Stream], None]
    max_frame_bytes: int


Kinds = dict[str, Kind]


SendAtOnce = Callable[[int, bytes, bool], bool]


class Lanes:
    """All lanes of one connection. `flush` is told whenever something waits to be sent. `send_at_once(id, data,
    finish)` is the short way for a small piece; it returns False, and does nothing, when it is not open."""

    def __init__(
        self,
        connection: Connection,
        quic: PeerConnection,
        kinds: Kinds,
        flush: Callable[[], None],
        send_at_once: SendAtOnce,
    ) -> None:
        self.connection = connection
        self.quic = quic
        self.kinds = kinds
        self.flush = flush
        self.send_at_once = send_at_once
        self.held_bytes = 0
        self._lanes: dict[int, Lane] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def open(self, kind: str, max_frame_bytes: int) -> Stream:
        """A new stream of ours; its kind leaves with the first frame, or at the next flush.

        When the peer has as many streams of ours open as it allows, the stream has already ended with RefusedError.
        """
        name = kind.encode()
        if not 0 < len(name) <= MAX_KIND_BYTES:
            raise ValueError(f"a stream kind is 1 to {MAX_KIND_BYTES} bytes: {kind!r}")
        stream_id = self.quic.get_next_available_stream_id()
        if not self.quic.may_open(stream_id):
            return self._refused(kind)
        lane = self._lanes[stream_id] = Lane(self, stream_id)
        self.quic.send_stream_data(stream_id, frame_header(len(name)) + name)
        return lane.begin(kind, max_frame_bytes)

    def ended(self, kind: str, error: MeshswarmError) -> Stream:
        """A stream that never was: its end is `error`."""
        lane = Lane(self, -1)
        lane.is_over = True
        stream = lane.begin(kind, 0)
        stream.end(error)
        return stream

    def _refused(self, kind: str) -> Stream:
        peer = self.connection.peer_id
        error = RefusedError(
            f"peer {peer.short} has as many streams from us open as it allows", peer=str(peer), retry_after_s=1.0
        )
        return self.ended(kind, error)

    def receive(self, stream_id: int, data: bytes, end: bool) -> None:
        self.quic.delivered(len(data))
        lane = self._lanes.get(stream_id)
        if lane is None:
            if self.is_ours(stream_id):
                return  # the rest of a stream that is long over here
            lane = self._lanes[stream_id] = Lane(self, stream_id)
        lane.receive(data, end)

    def reset(self, stream_id: int, code: int) -> None:
        """The other side gave up sending on a stream."""
        self.quic.abandon_rest(stream_id)
        if (lane := self._lanes.get(stream_id)) is not None:
            lane.reset(code)

    def stop(self, stream_id: int, code: int) -> None:
        """The other side does not want to receive on a stream any more."""
        if (lane := self._lanes.get(stream_id)) is not None:
            lane.stop(code)

    def end_all(self, error: MeshswarmError) -> None:
        """The connection is over."""
        lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            lane.is_over = True
            if lane.stream is not None:
                lane.stream.end(error)

    def is_ours(self, stream_id: int) -> bool:
        return (stream_id & 1 == 0) == self.quic.configuration.is_client

    def forget(self, stream_id: int) -> None:
        self._lanes.pop(stream_id, None)


class Lane:
    """One QUIC stream under a `Stream`. It stays known until both directions are done, so late data finds it."""

    __slots__ = (
        "_decoder",
        "_head",
        "_held",
        "_lanes",
        "_received_all",
        "_sent_all",
        "_stream_id",
        "is_over",
        "stream",
    )

    def __init__(self, lanes: Lanes, stream_id: int) -> None:
        self._lanes = lanes
        self._stream_id = stream_id
        self.stream: Stream | None = None
        self.is_over = False  # given up or refused: what still arrives is dropped
        self._decoder: FrameDecoder | None = None
        self._head = b""
        self._held = 0
        self._received_all = False
        self._sent_all = False

    def begin(self, kind: str, max_frame_bytes: int) -> Stream:
        self._decoder = FrameDecoder(max_frame_bytes)
        self.stream = Stream(self._lanes.connection, kind, self)
        return self.stream

    # -- from the network

    def receive(self, data: bytes, end: bool) -> None:
        if not self.is_over:
            if self.stream is None:
                data = self._read_head(data)
            if data and self._decoder is not None and not self.is_over:
                self._cut(data)
        if end:
            self._received_all = True
            self._receive_end()
            self._forget_if_done()

    def _read_head(self, data: bytes) -> bytes:
        """Read the kind that opens the stream; what follows it."""
        head = self._head + data
        length = int.from_bytes(head[:LENGTH_BYTES], "big")
        if len(head) >= LENGTH_BYTES and not 0 < length <= MAX_KIND_BYTES:
            self.abort(StreamCode.PROTOCOL)
            return b""
        if len(head) < LENGTH_BYTES + length or len(head) < LENGTH_BYTES:
            self._head = head
            return b""
        name, rest = head[LENGTH_BYTES : LENGTH_BYTES + length], head[LENGTH_BYTES + length :]
        self._head = b""
        kind = self._lanes.kinds.get(name.decode(errors="replace"))
        if kind is None:
            self.abort(StreamCode.UNKNOWN_KIND)
            return b""
        stream = self.begin(name.decode(), kind.max_frame_bytes)
        try:
            kind.handler(stream)
        except Exception as error:
            stream.fail(error)
        return rest

    def _cut(self, data: bytes) -> None:
        decoder, stream = self._decoder, self.stream
        assert decoder is not None and stream is not None
        for frame in decoder.feed(data):
            stream.deliver(frame)
        if decoder.error is not None and not self.is_over:
            stream.fail(RemoteProtocolError(f"peer {stream.peer_id.short}: {decoder.error}", peer=str(stream.peer_id)))
        self._count_held()

    def _receive_end(self) -> None:
        if self.stream is None or self.is_over or self._decoder is None:
            return
        if not self._decoder.is_between_frames:
            self.stream.fail(
                RemoteProtocolError(
                    f"peer {self.stream.peer_id.short} ended a {self.stream.kind!r} stream inside a frame",
                    peer=str(self.stream.peer_id),
                )
            )
            return
        self.stream.end(None)

    def reset(self, code: int) -> None:
        self._received_all = True
        self._give_up(code)

    def stop(self, code: int) -> None:
        self._sent_all = True  # aioquic has answered with a reset of its own
        self._give_up(code)

    def _give_up(self, code: int) -> None:
        if not self.is_over:
            self.abort(StreamCode.CANCELLED)
            if self.stream is not None:
                peer = self.stream.peer_id
                self.stream.end(stream_error(code, self.stream.kind, f"peer {peer.short}", str(peer)))
        self._forget_if_done()

    # -- Carrier

    def write(self, frame: bytes | bytearray | memoryview, *, finish: bool) -> None:
        if self._sent_all or self.is_over or self._is_stopped:
            return
        lanes, quic, stream_id = self._lanes, self._lanes.quic, self._stream_id
        size = len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes
        if size < _JOIN_BELOW_BYTES:
            data = b"".join((frame_header(size), frame))
            if not lanes.send_at_once(stream_id, data, finish):
                quic.send_stream_data(stream_id, data, finish)
                lanes.flush()
        else:
            if self.unacked_bytes() + size > MAX_UNACKED_BYTES:
                self._fail_slow_reader()
                return
            quic.send_stream_data(stream_id, frame_header(size))
            quic.write_buffer(stream_id, frame, finish)
            lanes.flush()
        if finish:
            self._sent_all = True
            self._forget_if_done()

    @property
    def _is_stopped(self) -> bool:
        """The other side wants nothing more, and `stop` will say so: another stream's event of the same datagram came
        first."""
        return self._lanes.quic.is_stopped(self._stream_id)

    def _fail_slow_reader(self) -> None:
        assert self.stream is not None
        peer = self.stream.peer_id
        self.stream.fail(
            RefusedError(
                f"peer {peer.short} does not read what we send on a {self.stream.kind!r} stream", peer=str(peer)
            )
        )

    def finish(self) -> None:
        if not self._sent_all and not self.is_over and not self._is_stopped:
            self._sent_all = True
            self._lanes.quic.send_stream_data(self._stream_id, b"", True)
            self._forget_if_done()
            self._lanes.flush()

    def abort(self, code: StreamCode) -> None:
        if self.is_over:
            return
        self.is_over = True
        if not self._sent_all:
            self._sent_all = True
            self._lanes.quic.reset_stream(self._stream_id, code)
        if not self._received_all:
            self._lanes.quic.stop_stream(self._stream_id, code)
        self._decoder = None
        self._count_held()
        self._forget_if_done()
        self._lanes.flush()

    def unacked_bytes(self) -> int:
        return self._lanes.quic.unacked_bytes(self._stream_id)

    def taken(self) -> None:
        self._count_held()

    def _count_held(self) -> None:
        """Keep the connection's total of bytes that wait here; the lane that drives it over the limit is given up."""
        partial = 0 if self._decoder is None else self._decoder.buffered_bytes
        held = partial + (0 if self.stream is None else self.stream.queued_bytes)
        if held == self._held:
            return
        grew = held > self._held
        self._lanes.held_bytes += held - self._held
        self._held = held
        if grew and self._lanes.held_bytes > MAX_HELD_BYTES and self.stream is not None:
            peer = self.stream.peer_id
            stream = self.stream
            self.abort(StreamCode.OVERLOADED)
            stream.end(RemoteProtocolError(f"peer {peer.short} sent more than we can hold for it", peer=str(peer)))

    def _forget_if_done(self) -> None:
        if self._received_all and self._sent_all:
            self._lanes.forget(self._stream_id)
