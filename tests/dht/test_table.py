"""The routing table: who is in it, who is nearest, and who is left alone."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.config import Address
from meshswarm.dht.contact import Contact
from meshswarm.dht.keys import distance, node_id
from meshswarm.dht.region import SPACE, spread
from meshswarm.dht.table import BACK_OFF_S, FRIENDS, BackOff, K, RoutingTable
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


def public(number: int, network: int) -> Contact:
    """Contact number n at an address of IPv4 /24 number `network`."""
    host = f"{20 + (network >> 16)}.{network >> 8 & 255}.{network & 255}.{number % 250 + 1}"
    return Contact(PeerId(number.to_bytes(32)), (Address(host, 4000),))


def test_one_network_gets_two_places_in_a_bucket_and_ten_in_all(table: RoutingTable) -> None:
    for number in range(1, 2000):
        table.saw(public(number, network=number % 2), 0.0, is_outbound=True)
    assert len(table) <= 20
    for bucket in table._buckets:
        counts = [bucket.count_of(each.network) for each in bucket.nodes.values()]
        assert max(counts, default=0) <= 2
    assert not any(table.saw(public(number, network=1), 0.0) for number in range(2000, 2500))
    assert any(table.saw(public(number, network=number), 0.0) for number in range(2500, 2600))


def test_a_place_of_a_network_is_free_again_when_its_peer_is_gone_or_has_moved(table: RoutingTable) -> None:
    for number in range(1, 400):
        table.saw(public(number, network=7), 0.0)
    full = len(table)
    gone = table.neighbours()[0].contact.peer
    for _ in range(2):
        table.failed(gone, 1.0)
    assert len(table) == full - 1
    assert any(table.saw(public(number, network=7), 2.0) for number in range(400, 900))
    assert len(table) == full
    mover = table.neighbours()[0].contact
    table.saw(Contact(mover.peer, (Address("9.9.9.9", 1),)), 3.0)
    assert table._networks[b"\x09\x09\x09"] == 1
    assert sum(table._networks.values()) == full


def test_ipv6_networks_count_by_their_48_bits_and_beside_ipv4(table: RoutingTable) -> None:
    for number in range(1, 200):
        table.saw(Contact(PeerId(number.to_bytes(32)), (Address(f"2001:db8:7:{number:x}::1", 1),)), 0.0)
    assert len(table) <= 10
    before = len(table)
    for number in range(200, 230):
        table.saw(public(number, network=number), 0.0)
    assert len(table) == before + 30


def test_local_peers_and_members_of_a_private_swarm_are_not_counted(table: RoutingTable) -> None:
    """A swarm on one machine, on one LAN, or of friends behind one address works."""
    for number in range(1, K + 1):
        table.saw(contact(number), 0.0)
    assert len(table) == K
    friends = RoutingTable(OWN, caps=FRIENDS)
    for number in range(1, K + 1):
        friends.saw(public(number, network=1), 0.0)
    assert len(friends) == K


def far(number: int, network: int | None) -> Contact | None:
    """Contact number n when it falls into the first bucket, which is never split again."""
    made = contact(number) if network is None else public(number, network)
    return made if made.place >> 159 != int.from_bytes(node_id(OWN)) >> 159 else None


def test_peers_that_were_dialled_keep_a_third_of_the_places(table: RoutingTable) -> None:
    for number in range(1, 300):
        if (made := far(number, number)) is not None:
            table.saw(made, 0.0)
    assert len(table._buckets[0]) == K
    for number in range(300, 400):
        if (made := far(number, number)) is not None:
            table.saw(made, 1.0, is_outbound=True)
    outbound = [each for each in table._buckets[0].nodes.values() if each.is_outbound]
    assert 3 * len(outbound) >= K
    assert len(table._buckets[0]) == K
    there = {n.contact.peer for n in table.neighbours()}
    for number in range(400, 1000):
        table.saw(public(number, number), 2.0)
    assert there <= {n.contact.peer for n in table.neighbours()}


def test_local_peers_leave_half_of_a_bucket_to_public_ones(table: RoutingTable) -> None:
    for number in range(1, 100):
        if (made := far(number, None)) is not None:
            table.saw(made, 0.0)
    assert len(table._buckets[0]) == K
    for number in range(100, 300):
        if (made := far(number, number)) is not None:
            table.saw(made, 1.0)
    members = list(table._buckets[0].nodes.values())
    assert sum(each.network is None for each in members) == K // 2
    assert len(members) == K


def test_who_failed_at_one_address_may_be_asked_at_another_but_not_for_ever() -> None:
    back_off = BackOff()
    wrong = Contact(PeerId(b"p" * 32), (Address("203.0.113.9", 9),))
    back_off.failed(wrong.peer, 0.0, wrong.addresses)
    assert back_off.holds_at(wrong, 1.0)
    elsewhere = Contact(wrong.peer, (Address("198.51.100.1", 1), *wrong.addresses))
    assert not back_off.holds_at(elsewhere, 1.0)
    for port in range(1, 10):
        back_off.failed(wrong.peer, 0.0, (Address("203.0.113.9", port),))
    assert back_off.holds_at(elsewhere, 1.0)


@settings(deadline=None, max_examples=25)
@given(
    st.sets(st.integers(1, 10_000), min_size=1, max_size=150),
    st.binary(min_size=20, max_size=20),
    st.integers(0, SPACE),
)
def test_around_a_target_are_those_that_a_spread_of_all_would_choose(
    numbers: set[int], target: bytes, radius: int
) -> None:
    table = RoutingTable(OWN)
    for number in numbers:
        table.saw(contact(number), 0.0)
    place = int.from_bytes(target)
    ranked = sorted(n.contact.place ^ place for n in table.neighbours())
    assert [c.place ^ place for c in table.around(target, 0.0, radius=radius)] == spread(ranked, K, radius)
    assert table.distances(target, 0.0) == ranked[:K]


def test_a_bucket_that_a_lookup_went_through_needs_no_refresh(table: RoutingTable) -> None:
    for number in range(1, 500):
        table.saw(contact(number), 0.0)
    count = len(table.refresh_targets(0.0, older_than_s=10.0, rng=random.Random(1)))
    table.looked_through(bytes(20), 5.0)
    table.looked_through(bytes([255]) * 20, 5.0)
    assert len(table.refresh_targets(10.0, older_than_s=10.0, rng=random.Random(1))) == count - 2


def test_whom_to_start_from_another_time_is_spread_over_the_space_and_not_for_strangers_to_choose(
    table: RoutingTable,
) -> None:
    """Strangers dial this peer all the time and were always heard last: those it dialled itself come first."""
    for number in range(1, 200):
        table.saw(contact(number), 0.0, is_outbound=number % 3 == 0)
    for number in range(1, 200):
        if number % 3:
            table.saw(contact(number), 1000.0 + number)
    kept = table.worth_keeping()
    assert {each.contact.peer for each in kept} == {each.contact.peer for each in table.neighbours()}
    assert len(kept) == len(table)
    first = kept[: len(table._buckets)]
    assert all(table._bucket(each.id) is bucket for each, bucket in zip(first, table._buckets, strict=True))
    assert all(each.is_outbound for each in first)
