from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.fetching.rates import LEAST_BUSY_BYTES_S, NO_LIMIT, QUIET_S, Limits, Pacer, Rates, UploadShare


def test_an_idle_peer_seeds_as_fast_as_it_may() -> None:
    assert UploadShare().observe(0.0, is_busy=False, slowdown=None) == NO_LIMIT
    assert UploadShare(5_000_000).observe(0.0, is_busy=False, slowdown=None) == 5_000_000


def test_a_session_cuts_what_goes_out_and_its_end_lets_it_out_again_after_a_while() -> None:
    share = UploadShare()
    assert share.observe(1.0, is_busy=True, slowdown=None) > 0
    assert share.observe(1.0 + QUIET_S - 0.1, is_busy=False, slowdown=None) > 0  # the next question may follow
    assert share.observe(1.0 + QUIET_S, is_busy=False, slowdown=None) == NO_LIMIT


def machine(up_bytes_s: float) -> float:
    """A machine whose steps take twice as long at 20 MB/s out."""
    return 1.0 + up_bytes_s / 20e6


def test_it_settles_where_steps_are_hardly_slower() -> None:
    share, now, seen = UploadShare(), 0.0, []
    limit = share.observe(now, is_busy=True, slowdown=None)
    for _ in range(200):
        now += Rates.PERIOD_S
        limit = share.observe(now, is_busy=True, slowdown=machine(limit))
        seen.append(machine(limit))
    settled = seen[20:]
    assert max(settled) < 1.15
    assert sum(settled) / len(settled) > 1.02, "it also uses what there is"


def test_a_machine_that_is_slow_for_other_reasons_still_gives_a_little() -> None:
    share = UploadShare()
    limits = [share.observe(float(n), is_busy=True, slowdown=3.0) for n in range(60)]
    assert limits[-1] == LEAST_BUSY_BYTES_S


@given(
    most=st.integers(1, 1 << 40),
    looks=st.lists(
        st.tuples(st.floats(0.01, 10.0), st.booleans(), st.none() | st.floats(0.01, 100.0)), min_size=1, max_size=60
    ),
)
def test_never_more_than_a_person_allowed(most: int, looks: list[tuple[float, bool, float | None]]) -> None:
    share, now = UploadShare(most), 0.0
    for after, is_busy, slowdown in looks:
        now += after
        limit = share.observe(now, is_busy=is_busy, slowdown=slowdown)
        assert 0 < limit <= most
        assert limit == most or is_busy or limit >= min(most, LEAST_BUSY_BYTES_S)


def test_it_is_told_only_when_it_changes() -> None:
    told: list[tuple[int, int]] = []
    busy = [False]
    rates = Rates(Limits(7, 0), lambda down, up: told.append((down, up)), lambda: busy[0], lambda: None)
    rates.look(0.0)
    rates.look(1.0)
    assert told == [(7, NO_LIMIT)]
    busy[0] = True
    rates.look(2.0)
    assert len(told) == 2
    assert told[1][0] == 7
    assert rates.up_bytes_s == told[1][1] > 0


@pytest.mark.parametrize("limits", [Limits(), Limits(up_bytes_s=9)])
def test_what_goes_out_is_bounded_before_the_first_look(limits: Limits) -> None:
    told: list[int] = []
    Rates(limits, lambda _, up: told.append(up), lambda: False, lambda: None).look(0.0)
    assert told == [limits.up_bytes_s]


@given(bytes_s=st.integers(1, 10**9), chunks=st.lists(st.integers(1, 10**6), min_size=1, max_size=200))
def test_paced_bytes_take_their_time(bytes_s: int, chunks: list[int]) -> None:
    pacer, now = Pacer(bytes_s), 100.0
    for n_bytes in chunks:
        now += pacer.wait_s(n_bytes, now)
    assert sum(chunks) <= (now - 100.0 + 1.0) * bytes_s * 1.001 + 1


def test_without_a_limit_nobody_waits() -> None:
    assert Pacer(NO_LIMIT).wait_s(10**12, 0.0) == 0.0
