"""What is measured of a swarm of any size: small in the tests, large in `scripts/bench/simulate.py`.

The rule this file keeps: a scenario is a swarm, what happens to it, and what is seen; the limits are the caller's.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.catalogue import Catalogue
from tests.simulation.churn import Churn
from tests.simulation.clock import VirtualLoop, simulate
from tests.simulation.malice import Malice, corrupt
from tests.simulation.meter import Outcome, Sent, Summary, TrafficMeter, find_peer, find_record
from tests.simulation.network import Network
from tests.simulation.peers import Crowd, Peer
from tests.simulation.shortcuts import shortcuts
from tests.simulation.telling import tell

SETTLING_S = 120.0  # before anything is measured
MATURE_S = 60.0  # a newcomer is sought only after it has been here this long

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Means over the living."""

    table: float
    records: float
    connections: float


@dataclass(frozen=True, slots=True)
class Life:
    """What was seen of a swarm that lives. `n_readings`: peers that read who serves their model while it was measured
    what is sent."""

    n_start: int
    n_end: int
    n_gone: int
    n_come: int
    virtual_s: float
    by_record: Summary
    by_peer: Summary
    sent: Sent
    n_readings: int
    sizes: Sizes
    faults: tuple[str, ...]


def live(
    n_peers: int,
    seed: int,
    *,
    per_hour: float = 0.2,
    virtual_s: float = 600.0,
    n_lookups: int = 1000,
    loss: float = 0.01,
    liars: float = 0.0,
    dead_share: float = 0.05,
    settling_s: float = SETTLING_S,
    talks: bool = False,
    say: Say = lambda line: None,
) -> Life:
    """A settled swarm under churn, of which `liars` lie, each third in another way. `dead_share`: as many as that have
    gone just before the start, so that tables and records begin with what churn leaves behind in them. What is sent is
    measured for `virtual_s`, then the lookups are made in as long again. `talks`: everything is sent that peers send
    who serve and are asked nothing: gossip and readings of who serves the same model too, not the table alone."""
    loop = VirtualLoop()
    network = Network(loop, seed, loss=loss)
    crowd = Crowd(network, gossips=talks)

    async def main() -> Life:
        catalogue = Catalogue(n_peers)
        crowd.settled(round(n_peers * (1 + dead_share)))
        say("tables filled")
        catalogue.have_served(crowd, crowd.living)
        say("records stored")
        liars_all = corrupt_share(crowd, liars)
        crowd.vanish(crowd.some(len(crowd.living) - n_peers))
        readers = [tell(peer, catalogue.n_layers(peer), network.rng, is_new=False) for peer in crowd.living if talks]

        async def come(peer: Peer) -> None:
            await catalogue.serve(peer)
            if talks:
                readers.append(tell(peer, catalogue.n_layers(peer), network.rng, is_new=True))

        crowd.on_come = come
        churn = Churn(crowd, per_hour=per_hour)
        background = loop.create_task(churn.run())
        await asyncio.sleep(settling_s)
        say("settled")
        traffic, began = TrafficMeter(crowd), loop.time()
        await asyncio.sleep(virtual_s)
        sent = traffic.read()
        n_readings = sum(reader._read_at >= began for reader in readers)
        say(f"a peer sends {sent.mean:.0f} B/s")
        lookups = await _measure_lookups(crowd, n_lookups, virtual_s, liars_all, say)
        background.cancel()
        return Life(
            n_start=n_peers,
            n_end=len(crowd.living),
            n_gone=churn.n_gone,
            n_come=churn.n_come,
            virtual_s=virtual_s,
            by_record=Summary.of(lookups[0]),
            by_peer=Summary.of(lookups[1]),
            sent=sent,
            n_readings=n_readings,
            sizes=sizes(crowd),
            faults=tuple(network.faults[:5]),
        )

    with shortcuts():
        return simulate(main(), loop)


def corrupt_share(crowd: Crowd, share: float) -> frozenset[Peer]:
    """Turns `share` of the crowd into liars, a third of each kind; who they are."""
    chosen = crowd.some(round(share * len(crowd.living)))
    kinds = list(Malice)
    for number, malice in enumerate(kinds):
        corrupt(chosen[number :: len(kinds)], malice, fellows=chosen)
    return frozenset(chosen)


async def _measure_lookups(
    crowd: Crowd, n_lookups: int, virtual_s: float, liars: frozenset[Peer], say: Say
) -> tuple[list[Outcome], list[Outcome]]:
    """`n_lookups` of records and a fifth as many of peers, spread over `virtual_s`, between honest peers that live."""
    rng, loop = crowd.network.rng, crowd.loop
    by_record: list[Outcome] = []
    by_peer: list[Outcome] = []
    running: set[asyncio.Task[None]] = set()
    busy: set[Peer] = set()

    def honest(*, sought: bool) -> Peer:
        while True:
            peer = rng.choice(crowd.living)
            old = loop.now_s - peer.started_s >= MATURE_S or peer.started_s == 0.0
            if peer not in liars and peer not in busy and old and (peer.record is not None or not sought):
                return peer

    async def one(seeker: Peer, sought: Peer, *, of_record: bool) -> None:
        try:
            if of_record:
                assert sought.record is not None
                span = sought.record.span
                key = rng.choice(seeker.dht._topics.span(sought.record.model_id, span.start, span.stop))
                outcome = await find_record(seeker, key, sought)
            else:
                outcome = await find_peer(seeker, sought)
        finally:
            busy.discard(seeker)
        if seeker.is_up and sought.is_up:  # else there was nobody left to ask, or to be found
            (by_record if of_record else by_peer).append(outcome)

    for number in range(n_lookups):
        await asyncio.sleep(virtual_s / n_lookups)
        for of_record in (True, False) if number % 5 == 0 else (True,):
            seeker, sought = honest(sought=False), honest(sought=True)
            if seeker is not sought:
                busy.add(seeker)
                task = loop.create_task(one(seeker, sought, of_record=of_record))
                running.add(task)
                task.add_done_callback(running.discard)
        if number % 200 == 199:
            hits = sum(outcome.hit for outcome in by_record)
            say(f"{number + 1} lookups, {hits} of {len(by_record)} found")
    if running:
        await asyncio.wait(running)
    return by_record, by_peer


def sizes(crowd: Crowd) -> Sizes:
    cores = [peer.dht._core for peer in crowd.living]
    now = crowd.loop.unix_s()
    return Sizes(
        table=statistics.mean(len(core.table) for core in cores),
        records=statistics.mean(len(core.store.all(now)) for core in cores),
        connections=statistics.mean(len(peer.endpoint.connections) for peer in crowd.living),
    )
