"""Who may start a connection to us. Pure code: counts only, no sockets.

A stranger costs a TLS handshake and some memory before HELLO tells who it is, so strangers are counted by network. When
many are half-open at once, a newcomer must first show that it receives what is sent to its address (a QUIC retry token,
RFC 9000, 8.1.2), which a forged source address cannot. The rule this file keeps: the answer depends on counts alone,
and what is refused costs us nothing.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Limits:
    """Connections that others dialled. An "address" is an IPv4 address or an IPv6 /64; a "network" a /24 or a /48.

    Loopback is one machine with perhaps many peers: only the totals hold there.
    """

    max_connections: int = 512
    max_half_open: int = 128
    retry_above_half_open: int = 16
    max_per_address: int = 16
    max_per_network: int = 64


class Answer(Enum):
    ACCEPT = "start the handshake"
    RETRY = "send a retry token first"
    REFUSE = "stay silent"


class Admission:
    """Counts connections from their first packet to their end."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._half_open = 0
        self._total = 0
        self._by_group: Counter[str] = Counter()

    def asks(self, host: str, *, has_token: bool) -> Answer:
        """A first packet came from `host`; `has_token` when it carries a valid retry token."""
        limits = self._limits
        if self._total >= limits.max_connections or self._half_open >= limits.max_half_open:
            return Answer.REFUSE
        for group, limit in zip(_groups(host), (limits.max_per_address, limits.max_per_network), strict=False):
            if self._by_group[group] >= limit:
                return Answer.REFUSE
        if self._half_open >= limits.retry_above_half_open and not has_token:
            return Answer.RETRY
        return Answer.ACCEPT

    def opened(self, host: str) -> None:
        """A handshake with `host` was started."""
        self._half_open += 1
        self._total += 1
        self._by_group.update(_groups(host))

    def established(self) -> None:
        """One of them finished HELLO."""
        self._half_open -= 1

    def ended(self, host: str, *, was_established: bool) -> None:
        """One of them is over."""
        self._total -= 1
        if not was_established:
            self._half_open -= 1
        for group in _groups(host):
            self._by_group[group] -= 1
            if not self._by_group[group]:
                del self._by_group[group]


def _groups(host: str) -> tuple[str, ...]:
    """The address and network that `host` is counted under; none for loopback."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return ()
    lengths = (32, 24) if address.version == 4 else (64, 48)
    return tuple(str(ipaddress.ip_network((address, length), strict=False)) for length in lengths)
