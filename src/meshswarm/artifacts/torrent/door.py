"""Who has dialled in: one host that takes the places of many is shut out for a while.

The rule this file keeps: plain code, on any clock. Addresses that cost nothing beyond the first (an IPv6 /64) count as
one host, and every count is bounded by the connections that there are.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

MOST_OF_ONE_HOST = 48
"""Connections that came from one host: several peers behind one translator, each with a few files."""
SHUT_FOR_S = 60.0
MAX_SHUT = 1024

Member = tuple[str, int]
HostRange = tuple[str, str]
"""First and last address."""


@dataclass(slots=True)
class Door:
    """`n_files`: how many are open, since a peer needs a connection for each. Times in seconds."""

    _inside: dict[str, set[Member]] = field(default_factory=dict)
    _shut: dict[str, float] = field(default_factory=dict)  # until when

    def came(self, member: Member, n_files: int, now: float) -> bool:
        """Somebody dialled in. True when his host is shut out from now on."""
        host = _host(member[0])
        inside = self._inside.setdefault(host, set())
        inside.add(member)
        if len(inside) <= max(MOST_OF_ONE_HOST, 4 * n_files) or host in self._shut:
            return False
        if len(self._shut) >= MAX_SHUT:
            self._shut.pop(min(self._shut, key=self._shut.__getitem__))
        self._shut[host] = now + SHUT_FOR_S
        return True

    def left(self, member: Member) -> None:
        host = _host(member[0])
        inside = self._inside.get(host)
        if inside is not None:
            inside.discard(member)
            if not inside:
                del self._inside[host]

    def inside(self) -> set[Member]:
        """Everybody who dialled in and has not left."""
        return set().union(*self._inside.values())

    def forget(self) -> None:
        """News was lost: nobody is known to be inside."""
        self._inside.clear()

    def reopen(self, now: float) -> bool:
        """Let those in again whose time is over. True when there are such."""
        over = [host for host, until in self._shut.items() if until <= now]
        for host in over:
            del self._shut[host]
        return bool(over)

    def shut(self) -> set[HostRange]:
        """Addresses that are not let in."""
        return {_range(host) for host in self._shut}


def _host(address: str) -> str:
    """An IPv4 address, or the first of an IPv6 /64."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ipaddress.IPv6Address(int(ip) >> 64 << 64)
    return str(ip)


def _range(host: str) -> HostRange:
    ip = ipaddress.ip_address(host)
    last = ipaddress.IPv6Address(int(ip) | (1 << 64) - 1) if ip.version == 6 else ip
    return host, str(last)
