"""A peer's front door to the network: dial a key, accept those who dial, hand out connections.

One UDP socket serves all connections in both directions; datagrams find theirs by connection id. The rule this file
keeps: there is one connection to each peer. When both sides dial at once, the one that the peer with the smaller PeerId
dialled stays; the other carries what was already opened on it and is closed when that is over.
"""

from __future__ import annotations

import asyncio
import datetime
import errno
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any

from meshswarm import __version__
from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, PeerUnreachableError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.admission import Admission, Limits
from meshswarm.net.certificate import make_certificate
from meshswarm.net.codes import CloseCode
from meshswarm.net.connection import Connection
from meshswarm.net.dial import Dial
from meshswarm.net.door import Door, Guest, destination
from meshswarm.net.express import ExpressConnection
from meshswarm.net.farewell import Farewells
from meshswarm.net.handshake import INSTANCE_BYTES, Self
from meshswarm.net.interfaces import reachable_addresses
from meshswarm.net.lanes import Kind, Kinds
from meshswarm.net.link import Datagrams, Link
from meshswarm.net.loopback import Loopback
from meshswarm.net.quic import quic_configuration
from meshswarm.net.requests import Answerer, RequestHandler
from meshswarm.net.roster import Roster
from meshswarm.net.stream import Stream
from meshswarm.net.swarm import Swarm
from meshswarm.net.udp import UdpSocket

logger = logging.getLogger(__name__)

AGENT = f"meshswarm/{__version__}"
DIAL_TIMEOUT_S = 5.0
_MAX_LOOPBACK_WINDOW_BYTES = 1024 * 1024


class Endpoint:
    """Make one with `bind`. Everything happens on the event loop it was bound in."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        identity: Identity,
        listen: Address,
        swarm: Swarm,
        agent: str,
        limits: Limits,
    ) -> None:
        certificate = make_certificate(identity, datetime.datetime.now(datetime.UTC))
        self.loop = loop
        self.peer_id = identity.peer_id
        self.kinds: Kinds = {}
        self._me = Self(identity, swarm, agent, instance=os.urandom(INSTANCE_BYTES))
        self._client = quic_configuration(identity, certificate, is_client=True)
        self._admission = Admission(limits)
        self._door = Door(quic_configuration(identity, certificate, is_client=False), self._admission)
        self._links: dict[bytes, Link] = {}  # by connection id
        self._touched: set[Link] = set()
        self._roster = Roster(loop, identity.peer_id)
        self._dials: dict[PeerId | Address, Dial] = {}  # by whom they look for, or by the address alone
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_connection: dict[object, Callable[[Connection], None]] = {}
        self._is_closed = False
        self._udp = UdpSocket(loop, listen, self)
        self._farewells = Farewells()
        self.address = self._udp.address
        """Where the socket is really bound."""
        self.loopback_window_bytes = min(self._udp.receive_buffer_bytes // 4, _MAX_LOOPBACK_WINDOW_BYTES)
        self._loopback = Loopback(loop, self.peer_id, agent, self.address, self.kinds)

    @classmethod
    async def bind(
        cls, identity: Identity, listen: Address, *, swarm: Swarm, agent: str = AGENT, limits: Limits | None = None
    ) -> Endpoint:
        """Listen on `listen` (port 0 takes a free one). Raises ListenError."""
        return cls(asyncio.get_running_loop(), identity, listen, swarm, agent, limits or Limits())

    def __repr__(self) -> str:
        return f"<Endpoint {self.peer_id!r} at {self.address}>"

    # -- what the program uses

    @property
    def addresses(self) -> list[Address]:
        """Where others may try to reach this peer: the bound address, or this machine's when that is a wildcard."""
        return reachable_addresses(self.address, self.families)

    @property
    def families(self) -> frozenset[int]:
        """The address families of the socket: AF_INET, AF_INET6 or both."""
        return frozenset({self._udp.family} | ({socket.AF_INET} if self._udp.takes_ipv4 else set()))

    @property
    def observed_addresses(self) -> dict[PeerId, str]:
        """Our address as each connected peer sees it: claims, to be believed when several agree."""
        return {link.peer_id: link.observed for link in self._roster.preferred() if link.observed}

    @property
    def connections(self) -> list[Connection]:
        """One per connected peer."""
        return list(self._roster.preferred())

    def connection(self, peer_id: PeerId) -> Connection | None:
        """The live connection to a peer, if there is one. To this very peer there always is."""
        return self._loopback if peer_id == self.peer_id else self._roster.get(peer_id)

    async def dial(
        self, peer_id: PeerId, addresses: Sequence[Address] = (), *, timeout_s: float = DIAL_TIMEOUT_S
    ) -> Connection:
        """A connection to `peer_id`: the live one, or a new one over any of `addresses` and where it was last seen.

        Raises PeerUnreachableError that names the peer, each address and the step that failed there.
        """
        if (live := self.connection(peer_id)) is not None:
            return live
        if self._is_closed:
            raise PeerUnreachableError("this peer is shutting down", peer=str(peer_id))
        return await self._dial(peer_id, peer_id, [*addresses, *self._roster.last_seen(peer_id)], timeout_s)

    async def dial_unknown(self, address: Address, *others: Address, timeout_s: float = DIAL_TIMEOUT_S) -> Connection:
        """A connection to whoever is at `address`, or at one of the `others` that are said to be the same peer's: its
        `peer_id` is the key that was proved there.

        Raises PeerUnreachableError, also when it is not of this swarm, or this very peer.
        """
        if self._is_closed:
            raise PeerUnreachableError("this peer is shutting down")
        return await self._dial(address, None, [address, *others], timeout_s)

    async def _dial(
        self, key: PeerId | Address, peer_id: PeerId | None, addresses: Sequence[Address], timeout_s: float
    ) -> Connection:
        dial = self._dials.get(key)
        if dial is None:
            dial = self._dials[key] = Dial(self.loop, peer_id, self._start_link, self._udp.sockaddr)
            dial.future.add_done_callback(lambda _future: self._dials.pop(key, None))
        dial.add(addresses)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(dial.future)
        except TimeoutError:
            raise dial.error(f"it did not answer within {timeout_s:g} s") from None

    def handle_stream(self, kind: str, handler: Callable[[Stream], None], *, max_frame_bytes: int) -> None:
        """Give every stream of `kind` that a peer opens to `handler`, whose errors end that stream alone."""
        self.kinds[kind] = Kind(handler, max_frame_bytes)

    def handle_request(self, kind: str, handler: Answerer, *, max_request_bytes: int, max_reply_bytes: int) -> None:
        """Answer requests of `kind` with what `handler(peer_id, payload)` returns.

        RefusedError and RemoteProtocolError reach the asker as such, with their sentence; anything else as a failure.
        The handler is cancelled when the asker goes away.
        """
        self.handle_stream(
            kind, RequestHandler(handler, max_reply_bytes, self._spawn), max_frame_bytes=max_request_bytes
        )

    def on_connection(self, callback: Callable[[Connection], None]) -> Callable[[], None]:
        """Call `callback` with every new connection, in either direction; returns what takes the wish back."""
        key = object()
        self._on_connection[key] = callback
        return lambda: self._on_connection.pop(key, None) and None

    async def close(self) -> None:
        """End all connections and free the port. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        error = PeerUnreachableError("this peer is shutting down")
        for dial in list(self._dials.values()):
            dial.cancel(error)
        for link in set(self._links.values()):
            link.end_turn()  # what was sent before this call goes out before the close
            link.end(CloseCode.SHUTDOWN, error)
        self._loopback.close("shutting down")
        self._roster.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._udp.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- for dials and links

    def _start_link(self, peer_id: PeerId | None, address: Address, sockaddr: Any) -> Link:
        quic = ExpressConnection(self._client)
        link = Link(self, quic, self._me, address, sockaddr, peer_id, takes_anybody=peer_id is None)
        self.id_issued(link, quic.host_cid)
        return link

    def send(self, link: Link, datagrams: Datagrams) -> bool:
        fits = True
        for datagram, sockaddr in datagrams:
            problem = self._udp.send(datagram, sockaddr)
            if problem == errno.EMSGSIZE:
                fits = False
            elif problem and not link.has_heard:
                self._refused_dial(link, problem)
        return fits

    def _refused_dial(self, link: Link, problem: int) -> None:
        """This machine itself cannot send to a dialled address: no network, no route, a filter."""
        reason = os.strerror(problem)
        self.loop.call_soon(link.end, CloseCode.DONE, PeerUnreachableError(f"it cannot be sent to: {reason}"))

    def established(self, link: Link) -> None:
        if not link.is_dialled_here:
            self._admission.established()
        self._roster.add(link)
        for key, dial in list(self._dials.items()):
            if key == link.peer_id or dial.owns(link):
                dial.found(link)
        for callback in list(self._on_connection.values()):
            try:
                callback(link)
            except Exception:
                logger.exception("a new connection to peer %s was not handled", link.peer_id.short)

    def ended(self, link: Link, error: MeshswarmError, last: Datagrams) -> None:
        for connection_id in link.connection_ids:
            self._links.pop(connection_id, None)
        self._touched.discard(link)
        if last:
            self.send(link, last)
            self._farewells.add(link.connection_ids, *last[-1], monotonic())
        if not link.is_dialled_here:
            self._admission.ended(link.sockaddr[0], was_established=link.was_open)
        self._roster.remove(link)
        for dial in list(self._dials.values()):
            dial.ended(link, error)

    def id_issued(self, link: Link, connection_id: bytes) -> None:
        self._links[connection_id] = link
        link.connection_ids.add(connection_id)

    def id_retired(self, link: Link, connection_id: bytes) -> None:
        self._links.pop(connection_id, None)
        link.connection_ids.discard(connection_id)

    def n_connections(self) -> int:
        return len(self._roster)

    # -- from the socket

    def datagram_received(self, data: bytes, sockaddr: Any) -> None:
        connection_id = destination(data)
        if connection_id is None:
            return
        now = monotonic()
        link = self._links.get(connection_id) or self._knock(connection_id, data, sockaddr, now)
        if link is None:
            return
        if link not in self._touched:
            link.is_deferred = True
            self._touched.add(link)
        try:
            link.receive(data, sockaddr, now)
        except Exception as error:
            logger.exception("a datagram from %s broke its connection", sockaddr[0])
            link.end(
                CloseCode.PROTOCOL, MeshswarmError(f"the connection to {link.remote_address} broke here: {error!r}")
            )

    def batch_received(self) -> None:
        while self._touched:
            self._touched.pop().end_turn()

    def refused(self, sockaddr: Any, reason: str) -> None:
        for dial in list(self._dials.values()):
            dial.refused(sockaddr, reason)
        for link in self._roster.at(sockaddr):
            link.suspect()

    def _knock(self, connection_id: bytes, data: bytes, sockaddr: Any, now: float) -> Link | None:
        """A datagram for no link: the rest of a closed one, or a stranger, for whom a new link may be made."""
        if (farewell := self._farewells.answer(connection_id, now)) is not None:
            self._udp.send(*farewell)
            return None
        answer = None if self._is_closed else self._door.knock(data, sockaddr, now)
        if not isinstance(answer, Guest):
            if answer is not None:
                self._udp.send(answer.datagram, sockaddr)
            return None
        self._admission.opened(sockaddr[0])
        link = Link(self, answer.quic, self._me, _address(sockaddr), sockaddr, None)
        for connection_id in (answer.first_id, answer.quic.host_cid):
            self.id_issued(link, connection_id)
        return link


def _address(sockaddr: Any) -> Address:
    return Address(str(sockaddr[0]).removeprefix("::ffff:"), sockaddr[1])
