"""Who is gone: how many voices it takes, and what takes the weight from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.routing.gossip.virtual import SCOPE

from meshswarm.identity import Identity, PeerId
from meshswarm.routing.gossip.standing import OUTLIVED_MS, REMEMBERED_S, Standings, Weight
from meshswarm.routing.gossip.words import Accusation, Appointment, Farewell


@pytest.fixture
def peer(who: Callable[[int], Identity]) -> PeerId:
    return who(1).peer_id


@pytest.fixture
def appointment(appoint: Callable[..., Appointment]) -> Appointment:
    return appoint(1, [2, 3, 4, 5, 6], 10)


@pytest.mark.parametrize(("by", "after_s"), [([2], 4.0), ([2, 3], 2.0), ([2, 3, 4], 0.0), ([2, 3, 4, 5, 6], 0.0)])
def test_fewer_voices_wait_longer(
    peer: PeerId, appointment: Appointment, accuse: Callable[..., Accusation], by: list[int], after_s: float
) -> None:
    standings = Standings()
    standings.take_accusation(accuse(appointment, by), 100.0)
    assert (peer in standings.gone(100.0)) is (after_s == 0)
    assert after_s == 0 or peer not in standings.gone(99.9 + after_s)
    assert peer in standings.gone(100.0 + after_s)


def test_voices_add_up_and_are_counted_once(
    peer: PeerId, appointment: Appointment, accuse: Callable[..., Accusation]
) -> None:
    standings = Standings()
    assert standings.take_accusation(accuse(appointment, [2]), 0.0) is Weight.NEW
    assert standings.take_accusation(accuse(appointment, [2]), 1.0) is Weight.STALE
    assert standings.take_accusation(accuse(appointment, [3]), 1.0) is Weight.MORE
    assert peer not in standings.gone(1.0)
    assert standings.take_accusation(accuse(appointment, [2, 4]), 1.5) is Weight.FULL
    assert peer in standings.gone(1.5)


def test_a_newer_appointment_ends_all_older_accusations(
    peer: PeerId, appointment: Appointment, accuse: Callable[..., Accusation]
) -> None:
    standings = Standings()
    standings.take_accusation(accuse(appointment, [2, 3, 4]), 0.0)
    assert not standings.take_alive(peer, 10, appointment=True), "the number that is accused answers nothing"
    assert not standings.take_alive(peer, 99), "a report is no answer"
    assert peer in standings.gone(0.0)
    assert standings.take_alive(peer, 11, appointment=True)
    assert peer not in standings.gone(0.0)
    assert standings.take_accusation(accuse(appointment, [2, 3, 4, 5, 6]), 1.0) is Weight.STALE
    assert peer not in standings.gone(100.0)


def test_what_is_clearly_newer_than_a_silence_ends_the_accusation_whatever_it_is(
    peer: PeerId, appointment: Appointment, accuse: Callable[..., Accusation]
) -> None:
    standings = Standings()
    standings.take_accusation(accuse(appointment, [2, 3, 4], number=5000), 0.0)
    assert not standings.take_alive(peer, 5000 + OUTLIVED_MS), "it may have been said just before it died"
    assert peer in standings.gone(0.0)
    assert standings.take_alive(peer, 5001 + OUTLIVED_MS) and peer not in standings.gone(0.0)
    assert standings.take_accusation(accuse(appointment, [2, 3, 4, 5], number=5000), 1.0) is Weight.STALE
    later = accuse(appointment, [2, 3, 4], number=5001 + OUTLIVED_MS)
    assert standings.take_accusation(later, 1.0) is Weight.FULL, "who has heard that too may say that it is silent now"
    assert peer in standings.gone(1.0)


def test_a_sign_of_life_outweighs_what_others_say(
    peer: PeerId, appointment: Appointment, accuse: Callable[..., Accusation]
) -> None:
    standings = Standings()
    standings.take_accusation(accuse(appointment, [2]), 0.0)
    standings.heard(peer, 1.0)
    assert peer not in standings.gone(50.0)
    standings.take_accusation(accuse(appointment, [3, 4]), 51.0)
    assert peer in standings.gone(51.0), "new voices count again"
    assert standings.heard(peer, 52.0)
    assert peer not in standings.gone(52.0)


def test_own_probes_decide_for_this_peer_until_it_speaks(peer: PeerId) -> None:
    standings = Standings()
    standings.unreachable(peer, 0.0)
    assert peer in standings.gone(0.0)
    standings.take_alive(peer, 5, appointment=True)
    assert peer in standings.gone(1.0), "others may reach it, this peer cannot"
    assert standings.heard(peer, 2.0)
    assert peer not in standings.gone(2.0)


def test_a_farewell_holds_until_the_peer_says_something_newer(who: Callable[[int], Identity], peer: PeerId) -> None:
    standings = Standings()
    standings.take_alive(peer, 7)
    assert not standings.take_farewell(Farewell.sign(who(1), SCOPE, 7), 0.0), "older than what it said since"
    assert standings.take_farewell(Farewell.sign(who(1), SCOPE, 8), 0.0)
    assert not standings.take_farewell(Farewell.sign(who(1), SCOPE, 8), 0.0)
    standings.heard(peer, 0.1)
    assert peer in standings.gone(0.1), "what was under way when it left is no return"
    assert standings.take_alive(peer, 9)
    assert peer not in standings.gone(0.2)


def test_what_happened_long_ago_is_forgotten(peer: PeerId) -> None:
    standings = Standings()
    standings.unreachable(peer, 0.0)
    standings.forget(REMEMBERED_S - 1)
    assert peer in standings.gone(REMEMBERED_S - 1)
    standings.forget(REMEMBERED_S)
    assert peer not in standings.gone(REMEMBERED_S)


def test_who_is_gone_is_told_without_looking_at_everybody(
    peer: PeerId, appointment: Appointment, accuse: Callable[..., Accusation]
) -> None:
    standings = Standings()
    for number in range(2, 5000):
        standings.unreachable(PeerId(number.to_bytes(32)), 0.0)
    standings.take_accusation(accuse(appointment, [2]), 0.0)
    before = standings.gone(1.0)
    assert standings.gone(3.9) is before, "nothing has changed, nothing is made anew"
    assert standings.gone(4.0) == before | {peer}
    assert standings.heard(peer, 5.0) and standings.gone(5.0) == before
    standings.forget(REMEMBERED_S)
    assert not standings.gone(REMEMBERED_S)
