"""The machine's owner comes first: when strangers' work should make room, and when it may go on (`serve --yield`).

The rule this file keeps: readings and the clock come in as arguments, and a mode lasts: what makes room at one load
makes no use of the machine again before the load has clearly gone for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

SMOOTHING_S = 3.0
CROWDED = 0.98
"""Processors that others use and those computing would use, as a share of all: from here on they contend."""
CALM = 0.85
NOTICED = 0.10
"""A share of the processors that others must use at least to count: less is the system's own."""
UNNOTICED = 0.07
THROTTLE_AFTER_S = 3.0
PAUSE_AFTER_S = 10.0
EASE_AFTER_S = 20.0


class Mode(Enum):
    """The value is the share of the time in which strangers' work is computed."""

    FULL = 1.0
    THROTTLED = 0.25
    PAUSED = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The machine at one moment: the share of all processors that programs other than this one use, and its power."""

    foreign_share: float
    on_battery: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """How much may be computed for strangers, and why it is less than all."""

    mode: Mode
    reason: str


AT_EASE = Standing(Mode.FULL, "")


class OwnerFirst:
    """Decides from readings, a few a second to one in a few seconds. `own_share`: the share of all processors that the
    threads of this peer take when they compute."""

    def __init__(self, own_share: float) -> None:
        self._own_share = min(1.0, own_share)
        self._foreign_share = 0.0
        self._read_at: float | None = None
        self._crowded_since: float | None = None
        self._quiet_since: float | None = None  # no longer crowded, or calm where that is asked for
        self.standing = AT_EASE

    def observe(self, reading: Reading, now: float) -> Standing:
        """What holds from now on."""
        self._smooth(reading.foreign_share, now)
        if reading.on_battery:
            self._crowded_since = self._quiet_since = None
            self.standing = Standing(Mode.PAUSED, "the machine runs on battery")
            return self.standing
        if self._is_crowded():
            self._quiet_since = None
            self._crowded_since = now if self._crowded_since is None else self._crowded_since
            self._make_room(now - self._crowded_since)
        else:
            self._crowded_since = None
            self._ease(now)
        return self.standing

    def _smooth(self, foreign_share: float, now: float) -> None:
        elapsed_s = math.inf if self._read_at is None else max(0.0, now - self._read_at)
        self._read_at = now
        weight = 1 - math.exp(-elapsed_s / SMOOTHING_S)
        self._foreign_share += weight * (min(1.0, max(0.0, foreign_share)) - self._foreign_share)

    def _is_crowded(self) -> bool:
        return self._foreign_share >= NOTICED and self._foreign_share + self._own_share >= CROWDED

    def _is_calm(self) -> bool:
        return self._foreign_share < UNNOTICED or self._foreign_share + self._own_share <= CALM

    def _make_room(self, crowded_s: float) -> None:
        reason = f"other programs use {100 * self._foreign_share:.0f} % of the processors"
        if self.standing.mode is Mode.PAUSED or crowded_s >= PAUSE_AFTER_S:
            self.standing = Standing(Mode.PAUSED, reason)
        elif self.standing.mode is Mode.THROTTLED or crowded_s >= THROTTLE_AFTER_S:
            self.standing = Standing(Mode.THROTTLED, reason)

    def _ease(self, now: float) -> None:
        """One step up, when the next one has been allowed for long enough."""
        if self.standing.mode is Mode.FULL or (self.standing.mode is Mode.THROTTLED and not self._is_calm()):
            self._quiet_since = None
            return
        self._quiet_since = now if self._quiet_since is None else self._quiet_since
        if now - self._quiet_since < EASE_AFTER_S:
            return
        self._quiet_since = None
        if self._is_calm():
            self.standing = AT_EASE
        else:
            self.standing = Standing(Mode.THROTTLED, self.standing.reason)
