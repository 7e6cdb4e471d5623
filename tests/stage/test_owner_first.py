"""The owner's programs get the machine within seconds, and strangers get it back when it has been quiet for a while."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.stage.owner_first import EASE_AFTER_S, Mode, OwnerFirst, Reading


class Machine:
    """Readings a second apart on a virtual clock."""

    def __init__(self, n_cpus: int, n_threads: int) -> None:
        self.n_cpus = n_cpus
        self.owner = OwnerFirst(n_threads / n_cpus)
        self.now = 50.0
        self.modes: list[Mode] = []

    def run(self, seconds: int, *, foreign_cpus: float = 0.0, on_battery: bool = False) -> Mode:
        for _ in range(seconds):
            self.now += 1
            standing = self.owner.observe(Reading(foreign_cpus / self.n_cpus, on_battery), self.now)
            self.modes.append(standing.mode)
            assert (standing.reason == "") is (standing.mode is Mode.FULL)
        return self.modes[-1]


@pytest.mark.parametrize(("n_cpus", "n_threads", "foreign_cpus"), [(2, 1, 1.2), (4, 3, 1.6), (16, 15, 4), (1, 1, 0.5)])
def test_a_busy_owner_is_given_way_in_steps(n_cpus: int, n_threads: int, foreign_cpus: float) -> None:
    machine = Machine(n_cpus, n_threads)
    assert machine.run(60) is Mode.FULL
    assert machine.run(8, foreign_cpus=foreign_cpus) is Mode.THROTTLED
    assert machine.run(20, foreign_cpus=foreign_cpus) is Mode.PAUSED
    assert f"use {100 * foreign_cpus / n_cpus:.0f} %" in machine.owner.standing.reason
    assert machine.run(300, foreign_cpus=foreign_cpus) is Mode.PAUSED
    assert machine.run(45) is Mode.FULL


@pytest.mark.parametrize(("n_cpus", "n_threads", "foreign_cpus"), [(16, 8, 6), (16, 15, 0.5), (2, 1, 0.4), (4, 3, 0.3)])
def test_where_there_is_room_for_both_nothing_changes(n_cpus: int, n_threads: int, foreign_cpus: float) -> None:
    machine = Machine(n_cpus, n_threads)
    machine.run(600, foreign_cpus=foreign_cpus)
    assert set(machine.modes) == {Mode.FULL}


def test_a_moments_load_changes_nothing() -> None:
    machine = Machine(2, 1)
    for _ in range(50):
        machine.run(1, foreign_cpus=2)
        machine.run(20)
    assert set(machine.modes) == {Mode.FULL}


def test_a_load_that_comes_and_goes_does_not_make_it_flap() -> None:
    machine = Machine(2, 1)
    for _ in range(40):
        machine.run(15, foreign_cpus=2)
        machine.run(10)
    changes = sum(before is not after for before, after in zip(machine.modes, machine.modes[1:], strict=False))
    assert changes <= 4


def test_a_smaller_load_that_stays_is_served_beside() -> None:
    machine = Machine(2, 1)
    machine.run(60, foreign_cpus=2)
    assert machine.run(60, foreign_cpus=0.85) is Mode.THROTTLED
    assert machine.run(60, foreign_cpus=0.2) is Mode.FULL


def test_on_battery_nothing_is_computed_for_strangers() -> None:
    machine = Machine(8, 2)
    machine.run(5)
    assert machine.run(1, on_battery=True) is Mode.PAUSED
    assert machine.run(100, on_battery=True) is Mode.PAUSED
    assert "battery" in machine.owner.standing.reason
    assert machine.run(int(EASE_AFTER_S) - 1) is Mode.PAUSED
    assert machine.run(2) is Mode.FULL


@given(st.lists(st.tuples(st.floats(-1, 5), st.booleans(), st.floats(0, 100)), max_size=100))
def test_it_always_comes_back(readings: list[tuple[float, bool, float]]) -> None:
    machine = Machine(2, 1)
    for foreign_share, on_battery, pause_s in readings:
        machine.now += pause_s
        machine.owner.observe(Reading(foreign_share, on_battery), machine.now)
    assert machine.run(90) is Mode.FULL
