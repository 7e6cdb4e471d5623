"""One attempt to reach a peer, shared by everybody who asks for it: all its addresses, a little apart.

The first address over which the peer proves its key and swarm wins. The rule this file keeps: an address where nobody
answers costs two seconds at most and holds nothing else up, and the error says for each address which step failed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any

from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, PeerUnreachableError
from meshswarm.identity import PeerId
from meshswarm.net.codes import CloseCode
from meshswarm.net.link import Link, Phase

STAGGER_S = 0.05
SILENCE_S = 2.0
RESOLVE_S = 2.0
MAX_ADDRESSES = 8

Start = Callable[[PeerId | None, Address, Any], Link]
SockaddrOf = Callable[[str, int], Any]


class Dial:
    """`peer_id` None: whoever answers. `start` begins a link to an address; `sockaddr_of` turns an IP address into what
    the socket sends to."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peer_id: PeerId | None, start: Start, sockaddr_of: SockaddrOf
    ) -> None:
        self.future: asyncio.Future[Link] = loop.create_future()
        self.future.add_done_callback(_retrieve)
        self._loop = loop
        self._peer_id = peer_id
        self._start = start
        self._sockaddr_of = sockaddr_of
        self._links: dict[Link, Address] = {}
        self._waiting: list[Address] = []  # not tried yet
        self._failures: dict[Address, str] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._resolving: dict[Address, asyncio.Task[None]] = {}
        self._next: asyncio.TimerHandle | None = None

    def add(self, addresses: Sequence[Address]) -> None:
        """Try these too. Addresses that are being tried or have failed in this attempt are left out."""
        known = {*self._links.values(), *self._waiting, *self._failures, *self._resolving}
        for address in dict.fromkeys(addresses):
            if address not in known and len(known) < MAX_ADDRESSES:
                known.add(address)
                self._waiting.append(address)
        if self._next is None:
            self._try_next()

    def owns(self, link: Link) -> bool:
        """Whether `link` was begun here and is not over."""
        return link in self._links

    def found(self, link: Link) -> None:
        """The peer is there: over one of these links, or over one that it dialled itself."""
        if not self.future.done():
            self.future.set_result(link)
        self._stop(keep=link)

    def ended(self, link: Link, error: MeshswarmError) -> None:
        """One of these links is over."""
        if link in self._links:
            self._failed(self._links.pop(link), str(error))

    def refused(self, sockaddr: Any, reason: str) -> None:
        """The network says that nobody is at `sockaddr`; only believed while nobody has answered from there."""
        for link in list(self._links):
            if link.sockaddr[:2] == sockaddr[:2] and not link.has_heard:
                self._give_up(link, f"nothing listens there ({reason})")

    def cancel(self, error: MeshswarmError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
        self._stop(keep=None)

    def error(self, problem: str) -> PeerUnreachableError:
        """What is known so far, for a caller that stops waiting because of `problem`."""
        known = [f"{address}: {reason}" for address, reason in self._failures.items()]
        known += [f"{address}: still {link.phase.value}" for link, address in self._links.items()]
        detail = f" ({'; '.join(known)})" if known else ""
        if self._peer_id is None:
            return PeerUnreachableError(f"no peer can be reached there: {problem}{detail}")
        return PeerUnreachableError(
            f"peer {self._peer_id.short} cannot be reached: {problem}{detail}", peer=str(self._peer_id)
        )

    # -- one address after the other

    def _try_next(self) -> None:
        self._next = None
        if self.future.done():
            return
        if self._waiting:
            self._try(self._waiting.pop(0))
            self._next = self._loop.call_later(STAGGER_S, self._try_next)
        else:
            self._fail_if_nothing_is_left()

    def _try(self, address: Address) -> None:
        try:
            ipaddress.ip_address(address.host.partition("%")[0])
        except ValueError:
            self._resolving[address] = self._loop.create_task(self._resolve(address))
            return
        self._connect(address, address.host)

    async def _resolve(self, address: Address) -> None:
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await self._loop.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)
        except (OSError, TimeoutError):
            self._failed(address, "its name cannot be resolved")
            return
        finally:
            self._resolving.pop(address, None)
        hosts = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not self.future.done():
            self._connect(address, *hosts)

    def _connect(self, address: Address, *hosts: str) -> None:
        """Start a link to the first of `hosts` that the socket can send to."""
        reason = "it has no address"
        for host in hosts:
            try:
                sockaddr = self._sockaddr_of(host, address.port)
            except OSError:
                reason = "this peer's socket does not speak its address family"
                continue
            link = self._start(self._peer_id, address, sockaddr)
            self._links[link] = address
            link.dial()
            self._timers.add(self._loop.call_later(SILENCE_S, self._check_silence, link))
            return
        self._failed(address, reason)

    def _check_silence(self, link: Link) -> None:
        if link in self._links and not link.has_heard:
            self._give_up(link, f"no answer in {SILENCE_S:g} s")

    def _give_up(self, link: Link, reason: str) -> None:
        """Ends the link, whose end comes back through `ended`."""
        link.end(CloseCode.DONE, PeerUnreachableError(reason))

    def _failed(self, address: Address, reason: str) -> None:
        self._failures[address] = reason
        if self._waiting and self._next is not None:  # do not wait for the stagger: this one is done with
            self._next.cancel()
            self._try_next()
        self._fail_if_nothing_is_left()

    def _fail_if_nothing_is_left(self) -> None:
        if not self.future.done() and not (self._links or self._waiting or self._resolving):
            self.future.set_exception(self.error("no address works" if self._failures else "no address is known"))
            self._stop(keep=None)

    def _stop(self, keep: Link | None) -> None:
        """Links that the peer may already count on live on beside `keep`; the endpoint retires them in good order."""
        if self._next is not None:
            self._next.cancel()
        for timer in self._timers:
            timer.cancel()
        for task in self._resolving.values():
            task.cancel()
        links, self._links = list(self._links), {}
        for link in links:
            if link is not keep and not link.is_shown and link.phase is not Phase.OPEN:
                self._give_up(link, "another address was faster")


def _retrieve(future: asyncio.Future[Link]) -> None:
    """Nobody may be waiting any more; that is no news for the event loop's log."""
    if not future.cancelled():
        future.exception()
