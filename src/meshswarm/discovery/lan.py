"""Peers on the local network, by mDNS (RFC 6762) and DNS-SD (RFC 6763): this one says that it is there, and listens.

The service's name is a label that only members of the swarm can tell from noise. A public swarm's peer adds its PeerId;
a private one's says nothing more, and whoever dials it learns the key in the handshake. Host names are left out.
The rule this file keeps: what others announce is checked by its label before anything is asked about it, so a network
full of other swarms costs nothing, and only so many are asked about at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from meshswarm.config import Address
from meshswarm.discovery.candidate import Candidate, Source, SourceError
from meshswarm.discovery.label import NONCE_BYTES, is_of_swarm, make_label
from meshswarm.discovery.search import MAX_ADDRESSES
from meshswarm.identity import PeerId
from meshswarm.net.swarm import Swarm

logger = logging.getLogger(__name__)
logging.getLogger("zeroconf").setLevel(logging.CRITICAL)  # what matters becomes a sentence; the rest is noise

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

SERVICE = "_meshswarm._udp.local."
CHECK_S = 30.0
RESOLVE_MS = 3000
MAX_RESOLVED_AT_A_TIME = 16
MAX_WAITING = 256
_ID = b"id"
_MAX_ANNOUNCED = 6


class LanSource:
    """`bound`: the socket that others are to dial; on a wildcard, all interfaces are used. `takes`: its address
    families. `announces` False: only listen. `clock`: Unix time. It looks until it is closed or fails."""

    source = Source.LAN
    patience_s = 1.5

    def __init__(
        self,
        swarm: Swarm,
        peer: PeerId,
        bound: Address,
        takes: frozenset[int],
        *,
        announces: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._swarm = swarm
        self._peer = peer
        self._bound = bound
        self._takes = takes
        self._announces = announces
        self._clock = clock
        self._own: set[str] = set()
        self._others: set[str] = set()
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._found: asyncio.Queue[Candidate] = asyncio.Queue(MAX_WAITING)

    @property
    def note(self) -> str:
        n = len(self._others)
        return f"{n} peer{'' if n == 1 else 's'} of other swarms there" if n else ""

    async def candidates(self) -> AsyncIterator[Candidate]:
        try:
            while True:  # each time on the interfaces that there are then
                async with contextlib.aclosing(self._listen()) as listening:
                    async for candidate in listening:
                        yield candidate
        except ImportError:
            raise SourceError("the package zeroconf is not installed, so the local network is not searched") from None
        except (OSError, RuntimeError, ValueError) as error:
            raise SourceError(f"the local network cannot be searched: {_reason(error)}") from None

    async def close(self) -> None:
        """Nothing is held when no round runs."""

    # -- inside

    async def _listen(self) -> AsyncGenerator[Candidate, None]:
        """Until this machine's addresses change."""
        zeroconf = self._open()
        browser = self._browser(zeroconf)
        watching = asyncio.create_task(self._announce(zeroconf))
        try:
            while True:
                getting = asyncio.create_task(self._found.get())
                try:
                    await asyncio.wait({getting, watching}, return_when=asyncio.FIRST_COMPLETED)
                    if watching.done():
                        watching.result()
                        return
                    candidate = getting.result()
                finally:
                    getting.cancel()
                yield candidate
        finally:
            await browser.async_cancel()
            await self._stop(zeroconf, watching)

    def _open(self) -> AsyncZeroconf:
        from zeroconf import InterfaceChoice, IPVersion
        from zeroconf.asyncio import AsyncZeroconf

        both = socket.AF_INET in self._takes and socket.AF_INET6 in self._takes
        version = IPVersion.All if both else IPVersion.V6Only if socket.AF_INET6 in self._takes else IPVersion.V4Only
        wanted: Any = InterfaceChoice.All if self._bound.is_unspecified else [self._bound.host]
        try:
            return AsyncZeroconf(interfaces=wanted, ip_version=version)
        except OSError:
            if version is not IPVersion.All:
                raise
            return AsyncZeroconf(interfaces=wanted, ip_version=IPVersion.V4Only)

    async def _announce(self, zeroconf: AsyncZeroconf) -> None:
        """Says that this peer is there, under another name whenever the swarm's own has changed. Ends when this
        machine's addresses are others: zeroconf goes on with the interfaces that it began with."""
        addresses = own_addresses(self._bound, self._takes)
        lan_name, info = "", None
        while own_addresses(self._bound, self._takes) == addresses:
            current = self._swarm.lan_name(self._clock())
            if self._announces and current != lan_name:
                if info is not None:
                    await zeroconf.async_unregister_service(info)
                lan_name, info = current, self._service(current, addresses)
                self._own.add(info.name)
                # A name with 64 random bits needs no asking whether somebody has it.
                await zeroconf.async_register_service(info, cooperating_responders=True)
            await asyncio.sleep(CHECK_S)

    def _service(self, lan_name: str, addresses: list[str]) -> AsyncServiceInfo:
        from zeroconf.asyncio import AsyncServiceInfo

        label = make_label(lan_name, os.urandom(NONCE_BYTES))
        return AsyncServiceInfo(
            SERVICE,
            f"{label}.{SERVICE}",
            port=self._bound.port,
            parsed_addresses=addresses,
            properties={} if self._swarm.is_private else {_ID: str(self._peer)},
            server=f"{label}.local.",
        )

    def _browser(self, zeroconf: AsyncZeroconf) -> Any:
        from zeroconf import ServiceStateChange
        from zeroconf.asyncio import AsyncServiceBrowser

        def on_change(zeroconf: Any, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            if state_change is not ServiceStateChange.Removed:
                self._heard(zeroconf, name)

        return AsyncServiceBrowser(zeroconf.zeroconf, [SERVICE], handlers=[on_change])

    def _heard(self, zeroconf: Any, name: str) -> None:
        """A service is there, or has changed."""
        if name in self._own or name in self._resolving:
            return
        if not is_of_swarm(name.removesuffix(f".{SERVICE}"), self._swarm, self._clock()):
            if len(self._others) < MAX_WAITING:
                self._others.add(name)
            return
        if len(self._resolving) < MAX_RESOLVED_AT_A_TIME:
            task = self._resolving[name] = asyncio.create_task(self._resolve(zeroconf, name))
            task.add_done_callback(lambda done: self._resolved(name, done))

    async def _resolve(self, zeroconf: Any, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(SERVICE, name)
        with contextlib.suppress(OSError):
            if not await info.async_request(zeroconf, RESOLVE_MS):
                return
        addresses = _dialable(info.parsed_scoped_addresses(), info.port or 0)
        peer = _peer_of(info.properties)
        if addresses and peer != self._peer:
            with contextlib.suppress(asyncio.QueueFull):  # more than anybody waits for: they are announced again
                self._found.put_nowait(Candidate(peer, addresses, Source.LAN))

    def _resolved(self, name: str, task: asyncio.Task[None]) -> None:
        self._resolving.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("the announcement %s could not be read: %r", name, error)

    async def _stop(self, zeroconf: AsyncZeroconf, watching: asyncio.Task[None]) -> None:
        tasks = [*self._resolving.values(), watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(OSError):
            await zeroconf.async_close()  # takes back what was announced


def own_addresses(bound: Address, takes: frozenset[int]) -> list[str]:
    """The IP addresses to announce for a socket: its own, or when that is a wildcard those of all interfaces."""
    if not bound.is_unspecified:
        return [bound.host]
    found = []
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family in takes:
                ip = ipaddress.ip_address(entry.address.partition("%")[0])
                if not ip.is_loopback:
                    found.append((entry.family != socket.AF_INET, ip.is_link_local, str(ip)))
    return [host for _, _, host in sorted(found)[:_MAX_ANNOUNCED]]


def _dialable(hosts: Sequence[str], port: int) -> tuple[Address, ...]:
    """The `hosts` that may be one peer's; link-local ones of IPv6 with the name of the interface they are behind."""
    found = []
    for host in hosts[: 2 * MAX_ADDRESSES]:
        plain, _, scope = host.partition("%")
        with contextlib.suppress(ValueError, OSError):
            ip = ipaddress.ip_address(plain)
            if ip.is_unspecified or ip.is_multicast or not 0 < port < 65536:
                continue
            if scope:
                plain = f"{plain}%{socket.if_indextoname(int(scope)) if scope.isdecimal() else scope}"
            found.append(Address(plain, port))
    return tuple(found[:MAX_ADDRESSES])


def _peer_of(properties: dict[bytes, bytes | None]) -> PeerId | None:
    """Who announced it, as far as that is said; nonsense is not worth believing and not worth an error."""
    try:
        return PeerId.parse((properties.get(_ID) or b"").decode("ascii"))
    except ValueError:
        return None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
