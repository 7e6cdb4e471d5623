"""Frames: how messages are cut out of a stream of bytes.

A frame is a 4-byte big-endian length and that many bytes. The rule this file keeps: a length is compared with the
stream's limit before anything is allocated for it, and memory grows only with bytes that really came. A whole frame
that lies in one piece of input costs one copy; one that is spread over many pieces costs one join.
"""

from __future__ import annotations

from meshswarm.errors import RemoteProtocolError

LENGTH_BYTES = 4
_PIECES_BEFORE_COMPACTION = 64
_BYTES_PER_PIECE = 1024


class FrameTooLargeError(RemoteProtocolError):
    """A peer announced a frame above the limit of its stream."""

    def __init__(self, length: int, max_frame_bytes: int, *, peer: str | None = None) -> None:
        super().__init__(f"a frame of {length} bytes is above this stream's limit of {max_frame_bytes}", peer=peer)
        self.length = length
        self.max_frame_bytes = max_frame_bytes


def frame_header(length: int) -> bytes:
    """The 4 bytes that go before a frame of `length` bytes."""
    return length.to_bytes(LENGTH_BYTES, "big")


class FrameDecoder:
    """Cuts frames out of pieces of any size.

    An oversize frame sets `error` and spends the decoder; what came before it is still returned, so the outcome does
    not depend on how the bytes were cut.
    """

    __slots__ = ("_bytes", "_length", "_pieces", "error", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._length: int | None = None  # body length of the frame being read, once its header is known
        self.error: FrameTooLargeError | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the frame that is still incomplete."""
        return self._bytes

    @property
    def is_between_frames(self) -> bool:
        """True when a stream may end here without cutting a frame in two."""
        return self._bytes == 0 and self._length is None

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes, in order. Look at `error` after handling them."""
        if self.error is not None:
            return []
        if self._bytes or self._length is not None:
            return self._feed_continued(data)
        return self._cut(data)

    def _feed_continued(self, data: bytes) -> list[bytes]:
        self._pieces.append(data)
        self._bytes += len(data)
        needed = LENGTH_BYTES if self._length is None else self._length
        if self._bytes < needed:
            if len(self._pieces) > _PIECES_BEFORE_COMPACTION + self._bytes // _BYTES_PER_PIECE:
                self._pieces = [b"".join(self._pieces)]  # many tiny pieces cost more than the bytes in them
            return []
        whole = b"".join(self._pieces)
        self._pieces, self._bytes = [], 0
        if self._length is None:
            return self._cut(whole)
        length, self._length = self._length, None
        frames = [whole if len(whole) == length else whole[:length]]
        if len(whole) > length:
            frames += self._cut(whole[length:])
        return frames

    def _cut(self, data: bytes) -> list[bytes]:
        frames: list[bytes] = []
        position, end = 0, len(data)
        while end - position >= LENGTH_BYTES:
            length = int.from_bytes(data[position : position + LENGTH_BYTES], "big")
            if length > self.max_frame_bytes:
                self.error = FrameTooLargeError(length, self.max_frame_bytes)
                return frames
            position += LENGTH_BYTES
            if end - position < length:
                self._length = length
                break
            frames.append(data[position : position + length])
            position += length
        if position < end:
            self._pieces, self._bytes = [data[position:]], end - position
        return frames
