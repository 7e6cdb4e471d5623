"""The queue before a full span: who is next, who is told what, who may not enter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.identity import Identity, PeerId
from meshswarm.stage.sessions.waiting_room import MAX_WAITING, MAX_WAITING_PER_HEAD, UNMEASURED_TURN_S, WaitingRoom


def head(number: int) -> PeerId:
    return Identity.from_seed(bytes([number]) * 32).peer_id


A, B, C = (head(number) for number in range(3))


def test_one_heads_sessions_are_served_in_the_order_they_came() -> None:
    room = WaitingRoom(2)
    tickets = [room.enter(A, 10.0) for _ in range(3)]
    assert room.line([]) == tickets


def test_everybodys_first_session_stands_before_anybodys_second() -> None:
    room = WaitingRoom(2)
    a1, a2, a3 = (room.enter(A, 10.0) for _ in range(3))
    b1, b2 = (room.enter(B, 10.0) for _ in range(2))
    assert room.line([]) == [a1, b1, a2, b2, a3]


def test_what_a_head_has_running_counts_as_its_place_in_line() -> None:
    room = WaitingRoom(2)
    a1 = room.enter(A, 10.0)
    b1 = room.enter(B, 10.0)
    b2 = room.enter(B, 10.0)
    assert room.line([A, A]) == [b1, b2, a1]
    assert [place.number for place in room.places([A, A]).values()] == [1, 2, 3]


def test_the_line_is_bounded_for_all_and_for_each_head() -> None:
    room = WaitingRoom(2)
    assert all(room.enter(A, 10.0) for _ in range(MAX_WAITING_PER_HEAD))
    assert room.enter(A, 10.0) is None
    for number in range(1, MAX_WAITING // MAX_WAITING_PER_HEAD):
        assert all(room.enter(head(number), 10.0) for _ in range(MAX_WAITING_PER_HEAD))
    assert len(room) == MAX_WAITING
    assert room.enter(head(99), 10.0) is None, "many heads cannot fill memory either"


def test_the_estimate_follows_how_long_sessions_were_at_work() -> None:
    room = WaitingRoom(4)
    assert room.estimate_s(1) == UNMEASURED_TURN_S / 4
    room.lasted(8.0)
    assert room.estimate_s(1) == 2.0
    assert room.estimate_s(6) == 12.0
    for _ in range(50):
        room.lasted(80.0)
    assert room.estimate_s(1) == pytest.approx(20.0, rel=0.01)


def test_who_does_not_want_to_wait_any_longer_is_named() -> None:
    room = WaitingRoom(1)
    late, soon = room.enter(A, 30.0), room.enter(B, 20.0)
    assert (late, soon) != (None, None)
    assert room.next_expiry == 20.0
    assert room.expired(19.9) == []
    assert room.expired(20.0) == [soon]
    room.leave(soon)  # type: ignore[arg-type]
    room.leave(soon)  # type: ignore[arg-type]
    assert room.next_expiry == 30.0


@given(st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=40))
def test_nobody_waits_for_more_than_one_session_of_each_other_head_per_own_one(arrivals: list[PeerId]) -> None:
    """Rooms become free one by one and their sessions go on for ever: the shares never differ by more than one while
    both still wait."""
    room = WaitingRoom(1)
    for each in arrivals:
        room.enter(each, 10.0)
    running: list[PeerId] = []
    while line := room.line(running):
        room.leave(line[0])
        running.append(line[0].head)
        waiting = {ticket.head for ticket in room.line(running)}
        shares = [running.count(each) for each in waiting]
        assert not shares or max(shares) - min(shares) <= 1
