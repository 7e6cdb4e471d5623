"""Whole swarms of cores on a virtual clock: deaths, stalls, rifts, clocks, and what it all costs.

`MESHSWARM_SEED=N pytest tests/routing/gossip` replays a failure.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.routing.gossip.virtual import (
    MODEL,
    START_MS,
    World,
    gone_times,
    neighbours_of,
    watchers_of,
)

from meshswarm.routing.gossip.neighbours import MAX_NEIGHBOURS

MakeWorld = Callable[..., World]


# -- swarms of every size


def test_alone_it_says_nothing_and_misses_nobody(make_world: MakeWorld) -> None:
    world = make_world()
    alone = world.add(1)
    world.run(60)
    assert alone.sent == 0 and not alone.core.gone(world.now) and alone.core.coverage(MODEL, world.now) == []


def test_two_peers_watch_each_other(make_world: MakeWorld) -> None:
    world = make_world()
    one, other = world.swarm(2)
    world.run(5)
    assert one.core.vigil.watchers.chosen == (other.peer,) and other.core.vigil.watchers.chosen == (one.peer,)
    assert one.core.reports(world.now).keys() == {other.peer}
    world.kill(other)
    assert gone_times(world, other.peer, 10)[one.peer] <= 5.0


def test_a_dead_peer_is_gone_within_5_s_nearby_and_15_s_everywhere(make_world: MakeWorld) -> None:
    world = make_world(loss=0.02)
    nodes = world.swarm(100)
    world.run(12)
    assert not any(node.core.gone(world.now) for node in nodes), world.seed
    for dead in world.rng.sample(nodes, 2):
        near = [node.peer for node in neighbours_of(world, dead)]
        world.kill(dead)
        seen = gone_times(world, dead.peer, 15)
        assert len(seen) == len(world.up()), (world.seed, len(seen))
        assert max(seen[peer] for peer in near) <= 5.0, world.seed


def test_when_a_third_dies_at_once_everybody_learns_of_all_that_have_watchers_left(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(50)
    world.run(12)
    dead = world.rng.sample(nodes, 15)
    n_left = {node.peer: sum(each not in dead for each in watchers_of(world, node)) for node in dead}
    for node in dead:
        world.kill(node)
    for after_s, least in ((15, 2), (7, 1)):
        world.run(after_s)
        due = {peer for peer, left in n_left.items() if left >= least}
        assert all(due <= node.core.gone(world.now) for node in world.up()), (world.seed, after_s)
    assert not any({node.peer for node in world.up()} & node.core.gone(world.now) for node in world.up()), world.seed


def test_neighbours_are_bounded_and_the_swarm_is_one(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = [world.add(number) for number in range(1, 41)]
    for node in nodes[1:]:
        world.introduce(node, nodes[:1])  # all know one peer only, as after a start from one address
    world.run(45)
    assert max(len(node.core.neighbours.active) for node in nodes) <= MAX_NEIGHBOURS
    reached, edge = {nodes[0].peer}, [nodes[0]]
    while edge:
        edge = [world.nodes[peer] for node in edge for peer in node.core.neighbours.active if peer not in reached]
        reached |= {node.peer for node in edge}
    assert len(reached) == len(nodes), world.seed
    assert min(len(node.core.vigil.watchers.chosen) for node in nodes) >= 3, world.seed


# -- stalls


def test_a_stall_of_two_seconds_is_no_death(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(40)
    world.run(12)
    for stalled in world.rng.sample(nodes, 8):
        world.stall(stalled, 2.0)
        assert len(gone_times(world, stalled.peer, 5)) < 10, (world.seed, "not by many, not for a moment")
        assert not world.who_thinks_gone(stalled.peer), world.seed
        assert not stalled.core.gone(world.now), "who was held up himself accuses nobody"


def test_who_was_thought_dead_comes_back_at_once(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(40)
    world.run(12)
    asleep = nodes[7]
    world.stall(asleep, 30.0)
    world.run(20)
    assert len(world.who_thinks_gone(asleep.peer)) == 39
    world.run(16)
    assert not world.who_thinks_gone(asleep.peer), world.seed
    assert not asleep.core.gone(world.now)


# -- leaving


def test_a_leaving_peer_says_so_and_is_gone_at_once(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(40)
    world.run(12)
    leaving = nodes[9]
    near = [node.peer for node in neighbours_of(world, leaving)]
    world.serve(leaving, draining=True)
    world.run(1)
    drained = [node for node in neighbours_of(world, leaving) if leaving.peer in node.core.draining(world.now)]
    assert len(drained) == len(near), world.seed
    world.leave(leaving)
    seen = gone_times(world, leaving.peer, 5)
    assert len(seen) == 39 and max(seen[peer] for peer in near) <= 0.2, world.seed
    assert all(leaving.peer not in node.core.reports(world.now) for node in world.up())


# -- rifts, clocks, restarts


def test_a_rift_heals(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(20)
    world.run(15)
    west = {node.peer for node in nodes[:10]}
    world.parted = lambda one, other: (one.peer in west) != (other.peer in west)
    world.run(20)
    assert all(len(node.core.gone(world.now)) == 10 for node in nodes), world.seed
    world.parted = lambda one, other: False
    world.run(60)
    assert not any(node.core.gone(world.now) for node in nodes), world.seed


@pytest.mark.parametrize("skew_ms", [-5 * 3600_000, 5 * 3600_000])
def test_clocks_that_are_hours_off_change_nothing(make_world: MakeWorld, skew_ms: int) -> None:
    world = make_world()
    nodes = world.swarm(10)
    late = world.add(99, started_ms=START_MS + skew_ms)
    world.introduce(late, nodes)
    world.serve(late, queue_s=2.0)
    world.run(20)
    near = [node.peer for node in neighbours_of(world, late)]
    assert near and all(world.nodes[peer].core.reports(world.now)[late.peer].queue_s == 2.0 for peer in near)
    assert not world.who_thinks_gone(late.peer)
    world.kill(late)
    seen = gone_times(world, late.peer, 15)
    assert len(seen) == 10 and max(seen[peer] for peer in near) <= 5.0


def test_a_peer_that_starts_again_with_its_clock_set_back_is_heard(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(10)
    world.run(10)
    first = nodes[0]
    for how in (world.kill, world.leave):
        how(first)
        world.run(10)
        assert len(world.who_thinks_gone(first.peer)) == 9
        first = world.add(1, started_ms=START_MS - 3600_000)
        world.introduce(first, nodes[1:])
        world.serve(first, queue_s=7.0)
        world.run(25)
        assert not world.who_thinks_gone(first.peer), world.seed
        heard = [node.core.reports(world.now).get(first.peer) for node in neighbours_of(world, first)]
        assert heard and all(report is not None and report.queue_s == 7.0 for report in heard), world.seed


# -- load, coverage, demand


def test_reports_of_a_model_reach_those_who_serve_or_ask_for_it(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(40)
    servers, head = nodes[:12], nodes[30]
    for place, node in enumerate(servers):
        world.serve(node, f"{place % 3 * 10}:{place % 3 * 10 + 10}")
        world.introduce(node, servers[:place], is_kin=True)
    head.core.asked(MODEL, world.now)
    world.introduce(head, servers, is_kin=True)
    world.run(40)
    for node in (*servers, head):
        known = {peer for peer, report in node.core.reports(world.now).items() if report.model_id == MODEL}
        assert known >= {each.peer for each in servers} - {node.peer}, world.seed
    world.serve(servers[0], "0:10", free_kv_tokens=0, queue_s=9.0)
    began = world.now
    world.run(20, until=lambda: head.core.reports(world.now)[servers[0].peer].free_kv_tokens == 0)
    assert world.now - began <= 10.0, world.seed


def test_summaries_and_demand_reach_everybody_by_a_few_authors(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(30)
    servers = nodes[:20]
    for place, node in enumerate(servers):
        world.serve(node, "0:10" if place % 5 else "10:30", us_per_layer=1000)
        world.introduce(node, servers[:place], is_kin=True)
    for node in servers[:2]:
        for _ in range(60):
            node.core.asked(MODEL, world.now)
    world.run(90)
    for node in nodes:
        told = node.core.coverage(MODEL, world.now)
        assert 1 <= len(told) <= 4, world.seed
        best = told[0]  # of whoever knows most
        assert best.n_layers == 30 and best.n_peers >= 15, world.seed
        assert best.weakest_layer >= 10 and 50.0 <= best.tokens_per_s <= 200.0, world.seed
        assert node.core.demand(world.now)[MODEL] > 0.1, world.seed
    lately = START_MS + (world.now - 40) * 1000
    told = [summary for node in nodes for summary in node.core.coverage(MODEL, world.now)]
    authors = {summary.author for summary in told if summary.number >= lately}
    assert 1 <= len(authors) <= 8, (world.seed, len(authors))


def test_one_peers_claim_of_demand_weighs_little(make_world: MakeWorld) -> None:
    world = make_world()
    one, liar = world.swarm(2)
    for _ in range(10**5):
        liar.core.meter.count(MODEL, world.now)
    world.run(5)
    assert one.core.reports(world.now)[liar.peer].demand[0][1] > 1000
    assert one.core.demand(world.now)[MODEL] == 10.0


def test_a_peer_sends_well_under_2_kb_a_second(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(50)
    servers = nodes[:20]
    for place, node in enumerate(servers):
        world.serve(node, f"{place % 3 * 10}:{place % 3 * 10 + 10}")
        world.introduce(node, world.rng.sample(servers, 10), is_kin=True)
    world.run(30)
    for node in nodes:
        node.sent = 0
    world.run(20)
    rates = sorted(node.sent / 20 for node in nodes)
    assert sum(rates) / len(rates) < 1300 and rates[-1] < 2500, (world.seed, rates[-5:])
