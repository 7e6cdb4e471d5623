"""Strangers' work waits in order, for as long as it is told to, and none of it is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshswarm.stage.engine.gate import Gate


def test_an_open_gate_lets_everything_through_in_order() -> None:
    gate: Gate[str] = Gate()
    for slot, name in enumerate("abc"):
        gate.arrive(slot, name)
    assert gate.wait_s(0.0) == 0.0
    assert gate.passed(0.0) == ["a", "b", "c"]
    assert gate.passed(0.0) == [] and gate.wait_s(0.0) is None


def test_a_shut_gate_opens_when_the_share_changes() -> None:
    gate: Gate[str] = Gate()
    gate.set_share(0.0, 10.0)
    gate.arrive(0, "a")
    assert gate.passed(1e9) == [] and gate.wait_s(1e9) is None
    gate.set_share(1.0, 20.0)
    assert gate.passed(20.0) == ["a"]


def test_a_slot_that_ends_takes_its_work_along() -> None:
    gate: Gate[str] = Gate()
    gate.set_share(0.0, 0.0)
    for slot, name in ((0, "a"), (1, "b"), (0, "c")):
        gate.arrive(slot, name)
    assert gate.drop(0) == ["a", "c"] and gate.drop(0) == []
    gate.set_share(1.0, 1.0)
    assert gate.passed(1.0) == ["b"]


@given(st.floats(0.05, 0.95), st.lists(st.floats(0.001, 2.0), min_size=20, max_size=60))
def test_strangers_get_their_share_of_the_time(share: float, turns: list[float]) -> None:
    gate: Gate[int] = Gate()
    gate.set_share(share, 0.0)
    now = worked = 0.0
    for number, seconds in enumerate(turns):
        gate.arrive(0, number)
        now += gate.wait_s(now) or 0.0
        assert gate.passed(now) == [number]
        now += seconds
        worked += seconds
        gate.worked(seconds, now)
    rest = gate.wait_s(now)
    gate.arrive(0, -1)
    now += rest or gate.wait_s(now) or 0.0
    assert abs(worked / now - share) < 1e-6
