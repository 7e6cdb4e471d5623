"""How large a datagram a path carries. Pure code: sizes to probe come out, what became of them goes in.

Every path carries 1200 bytes (RFC 9000, 14). Larger sizes are tried with one packet each that holds nothing else; the
largest that arrives is used. When larger packets vanish in a row while small ones may still pass (a black hole), the
size goes back to 1200 at once and the rungs are tried again later. The rule this file keeps: nothing that anybody
waits for is sent at a size that was not seen to arrive.
"""

from __future__ import annotations

import ipaddress

from meshswarm.net.congestion import BASE_DATAGRAM_BYTES, ETHERNET_BYTES

JUMBO_BYTES = 8900  # 9000 less headers; also below macOS's default limit of 9216 for a UDP datagram
LOOPBACK_BYTES = (16384, 61440)  # the first is also macOS's loopback MTU, the second fits Linux's 65536 with headers
BLACK_HOLE_LOSSES = 4
_RETRY_AFTER_S = (1.0, 5.0)
_COOL_DOWN_S = 60.0
_MAX_COOL_DOWN_S = 960.0


def rungs_for(host: str) -> tuple[int, ...]:
    """Sizes worth trying towards the IP address `host`, smallest first."""
    if _address(host).is_loopback:
        return (ETHERNET_BYTES, JUMBO_BYTES, *LOOPBACK_BYTES)
    return (ETHERNET_BYTES, JUMBO_BYTES) if is_near(host) else (ETHERNET_BYTES,)


def is_near(host: str) -> bool:
    """Whether the IP address `host` is of this machine or a local network, where bytes cost next to nothing."""
    address = _address(host)
    return address.is_loopback or address.is_private or address.is_link_local


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


class PathMtu:
    """The ladder of one path. `begin`, call `due` at `next_at`, and probe each size it returns."""

    def __init__(self, rungs: tuple[int, ...]) -> None:
        self.size = BASE_DATAGRAM_BYTES
        self._rungs = rungs
        self._cool_down_s = _COOL_DOWN_S
        self._attempts: dict[int, int] = {}
        self._due: dict[int, float] = {}
        self._has_begun = False

    def begin(self, now: float) -> None:
        """The path is worth knowing. Only the first call counts."""
        if not self._has_begun:
            self._has_begun = True
            self._start(now)

    def _start(self, at: float) -> None:
        self._attempts = dict.fromkeys(self._rungs, 0)
        self._due = dict.fromkeys(self._rungs, at)

    @property
    def next_at(self) -> float | None:
        """When the next probe is due, or None when nothing is left to try."""
        return min(self._due.values(), default=None)

    def due(self, now: float) -> list[int]:
        """Sizes to probe now. Each must be reported once, with `arrived`, `missed` or `too_large`."""
        sizes = [size for size, at in self._due.items() if at <= now]
        for size in sizes:
            del self._due[size]
        return sizes

    def arrived(self, size: int) -> bool:
        """A probe was acknowledged. True when `self.size` rose to it."""
        if size <= self.size:
            return False
        self.size = size
        self._due = {rung: at for rung, at in self._due.items() if rung > size}
        return True

    def missed(self, size: int, now: float) -> None:
        """A probe was lost; one loss may be chance, so it is tried again a little later."""
        attempt = self._attempts.get(size, len(_RETRY_AFTER_S))
        if size > self.size and attempt < len(_RETRY_AFTER_S):
            self._attempts[size] = attempt + 1
            self._due[size] = now + _RETRY_AFTER_S[attempt]

    def too_large(self, size: int) -> None:
        """This machine itself refused to send `size` bytes: neither it nor anything above it will ever pass."""
        self._rungs = tuple(rung for rung in self._rungs if rung < size)
        self._due = {rung: at for rung, at in self._due.items() if rung < size}
        if self.size >= size:
            self.size = BASE_DATAGRAM_BYTES

    def black_hole(self, now: float) -> None:
        """Packets of the present size vanish: back to the base, and try the rungs again after a while."""
        self.size = BASE_DATAGRAM_BYTES
        self._start(now + self._cool_down_s)
        self._cool_down_s = min(2 * self._cool_down_s, _MAX_COOL_DOWN_S)
