"""What time it is in the swarm: the middle of the clocks of those neighbours that this peer chose itself, and its own.

Statements of silence hold a time, so whoever makes or reads one should not depend on one machine's clock. The rule this
file keeps: who came by himself has no voice, and below three voices the own clock alone counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from statistics import median

from meshswarm.identity import PeerId

JURY = 3
_MAX_CLOCKS = 64


class SwarmClock:
    """`now` is any clock that only rises; `started_ms`: Unix time at `now`, by this machine."""

    def __init__(self, now: float, started_ms: int) -> None:
        self._started, self._started_ms = now, started_ms
        self._ahead_s: OrderedDict[PeerId, float] = OrderedDict()

    def heard(self, peer: PeerId, at_ms: int, now: float) -> None:
        """`peer` itself said that it was `at_ms` (Unix time), some seconds ago at most."""
        self._ahead_s.pop(peer, None)
        self._ahead_s[peer] = at_ms / 1000 - self._own_s(now)
        if len(self._ahead_s) > _MAX_CLOCKS:
            self._ahead_s.popitem(last=False)

    def time_s(self, now: float, voices: Iterable[PeerId]) -> float:
        """Unix time in seconds, by the clocks of `voices` and this machine's."""
        ahead_s = [self._ahead_s[peer] for peer in voices if peer in self._ahead_s]
        return self._own_s(now) + (median([0.0, *ahead_s]) if len(ahead_s) >= JURY else 0.0)

    def _own_s(self, now: float) -> float:
        return self._started_ms / 1000 + max(0.0, now - self._started)
