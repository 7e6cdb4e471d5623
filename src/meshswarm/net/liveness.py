"""When to ask a peer whether it still lives, and when to call it lost. Pure code: time comes in, verdicts go out.

A connection that something depends on is *held*: probed after 1 s of silence, lost after 4 s. Others are probed after
15 s and lost after 30 s, which costs next to nothing. The rule this file keeps: only silence while this process was
listening counts. A laptop that slept wakes up with a probe, not with a list of dead friends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Pace:
    """Probe after `probe_s` of silence (and again each `probe_s`), lost after `lost_s`."""

    probe_s: float
    lost_s: float


HELD = Pace(1.0, 4.0)
FREE = Pace(15.0, 30.0)
SUSPECT_S = 1.0  # how long a peer may stay silent after the network said that nobody is there
_OVERSLEPT_S = 1.0  # a check that comes this much too late means that this process did not run


class Verdict(Enum):
    QUIET = "nothing to do"
    PROBE = "ask the peer for a sign of life"
    LOST = "the peer is gone"


class Liveness:
    """Watches one connection. Call `check` at `next_at`; it may be called at any other time too."""

    def __init__(self, now: float) -> None:
        self._holds = 0
        self._quiet_from = now  # silence is counted from here
        self._probed_at: float | None = None  # last probe that was not followed by a sign of life
        self._suspect_since: float | None = None
        self._awake_until = now + FREE.probe_s

    @property
    def pace(self) -> Pace:
        return HELD if self._holds else FREE

    @property
    def is_held(self) -> bool:
        return self._holds > 0

    @property
    def is_suspect(self) -> bool:
        """The network said that nobody is there, and nobody has spoken since."""
        return self._suspect_since is not None

    @property
    def next_at(self) -> float:
        """When `check` should be called next."""
        pace = self.pace
        probe_at = (self._quiet_from if self._probed_at is None else self._probed_at) + pace.probe_s
        return min(probe_at, self._lost_at())

    def hold(self, now: float) -> None:
        """Somebody depends on this peer from now on; the silence of idle times is forgiven."""
        self._holds += 1
        if self._holds == 1:
            self._quiet_from = max(self._quiet_from, now - HELD.probe_s)  # probe at once if it was silent before
            self._probed_at = None

    def release(self) -> None:
        self._holds -= 1

    def heard(self, at: float) -> None:
        """A packet that really came from the peer arrived."""
        if at > self._quiet_from:
            self._quiet_from = at
            self._probed_at = self._suspect_since = None

    def suspect(self, now: float) -> None:
        """The network said that nobody is there: a hint that anybody could forge, so the peer may still answer."""
        if self._suspect_since is None:
            self._suspect_since = now
            self._probed_at = now - self.pace.probe_s  # probe at the next check

    def check(self, now: float) -> Verdict:
        overslept = now > self._awake_until + _OVERSLEPT_S
        if overslept:
            self._quiet_from = now
            self._suspect_since = None
        verdict = self._verdict(now, overslept)
        if verdict is Verdict.PROBE:
            self._probed_at = now
        self._awake_until = max(now, self.next_at)
        return verdict

    def _verdict(self, now: float, overslept: bool) -> Verdict:
        if overslept:
            return Verdict.PROBE
        if now >= self._lost_at():
            return Verdict.LOST
        last = self._quiet_from if self._probed_at is None else self._probed_at
        return Verdict.PROBE if now >= last + self.pace.probe_s else Verdict.QUIET

    def _lost_at(self) -> float:
        at = self._quiet_from + self.pace.lost_s
        return at if self._suspect_since is None else min(at, self._suspect_since + SUSPECT_S)
