"""Keys sealed for one member and one question."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.identity import Identity
from meshswarm.membership.handover import MAX_PARCEL_BYTES, Receiver, parcel_of
from meshswarm.net.swarm import MAX_SWARM_KEYS

ALICE, BOB, MALLORY = (Identity.from_seed(letter * 32).peer_id for letter in (b"a", b"b", b"m"))
KEYS = [bytes([n]) * 32 for n in range(MAX_SWARM_KEYS)]


def test_the_one_who_asked_can_open_it() -> None:
    receiver = Receiver(BOB, ALICE)
    parcel = parcel_of(KEYS, ALICE, BOB, receiver.half)
    assert receiver.open(parcel) == receiver.open(parcel) == KEYS
    assert len(parcel) <= MAX_PARCEL_BYTES and all(key not in parcel for key in KEYS)


def test_nobody_else_can() -> None:
    receiver = Receiver(BOB, ALICE)
    parcel = parcel_of(KEYS, ALICE, BOB, receiver.half)
    for_others = [parcel_of(KEYS, ALICE, MALLORY, receiver.half), parcel_of(KEYS, MALLORY, BOB, receiver.half)]
    for other, sealed in [(Receiver(BOB, ALICE), parcel), *((receiver, each) for each in for_others)]:
        with pytest.raises(ValueError, match="not sealed for this"):
            other.open(sealed)


@settings(deadline=None)
@given(at=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_a_changed_parcel_is_refused(at: int, flip: int) -> None:
    receiver = Receiver(BOB, ALICE)
    parcel = parcel_of(KEYS, ALICE, BOB, receiver.half)
    at %= len(parcel)
    if at == 31 and flip == 128:
        return  # the top bit of an X25519 point is ignored (RFC 7748)
    with pytest.raises(ValueError):
        receiver.open(parcel[:at] + bytes([parcel[at] ^ flip]) + parcel[at + 1 :])


@pytest.mark.parametrize("half", [bytes(32), b"short", b"\x01" + bytes(31)])
def test_a_half_that_is_none_is_refused(half: bytes) -> None:
    with pytest.raises(ValueError):
        parcel_of(KEYS, ALICE, BOB, half)
    with pytest.raises(ValueError):
        Receiver(BOB, ALICE).open(half)
