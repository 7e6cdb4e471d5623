"""Threads earn their place at load, and lose it when they stall each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.stage.engine.threads import (
    FIRST_HOLD_S,
    MAX_HOLD_S,
    KeptThreads,
    ThreadTimes,
    ThreadWatch,
    candidate_counts,
    time_counts,
    usable_cpus,
)

ROOT = bytes(range(32))


@pytest.mark.parametrize(
    ("n_cpus", "counts"),
    [(1, (1,)), (2, (1,)), (3, (2, 1)), (4, (3, 2, 1)), (8, (7, 4, 2, 1)), (16, (15, 8, 4, 2, 1))],
)
def test_a_processor_is_left_for_the_event_loop(n_cpus: int, counts: tuple[int, ...]) -> None:
    assert candidate_counts(n_cpus) == counts


def test_a_containers_quota_counts(tmp_path: Path) -> None:
    n_cpus = usable_cpus(tmp_path)
    assert n_cpus >= 1
    for text, expected in (("max 100000", n_cpus), ("100000 100000", 1), ("20000 100000", 1), ("broken", n_cpus)):
        (tmp_path / "cpu.max").write_text(text)
        assert usable_cpus(tmp_path) == expected


# Measured with two cores on SmolLM2, as tokens a second: quiet, half a core taken, all cores taken.
@pytest.mark.parametrize(("two", "one", "best"), [(95, 67, 2), (55, 67, 1), (0.9, 67, 1)])
def test_the_measured_cases_are_chosen_right(two: float, one: float, best: int) -> None:
    assert time_counts((2, 1), lambda count: 1 / (two if count == 2 else one)).best == best


def test_fewer_threads_win_a_tie_and_hopeless_counts_are_not_timed() -> None:
    asked = []

    def step_s(count: int) -> float:
        asked.append(count)
        return {15: 1.05, 8: 1.0, 4: 1.5}[count]

    assert time_counts((15, 8, 4, 2, 1), step_s).best == 8
    assert asked == [15, 8, 4]
    assert ThreadTimes({8: 1.0, 4: 1.04}).best == 4


def test_what_was_measured_is_kept_for_this_build_and_machine(tmp_path: Path) -> None:
    times = ThreadTimes({3: 0.002, 2: 0.0025})
    kept = KeptThreads(tmp_path, "0.3.36-1", 4)
    assert kept.get(ROOT) is None
    kept.put(ROOT, times)
    assert kept.get(ROOT) == times
    assert kept.get(bytes(32)) is None
    assert KeptThreads(tmp_path, "0.3.37-1", 4).get(ROOT) is None
    assert KeptThreads(tmp_path, "0.3.36-1", 8).get(ROOT) is None


@pytest.mark.parametrize("step_us", ["[]", "{}", '{"two": 1}', '{"2": -1}', '{"0": 1}', '{"2": NaN}', "null", "5"])
def test_a_damaged_note_is_measured_anew(tmp_path: Path, step_us: str) -> None:
    kept = KeptThreads(tmp_path, "b", 4)
    (tmp_path / f"{ROOT.hex()}.json").write_text(f'{{"build": "b", "cpus": 4, "step_us": {step_us}}}')
    assert kept.get(ROOT) is None


class Machine:
    """Steps of an engine on a virtual clock; `cost` gives the seconds of a step with so many threads and rows."""

    def __init__(self, n_threads: int, cost: Callable[[int, int], float]) -> None:
        self.watch = ThreadWatch(n_threads)
        self.cost = cost
        self.now = 100.0
        self.n_threads = n_threads
        self.changes: list[tuple[float, int]] = []

    def step(self, n_rows: int = 1) -> None:
        seconds = self.cost(self.n_threads, n_rows)
        self.now += seconds
        changed = self.watch.observe(n_rows, seconds, self.now)
        if changed is not None:
            self.n_threads = changed
            self.changes.append((self.now, changed))

    def run(self, seconds: float, n_rows: int = 1) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step(n_rows)


def quiet(n_threads: int, n_rows: int) -> float:
    return 0.010 * n_rows**0.5 / n_threads


def crowded(n_threads: int, n_rows: int) -> float:
    return quiet(1, n_rows) * (1.0 if n_threads == 1 else 100.0)


def test_a_quiet_machine_keeps_its_threads() -> None:
    machine = Machine(8, quiet)
    for n_rows in (1, 16, 1, 128, 4):
        machine.run(60, n_rows)
    assert machine.changes == []


def test_a_collapse_is_left_within_a_few_steps() -> None:
    machine = Machine(2, quiet)
    machine.run(5)
    machine.cost = crowded
    for _ in range(3):
        machine.step()
    assert machine.n_threads == 1


def test_a_crowded_machine_is_probed_ever_more_rarely() -> None:
    machine = Machine(2, quiet)
    machine.run(5)
    machine.cost = crowded
    machine.run(3600)
    assert machine.n_threads == 1
    probes = [at for at, count in machine.changes[1:] if count == 2]
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert 3 <= len(probes) <= 12
    assert gaps[0] >= FIRST_HOLD_S and gaps[-1] >= gaps[0] and all(gap <= MAX_HOLD_S + 5 for gap in gaps)


def test_threads_come_back_when_the_machine_is_quiet_again() -> None:
    machine = Machine(8, quiet)
    machine.run(5)
    machine.cost = crowded
    machine.run(30)
    assert machine.n_threads == 1
    machine.cost = quiet
    machine.run(4 * MAX_HOLD_S)
    assert machine.n_threads == 8


def test_work_that_grew_is_no_collapse() -> None:
    """A session with a long context: every count takes longer, so fewer threads do not help."""
    machine = Machine(4, quiet)
    machine.run(5)
    machine.cost = lambda n_threads, n_rows: 20 * quiet(n_threads, n_rows)
    machine.run(120)
    assert machine.n_threads == 4
    assert len(machine.changes) <= 2


def test_one_slow_step_is_no_collapse() -> None:
    machine = Machine(4, quiet)
    for _ in range(20):
        machine.run(1)
        machine.watch.observe(1, 1.0, machine.now)
        machine.watch.observe(1, 1.0, machine.now)
    assert machine.watch.n_threads == 4


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.integers(1, 512), st.floats(1e-6, 1e3), st.floats(0, 1e3)), max_size=200),
)
def test_there_is_always_a_sensible_count(n_threads: int, steps: list[tuple[int, float, float]]) -> None:
    watch, now, current = ThreadWatch(n_threads), 0.0, n_threads
    for n_rows, seconds, pause_s in steps:
        now += seconds + pause_s
        changed = watch.observe(n_rows, seconds, now)
        current = current if changed is None else changed
        assert 1 <= current <= n_threads and current == watch.n_threads
