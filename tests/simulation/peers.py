"""Peers of a simulated swarm: the product's own `Dht` and gossip over a virtual endpoint, started and killed at will.

The rule this file keeps: a peer decides nothing that the product does not decide. Where thousands are wanted at once,
`settled` hands every table the contacts that joining would have given it, through the table's own `saw`; those who come
later join as real peers do.
"""

from __future__ import annotations

import asyncio
import bisect
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tests.simulation.clock import VirtualLoop
from tests.simulation.network import Network, VirtualEndpoint

from meshswarm.config import Address
from meshswarm.dht.contact import Contact
from meshswarm.dht.keys import distance, node_id
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.dht.upkeep import Periods
from meshswarm.identity import Identity, PeerId
from meshswarm.net.swarm import Swarm
from meshswarm.routing.gossip.node import GossipNode
from meshswarm.span import Span

SWARM = Swarm("simulation")


class Peer:
    """One peer. It runs from `start` to `vanish` or `leave`."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        *,
        swarm: Swarm = SWARM,
        address: Address | None = None,
        reachable: bool = True,
        periods: Periods | None = None,
        gossips: bool = False,
    ) -> None:
        self.network = network
        self.identity = identity
        self.endpoint: VirtualEndpoint = network.bind(identity, swarm, reachable=reachable, address=address)
        self.dht = Dht(
            self.endpoint,  # type: ignore[arg-type]
            identity,
            swarm,
            clock=network.loop.unix_s,
            periods=periods,
            rng=random.Random(network.rng.getrandbits(64)),
            server=reachable,
        )
        self.gossip: GossipNode | None = None
        if gossips:
            self.gossip = GossipNode(
                self.endpoint,  # type: ignore[arg-type]
                identity,
                swarm,
                clock=network.loop.time,
                rng=random.Random(network.rng.getrandbits(64)),
                started_ms=int(network.loop.unix_s() * 1000),
                known=self.dht.knows,
            )
        self.started_s = network.loop.now_s
        self.record: CoverageRecord | None = None
        self._running: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Peer {self.peer_id.key.hex()[:8]}>"

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def contact(self) -> Contact:
        return Contact(self.peer_id, (self.endpoint.address,))

    @property
    def is_up(self) -> bool:
        return self.endpoint.is_up

    def start(self) -> None:
        """The background work of the product."""
        self.run(self.dht.run())
        if self.gossip is not None:
            self.gossip.met(self.dht.known_peers())
            self.run(self.gossip.run())

    def run(self, duty: Coroutine[Any, Any, None]) -> None:
        """One more thing that it does until it ends."""
        task = self.network.loop.create_task(duty)
        self._running.append(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Duties do not fail: what ended one is a fault of the product."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.network.faults.append(f"{self!r}: {error!r}")

    async def join(self, through: Iterable[Peer]) -> int:
        known = await self.dht.join([(peer.peer_id, (peer.endpoint.address,)) for peer in through])
        self.start()
        return known

    async def serve(self, record: CoverageRecord) -> None:
        self.record = record
        await self.dht.publish_coverage(record)

    def vanish(self) -> None:
        """Power cut."""
        self.endpoint.vanish()
        for duty in self._running:
            duty.cancel()

    async def leave(self) -> None:
        """As the product ends: what was said is taken back, connections are closed."""
        if self.gossip is not None:
            await self.gossip.leave()
        await self.dht.withdraw()
        await self.endpoint.close()
        for duty in self._running:
            duty.cancel()


class Crowd:
    """The peers of one swarm. `living` is in the order of their arrival."""

    def __init__(self, network: Network, *, periods: Periods | None = None, gossips: bool = False) -> None:
        self.network = network
        self.loop: VirtualLoop = network.loop
        self.living: list[Peer] = []
        self.by_id: dict[PeerId, Peer] = {}
        self.n_left = 0
        self.on_come: Callable[[Peer], Awaitable[None]] | None = None
        """What a newcomer does once it is in: serve something, for example."""
        self._periods = periods
        self._gossips = gossips

    def make(self, *, identity: Identity | None = None, address: Address | None = None, reachable: bool = True) -> Peer:
        identity = identity or Identity.from_seed(self.network.rng.randbytes(32))
        peer = Peer(
            self.network,
            identity,
            address=address,
            reachable=reachable,
            periods=self._periods,
            gossips=self._gossips,
        )
        self.by_id[peer.peer_id] = peer
        return peer

    async def grow(self, count: int, *, together: int = 8) -> None:
        """`count` more peers, each joining through up to three others, `together` at a time."""
        for first in range(0, count, together):
            batch = [self.make() for _ in range(min(together, count - first))]
            if not self.living:
                self.living.append(batch.pop(0))
                self.living[0].start()
            await asyncio.gather(*(peer.join(self.some(3)) for peer in batch))
            self.living += batch

    def settled(self, count: int) -> None:
        """`count` more peers that have been here for a while: their tables hold whom joining and living would have
        brought there, the nearest of all and some in every bucket. Nothing is sent."""
        newcomers = [self.make() for _ in range(count)]
        self.living += newcomers
        settle(self.living, self.network.rng, self.loop.unix_s())
        for peer in newcomers:
            rest(peer, self.network.rng)
            peer.start()

    def some(self, count: int) -> list[Peer]:
        return self.network.rng.sample(self.living, min(count, len(self.living)))

    def vanish(self, peers: Iterable[Peer]) -> None:
        """They are gone without a word."""
        gone = set(peers)
        for peer in self.living:
            if peer in gone:
                peer.vanish()
                self.n_left += 1
        self.living = [peer for peer in self.living if peer not in gone]

    async def leave(self, peer: Peer) -> None:
        self.living.remove(peer)
        self.n_left += 1
        await peer.leave()

    async def come(self) -> Peer:
        """One more peer, as a real one comes."""
        peer = self.make()
        await peer.join(self.some(3))
        self.living.append(peer)
        if self.on_come is not None:
            await self.on_come(peer)
        return peer

    def nearest(self, target: bytes, count: int = 20) -> list[Peer]:
        """The truth: those who live nearest to `target`, nearest first."""
        places = [int.from_bytes(node_id(peer.peer_id)[:8]) for peer in self.living]
        far = np.array(places, dtype=np.uint64) ^ np.uint64(int.from_bytes(target[:8]))
        likely = np.argpartition(far, count)[: count + 1] if count < len(places) else range(len(places))
        near = [self.living[at] for at in likely]
        return sorted(near, key=lambda peer: distance(node_id(peer.peer_id), target))[:count]


def settle(peers: Sequence[Peer], rng: random.Random, now: float, *, near: int = 40, per_bucket: int = 24) -> None:
    """Fills the tables of `peers` with each other: the `near` nearest in the order of ids on either side, and of every
    half of the space that a peer is not in, quarter, eighth and so on, up to `per_bucket` at random."""
    ordered = sorted(peers, key=lambda peer: node_id(peer.peer_id))
    places = [int.from_bytes(node_id(peer.peer_id)) for peer in ordered]
    contacts = [peer.contact for peer in ordered]
    for at, peer in enumerate(ordered):
        chosen = set(range(max(0, at - near), min(len(ordered), at + near + 1)))
        for depth in range(160):
            size = 1 << (159 - depth)
            start = (places[at] ^ size) & ~(size - 1)
            low, high = bisect.bisect_left(places, start), bisect.bisect_left(places, start + size)
            if high - low <= per_bucket:
                chosen.update(range(low, high))
            else:
                chosen.update(rng.sample(range(low, high), per_bucket))
            own_low = bisect.bisect_left(places, places[at] & ~(size - 1))
            own_high = bisect.bisect_left(places, (places[at] & ~(size - 1)) + size)
            if own_high - own_low <= 1:
                break
        table = peer.dht._core.table
        order = sorted(chosen - {at})
        rng.shuffle(order)
        for other in order:
            table.saw(contacts[other], now - rng.uniform(0.0, 600.0))


def rest(peer: Peer, rng: random.Random) -> None:
    """What is done from time to time was done at some time within its period, not all of it a moment ago or never."""
    periods, now, upkeep = Periods(), peer.network.loop.unix_s(), peer.dht._upkeep
    upkeep._looked_around_at = now - rng.uniform(0.0, periods.look_around_s)
    then = now - rng.uniform(0.0, periods.refresh_s)
    peer.dht._core.table.refresh_targets(then, older_than_s=0.0, rng=rng)
    usual, first_s = upkeep._periods, rng.uniform(0.05, 1.0) * upkeep._periods.round_s
    upkeep._periods = replace(usual, round_s=first_s)
    peer.network.loop.call_later(0.8 * first_s, setattr, upkeep, "_periods", usual)


def coverage_record(
    peer: Peer, model_id: bytes, span: Span, *, us_per_layer: int = 300, free_kv_tokens: int = 16384
) -> CoverageRecord:
    """What a plain server of `span` says."""
    return CoverageRecord(
        peer=peer.peer_id,
        addresses=(peer.endpoint.address,),
        model_id=model_id,
        span=span,
        loaded=True,
        numclass="cpu",
        n_ctx=4096,
        us_per_layer=us_per_layer,
        prefill_us_per_row_layer=100,
        free_kv_tokens=free_kv_tokens,
        roles=("server",),
    )
