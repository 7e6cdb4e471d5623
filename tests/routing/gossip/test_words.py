"""Appointments, accusations and farewells: who may say what about whom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.routing.gossip.virtual import SCOPE

from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity
from meshswarm.routing.gossip.words import MAX_ACCUSATION_BYTES, Accusation, Appointment, Farewell

Who = Callable[[int], Identity]


def test_an_appointment_is_its_peers_own(who: Who, appoint: Callable[..., Appointment]) -> None:
    appointment = appoint(1, [2, 3, 4, 5, 6], 7)
    read = Appointment.decode(appointment.wire)
    assert read == appointment and read.verify() and read.number == 7
    assert read.watchers == tuple(who(number).peer_id for number in (2, 3, 4, 5, 6))


@pytest.mark.parametrize("watchers", [[], [1], [2, 2], [2, 3, 4, 5, 6, 7]])
def test_watchers_are_one_to_five_different_others(appoint: Callable[..., Appointment], watchers: list[int]) -> None:
    with pytest.raises(WireError):
        appoint(1, watchers)


def test_an_accusation_holds_for_whoever_reads_it(
    appoint: Callable[..., Appointment], accuse: Callable[..., Accusation]
) -> None:
    accusation = accuse(appoint(1, [2, 3, 4, 5, 6]), [2, 3, 4, 5, 6])
    data = accusation.encode()
    assert len(data) <= MAX_ACCUSATION_BYTES
    read = Accusation.decode(data)
    assert read.verify() and dict(read.statements) == {place: accusation.statements[place] for place in range(3)}


def test_only_those_who_were_chosen_can_accuse(
    who: Who, appoint: Callable[..., Appointment], accuse: Callable[..., Accusation]
) -> None:
    appointment = appoint(1, [2, 3, 4])
    with pytest.raises(ValueError):
        Accusation.state(who(9), appointment, 1)
    by_himself = Accusation.state(who(9), replace(appointment, watchers=(who(9).peer_id,)), 1)
    assert not Accusation(appointment, {0: by_himself.statements[0]}).verify()
    honest = accuse(appointment, [2])
    for changed in (replace(honest.statements[0], at_s=1), replace(honest.statements[0], number=2**50)):
        assert not Accusation(appointment, {0: changed}).verify(), "a statement with another time or number"
    assert not Accusation(appointment, {1: honest.statements[0]}).verify(), "one voice counted as another's"
    forged = Appointment.sign(who(9), SCOPE, 1, appointment.watchers)
    assert not Accusation(forged, honest.statements).verify(), "a statement moved to another appointment"
    later = appoint(1, [2, 3, 4], 2)
    assert not Accusation(later, honest.statements).verify(), "an old statement under a new number"


def test_an_appointment_signed_by_somebody_else_is_seen(who: Who, appoint: Callable[..., Appointment]) -> None:
    payload, _ = msgpack.unpackb(appoint(1, [2]).wire)
    forged = Appointment.decode(msgpack.packb([payload, who(9).sign("watchers", payload)]))
    assert not forged.verify()


def test_a_farewell_is_its_peers_own(who: Who) -> None:
    farewell = Farewell.sign(who(1), SCOPE, 5)
    assert Farewell.decode(farewell.wire).verify()
    payload, _ = msgpack.unpackb(farewell.wire)
    assert not Farewell.decode(msgpack.packb([payload, who(2).sign("farewell", payload)])).verify()
    assert not Farewell.decode(msgpack.packb([payload, who(1).sign("load", payload)])).verify()


@given(st.binary(max_size=800))
def test_any_bytes_are_a_word_or_an_error(data: bytes) -> None:
    for decode in (Appointment.decode, Accusation.decode, Farewell.decode):
        with contextlib.suppress(WireError):
            decode(data)


numbers = st.integers(-1, 2**60) | st.none()


@given(st.lists(st.tuples(st.integers(-1, 6) | st.none(), numbers, numbers, st.binary(max_size=70)), max_size=7))
def test_any_statements_are_an_accusation_or_an_error(said: list[tuple[int | None, ...]]) -> None:
    me = Identity.from_seed(bytes(31) + b"\1")
    watchers = tuple(Identity.from_seed(bytes(31) + bytes([n])).peer_id for n in (2, 3))
    appointment = Appointment.sign(me, SCOPE, 1, watchers)
    try:
        accusation = Accusation.decode(msgpack.packb([appointment.wire, [list(each) for each in said]]))
    except WireError:
        return
    assert set(accusation.statements) <= {0, 1} and not accusation.verify()
