"""Reads how busy the machine is with other programs, and whether it runs on battery.

The rule this file keeps: it only reads; `OwnerFirst` decides. What a system cannot tell counts as "nothing".
"""

from __future__ import annotations

import psutil

from meshswarm.stage.owner_first import Reading

_IDLE = frozenset({"idle", "iowait", "steal"})  # steal is the work of other machines on the same hardware
_COUNTED_IN_USER = frozenset({"guest", "guest_nice"})


class LoadMeter:
    """Each `read` covers the time since the one before."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._machine_s = self._busy_and_total_s()
        self._own_s = self._own_busy_s()

    def read(self) -> Reading:
        busy_s, total_s = self._busy_and_total_s()
        own_s = self._own_busy_s()
        elapsed_s = total_s - self._machine_s[1]
        foreign_s = (busy_s - self._machine_s[0]) - (own_s - self._own_s)
        self._machine_s, self._own_s = (busy_s, total_s), own_s
        share = foreign_s / elapsed_s if elapsed_s > 0 else 0.0
        return Reading(min(1.0, max(0.0, share)), _is_on_battery())

    def _own_busy_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _busy_and_total_s(self) -> tuple[float, float]:
        """Of all processors together."""
        times = psutil.cpu_times()._asdict()
        counted = {name: seconds for name, seconds in times.items() if name not in _COUNTED_IN_USER}
        return sum(seconds for name, seconds in counted.items() if name not in _IDLE), sum(counted.values())


def _is_on_battery() -> bool:
    read = getattr(psutil, "sensors_battery", None)  # not on every system
    try:
        battery = None if read is None else read()
    except (OSError, RuntimeError, NotImplementedError):
        return False
    return battery is not None and battery.power_plugged is False
