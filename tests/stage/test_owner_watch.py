"""What the owner's programs use is told from what this one uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from meshswarm.stage import owner_watch
from meshswarm.stage.owner_watch import LoadMeter


class Machine:
    """Counters as psutil gives them, of two processors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = {"user": 100.0, "system": 10.0, "idle": 50.0, "iowait": 1.0, "steal": 0.0, "guest": 5.0}
        self.own = SimpleNamespace(user=20.0, system=2.0)
        self.battery: Any = None
        monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(cpu_times=lambda: self.own))
        monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(_asdict=lambda: dict(self.times)))
        monkeypatch.setattr(psutil, "sensors_battery", lambda: self.battery, raising=False)

    def spend(self, *, own: float, foreign: float, idle: float) -> None:
        self.times["user"] += own + foreign
        self.times["idle"] += idle
        self.own.user += own


def test_own_work_is_not_the_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    meter = LoadMeter()
    machine.spend(own=1.0, foreign=0.5, idle=0.5)
    assert meter.read().foreign_share == pytest.approx(0.25)
    machine.spend(own=2.0, foreign=0.0, idle=0.0)
    assert meter.read().foreign_share == pytest.approx(0.0)
    machine.times["guest"] += 1.0
    machine.spend(own=0.0, foreign=1.8, idle=0.2)
    assert meter.read().foreign_share == pytest.approx(0.9)


def test_counters_that_stand_still_or_disagree_are_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    meter = LoadMeter()
    assert meter.read().foreign_share == 0.0
    machine.spend(own=0.0, foreign=0.0, idle=1.0)
    machine.own.user += 5.0
    assert meter.read().foreign_share == 0.0


@pytest.mark.parametrize(
    ("battery", "expected"),
    [
        (None, False),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=None), False),  # the system does not know
        (SimpleNamespace(power_plugged=False), True),
    ],
)
def test_a_battery_counts_when_it_is_what_the_machine_runs_on(
    monkeypatch: pytest.MonkeyPatch, battery: Any, expected: bool
) -> None:
    machine = Machine(monkeypatch)
    machine.battery = battery
    assert LoadMeter().read().on_battery is expected


def test_a_system_without_batteries_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    monkeypatch.delattr(owner_watch.psutil, "sensors_battery")
    assert not LoadMeter().read().on_battery


def test_this_machine_can_be_read() -> None:
    meter = LoadMeter()
    sum(range(10**6))
    assert 0.0 <= meter.read().foreign_share <= 1.0
