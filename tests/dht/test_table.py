"""The routing table: who is in it, who is nearest, and who is left alone."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.config import Address
from meshswarm.dht.contact import Contact
from meshswarm.dht.keys import distance, node_id
from meshswarm.dht.table import BACK_OFF_S, BackOff, RoutingTable
from meshswarm.identity import PeerId

OWN = PeerId(bytes(32))


def contact(number: int, port: int = 4000) -> Contact:
    return Contact(PeerId(number.to_bytes(32)), (Address("10.0.0.1", port),))


@pytest.fixture
def table() -> RoutingTable:
    return RoutingTable(OWN)


def test_a_peer_enters_once(table: RoutingTable) -> None:
    assert table.saw(contact(1), 0.0)
    assert not table.saw(contact(1), 1.0)
    assert len(table) == 1
    assert contact(1).peer in table
    assert contact(2).peer not in table


def test_this_peer_and_peers_without_addresses_never_enter(table: RoutingTable) -> None:
    assert not table.saw(Contact(OWN, (Address("10.0.0.1", 1),)), 0.0)
    assert not table.saw(Contact(PeerId(b"x" * 32), ()), 0.0)
    assert len(table) == 0


def test_what_is_known_of_a_peer_grows_and_the_newest_address_is_first(table: RoutingTable) -> None:
    table.saw(contact(1, 4001), 5.0, rtt_s=0.02)
    table.saw(contact(1, 4002), 9.0)
    known = table.get(contact(1).peer)
    assert known is not None
    assert [address.port for address in known.contact.addresses] == [4002, 4001]
    assert (known.last_seen, known.rtt_s) == (9.0, 0.02)


@settings(deadline=None, max_examples=25)
@given(st.sets(st.integers(1, 10_000), min_size=1, max_size=120), st.binary(min_size=20, max_size=20))
def test_the_closest_are_the_closest_there_are(numbers: set[int], target: bytes) -> None:
    table = RoutingTable(OWN)
    for number in numbers:
        table.saw(contact(number), 0.0)
    ranked = sorted((n.contact for n in table.neighbours()), key=lambda c: distance(c.node_id, target))
    assert table.closest(target, 0.0) == ranked[:20]
    own = distance(node_id(OWN), target)
    assert table.closer_than_own(target) == sum(distance(c.node_id, target) < own for c in ranked)


def test_the_table_stays_small_and_knows_its_own_surroundings_best(table: RoutingTable) -> None:
    for number in range(1, 3000):
        table.saw(contact(number), 0.0)
    assert len(table) < 250
    assert sum(len(bucket.replacement_nodes) for bucket in table._buckets) <= 10 * len(table._buckets)
    nearest = sorted((contact(n) for n in range(1, 3000)), key=lambda c: distance(c.node_id, node_id(OWN)))[:20]
    assert set(table.closest(node_id(OWN), 0.0)) == set(nearest)


def test_newcomers_never_push_out_those_who_answer(table: RoutingTable) -> None:
    for number in range(1, 300):
        table.saw(contact(number), 0.0)
    there = {n.contact.peer for n in table.neighbours()}
    for number in range(300, 3000):
        table.saw(contact(number), 1.0)
    assert there <= {n.contact.peer for n in table.neighbours()}


def test_whoever_fails_is_left_alone_then_dropped_and_a_waiting_peer_takes_the_place() -> None:
    table = RoutingTable(OWN, k=2)
    for number in range(1, 200):
        table.saw(contact(number), 0.0)
    before = len(table)
    failing = table.neighbours()[0].contact
    table.failed(failing.peer, 10.0)
    assert failing.peer in table
    assert failing not in table.closest(failing.node_id, 10.0)
    assert failing in table.closest(failing.node_id, 10.1 + BACK_OFF_S[0])
    table.failed(failing.peer, 40.0)
    assert failing.peer not in table
    assert len(table) in (before, before - 1)


def test_an_answer_forgives(table: RoutingTable) -> None:
    table.saw(contact(1), 0.0)
    table.failed(contact(1).peer, 1.0)
    table.saw(contact(1), 2.0)
    assert table.closest(bytes(20), 2.0) == [contact(1)]
    table.failed(contact(1).peer, 3.0)
    assert contact(1).peer in table


def test_back_off_grows_and_ends() -> None:
    back_off = BackOff()
    peer = PeerId(b"p" * 32)
    now = 0.0
    for number, pause in enumerate([*BACK_OFF_S, BACK_OFF_S[-1]], start=1):
        assert back_off.failed(peer, now) == number
        assert back_off.held(now) == {peer}
        assert back_off.holds(peer, now + pause - 0.1)
        assert not back_off.holds(peer, now + pause)
        now += pause
    back_off.cleared(peer)
    assert back_off.failed(peer, now) == 1


def test_back_off_remembers_only_so_many() -> None:
    back_off = BackOff()
    for number in range(3000):
        back_off.failed(PeerId(number.to_bytes(32)), 0.0)
    assert len(back_off.held(0.0)) <= 1024


def test_the_longest_unseen_are_doubted_first(table: RoutingTable) -> None:
    for number, seen in ((1, 50.0), (2, 10.0), (3, 990.0)):
        table.saw(contact(number), seen)
    assert table.doubtful(1000.0, unseen_s=600.0) == [contact(2), contact(1)]
    table.failed(contact(2).peer, 1000.0)
    assert table.doubtful(1000.0, unseen_s=600.0) == [contact(1)]


def test_buckets_are_refreshed_one_id_each_when_their_time_has_come(table: RoutingTable) -> None:
    rng = random.Random(1)
    table.saw(contact(1), 0.0)
    assert table.refresh_targets(0.0, older_than_s=10.0, rng=rng) == []
    for number in range(2, 500):
        table.saw(contact(number), 0.0)
    targets = table.refresh_targets(0.0, older_than_s=10.0, rng=rng)
    assert len(targets) > 2
    assert table.refresh_targets(9.0, older_than_s=10.0, rng=rng) == []
    assert len(table.refresh_targets(10.0, older_than_s=10.0, rng=rng)) == len(targets)
