"""What two connected peers say to each other about their connection: signs of life and round-trip times.

These are the frames that follow HELLO on its stream. The rule this file keeps: an answer is never larger than its
question, and what is not understood is ignored, so newer peers can say more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import msgpack

_SMOOTHING = 1 / 8  # RFC 6298


class _Op(IntEnum):
    PING = 1
    PONG = 2


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with a Pong of the same `token`. `held`: the sender depends on this connection, so do not close it."""

    token: int
    held: bool

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([_Op.PING, self.token, self.held])
        return packed


@dataclass(frozen=True, slots=True)
class Pong:
    token: int

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([_Op.PONG, self.token])
        return packed


def unpack(frame: bytes) -> Ping | Pong | None:
    """None for what this version does not know, and for garbage."""
    try:
        match msgpack.unpackb(frame, max_array_len=16):
            case [_Op.PING, int(token), bool(held), *_]:
                return Ping(token, held)
            case [_Op.PONG, int(token), *_]:
                return Pong(token)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        pass
    return None


class RttEstimate:
    """Smoothed round-trip time of pings, from program to program."""

    def __init__(self) -> None:
        self.smoothed_s: float | None = None

    def add(self, sample_s: float) -> None:
        if self.smoothed_s is None:
            self.smoothed_s = sample_s
        else:
            self.smoothed_s += _SMOOTHING * (sample_s - self.smoothed_s)
