"""Liars, forgers, conspirators and floods: what they can do to a swarm of cores on a virtual clock, which is little.

`MESHSWARM_SEED=N pytest tests/routing/gossip` replays a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.routing.gossip.virtual import (
    MODEL,
    SCOPE,
    START_MS,
    World,
    accusation,
    gone_times,
    push,
    watchers_of,
)

from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.routing.gossip import messages
from meshswarm.routing.gossip.messages import SWAP, WATCH, WITNESS, Word, WordKind
from meshswarm.routing.gossip.neighbours import MAX_INCOMING, MAX_NEIGHBOURS
from meshswarm.routing.gossip.report import LoadReport, SignedReport
from meshswarm.routing.gossip.words import Accusation, Appointment, Farewell, Statement
from meshswarm.span import Span

MakeWorld = Callable[..., World]


def test_a_strangers_accusation_is_worthless_and_ends_his_neighbourship(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(20)
    world.run(10)
    liar, victim = nodes[0], nodes[1]
    forged = Appointment.sign(liar.identity, SCOPE, 2**50, (nodes[2].peer,))
    honest = victim.core.words.appointment
    assert honest is not None
    stated = Accusation.state(liar.identity, replace(honest, watchers=(liar.peer,)), START_MS // 1000)
    places = dict.fromkeys(range(len(honest.watchers)), stated.statements[0])
    nothing = Statement(START_MS // 1000, 2**50, bytes(64))
    for lie in (Accusation(honest, places), Accusation(replace(forged, peer=victim.peer), {0: nothing})):
        for node in nodes[2:]:
            with pytest.raises(WireError):
                push(world, liar, [node], Word(WordKind.ACCUSATION, lie.encode()))
            assert liar.peer not in node.core.neighbours.active
    world.run(10)
    assert not world.who_thinks_gone(victim.peer)


@pytest.mark.parametrize("n_liars", [1, 2])
def test_lying_watchers_cannot_remove_a_live_peer(make_world: MakeWorld, n_liars: int) -> None:
    world = make_world()
    nodes = world.swarm(30)
    world.run(12)
    victim = nodes[5]
    liars = watchers_of(world, victim)[:n_liars]
    lie = accusation(world, victim, liars)
    push(world, liars[0], [node for node in nodes if node is not victim], Word(WordKind.ACCUSATION, lie.encode()))
    assert not gone_times(world, victim.peer, 10), world.seed
    assert not {liar.peer for liar in liars} & set(victim.core.vigil.watchers.chosen), "they watch it no longer"


def test_a_conspiracy_of_watchers_lasts_two_seconds(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(30)
    world.run(12)
    victim = nodes[5]
    liars = watchers_of(world, victim)[:3]
    lie = accusation(world, victim, liars)
    others = [node for node in nodes if node is not victim]
    push(world, liars[0], others, Word(WordKind.ACCUSATION, lie.encode()))
    world.run(2)
    assert not world.who_thinks_gone(victim.peer), world.seed
    push(world, liars[0], others, Word(WordKind.ACCUSATION, lie.encode()))
    assert not world.who_thinks_gone(victim.peer), "the same lie works once"


def test_nobody_says_farewell_for_another(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(5)
    world.run(5)
    forged = replace(Farewell.sign(nodes[0].identity, SCOPE, 2**50), peer=nodes[1].peer)
    data = forged.wire.replace(nodes[0].peer.key, nodes[1].peer.key)
    with pytest.raises(WireError):
        push(world, nodes[0], [nodes[2]], Word(WordKind.FAREWELL, data))
    assert not world.who_thinks_gone(nodes[1].peer)


def test_words_of_another_swarm_mean_nothing_here(make_world: MakeWorld) -> None:
    world = make_world()
    one, other = world.swarm(2)
    world.run(5)
    foreign = SignedReport.sign(other.identity, bytes(16), LoadReport(other.peer, seq=2**50))
    for word in (
        Word(WordKind.REPORT, foreign.wire),
        Word(WordKind.FAREWELL, Farewell.sign(other.identity, bytes(16), 2**50).wire),
        Word(WordKind.APPOINTMENT, Appointment.sign(other.identity, bytes(16), 2**50, (one.peer,)).wire),
    ):
        with pytest.raises(WireError):
            push(world, other, [one], word)
    assert one.core.loads.number(other.peer) < 2**50 and not one.core.gone(world.now)


def test_replayed_reports_change_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    one, other = world.swarm(2)
    world.serve(other, queue_s=3.0)
    world.run(5)
    old = one.core.loads.get(other.peer)
    assert old is not None
    world.serve(other, queue_s=0.0)
    world.run(5)
    push(world, other, [one], Word(WordKind.REPORT, old.wire))
    assert one.core.reports(world.now)[other.peer].queue_s == 0.0


def test_watching_is_asked_for_by_the_peer_itself(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(4)
    world.run(10)
    appointment = nodes[1].core.words.appointment
    assert appointment is not None
    stolen = messages.encode_watch(appointment.wire, ())
    with pytest.raises(WireError):
        nodes[2].core.answer(WATCH, nodes[3].peer, stolen, world.now)
    stranger = Identity.from_seed(b"s" * 32).peer_id
    asked = nodes[2].core.answer(WITNESS, stranger, messages.encode_witness(nodes[1].peer, 1), world.now)
    assert messages.decode_heard(asked) is None and not nodes[2].core.has_asks


def test_any_bytes_are_answered_or_refused(make_world: MakeWorld) -> None:
    world = make_world()
    one, other = world.swarm(2)
    world.run(3)
    for kind in (*messages.KINDS, "gossip/none"):
        for _ in range(200):
            data = world.rng.randbytes(world.rng.randrange(80))
            try:
                one.core.answer(kind, other.peer, data, world.now)
            except WireError:
                continue
    world.run(30)
    assert not one.core.gone(world.now)


def test_who_is_expelled_is_forgotten_and_spoken_of_no_more(make_world: MakeWorld) -> None:
    world = make_world()
    one, other, third = world.swarm(3)
    expelled: set[PeerId] = set()
    for node in (one, third):
        node.core._admits = node.core._hearing._admits = lambda peer: peer not in expelled
    world.serve(other)
    one.core.asked(MODEL, world.now)
    world.run(40)
    assert other.peer in one.core.reports(world.now) and one.core.coverage(MODEL, world.now)
    expelled.add(other.peer)
    for node in (one, third):
        node.core.expel()
    world.kill(other)  # its connections are closed
    late = SignedReport.sign(other.identity, SCOPE, LoadReport(other.peer, seq=2**50))
    push(world, third, [one], Word(WordKind.REPORT, late.wire))
    world.run(15)
    assert other.peer not in one.core.reports(world.now) and not one.core.coverage(MODEL, world.now)
    assert other.peer not in one.core.neighbours.known() and other.peer not in one.core.vigil.wards
    assert other.peer not in one.core.vigil.watchers.chosen


def test_a_flood_of_lies_is_not_passed_on(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(30)
    world.run(20)
    liar = nodes[0]
    for node in nodes:
        node.sent = 0
    for number in range(400):  # reports of peers that are none, each well signed
        ghost = Identity.from_seed((10_000 + number).to_bytes(32))
        report = LoadReport(ghost.peer_id, seq=1, model_id=bytes(32), span=Span(0, 1), n_layers=1)
        push(world, liar, nodes[1:2], Word(WordKind.REPORT, SignedReport.sign(ghost, SCOPE, report).wire))
    world.run(20)
    assert max(node.sent / 20 for node in nodes) < 3000, world.seed
    assert all(len(node.core.reports(world.now)) < 30 for node in nodes), world.seed


def test_swaps_of_strangers_are_answered_within_their_limits(make_world: MakeWorld) -> None:
    world = make_world()
    nodes = world.swarm(40)
    for node in nodes:
        world.serve(node)
    world.run(20)
    asked = messages.encode_swap(messages.Swap(wants_contacts=True))
    for number in range(50):
        stranger = Identity.from_seed((20_000 + number).to_bytes(32)).peer_id
        reply = nodes[0].core.answer(SWAP, stranger, asked, world.now)
        assert len(reply) < 1500
    active = nodes[0].core.neighbours.active
    assert len(active) <= MAX_NEIGHBOURS
    assert sum(not each.is_chosen for each in active.values()) <= MAX_INCOMING, "strangers took chosen places"
