"""Rates, stalls and waits, on a clock of the test's own."""

from __future__ import annotations

import random

from meshswarm.artifacts.sources.pace import Meter, Retries, StallWatch


def test_the_rate_is_that_of_the_last_seconds() -> None:
    meter = Meter(10_000, 1_000, 0.0)
    assert meter.progress(0.0).eta_s is None
    now = meter.add(1_000, 1.0)
    assert (now.done_bytes, now.total_bytes, now.bytes_s, now.eta_s) == (2_000, 10_000, 1_000.0, 8.0)
    for second in range(2, 40):
        now = meter.add(10, float(second))
    assert 9 <= now.bytes_s <= 11, "what was fast long ago is forgotten"
    assert meter.progress(10_000.0).bytes_s < 1


def test_dripping_is_stalling() -> None:
    watch = StallWatch(patience_s=10.0, min_bytes=100)
    watch.start(0.0)
    for second in range(9):
        watch.feed(10, float(second))
    assert watch.deadline == 10.0
    watch.feed(10, 9.0)
    assert watch.deadline == 19.0


def test_waits_grow_and_end_and_begin_anew_with_progress() -> None:
    retries, rng = Retries(max_at_first=2, max_in_a_row=4, first_wait_s=1.0, longest_wait_s=3.0), random.Random(1)
    first = [retries.wait_s(None, rng) for _ in range(3)]
    assert first[2] is None and first[0] is not None and 0.5 <= first[0] <= 1.0
    retries.progressed()
    later = [retries.wait_s(None, rng) for _ in range(5)]
    assert later[4] is None and all(wait is not None and wait <= 3.0 for wait in later[:4])


def test_a_server_that_asks_for_time_gets_it_within_reason() -> None:
    assert Retries().wait_s(60.0, random.Random(1)) == 60.0
    assert Retries().wait_s(121.0, random.Random(1)) is None
