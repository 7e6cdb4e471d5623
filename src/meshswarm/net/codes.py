"""The numbers that travel when a connection or a stream ends early, and the sentences they become.

A code says what the other side should do about it. HELLO failures share one code on purpose: who is not a member
learns nothing about why.
"""

from __future__ import annotations

from enum import IntEnum

from meshswarm.errors import MeshswarmError, PeerUnreachableError, RefusedError, RemoteError, RemoteProtocolError


class CloseCode(IntEnum):
    """Why a connection was closed (QUIC application error codes)."""

    DONE = 0x0
    HELLO_FAILED = 0x1
    NO_COMMON_VERSION = 0x2
    PROTOCOL = 0x3
    SURPLUS = 0x4
    IDLE = 0x5
    OVERLOADED = 0x6
    SHUTDOWN = 0x7


class StreamCode(IntEnum):
    """Why a stream was reset or refused (QUIC application error codes)."""

    CANCELLED = 0x100
    UNKNOWN_KIND = 0x101
    PROTOCOL = 0x102
    HANDLER_FAILED = 0x103
    OVERLOADED = 0x104


class StreamResetError(RemoteError):
    """The other side gave a stream up before its end."""


_CLOSE_SENTENCES = {
    CloseCode.DONE: "closed the connection",
    CloseCode.HELLO_FAILED: "did not accept our HELLO; it may belong to another swarm",
    CloseCode.NO_COMMON_VERSION: "speaks no protocol version that we speak; one of the two must be upgraded",
    CloseCode.PROTOCOL: "closed the connection because of something we sent",
    CloseCode.SURPLUS: "closed this connection because it has another one with us",
    CloseCode.IDLE: "closed the connection because nobody used it",
    CloseCode.OVERLOADED: "closed the connection because it is overloaded",
    CloseCode.SHUTDOWN: "is shutting down",
}


def close_error(code: int, who: str, peer: str | None, detail: str = "") -> PeerUnreachableError:
    """The error of a connection that the other side closed. `who` begins the sentence, for example "peer abc"."""
    try:
        sentence = _CLOSE_SENTENCES[CloseCode(code)]
    except ValueError:
        sentence = f"closed the connection with the unknown code {code:#x}"
    return PeerUnreachableError(f"{who} {sentence}{f' ({detail})' if detail else ''}", peer=peer)


def stream_error(code: int, kind: str, who: str, peer: str | None) -> MeshswarmError:
    """The error of a stream of `kind` that the other side reset or refused."""
    match code:
        case StreamCode.UNKNOWN_KIND:
            return RefusedError(f"{who} does not know streams of kind {kind!r}", peer=peer)
        case StreamCode.PROTOCOL:
            return RemoteProtocolError(f"{who} says that we broke the protocol on its {kind!r} stream", peer=peer)
        case StreamCode.HANDLER_FAILED:
            return RefusedError(f"{who} failed while handling a {kind!r} stream", peer=peer)
        case StreamCode.OVERLOADED:
            return RefusedError(f"{who} has no room for a {kind!r} stream now", peer=peer, retry_after_s=1.0)
        case _:
            return StreamResetError(f"{who} gave up a {kind!r} stream", peer=peer)
