"""What a server is asked for, and when it is dropped."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.sources.web_plan import WebLimits, WebPlan
from meshswarm.artifacts.torrent.content import Content

CONTENT = Content(20 * (256 << 10) - 5, bytes(32))
LIMITS = WebLimits(max_in_flight=3, max_bytes=4 * (256 << 10))


def plan(*, accepts_ranges: bool = True, limits: WebLimits = LIMITS) -> WebPlan:
    return WebPlan(CONTENT, accepts_ranges, limits, random.Random(0))


def spans(made: WebPlan, wanted: list[int], now: float = 0.0) -> list[tuple[int, int]]:
    found = []
    while (request := made.next(wanted, now)) is not None:
        found.append((request.first, request.stop))
    return found


def test_neighbours_are_asked_for_together_the_urgent_first_and_few_at_a_time() -> None:
    assert spans(plan(), [7, 8, 0, 1, 2, 3, 4, 5, 12, 19]) == [(7, 9), (0, 4), (4, 6)]
    assert spans(plan(), [19, 3]) == [(19, 20), (3, 4)]
    large = WebPlan(Content(40 << 30, bytes(32)), True, WebLimits(max_bytes=1), random.Random(0))
    request = large.next([0, 1], 0.0)
    assert request is not None and (request.first, request.stop) == (0, 1), "never less than a piece"
    assert request.deadline_s == 20 + 256, "a second for every 16 KiB of a piece of 4 MiB"


@given(st.lists(st.integers(0, 19), unique=True, max_size=20), st.integers(0, 2**16))
def test_every_piece_wanted_is_asked_for_once_and_no_other(wanted: list[int], seed: int) -> None:
    made, asked, rng = plan(), [], random.Random(seed)
    left, flying = list(wanted), []
    while left or flying:
        while (request := made.next(left, 0.0)) is not None:
            flying.append(request)
            asked += range(request.first, request.stop)
        done = flying.pop(rng.randrange(len(flying)))
        made.ended(done)
        left = [index for index in left if not done.first <= index < done.stop]
    assert sorted(asked) == sorted(wanted) and made.dropped is None


def test_a_liar_is_dropped_after_three_pieces() -> None:
    made = plan()
    made.next([0, 1, 2, 3], 0.0)
    for index, is_dropped in ((0, False), (1, False), (2, True)):
        made.took(index, False)
        assert (made.dropped is not None) is is_dropped
    assert made.dropped == "it gave wrong bytes for 3 pieces: its file is another one, or it lies"
    assert made.next([9], 0.0) is None


def test_a_wrong_piece_is_not_asked_for_again() -> None:
    made = plan()
    request = made.next([4], 0.0)
    assert request is not None
    made.took(4, False)
    made.ended(request)
    assert spans(made, [4, 5]) == [(5, 6)]
    other = plan()
    request = other.next([4], 0.0)
    assert request is not None
    other.took(4, False)
    other.ended(request)
    assert other.next([4], 0.0) is None
    assert other.dropped == "it gave wrong bytes for all that is still wanted"


def test_failures_wait_longer_each_time_and_end_the_use_of_a_server() -> None:
    made, now, waits = plan(), 0.0, []
    for _ in range(LIMITS.max_failures):
        request = made.next([0], now)
        assert request is not None
        made.failed(request, "it is too slow", now, may_pass=True)
        waits.append(made.wait_s(now))
        assert made.next([0], now) is None
        now += waits[-1]
    assert waits[0] < waits[-1] and made.dropped is None
    request = made.next([0], now)
    assert request is not None
    made.failed(request, "it is too slow", now, may_pass=True)
    assert made.dropped == "it is too slow"


def test_a_good_piece_makes_up_for_failures() -> None:
    made, now = plan(), 0.0
    for _ in range(20):
        request = made.next([0, 1], now)
        assert request is not None
        made.took(0, True)
        made.failed(request, "broke", now, may_pass=True)
        now += made.wait_s(now)
    assert made.dropped is None


def test_what_will_not_pass_drops_at_once() -> None:
    for may_pass, asked_s in ((False, None), (True, 61.0)):
        made = plan()
        request = made.next([0], 0.0)
        assert request is not None
        made.failed(request, "HTTP 403", 0.0, may_pass=may_pass, asked_s=asked_s)
        assert made.dropped == "HTTP 403"


def test_without_ranges_it_is_the_whole_file_once_or_nothing() -> None:
    made = plan(accepts_ranges=False)
    assert made.next(list(range(19)), 0.0) is None
    assert made.dropped == "it does not give parts of a file, only all of it"
    made = plan(accepts_ranges=False)
    request = made.next(list(range(20)), 0.0)
    assert request is not None and (request.first, request.stop) == (0, 20)
    assert made.next(list(range(20)), 0.0) is None and made.dropped is None
    made.failed(request, "it ended early", 0.0, may_pass=True)
    assert made.dropped == "it ended early"
