"""Who is owed a record."""

from collections.abc import Callable

import pytest

from meshswarm.config import Address
from meshswarm.dht.contact import Contact
from meshswarm.dht.handover import Handover
from meshswarm.dht.keys import distance
from meshswarm.dht.region import SPACE
from meshswarm.dht.signed import SignedRecord
from meshswarm.identity import PeerId

KEY = bytes(20)
PEERS = [Contact(PeerId(bytes([n]) * 32), (Address("10.0.0.1", 1),)) for n in range(8)]


@pytest.fixture
def record(make_record: Callable[..., SignedRecord]) -> SignedRecord:
    return make_record()


def test_what_was_never_spread_is_owed_to_everybody_and_nobody_gets_it_twice(record: SignedRecord) -> None:
    handover = Handover()
    assert all(handover.owes(record, KEY, peer) for peer in PEERS)
    handover.gave(record, KEY, PEERS[0].peer.key)
    assert [handover.owes(record, KEY, peer) for peer in PEERS[:2]] == [False, True]


def test_who_did_not_take_it_is_asked_again_with_the_next_one_only(
    record: SignedRecord, make_record: Callable[..., SignedRecord]
) -> None:
    handover = Handover()
    handover.spreads(record, KEY, SPACE)
    handover.refused(record, KEY, PEERS[0].peer.key)
    assert not handover.owes(record, KEY, PEERS[0])
    assert not handover.is_thin(record, [KEY])
    newer = make_record(seq=2)
    handover.spreads(newer, KEY, SPACE)
    assert handover.owes(newer, KEY, PEERS[0])


def test_who_is_too_far_away_is_owed_nothing(record: SignedRecord) -> None:
    handover = Handover()
    by_distance = sorted(PEERS, key=lambda peer: distance(peer.node_id, KEY))
    handover.spreads(record, KEY, distance(by_distance[3].node_id, KEY))
    assert [handover.owes(record, KEY, peer) for peer in by_distance] == [True] * 3 + [False] * 5


def test_a_newer_record_is_owed_again_and_one_that_came_back_is_too(
    record: SignedRecord, make_record: Callable[..., SignedRecord]
) -> None:
    handover = Handover()
    handover.spreads(record, KEY, SPACE)
    handover.gave(record, KEY, PEERS[0].peer.key)
    handover.lost(PEERS[0].peer.key)
    assert handover.owes(record, KEY, PEERS[0])
    handover.gave(record, KEY, PEERS[0].peer.key)
    assert handover.owes(make_record(seq=2), KEY, PEERS[0])


def test_it_is_thin_when_more_than_half_are_gone(record: SignedRecord) -> None:
    handover = Handover()
    handover.spreads(record, KEY, SPACE)
    assert not handover.is_thin(record, [KEY])
    for peer in PEERS:
        handover.gave(record, KEY, peer.peer.key)
    for gone, peer in enumerate(PEERS, start=1):
        handover.lost(peer.peer.key)
        assert handover.is_thin(record, [KEY]) == (gone > 4)
    handover.keep_only([])
    assert not handover.is_thin(record, [KEY])
