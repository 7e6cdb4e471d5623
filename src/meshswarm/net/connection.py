"""A connection to one peer, as the rest of the program sees it: streams, requests, liveness and its end.

`link.Link` is the one over the network, `loopback.Loopback` the one of a peer to itself. The rule this file keeps: the
end of a connection is said once to everybody who asked, whatever caused it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType

from meshswarm.config import Address
from meshswarm.errors import MeshswarmError
from meshswarm.identity import PeerId
from meshswarm.net import requests
from meshswarm.net.stream import Stream

logger = logging.getLogger(__name__)

OnLost = Callable[[MeshswarmError], None]


class Hold:
    """While it is held, a connection's peer is watched closely. Release it, or use it in a `with` block."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """May be called more than once."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Connection(ABC):
    """An authenticated connection to `peer_id`, in our swarm. `agent` is what software the peer says it runs;
    `instance` is drawn anew whenever a peer starts."""

    peer_id: PeerId
    agent: str
    instance: bytes = b""
    remote_address: Address

    def __init__(self) -> None:
        self._lost: MeshswarmError | None = None
        self._on_lost: dict[object, OnLost] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.peer_id!r} at {self.remote_address}>"

    @property
    def closed(self) -> bool:
        return self._lost is not None

    @property
    @abstractmethod
    def rtt_s(self) -> float | None:
        """Smoothed round-trip time, measured from program to program; None until there is a measurement."""

    @abstractmethod
    def open_stream(self, kind: str, *, max_frame_bytes: int) -> Stream:
        """A new stream; `max_frame_bytes` limits what may be received on it.

        Costs no round trip. A kind that the peer does not know ends the stream with RefusedError. On a connection that
        is closed, the stream has already ended with the reason.
        """

    async def request(
        self, kind: str, payload: bytes, *, timeout_s: float = 5.0, max_reply_bytes: int = requests.MAX_REPLY_BYTES
    ) -> bytes:
        """Ask the peer and return its answer: one stream, one frame each way.

        Raises PeerUnreachableError (no answer within `timeout_s`, connection lost), RefusedError or
        RemoteProtocolError (what the peer answered).
        """
        return await requests.ask(self, kind, payload, timeout_s=timeout_s, max_reply_bytes=max_reply_bytes)

    @abstractmethod
    async def measure_rtt(self) -> float:
        """Seconds of one round trip made now. Raises what ended the connection if it ends first."""

    @abstractmethod
    def hold(self) -> Hold:
        """Watch the peer closely until the hold is released: lost after 4 s of silence instead of 30."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """End the connection and everything on it. `reason` is for this side's callers only."""

    def on_lost(self, callback: OnLost) -> Callable[[], None]:
        """Call `callback` once when the connection ends, with why; returns what takes the wish back."""
        key = object()
        if self._lost is not None:
            asyncio.get_running_loop().call_soon(callback, self._lost)
        else:
            self._on_lost[key] = callback
        return lambda: self._on_lost.pop(key, None) and None

    def _say_lost(self, error: MeshswarmError) -> None:
        if self._lost is not None:
            return
        self._lost = error
        callbacks, self._on_lost = list(self._on_lost.values()), {}
        for callback in callbacks:
            try:
                callback(error)
            except Exception:
                logger.exception("the end of the connection to peer %s was not handled", self.peer_id.short)
