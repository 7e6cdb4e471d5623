"""What is wanted, here, on the disk, in doubt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.torrent.plan import STALL_BYTES, PiecePlan, Stall


def test_a_piece_counts_only_once_it_is_flushed() -> None:
    plan = PiecePlan(4)
    want = plan.want([1, 2], 4)
    assert sorted(plan.priorities()) == [(1, 4), (2, 4)]
    plan.verified(1)
    plan.verified(2)
    assert want.has_come and not want.is_done and not plan.on_disk
    plan.flush_asked()
    assert plan.flushed() and want.is_done and plan.on_disk == {1, 2}


def test_what_came_after_the_flush_was_asked_for_is_not_flushed() -> None:
    plan = PiecePlan(4)
    plan.verified(0)
    plan.flush_asked()
    plan.verified(1)
    plan.flushed()
    assert plan.on_disk == {0} and plan.unflushed == {1}


@pytest.mark.parametrize("is_known_first", [True, False])
def test_an_answer_to_libtorrents_own_flush_stands_for_nothing(is_known_first: bool) -> None:
    """It may have begun before the last pieces came."""
    plan = PiecePlan(2)
    plan.verified(0)
    if is_known_first:
        plan.finished()
    plan.flush_asked()
    if not is_known_first:
        plan.finished()
    assert not plan.flushed() and not plan.on_disk
    assert plan.flushed() and plan.on_disk == {0}


def test_a_flush_of_a_broken_disk_stands_for_nothing() -> None:
    plan = PiecePlan(2)
    plan.verified(0)
    plan.flush_asked()
    plan.is_broken = True
    assert not plan.flushed() and not plan.on_disk


def test_a_piece_that_came_wrong_is_not_asked_of_all_again() -> None:
    plan = PiecePlan(3)
    plan.want([0, 1, 2], 4)
    plan.priorities()
    assert plan.failed(1) and not plan.failed(1)
    assert plan.priorities() == [(1, 0)]
    assert plan.doubtful == {1} and plan.missing() == {0, 1, 2}
    plan.verified(1)
    assert plan.doubtful == set() and plan.priorities() == []
    assert not plan.failed(1), "what is here is not in doubt because it came again"


def test_the_most_urgent_of_two_wants_counts_until_it_ends() -> None:
    plan = PiecePlan(3)
    plan.want([0, 1], 2)
    urgent = plan.want([1, 2], 7)
    assert sorted(plan.priorities()) == [(0, 2), (1, 7), (2, 7)]
    plan.drop(urgent)
    assert sorted(plan.priorities()) == [(1, 2), (2, 0)]
    assert plan.priorities() == []


def test_what_is_lost_is_wanted_again() -> None:
    plan = PiecePlan(3, on_disk=[0, 1])
    want = plan.want([0, 1, 2], 4)
    assert plan.priorities() == [(2, 4)]
    plan.found([1])
    assert want.missing == {0, 2} and sorted(plan.priorities()) == [(0, 4), (2, 4)]


def test_a_piece_the_file_has_not_is_refused() -> None:
    for wrong in (-1, 3):
        with pytest.raises(IndexError):
            PiecePlan(3).want([wrong], 4)
    plan = PiecePlan(3)
    plan.verified(3)
    assert not plan.failed(7) and not plan.unflushed and not plan.doubtful


EVENTS = st.one_of(
    st.tuples(st.sampled_from(["verified", "failed"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["flush", "flushed", "finished", "all_flushed", "found"]), st.just(0)),
)


@given(st.lists(EVENTS, max_size=40))
def test_sets_stay_apart_and_a_want_ends_exactly_when_all_is_on_the_disk(events: list[tuple[str, int]]) -> None:
    plan = PiecePlan(6)
    want = plan.want(range(5), 4)
    asked: dict[int, int] = {}
    for name, piece in events:
        match name:
            case "verified":
                plan.verified(piece)
            case "failed":
                plan.failed(piece)
            case "flush":
                plan.flush_asked()
            case "flushed":
                plan.flushed()
            case "finished":
                plan.finished()
            case "all_flushed":
                plan.all_flushed()
            case "found":
                plan.found(set(plan.on_disk))
                asked = {}
        asked |= dict(plan.priorities())
        assert not plan.on_disk & plan.unflushed and not plan.doubtful & (plan.on_disk | plan.unflushed)
        assert want.is_done == (want.pieces <= plan.on_disk)
        assert want.has_come == all(plan.is_here(index) for index in want.pieces)
        open_pieces = want.missing - plan.doubtful
        assert {index for index, priority in asked.items() if priority and not plan.is_here(index)} == open_pieces


def test_nothing_for_the_whole_patience_is_a_stall() -> None:
    stall = Stall(10.0, since=0.0)
    stall.came(STALL_BYTES, 6.0)
    assert not stall.is_over(15.9) and stall.is_over(16.0)
    stall.came(STALL_BYTES + 100, 15.0)
    assert stall.is_over(16.0), "a trickle is nothing"
    stall.moved(STALL_BYTES + 100, 15.0)
    assert not stall.is_over(24.0)
    stall.came(0, 25.0)
    assert not stall.is_over(30.0), "counted anew after all connections were made anew"
