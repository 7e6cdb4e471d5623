"""The datagram size climbs to what arrives, and falls back when it no longer does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.net.congestion import ETHERNET_BYTES
from meshswarm.net.pathmtu import JUMBO_BYTES, PathMtu, is_near, rungs_for

ALL = (1440, 8900, 16384, 61440)


def begun(rungs: tuple[int, ...]) -> PathMtu:
    path = PathMtu(rungs)
    path.begin(0.0)
    return path


@pytest.mark.parametrize(
    ("host", "rungs"),
    [
        ("127.0.0.1", ALL),
        ("::1", ALL),
        ("::ffff:127.0.0.1", ALL),
        ("192.168.1.7", (1440, 8900)),
        ("fe80::1%eth0", (1440, 8900)),
        ("8.8.8.8", (1440,)),
        ("2001:4860:4860::8888", (1440,)),
    ],
)
def test_rungs_by_kind_of_address(host: str, rungs: tuple[int, ...]) -> None:
    assert rungs_for(host) == rungs


def test_all_rungs_are_tried_at_once_and_the_largest_that_arrives_wins() -> None:
    path = begun(ALL)
    assert path.size == 1200
    assert path.due(0.0) == [1440, 8900, 16384, 61440]
    assert path.next_at is None
    assert path.arrived(8900)
    assert not path.arrived(1440)
    assert path.arrived(61440)
    assert path.size == 61440


def test_a_lost_probe_is_tried_again_twice_and_then_left() -> None:
    path = begun((ETHERNET_BYTES,))
    times = []
    now = 0.0
    while path.next_at is not None:
        now = path.next_at
        assert path.due(now) == [ETHERNET_BYTES]
        times.append(now)
        path.missed(ETHERNET_BYTES, now)
    assert times == [0.0, 1.0, 6.0]
    assert path.size == 1200


def test_losing_a_smaller_rung_than_the_present_size_does_not_matter() -> None:
    path = begun(ALL)
    path.due(0.0)
    path.arrived(8900)
    path.missed(1440, 0.1)
    assert path.next_at is None


def test_what_this_machine_refuses_is_never_tried_again() -> None:
    path = begun(ALL)
    path.due(0.0)
    path.too_large(8900)
    path.arrived(1440)
    path.black_hole(10.0)
    assert path.due(path.next_at or 0.0) == [1440]


def test_a_black_hole_falls_back_and_tries_again_with_growing_pauses() -> None:
    path = begun((1440, JUMBO_BYTES))
    pauses = []
    now = 0.0
    for _ in range(6):
        path.due(now)
        path.arrived(JUMBO_BYTES)
        path.black_hole(now)
        assert path.size == 1200
        assert path.next_at is not None
        pauses.append(path.next_at - now)
        now = path.next_at
    assert pauses == [60, 120, 240, 480, 960, 960]


@given(limit=st.integers(1200, 70000), losses=st.lists(st.booleans(), max_size=20))
def test_any_path_ends_at_the_largest_rung_it_carries(limit: int, losses: list[bool]) -> None:
    """With at most two chance losses of a probe, the outcome is a matter of the path alone."""
    path = begun(ALL)
    chance = dict.fromkeys(ALL, 2)
    steps = iter(losses)
    while (at := path.next_at) is not None:
        for size in path.due(at):
            lucky = not next(steps, False) or chance[size] == 0
            if size <= limit and lucky:
                path.arrived(size)
            else:
                chance[size] -= 1
                path.missed(size, at)
    assert path.size == max((size for size in ALL if size <= limit), default=1200)


def test_nothing_is_tried_before_the_path_is_worth_it_and_all_of_it_once() -> None:
    path = PathMtu((ETHERNET_BYTES,))
    assert path.next_at is None and path.due(1e9) == []
    path.begin(5.0)
    assert path.due(5.0) == [ETHERNET_BYTES]
    path.begin(6.0)
    assert path.next_at is None


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("192.168.1.2", True),
        ("fe80::1%eth0", True),
        ("::ffff:10.0.0.1", True),
        ("8.8.8.8", False),
        ("2606:4700::1111", False),
        ("::ffff:8.8.8.8", False),
    ],
)
def test_which_hosts_are_near(host: str, near: bool) -> None:
    assert is_near(host) is near
