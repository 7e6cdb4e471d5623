"""Connections to the TLS port that never shake hands: libtorrent keeps them for ever, each with a file descriptor.

The rule this file keeps: only a connection that this port accepted, that libtorrent has not spoken of, and that is
older than any honest handshake (or than the newest 64) is shut down, after a look that it still is that connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass, field

import psutil

from meshswarm.artifacts.torrent.blame import Member

HANDSHAKE_S = 10.0
MOST_WAITING = 64


@dataclass(slots=True)
class Knocking:
    """Looks at this process's connections to `port`. Blocking, some milliseconds. Times in seconds on any clock."""

    port: int
    _since: dict[tuple[Member, int], float] = field(default_factory=dict)

    def shut_silent(self, inside: Collection[Member], now: float) -> int:
        """Shut who has connected for `HANDSHAKE_S` and is not `inside`. How many were shut."""
        waiting = {each: self._since.get(each, now) for each in self._accepted() if each[0] not in inside}
        oldest_first = sorted(waiting, key=waiting.__getitem__)
        n_too_many = max(0, len(oldest_first) - MOST_WAITING)
        late = [each for n, each in enumerate(oldest_first) if n < n_too_many or now - waiting[each] >= HANDSHAKE_S]
        self._since = {each: since for each, since in waiting.items() if each not in late}
        return sum(_shut(member, descriptor, self.port) for member, descriptor in late)

    def _accepted(self) -> list[tuple[Member, int]]:
        """(who, file descriptor) of each connection that came to the port."""
        with contextlib.suppress(psutil.Error, OSError):
            return [
                ((_plain(each.raddr.ip), each.raddr.port), each.fd)
                for each in psutil.Process().net_connections("tcp")
                if each.raddr and each.laddr.port == self.port and each.fd >= 0
            ]
        return []


def _shut(member: Member, descriptor: int, port: int) -> bool:
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False
    with connection:
        try:
            host, remote_port = connection.getpeername()[:2]
            if (_plain(host), remote_port) != member or connection.getsockname()[1] != port:
                return False
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:").partition("%")[0]
