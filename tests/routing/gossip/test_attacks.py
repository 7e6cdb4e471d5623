"""Attacks run against real cores on a virtual clock: old accusations played again, invented peers, crowded places.

`MESHSWARM_SEED=N pytest tests/routing/gossip` replays a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from tests.routing.gossip.virtual import (
    MODEL,
    SCOPE,
    START_MS,
    Node,
    World,
    accusation,
    gone_times,
    neighbours_of,
    push,
    watchers_of,
)

from meshswarm.config import Address
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.routing.gossip import gate, messages, vigil
from meshswarm.routing.gossip.ask import Ask
from meshswarm.routing.gossip.events import KEPT_S, OTHERS_BURST, OTHERS_PER_S
from meshswarm.routing.gossip.hearing import SILENCE_AGE_S, SILENCE_AHEAD_S
from meshswarm.routing.gossip.loads import MAX_REPORTS
from meshswarm.routing.gossip.messages import PROBE, PUSH, SWAP, WATCH, WITNESS, Swap, Word, WordKind
from meshswarm.routing.gossip.report import LoadReport, SignedReport
from meshswarm.routing.gossip.words import Accusation, Appointment, Farewell
from meshswarm.span import Span

MakeWorld = Callable[..., World]


def ghost(number: int) -> Identity:
    """An invented peer."""
    return Identity.from_seed((50_000 + number).to_bytes(32))


def ghost_farewell(number: int) -> Word:
    return Word(WordKind.FAREWELL, Farewell.sign(ghost(number), SCOPE, 1).wire)


def ghost_death(number: int, at_s: int) -> Word:
    """An accusation that is right in all, but for the peers in it."""
    appointment = Appointment.sign(ghost(number), SCOPE, 1, tuple(ghost(30_000 + each).peer_id for each in range(3)))
    lie = Accusation.state(ghost(30_000), appointment, at_s)
    for each in (1, 2):
        lie = lie.merged(Accusation.state(ghost(30_000 + each), appointment, at_s))
    return Word(WordKind.ACCUSATION, lie.encode())


def ghosts_in(peers: Iterable[PeerId], nodes: list[Node]) -> int:
    return len(set(peers) - {node.peer for node in nodes})


def newcomer_apart(world: World, nodes: list[Node], number: int, victim: Node) -> Node:
    """A peer that came after all that was said of `victim`, knows of it and is no neighbour of it."""
    newcomer = world.add(number)
    world.introduce(newcomer, [node for node in nodes if node is not victim])
    world.run(8)
    newcomer.core.met(victim.peer, (victim.address,))
    assert victim.peer not in newcomer.core.neighbours.active, world.seed
    assert newcomer.core.standings.appointed(victim.peer) < 0, world.seed
    return newcomer


# -- old accusations


def test_an_old_accusation_is_worthless_to_who_missed_the_answer(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(30)
    world.run(12)
    victim = nodes[5]
    liars = watchers_of(world, victim)[:3]
    newcomer = newcomer_apart(world, nodes, 100, victim)
    for age_s in (SILENCE_AGE_S + 60, -SILENCE_AHEAD_S - 60):
        old = accusation(world, victim, liars, at=world.now - age_s)
        push(world, liars[0], [newcomer, *nodes], Word(WordKind.ACCUSATION, old.encode()))
        assert not world.who_thinks_gone(victim.peer), age_s
    lately = accusation(world, victim, liars, at=world.now - SILENCE_AGE_S + 60)
    push(world, liars[0], [newcomer], Word(WordKind.ACCUSATION, lately.encode()))
    assert victim.peer in newcomer.core.gone(world.now), "machines that are minutes apart understand each other"


def test_who_believes_a_replay_is_told_the_answer_by_the_first_he_tells(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(30)
    world.run(12)
    victim = nodes[5]
    liars = watchers_of(world, victim)[:3]
    lie = Word(WordKind.ACCUSATION, accusation(world, victim, liars).encode())
    push(world, liars[0], [node for node in nodes if node is not victim], lie)
    world.run(KEPT_S + 3)  # the answer is told to newcomers no longer
    assert not world.who_thinks_gone(victim.peer), world.seed
    newcomer = newcomer_apart(world, nodes, 100, victim)
    push(world, liars[0], [newcomer], lie)
    assert victim.peer in newcomer.core.gone(world.now)
    world.run(2)
    assert victim.peer not in newcomer.core.gone(world.now), world.seed


def test_what_a_peer_says_later_outweighs_a_replay(make_world: MakeWorld) -> None:
    world = make_world()
    one, liar, *others = world.swarm(8)
    world.run(5)
    victim = others[0]
    old = accusation(world, victim, watchers_of(world, victim)[:3])
    world.parted = lambda here, there: victim in (here, there) and one in (here, there)
    newcomer = world.add(100)  # it has heard a report of the victim, and no appointment
    world.introduce(newcomer, [one, liar])
    newcomer.core.met(victim.peer, (victim.address,))
    newcomer.core.asked(MODEL, world.now)
    late = LoadReport(victim.peer, seq=old.number + 31_000, model_id=MODEL, span=Span(0, 10), n_layers=30)
    push(world, liar, [newcomer], Word(WordKind.REPORT, SignedReport.sign(victim.identity, SCOPE, late).wire))
    push(world, liar, [newcomer], Word(WordKind.ACCUSATION, old.encode()))
    assert victim.peer not in newcomer.core.gone(world.now)


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_peer_whose_clock_is_hours_off_hears_of_deaths_and_tells_them(make_world: MakeWorld, hours: int) -> None:
    world = make_world()
    nodes = world.swarm(20)
    late = world.add(99, started_ms=START_MS + hours * 3600_000)
    world.introduce(late, nodes)
    world.run(25)
    told = late.core._hearing.time_s(world.now)
    assert abs(told - START_MS / 1000 - world.now) < 15, (world.seed, "it goes by its neighbours' clocks")
    dead = next(node for node in nodes if late.peer not in node.core.neighbours.active)
    world.kill(dead)
    assert len(gone_times(world, dead.peer, 15)) == len(world.up()), world.seed
    watched = next((world.nodes[peer] for peer in late.core.vigil.wards._wards), None)
    assert watched is not None, world.seed
    others = [node for node in watchers_of(world, watched) if node is not late]
    for node in (watched, *others):
        world.kill(node)  # nobody but the one with the wrong clock can tell
    world.run(15)
    assert len(world.who_thinks_gone(watched.peer)) == len(world.up()), world.seed


# -- invented peers


def test_invented_peers_push_no_real_news_out(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(30)
    world.run(12)
    hearer = nodes[0]
    liar, asker = [world.nodes[peer] for peer in hearer.core.neighbours.active][:2]
    victim = next(node for node in nodes if hearer.core.knows(node.peer) and node not in (liar, asker))
    real = accusation(world, victim, watchers_of(world, victim)[:3])
    push(world, liar, [hearer], Word(WordKind.ACCUSATION, real.encode()))
    for number in range(200):
        push(world, liar, [hearer], ghost_death(number, START_MS // 1000 + int(world.now)))
    swap = messages.encode_swap(Swap())
    reply = messages.decode_swapped(hearer.core.answer(SWAP, asker.peer, swap, world.now))
    assert real.encode() in [word.data for word in reply.words], "the real one among 200 newer ones"


def test_a_flood_of_invented_deaths_is_held_up_at_the_first_hop_and_a_real_one_is_not(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(40)
    world.run(12)
    liar, dead = nodes[0], nodes[1]
    for node in nodes:
        node.sent = 0
    sent = iter(range(10**6))
    world.kill(dead)
    began, seen = world.now, {}
    while world.now < began + 15:
        for _ in range(10):
            push(world, liar, neighbours_of(world, liar), ghost_death(next(sent), START_MS // 1000 + int(world.now)))
        world.run(0.2)
        for node in world.up():
            if node not in seen and dead.peer in node.core.gone(world.now):
                seen[node] = world.now - began
    assert len(seen) == len(world.up()), (world.seed, len(seen))
    n_let_in = gate.OTHERS_BURST + 15 * gate.OTHERS_PER_S + 1
    n_words = next(sent)
    assert n_words > 700
    for node in neighbours_of(world, liar):
        n_ghosts = ghosts_in(node.core.gone(world.now), nodes)
        assert n_ghosts <= n_let_in * len(node.core.neighbours.active), (world.seed, n_ghosts)
        assert n_ghosts < n_words / 4, (world.seed, n_ghosts, n_words)
    honest = [node.sent / 15 for node in world.up() if node is not liar]
    budget = OTHERS_BURST / 15 + OTHERS_PER_S
    assert sum(honest) / len(honest) < 1300 + 2 * budget, (world.seed, sum(honest) / len(honest))


def test_no_number_of_keys_makes_strangers_heard(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(20)
    world.run(12)
    hearer = nodes[0]
    for number in range(300):
        hearer.core.answer(
            PUSH, ghost(number).peer_id, messages.encode_push((ghost_farewell(9000 + number),)), world.now
        )
    assert not hearer.core.gone(world.now), "a stranger has nothing to say of a stranger"


def test_marks_and_numbers_of_known_peers_outlast_any_number_of_invented_ones(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(6)
    world.run(10)
    one, dead, left = nodes[:3]
    world.kill(dead)
    world.leave(left)
    world.run(10)
    standings = one.core.standings
    numbers = {node.peer: standings.number(node.peer) for node in nodes[3:]}
    for number in range(20_000):
        peer = PeerId(number.to_bytes(32))
        standings.unreachable(peer, world.now)
        standings.take_alive(peer, 2**50, appointment=True)
    assert {dead.peer, left.peer} <= one.core.gone(world.now)
    assert {peer: standings.number(peer) for peer in numbers} == numbers
    assert len(one.core.gone(world.now)) <= 8192 + 2048


def test_reports_of_invented_peers_push_out_no_report_of_a_real_one(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(12)
    for node in nodes[:6]:
        world.serve(node)
        world.introduce(node, nodes[:6], is_kin=True)
    world.run(15)
    one, liar = nodes[:2]
    known = set(one.core.reports(world.now))
    for number in range(600):
        report = LoadReport(ghost(number).peer_id, seq=1, model_id=MODEL, span=Span(0, 1), n_layers=30)
        push(world, liar, [one], Word(WordKind.REPORT, SignedReport.sign(ghost(number), SCOPE, report).wire))
        if number % 50 == 0:
            world.run(0.2)
    assert known <= set(one.core.reports(world.now)) and len(known) >= 5


def test_a_full_room_of_reports_gives_up_invented_peers_first(
    make_world: MakeWorld, make_report: Callable[..., SignedReport]
) -> None:
    world = make_world()
    one, real = world.swarm(2)
    world.serve(real)
    world.run(5)
    one.core.asked(MODEL, world.now)
    interests = one.core._hearing.interests()
    for number in range(2 * MAX_REPORTS):
        one.core.loads.take(make_report(70_000 + number), world.now, one.core.knows, interests)
    assert len(one.core.reports(world.now)) == MAX_REPORTS and real.peer in one.core.reports(world.now)


def test_invented_contacts_make_nobody_known(make_world: MakeWorld) -> None:
    world = make_world()
    one, other = world.swarm(2)
    world.run(5)
    told = [messages.Contact(ghost(number).peer_id, (Address("10.9.9.9", 4000),)) for number in range(4)]
    ask = Ask(other.peer, (), SWAP, b"", 1.0, world.now)
    one.core.took(ask, messages.encode_swapped(messages.Swapped(True, (), tuple(told))), world.now)
    assert ghost(1).peer_id in one.core.neighbours.known() and not one.core.knows(ghost(1).peer_id)
    assert one.core.knows(other.peer)


# -- places


def appointed(identity: Identity, watchers: Iterable[PeerId], where: tuple[tuple[Address, ...], ...] = ()) -> bytes:
    return messages.encode_watch(Appointment.sign(identity, SCOPE, START_MS + 10**6, tuple(watchers)).wire, where)


def test_strangers_take_no_honest_peers_place_among_the_watched(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(20)
    world.run(3)
    watcher = nodes[0]
    for number in range(40):
        reply = watcher.core.answer(WATCH, ghost(number).peer_id, appointed(ghost(number), [watcher.peer]), world.now)
        assert not messages.decode_watched(reply), "who is no neighbour is not watched"
    lonely = messages.encode_swap(Swap(is_lonely=True))
    for number in range(40):  # lonely ones get in, one for another: each is a neighbour for a while
        watcher.core.answer(SWAP, ghost(number).peer_id, lonely, world.now)
        watcher.core.answer(WATCH, ghost(number).peer_id, appointed(ghost(number), [watcher.peer]), world.now)
    for peer in watcher.core.neighbours.active:
        if peer in world.nodes:
            question = appointed(world.nodes[peer].identity, [watcher.peer])
            watcher.core.answer(WATCH, peer, question, world.now)
            assert peer in watcher.core.vigil.wards, "an honest neighbour finds its place"
    world.run(12)
    dead = next(node for node in nodes if watcher in watchers_of(world, node))
    world.kill(dead)
    assert dead.peer in watcher.core.gone(world.now + 0.0) or gone_times(world, dead.peer, 5)[watcher.peer] <= 5.0


# -- whom a ward can make a watcher call


def test_a_ward_aims_its_watchers_at_one_address_each_and_not_often(make_world: MakeWorld) -> None:
    world = make_world()
    one, other = world.swarm(2)
    world.run(5)
    others = [ghost(number).peer_id for number in range(4)]
    targets = tuple(Address("10.66.0.1", 5000 + port) for port in range(8))
    question = appointed(other.identity, [one.peer, *others], ((), targets, targets, targets, targets))
    assert messages.decode_watched(one.core.answer(WATCH, other.peer, question, world.now))
    one.core.take_asks()
    calls: list[tuple[float, Ask]] = []
    n_probes = 0
    now = world.now
    while now < world.now + 3 * vigil.WITNESSES_S:
        now += 0.5
        one.core.tick(now)
        for ask in one.core.take_asks():
            if ask.kind == WITNESS:
                calls.append((now, ask))
            elif ask.kind == PROBE:
                n_probes += 1
                one.core.took(ask, messages.encode_empty(), now)  # it lives, and is late again and again
    times = sorted({at for at, _ in calls})
    assert len(times) >= 2 and n_probes > 2 * len(times)
    assert all(after - before >= vigil.WITNESSES_S for before, after in pairwise(times)), times
    assert len(calls) == len(times) * len(others)
    assert {len(ask.addresses) for _, ask in calls} == {vigil.MAX_WHERE} == {1}


# -- versions


def test_an_older_gossip_is_refused_with_a_sentence_and_is_no_neighbour(make_world: MakeWorld) -> None:
    world = make_world()
    one, other = world.swarm(2)
    world.run(5)
    assert other.peer in one.core.neighbours.active
    swap = messages.wire.pack([1, 0, [], [], [], [], []])
    with pytest.raises(WireError, match="version 1 of gossip; version 2 or newer"):
        one.core.answer(SWAP, other.peer, swap, world.now)
    assert other.peer not in one.core.neighbours.active
    newer = messages.wire.pack([3, 0, [], [], [], [], [], "more"])
    assert messages.decode_swapped(one.core.answer(SWAP, other.peer, newer, world.now)).accepted
