"""Closed connections, for the moment in which the other side may not have heard of it.

A close is one datagram, and datagrams get lost. Whoever keeps talking to a closed connection gets that datagram again,
a few times (RFC 9000, 10.2.1), instead of finding out by silence. Pure code: `now` comes in, datagrams come out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LINGER_S = 3.0
MAX_REPEATS = 5
MAX_REMEMBERED_IDS = 4096


class Farewells:
    """Remembers the last datagram of closed connections by their connection ids."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, _Farewell] = {}  # oldest first

    def add(self, connection_ids: Iterable[bytes], datagram: bytes, sockaddr: Any, now: float) -> None:
        """A connection was closed with `datagram`, sent to `sockaddr`."""
        self._forget_old(now)
        if len(self._by_id) < MAX_REMEMBERED_IDS:
            self._by_id |= dict.fromkeys(connection_ids, _Farewell(datagram, sockaddr, now + LINGER_S))

    def answer(self, connection_id: bytes, now: float) -> tuple[bytes, Any] | None:
        """What to send to whoever still uses a closed connection, and where; None when there is nothing to say."""
        farewell = self._by_id.get(connection_id)
        if farewell is None or farewell.until < now or farewell.repeats >= MAX_REPEATS:
            return None
        farewell.repeats += 1
        return farewell.datagram, farewell.sockaddr

    def _forget_old(self, now: float) -> None:
        while self._by_id and self._by_id[oldest := next(iter(self._by_id))].until < now:
            del self._by_id[oldest]


class _Farewell:
    __slots__ = ("datagram", "repeats", "sockaddr", "until")

    def __init__(self, datagram: bytes, sockaddr: Any, until: float) -> None:
        self.datagram = datagram
        self.sockaddr = sockaddr
        self.until = until
        self.repeats = 0
