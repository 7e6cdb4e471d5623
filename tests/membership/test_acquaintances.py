"""Whom a member knows: bounded, saved, and without the word of who was expelled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.identity import PeerId
from meshswarm.membership.acquaintances import MAX_ACQUAINTANCES, MAX_VOUCHERS, Acquaintances

ALICE, BOB, CAROL, DAVE = (PeerId(letter * 32) for letter in (b"a", b"b", b"c", b"d"))


def test_who_was_met_stays_and_whom_only_the_expelled_named_goes_too() -> None:
    known = Acquaintances()
    known.meet(ALICE, 1)
    known.meet(BOB, 2)
    known.hear([CAROL], said_by=BOB)
    known.hear([DAVE], said_by=BOB)
    known.hear([DAVE, ALICE], said_by=ALICE)
    assert known.met() == [BOB, ALICE]
    assert set(known.trusted_without([])) == {ALICE, BOB, CAROL, DAVE}
    assert set(known.trusted_without([BOB])) == {ALICE, DAVE}
    alice = known.get(ALICE)
    assert alice is not None and alice.heard_from == []


def test_newcomers_are_to_be_saved_at_once() -> None:
    known = Acquaintances()
    known.meet(ALICE, 1)
    assert known.has_new and known.is_changed
    known.saved()
    known.meet(ALICE, 2)
    assert known.is_changed and not known.has_new
    known.hear([BOB], said_by=ALICE)
    assert known.has_new


def test_the_number_of_acquaintances_and_vouchers_is_bounded() -> None:
    known = Acquaintances()
    known.meet(ALICE, 5)
    known.hear([PeerId(n.to_bytes(32)) for n in range(MAX_ACQUAINTANCES + 10)], said_by=BOB)
    assert len(known) == MAX_ACQUAINTANCES
    for n in range(10):
        known.hear([ALICE], said_by=PeerId((n + 1).to_bytes(32)))
        known.meet(PeerId((2**200 + n).to_bytes(32)), n + 1)
    assert len(known) == MAX_ACQUAINTANCES and ALICE in known.met()
    met = known.get(ALICE)
    assert met is not None and len(met.heard_from) == MAX_VOUCHERS


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([ALICE, BOB, CAROL]), st.integers(1, 10**13)))
def test_what_is_saved_is_read_again(times: dict[PeerId, int]) -> None:
    known = Acquaintances()
    for peer, now_ms in times.items():
        known.meet(peer, now_ms)
    known.hear([DAVE], said_by=ALICE)
    assert Acquaintances.from_json(known.as_json()).as_json() == known.as_json()


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {},
        {"version": 2, "members": {str(ALICE): {"met_ms": 1, "heard_from": []}}},
        {"version": 1, "members": None},
        {"version": 1, "members": [1]},
        {"version": 1, "members": {"x": {"met_ms": 1, "heard_from": []}, str(ALICE): None}},
        {"version": 1, "members": {str(ALICE): {"met_ms": "x", "heard_from": []}, str(BOB): {"heard_from": []}}},
        {"version": 1, "members": {str(ALICE): {"met_ms": 1, "heard_from": 3}, str(BOB): {"met_ms": 1}}},
        {"version": 1, "members": {str(ALICE): {"met_ms": 1, "heard_from": ["x"]}}},
    ],
)
def test_what_makes_no_sense_in_the_file_is_left_out(saved: dict[str, object] | None) -> None:
    assert len(Acquaintances.from_json(saved)) == 0
    whole = {"version": 1, "members": {str(CAROL): {"met_ms": 1, "heard_from": []}}}
    if saved is not None and isinstance(saved.get("members"), dict) and saved["version"] == 1:
        whole["members"] |= saved["members"]
        assert Acquaintances.from_json(whole).all() == [CAROL]
