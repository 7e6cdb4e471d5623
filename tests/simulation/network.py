"""A virtual network: endpoints and connections with the real ones' surface, over links with distance, loss and rifts.

The shells of the product (`Dht`, gossip) run over it unchanged. What a connection does by itself is modelled from what
the real one was seen to do (`Costs`): it is dialled in two round trips, asks for a sign of life every 15 s of silence,
misses a vanished peer after 30 s, and ends when nobody used it for 300 s, or for 30 s where one end has more than 32.

The rule this file keeps: it carries bytes and counts them, and knows nothing of what they say. Packet loss delays (QUIC
sends again); only a rift or a vanished peer keeps bytes from arriving.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from tests.simulation.clock import VirtualLoop

from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, PeerUnreachableError, RefusedError, RemoteProtocolError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.admission import Admission, Answer, Limits
from meshswarm.net.liveness import FREE
from meshswarm.net.swarm import Swarm
from meshswarm.net.upkeep import CROWDED_IDLE_CLOSE_S, IDLE_CLOSE_S, MAX_RESTING
from meshswarm.routing.gossip import messages as gossip

Answerer = Callable[[PeerId, bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of UDP datagrams with their 28 bytes of IPv4 and UDP headers, as `real_costs` measures them between two
    real endpoints."""

    dial_bytes: int = 2900
    """What who dials sends until the connection is open."""
    dialled_bytes: int = 2030
    request_bytes: int = 140
    """Beyond its payload: headers, the stream's kind, the acknowledgement of the answer."""
    reply_bytes: int = 125
    datagram_bytes: int = 90
    """Headers of each datagram after the first, and its acknowledgement, per `payload_per_datagram` bytes."""
    payload_per_datagram: int = 1350
    ping_bytes: int = 195
    """What each side sends for one exchange of signs of life."""
    close_bytes: int = 60

    def message(self, payload: int, fixed: int) -> int:
        return payload + fixed + payload // self.payload_per_datagram * self.datagram_bytes


@dataclass(slots=True)
class Traffic:
    """Bytes one peer has sent, by what for."""

    dials: int = 0
    requests: int = 0
    replies: int = 0
    pings: int = 0
    n_dials: int = 0
    n_requests: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.dials + self.requests + self.replies + self.pings

    def copy(self) -> Traffic:
        return replace(self, by_kind=dict(self.by_kind))

    def since(self, old: Traffic) -> Traffic:
        """What was added after `old` was copied."""
        kinds = {kind: count - old.by_kind.get(kind, 0) for kind, count in self.by_kind.items()}
        return Traffic(
            self.dials - old.dials,
            self.requests - old.requests,
            self.replies - old.replies,
            self.pings - old.pings,
            self.n_dials - old.n_dials,
            self.n_requests - old.n_requests,
            kinds,
        )


class Network:
    """`loss`: the share of datagrams lost. `distance_s`: the one-way delay across the whole map. Kinds in `instant`
    have handlers that never wait; they are run without a task."""

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int,
        *,
        loss: float = 0.0,
        distance_s: float = 0.08,
        costs: Costs | None = None,
        instant: frozenset[str] = frozenset({"dht/ping", "dht/find", "dht/store", *gossip.KINDS}),
    ) -> None:
        self.loop = loop
        self.seed = seed
        self.rng = random.Random(seed)
        self.loss = loss
        self.distance_s = distance_s
        self.costs = costs or Costs()
        self.instant = instant
        self.endpoints: dict[PeerId, VirtualEndpoint] = {}
        self.at: dict[Address, VirtualEndpoint] = {}
        self.faults: list[str] = []
        """What handlers raised that no handler should raise."""
        self.rift: Callable[[VirtualEndpoint, VirtualEndpoint], bool] | None = None
        """True for two endpoints that cannot reach each other at present."""
        self._hosts = _hosts(self.rng)

    def bind(
        self, identity: Identity, swarm: Swarm, *, reachable: bool = True, address: Address | None = None
    ) -> VirtualEndpoint:
        """A new endpoint somewhere on the map, by default alone in its /24."""
        endpoint = VirtualEndpoint(self, identity, swarm, address or next(self._hosts), reachable)
        self.endpoints[endpoint.peer_id] = endpoint
        self.at[endpoint.address] = endpoint
        return endpoint

    def flight_s(self, source: VirtualEndpoint, target: VirtualEndpoint) -> float | None:
        """Seconds of one message on its way now; None when it never arrives."""
        if not target.is_up or (self.rift is not None and self.rift(source, target)):
            return None
        flight = source.delay_s(target) * self.rng.uniform(1.0, 1.1)
        missed_after_s = 3 * flight + 0.02
        while self.loss and self.rng.random() < self.loss:
            flight += missed_after_s  # then it is sent again, with twice the patience: RFC 9002, 6.2
            missed_after_s *= 2
        return flight

    def settle(self) -> None:
        """Counts the signs of life of all open connections up to now."""
        for endpoint in self.endpoints.values():
            endpoint.settle()


class Wire:
    """What both ends of one connection share."""

    __slots__ = ("ended_at", "ends", "network", "on_end", "settled_at", "used_at")

    def __init__(self, network: Network, ends: tuple[VirtualEndpoint, VirtualEndpoint]) -> None:
        self.network = network
        self.ends = ends
        self.used_at = self.settled_at = network.loop.now_s
        self.ended_at = math.inf
        self.on_end: dict[object, tuple[VirtualEndpoint, Callable[[MeshswarmError], None]]] = {}
        network.loop.call_later(CROWDED_IDLE_CLOSE_S, self._look)

    def gone_s(self) -> float:
        """When it ended, or one end misses the other."""
        one, other = self.ends
        return min(self.ended_at, min(one.down_at, other.down_at) + FREE.lost_s)

    def use(self, now: float) -> None:
        self.settle(now)
        self.used_at = self.settled_at = now

    def end(self) -> None:
        """Closed by one end, in whose traffic that counts."""
        now = self.network.loop.now_s
        self.settle(now)
        self.ended_at = min(self.ended_at, now)
        for end in self.ends:
            end.forget(self)
        callbacks, self.on_end = list(self.on_end.values()), {}
        for end, callback in callbacks:
            if end.is_up:
                callback(PeerUnreachableError("the connection has ended"))

    def settle(self, now: float) -> None:
        """Counts the signs of life since the last use: one exchange in every 15 s of silence."""
        until = min(now, self.gone_s())
        done = int(max(0.0, self.settled_at - self.used_at) / FREE.probe_s)
        count = int(max(0.0, until - self.used_at) / FREE.probe_s) - done
        if count > 0:
            for end in self.ends:
                if end.down_at > until:
                    end.traffic.pings += count * self.network.costs.ping_bytes
        self.settled_at = max(self.settled_at, until)

    def _look(self) -> None:
        """What `net.upkeep` does now and then: ends what rests."""
        now = self.network.loop.now_s
        if now >= self.gone_s():
            self.end()
            return
        rested_s = now - self.used_at
        crowded = any(len(end.links) > MAX_RESTING for end in self.ends)
        if rested_s >= (CROWDED_IDLE_CLOSE_S if crowded else IDLE_CLOSE_S):
            self.ends[0].traffic.pings += self.network.costs.close_bytes
            self.end()
            return
        self.network.loop.call_later(max(CROWDED_IDLE_CLOSE_S - rested_s, FREE.probe_s), self._look)


class VirtualConnection:
    """One end's view, with the surface of `net.connection.Connection` that asking needs."""

    __slots__ = ("_end", "_far", "_smoothed_s", "agent", "instance", "peer_id", "remote_address", "wire")

    def __init__(self, end: VirtualEndpoint, far: VirtualEndpoint, wire: Wire) -> None:
        self._end = end
        self._far = far
        self._smoothed_s: float | None = None
        self.peer_id = far.peer_id
        self.remote_address = far.address
        self.agent = "simulated"
        self.instance = b""
        self.wire = wire

    @property
    def closed(self) -> bool:
        return self._end.network.loop.now_s >= self.wire.gone_s()

    @property
    def rtt_s(self) -> float | None:
        return self._smoothed_s

    def close(self, reason: str = "") -> None:
        if not self.closed:
            self._end.traffic.pings += self._end.network.costs.close_bytes
            self.wire.end()

    def on_lost(self, callback: Callable[[MeshswarmError], None]) -> Callable[[], None]:
        key = object()
        self.wire.on_end[key] = (self._end, callback)
        return lambda: self.wire.on_end.pop(key, None) and None

    async def measure_rtt(self) -> float:
        loop = self._end.network.loop
        began = loop.now_s
        await self._exchange("", b"", 5.0)
        self._smoothed_s = loop.now_s - began
        return self._smoothed_s

    async def request(
        self, kind: str, payload: bytes, *, timeout_s: float = 5.0, max_reply_bytes: int = 1024 * 1024
    ) -> bytes:
        loop = self._end.network.loop
        began = loop.now_s
        reply = await self._exchange(kind, payload, timeout_s)
        if len(reply) > max_reply_bytes:
            raise RemoteProtocolError(f"peer {self.peer_id.short} sent a reply of {len(reply)} bytes")
        if self._smoothed_s is None:
            self._smoothed_s = loop.now_s - began
        return reply

    def _exchange(self, kind: str, payload: bytes, timeout_s: float) -> asyncio.Future[bytes]:
        network, end = self._end.network, self._end
        loop = network.loop
        answer: asyncio.Future[bytes] = loop.create_future()
        if self.closed or not end.is_up:
            answer.set_exception(_gone(self.peer_id, "the connection has ended"))
            return answer
        self.wire.use(loop.now_s)
        size = network.costs.message(len(payload), network.costs.request_bytes)
        end.traffic.requests += size
        end.traffic.n_requests += 1
        end.traffic.by_kind[kind] = end.traffic.by_kind.get(kind, 0) + size
        timer = loop.call_later(timeout_s, _expire, answer, self.peer_id, kind)
        answer.add_done_callback(lambda _: timer.cancel())
        flight = network.flight_s(end, self._far)
        if flight is not None:
            loop.call_later(flight, self._far.arrived, end, kind, payload, answer, self.wire)
        return answer


class VirtualEndpoint:
    """The surface of `net.endpoint.Endpoint` that the shells use."""

    def __init__(self, network: Network, identity: Identity, swarm: Swarm, address: Address, reachable: bool) -> None:
        self.network = network
        self.loop = network.loop
        self.identity = identity
        self.peer_id = identity.peer_id
        self.swarm_id = swarm.swarm_id
        self.address = address
        self.addresses = [address]
        self.is_reachable = reachable
        self.is_up = True
        self.down_at = math.inf
        self.traffic = Traffic()
        self.links: dict[PeerId, VirtualConnection] = {}
        self.place = (network.rng.random(), network.rng.random())
        self.access_s = network.rng.uniform(0.002, 0.015)
        self.handlers: dict[str, Answerer] = {}
        self._admission = Admission(Limits())
        self._incoming: dict[PeerId, VirtualConnection] = {}
        self._dials: dict[PeerId, asyncio.Future[VirtualConnection]] = {}
        self._on_connection: dict[object, Callable[[VirtualConnection], None]] = {}

    def delay_s(self, other: VirtualEndpoint) -> float:
        """One way to another endpoint: both accesses, and the straight line on the map."""
        return self.access_s + other.access_s + math.dist(self.place, other.place) * self.network.distance_s

    @property
    def observed_addresses(self) -> dict[PeerId, str]:
        return {}

    @property
    def connections(self) -> list[VirtualConnection]:
        return [link for link in list(self.links.values()) if self.connection(link.peer_id) is not None]

    def connection(self, peer_id: PeerId) -> VirtualConnection | None:
        link = self.links.get(peer_id)
        if link is not None and link.closed:
            self.forget(link.wire)
            return None
        return link

    async def dial(
        self, peer_id: PeerId, addresses: Sequence[Address] = (), *, timeout_s: float = 5.0
    ) -> VirtualConnection:
        if (live := self.connection(peer_id)) is not None:
            return live
        dial = self._dials.get(peer_id)
        if dial is None:
            dial = self._dials[peer_id] = self.loop.create_future()
            dial.add_done_callback(lambda done: (self._dials.pop(peer_id, None), done.exception()))
            self._knock(peer_id, addresses, dial, timeout_s)
        return await asyncio.shield(dial)

    def handle_request(self, kind: str, handler: Answerer, *, max_request_bytes: int, max_reply_bytes: int) -> None:
        self.handlers[kind] = handler

    def on_connection(self, callback: Callable[[VirtualConnection], None]) -> Callable[[], None]:
        key = object()
        self._on_connection[key] = callback
        return lambda: self._on_connection.pop(key, None) and None

    def vanish(self) -> None:
        """Gone without a word."""
        self.settle()
        self.is_up = False
        self.down_at = self.loop.now_s
        self.network.at.pop(self.address, None)

    async def close(self) -> None:
        """Gone with a word to everybody connected."""
        for link in list(self.links.values()):
            link.close()
        self.vanish()

    def settle(self) -> None:
        """Counts the signs of life of this end's connections up to now."""
        for link in self.links.values():
            link.wire.settle(self.loop.now_s)

    # -- inside

    def _knock(
        self,
        peer_id: PeerId,
        addresses: Sequence[Address],
        dial: asyncio.Future[VirtualConnection],
        timeout_s: float,
    ) -> None:
        costs = self.network.costs
        self.traffic.n_dials += 1
        there = [end for address in addresses if (end := self.network.at.get(address)) is not None]
        right = next((end for end in there if end.peer_id == peer_id and end.is_reachable), None)
        flight = None if right is None else self.network.flight_s(self, right)
        back = None if right is None else self.network.flight_s(right, self)
        if right is None or flight is None or back is None or not right.admits(self):
            self.traffic.dials += costs.dial_bytes // 2  # the first flight, sent again once or twice
            self.loop.call_later(timeout_s, _expire, dial, peer_id, "a dial")
            return
        self.traffic.dials += costs.dial_bytes
        self.loop.call_later(2 * (flight + back), self._open, right, dial)

    def admits(self, other: VirtualEndpoint) -> bool:
        """By the real counts of `net.admission`, and only members of this swarm."""
        if other.swarm_id != self.swarm_id:
            return False
        if self._admission.asks(other.address.host, has_token=True) is Answer.REFUSE:
            return False
        self._admission.opened(other.address.host)
        self._admission.established()
        return True

    def _open(self, far: VirtualEndpoint, dial: asyncio.Future[VirtualConnection]) -> None:
        if not self.is_up or not far.is_up or dial.done():
            return
        far.traffic.dials += self.network.costs.dialled_bytes
        wire = Wire(self.network, (self, far))
        near_end, far_end = VirtualConnection(self, far, wire), VirtualConnection(far, self, wire)
        for old in (far._incoming.get(self.peer_id), far.links.get(self.peer_id)):
            if old is not None:
                old.wire.end()
        self.links[far.peer_id] = near_end
        far.links[self.peer_id] = far._incoming[self.peer_id] = far_end
        dial.set_result(near_end)
        for end, link in ((self, near_end), (far, far_end)):
            for callback in list(end._on_connection.values()):
                callback(link)

    def forget(self, wire: Wire) -> None:
        """That connection is over."""
        far = wire.ends[1] if wire.ends[0] is self else wire.ends[0]
        if (link := self.links.get(far.peer_id)) is not None and link.wire is wire:
            del self.links[far.peer_id]
        if (link := self._incoming.get(far.peer_id)) is not None and link.wire is wire:
            del self._incoming[far.peer_id]
            self._admission.ended(far.address.host, was_established=True)

    def arrived(
        self, asker: VirtualEndpoint, kind: str, payload: bytes, answer: asyncio.Future[bytes], wire: Wire
    ) -> None:
        """A question came."""
        if not self.is_up:
            return
        if not kind:
            self._reply(asker, b"", answer, wire)
            return
        handler = self.handlers.get(kind)
        if handler is None:
            self._reply(asker, RefusedError(f"nobody here answers {kind!r}"), answer, wire)
        elif kind in self.network.instant:
            work = handler(asker.peer_id, payload)
            try:
                work.send(None)  # type: ignore[attr-defined]
            except StopIteration as end:
                self._reply(asker, end.value, answer, wire)
            except Exception as error:
                self._reply(asker, error, answer, wire)
            else:
                raise AssertionError(f"the handler of {kind!r} waits, and cannot be run in an instant")
        else:
            self.loop.create_task(self._answer(handler, asker, payload, answer, wire))

    async def _answer(
        self, handler: Answerer, asker: VirtualEndpoint, payload: bytes, answer: asyncio.Future[bytes], wire: Wire
    ) -> None:
        try:
            reply: bytes | Exception = await handler(asker.peer_id, payload)
        except Exception as error:
            reply = error
        self._reply(asker, reply, answer, wire)

    def _reply(
        self, asker: VirtualEndpoint, reply: bytes | Exception, answer: asyncio.Future[bytes], wire: Wire
    ) -> None:
        if not self.is_up:
            return
        costs = self.network.costs
        if isinstance(reply, Exception):
            if not isinstance(reply, MeshswarmError):
                self.network.faults.append(f"{type(reply).__name__}: {reply}")
            reply = _as_told(reply, self.peer_id)
        size = costs.message(100 if isinstance(reply, Exception) else len(reply), costs.reply_bytes)
        self.traffic.replies += size
        flight = self.network.flight_s(self, asker)
        if flight is not None:
            self.loop.call_later(flight, _deliver, answer, reply)


def _deliver(answer: asyncio.Future[bytes], reply: bytes | Exception) -> None:
    if answer.done():
        return
    if isinstance(reply, Exception):
        answer.set_exception(reply)
    else:
        answer.set_result(reply)


def _expire(answer: asyncio.Future[bytes] | asyncio.Future[VirtualConnection], peer: PeerId, what: str) -> None:
    if not answer.done():
        answer.set_exception(_gone(peer, f"no answer to {what}"))


def _gone(peer: PeerId, why: str) -> PeerUnreachableError:
    return PeerUnreachableError(f"peer {peer.short}: {why}", peer=str(peer))


def _as_told(error: Exception, peer: PeerId) -> Exception:
    """What the asker hears, as `net.requests` tells it."""
    if isinstance(error, RefusedError):
        return RefusedError(str(error), peer=str(peer), retry_after_s=error.retry_after_s)
    if isinstance(error, RemoteProtocolError):
        return RemoteProtocolError(str(error), peer=str(peer))
    return RemoteProtocolError("a failure without details", peer=str(peer))


def _hosts(rng: random.Random) -> itertools.chain[Address]:
    """Addresses in networks of their own, at random over the public ones."""
    networks = list(range(1 << 16))
    rng.shuffle(networks)
    return itertools.chain.from_iterable(
        (Address(f"{first}.{n >> 8}.{n & 255}.{rng.randrange(1, 255)}", 4810) for n in networks)
        for first in (45, 77, 93, 151)
    )
