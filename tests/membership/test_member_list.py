"""The owner's list: only the owner's, only for its swarm, and a higher number replaces a lower one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.membership.member_list import MAX_EXPELLED, MAX_HOLDERS, MAX_LIST_BYTES, ListedKey, MemberList
from meshswarm.net.swarm import MAX_SWARM_KEYS

OWNER, MALLORY = (Identity.from_seed(letter * 32) for letter in (b"o", b"m"))
SWARM = b"s" * 16
PEERS = tuple(Identity.from_seed(bytes([n]) * 32).peer_id for n in range(4))


def member_list(**changes: object) -> MemberList:
    fields = {"swarm_id": SWARM, "number": 3, "made_ms": 1000, "keys": (ListedKey(b"1" * 16),), **changes}
    return MemberList(**fields)


def test_what_the_owner_signs_is_read_again() -> None:
    made = member_list(
        keys=(ListedKey(b"2" * 16), ListedKey(b"1" * 16, 5000)), expelled=PEERS[:1], holders=PEERS[1:]
    ).signed(OWNER)
    assert MemberList.decode(made.wire, OWNER.peer_id, SWARM) == made
    assert made.expelled == PEERS[:1] and made.holders == PEERS[1:] and made.keys[1].ends_ms == 5000
    assert member_list().signed(OWNER).holders is None and member_list(holders=()).signed(OWNER).holders == ()


def test_nobody_else_signs_and_no_other_swarm_is_meant() -> None:
    wire = member_list().signed(OWNER).wire
    for data, owner, swarm in (
        (member_list().signed(MALLORY).wire, OWNER.peer_id, SWARM),
        (wire, MALLORY.peer_id, SWARM),
        (wire, OWNER.peer_id, b"t" * 16),
    ):
        with pytest.raises(WireError):
            MemberList.decode(data, owner, swarm)


@settings(deadline=None)
@given(at=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_no_changed_byte_is_believed(at: int, flip: int) -> None:
    wire = member_list(expelled=PEERS[:2]).signed(OWNER).wire
    at %= len(wire)
    with pytest.raises(WireError):
        MemberList.decode(wire[:at] + bytes([wire[at] ^ flip]) + wire[at + 1 :], OWNER.peer_id, SWARM)


@settings(deadline=None)
@given(data=st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        MemberList.decode(data, OWNER.peer_id, SWARM)


def test_the_largest_list_fits_and_a_larger_one_is_not_signed() -> None:
    many = tuple(PeerId(n.to_bytes(32)) for n in range(MAX_HOLDERS))
    keys = tuple(ListedKey(bytes([n]) * 16, n) for n in range(MAX_SWARM_KEYS))
    largest = member_list(keys=keys, expelled=many[:MAX_EXPELLED], holders=many).signed(OWNER)
    assert len(largest.wire) <= MAX_LIST_BYTES
    for changes in ({"expelled": many[: MAX_EXPELLED + 1]}, {"keys": ()}, {"keys": (*keys, keys[0])}, {"number": 0}):
        with pytest.raises(ValueError, match="cannot be a member list"):
            member_list(**changes).signed(OWNER)


def test_a_higher_number_replaces_and_equal_ones_have_one_winner() -> None:
    old, new, twin = (member_list(number=n, made_ms=m).signed(OWNER) for n, m in ((3, 1), (4, 1), (4, 2)))
    assert old.replaces(None) and new.replaces(old) and not old.replaces(new) and not new.replaces(new)
    assert new.replaces(twin) != twin.replaces(new)
