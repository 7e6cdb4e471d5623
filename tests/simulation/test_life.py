"""Swarms that live: peers come and go, some lie, networks part and heal, and lookups still find what is there.

Every failure names the seed; `MESHSWARM_SEED=N pytest tests/simulation` replays it.
"""

import asyncio
import math
import os
import statistics
from collections.abc import Coroutine
from typing import Any

from tests.simulation.catalogue import Catalogue
from tests.simulation.clock import VirtualLoop, simulate
from tests.simulation.malice import Malice, corrupt, grind
from tests.simulation.meter import find_record
from tests.simulation.network import Network
from tests.simulation.peers import Crowd, coverage_record
from tests.simulation.pricing import price_out
from tests.simulation.restoring import restore
from tests.simulation.scenarios import live
from tests.simulation.shortcuts import shortcuts

from meshswarm.config import Address
from meshswarm.dht.keys import distance, node_id
from meshswarm.dht.upkeep import Periods
from meshswarm.span import Span

SEED = int(os.environ.get("MESHSWARM_SEED", "20261130"))
MODEL = bytes(range(32))


def run(main: Coroutine[Any, Any, None], loop: VirtualLoop) -> None:
    with shortcuts():
        simulate(main, loop)


def test_lookups_succeed_while_a_fifth_of_the_swarm_leaves_in_an_hour() -> None:
    n_peers = 200
    seen = live(n_peers, SEED, per_hour=0.2, virtual_s=20.0, n_lookups=60, settling_s=5.0)
    told = f"seed {SEED}: {seen}"
    assert not seen.faults, told
    assert seen.by_record.n > 40 and seen.by_record.success == 1.0, told
    assert seen.by_peer.success == 1.0, told
    assert seen.by_record.median_rounds <= math.log2(n_peers) / 2, told
    assert seen.sent.mean <= 4000, told


def test_all_that_a_peer_at_rest_sends_is_less_than_4_kb_in_a_second() -> None:
    """The table, connections, gossip, and readings of who serves the same model, as the product makes them."""
    seen = live(40, SEED + 7, per_hour=0.2, virtual_s=20.0, n_lookups=10, settling_s=30.0, talks=True)
    told = f"seed {SEED + 7}: {seen}"
    assert not seen.faults, told
    assert seen.n_readings > 0, f"nobody read, so this proves too little: {told}"
    assert seen.sent.mean <= 4000, told


def test_lookups_succeed_while_a_fifth_lies() -> None:
    seen = live(120, SEED + 1, virtual_s=12.0, n_lookups=100, settling_s=2.0, liars=0.2)
    told = f"seed {SEED + 1}: {seen}"
    assert not seen.faults, told
    assert seen.by_record.success >= 0.99, told
    assert seen.by_peer.success >= 0.99, told


def test_a_network_that_parted_heals_without_lost_or_doubled_records() -> None:
    loop = VirtualLoop()
    network = Network(loop, SEED + 2)
    crowd = Crowd(network, periods=Periods(republish_s=60.0, round_s=10.0, look_around_s=60.0))

    async def main() -> None:
        crowd.settled(30)
        servers = crowd.some(12)
        for number, peer in enumerate(servers):
            await peer.serve(coverage_record(peer, MODEL, Span(number, number + 12)))
        network.rift = lambda one, other: (one.place[0] < 0.5) != (other.place[0] < 0.5)
        await asyncio.sleep(60.0)
        moved = servers[0]
        await moved.serve(coverage_record(moved, MODEL, Span(20, 32)))
        left, right = [[p for p in crowd.living if (p.endpoint.place[0] < 0.5) == side] for side in (True, False)]
        assert min(len(left), len(right)) > 7, f"seed {SEED + 2}: nothing was parted"
        network.rift = None
        await asyncio.sleep(150.0)
        expected = {peer.peer_id: peer.record.span for peer in servers if peer.record is not None}
        for seeker in (*left[:3], *right[:3]):
            seen = await seeker.dht.coverage(MODEL, 32, fresh=True)
            assert len(seen) == len(expected), f"seed {SEED + 2}"
            assert {record.peer: record.span for record in seen} == expected, f"seed {SEED + 2}"
        assert not network.faults, f"seed {SEED + 2}: {network.faults}"

    run(main(), loop)


def test_a_key_surrounded_by_ground_ids_still_gives_its_records() -> None:
    """Thirty colluders sit nearer to one key than any honest peer does, behind few networks as rented machines are."""
    loop = VirtualLoop()
    network = Network(loop, SEED + 3)
    crowd = Crowd(network)

    async def main() -> None:
        crowd.settled(120)
        honest = list(crowd.living)
        key = honest[0].dht._topics.block(MODEL, 2)
        nearest = distance(node_id(crowd.nearest(key, 1)[0].peer_id), key)
        eclipse = []
        for number in range(30):
            identity = grind(key, network.rng.randbytes(32), closer_than=nearest)
            assert identity is not None
            eclipse.append(crowd.make(identity=identity, address=Address(f"203.0.{113 + number // 10}.{number}", 4810)))
        corrupt(eclipse, Malice.COLLUDE)
        for peer in eclipse:
            await peer.join(crowd.some(3))
        author = honest[7]
        await author.serve(coverage_record(author, MODEL, Span(8, 12)))
        found = [await find_record(seeker, key, author) for seeker in network.rng.sample(honest, 12)]
        hits = sum(outcome.hit for outcome in found)
        assert hits == len(found), f"seed {SEED + 3}: {hits} of {len(found)}"

    run(main(), loop)


def test_a_flash_crowd_joins_through_one_peer() -> None:
    """Sixty at once, all of which know the same one."""
    loop = VirtualLoop()
    network = Network(loop, SEED + 4)
    crowd = Crowd(network)

    async def main() -> None:
        first = crowd.make()
        first.start()
        crowd.living.append(first)
        newcomers = [crowd.make() for _ in range(60)]
        known = await asyncio.gather(*(peer.join([first]) for peer in newcomers))
        crowd.living += newcomers
        assert min(known) > 0, f"seed {SEED + 4}"
        await asyncio.sleep(60.0)
        catalogue = Catalogue(60, peers_per_model=20)
        for peer in crowd.some(20):
            await catalogue.serve(peer)
        for _ in range(20):
            seeker, author = crowd.some(1)[0], network.rng.choice([p for p in crowd.living if p.record is not None])
            assert author.record is not None
            key = author.dht._topics.span(author.record.model_id, author.record.span.start, author.record.span.stop)[0]
            if seeker is not author:
                assert (await find_record(seeker, key, author)).hit, f"seed {SEED + 4}"
        assert not network.faults, f"seed {SEED + 4}: {network.faults}"

    run(main(), loop)


def test_liars_about_speed_are_priced_out_after_their_first_sessions() -> None:
    worlds = [price_out(60, SEED + number, n_heads=4, n_sessions=40) for number in range(4)]
    told = f"seeds from {SEED}: {worlds}"
    harmed_first = statistics.mean(world.harmed_first for world in worlds)
    harmed_last = statistics.mean(world.harmed_last for world in worlds)
    assert harmed_first > 0.15, f"the liars did too little harm to prove anything: {told}"
    assert harmed_last < min(0.1, harmed_first / 2), told
    assert all(world.uses_median <= 2 for world in worlds), told


def test_a_model_whose_middle_vanished_is_whole_again_within_a_minute() -> None:
    seen = restore(40, SEED + 6, n_holders=20, watched_s=0.0)
    told = f"seed {SEED + 6}: {seen}"
    assert not seen.faults, told
    assert seen.uncovered > 0, f"nothing was lost, so this proves nothing: {told}"
    assert seen.known_gone_s is not None and seen.known_gone_s <= 15.5, told
    assert seen.covered_s is not None and seen.covered_s < 60, told
    assert seen.seen_s is not None and seen.seen_s < 120, told
    assert seen.n_moves_twice == 0, told
    assert max(seen.sent_before.mean, seen.sent_by_holders.mean) <= 4000, told
