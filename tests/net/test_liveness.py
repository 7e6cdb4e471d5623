"""Liveness under a virtual clock: who is probed when, and who is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshswarm.net.liveness import Liveness, Verdict


def run(liveness: Liveness, start: float, stop: float, answers: bool = False) -> list[tuple[float, Verdict]]:
    """Call `check` when it asks to be called, until `stop`; what it said that was not QUIET."""
    said: list[tuple[float, Verdict]] = []
    now = start
    while (now := max(now, liveness.next_at)) < stop:
        verdict = liveness.check(now)
        if verdict is not Verdict.QUIET:
            said.append((round(now, 6), verdict))
        if verdict is Verdict.LOST:
            break
        if verdict is Verdict.PROBE and answers:
            liveness.heard(now + 0.01)
    return said


def test_held_probes_each_second_and_lost_after_four() -> None:
    liveness = Liveness(0.0)
    liveness.hold(0.0)
    liveness.heard(0.5)
    probes = [(1.5, Verdict.PROBE), (2.5, Verdict.PROBE), (3.5, Verdict.PROBE)]
    assert run(liveness, 0.0, 99.0) == [*probes, (4.5, Verdict.LOST)]


def test_free_probes_after_fifteen_seconds_and_lost_after_thirty() -> None:
    assert run(Liveness(0.0), 0.0, 99.0) == [(15.0, Verdict.PROBE), (30.0, Verdict.LOST)]


def test_a_peer_that_answers_is_never_lost() -> None:
    held = Liveness(0.0)
    held.hold(0.0)
    said = run(held, 0.0, 60.0, answers=True)
    assert {verdict for _, verdict in said} == {Verdict.PROBE}
    assert 55 <= len(said) <= 60
    assert len(run(Liveness(0.0), 0.0, 60.0, answers=True)) == 3


def test_traffic_makes_probes_needless() -> None:
    liveness = Liveness(0.0)
    liveness.hold(0.0)
    for tick in range(1, 200):
        liveness.heard(tick * 0.5)
        assert liveness.check(tick * 0.5 + 0.4) is Verdict.QUIET


def test_taking_hold_after_idle_time_probes_at_once_and_forgives_the_silence() -> None:
    liveness = Liveness(0.0)
    liveness.hold(14.0)
    assert run(liveness, 14.0, 99.0) == [
        (14.0, Verdict.PROBE),
        (15.0, Verdict.PROBE),
        (16.0, Verdict.PROBE),
        (17.0, Verdict.LOST),
    ]


def test_releasing_goes_back_to_the_slow_pace() -> None:
    liveness = Liveness(0.0)
    liveness.hold(0.0)
    liveness.hold(0.0)
    liveness.release()
    assert liveness.is_held
    liveness.release()
    assert not liveness.is_held
    assert run(liveness, 0.0, 99.0)[-1] == (30.0, Verdict.LOST)


def test_a_process_that_slept_asks_first() -> None:
    liveness = Liveness(0.0)
    liveness.hold(0.0)
    assert liveness.check(1.0) is Verdict.PROBE
    assert liveness.check(500.0) is Verdict.PROBE
    assert run(liveness, 500.0, 999.0)[-1] == (504.0, Verdict.LOST)


def test_a_hint_that_nobody_is_there_is_checked_within_a_second() -> None:
    forged, true = Liveness(0.0), Liveness(0.0)
    for liveness in (forged, true):
        liveness.suspect(2.0)
        assert liveness.check(2.0) is Verdict.PROBE
        assert liveness.is_suspect
    forged.heard(2.1)
    assert not forged.is_suspect
    assert forged.check(3.5) is Verdict.QUIET
    assert run(true, 2.0, 99.0) == [(3.0, Verdict.LOST)]


@given(gaps=st.lists(st.floats(0.01, 3.9), min_size=1, max_size=50), held=st.booleans())
def test_whoever_speaks_in_time_lives(gaps: list[float], held: bool) -> None:
    liveness = Liveness(0.0)
    if held:
        liveness.hold(0.0)
    now = 0.0
    for gap in gaps:
        until = now + gap
        while liveness.next_at < until:
            now = max(now, liveness.next_at)
            assert liveness.check(now) is not Verdict.LOST
        now = until
        liveness.heard(now)
