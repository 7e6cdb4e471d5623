"""How fast a download goes, when it has stalled, and how long to wait before asking again.

The rule this file keeps: time and chance come in as arguments. A server that drips is as bad as one that is silent,
and one that gave something new deserves another try.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

_RATE_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """`bytes_s`: over the last ten seconds. `eta_s`: None while that is 0."""

    done_bytes: int
    total_bytes: int
    bytes_s: float
    eta_s: float | None


class Meter:
    """Counts bytes as they come. `done`: what was there before."""

    def __init__(self, total: int, done: int, now: float) -> None:
        self._total = total
        self._done = done
        self._marks: deque[tuple[float, int]] = deque([(now, done)])

    def add(self, n_bytes: int, now: float) -> DownloadProgress:
        self._done += n_bytes
        self._marks.append((now, self._done))
        while len(self._marks) > 2 and self._marks[1][0] < now - _RATE_WINDOW_S:
            self._marks.popleft()
        return self.progress(now)

    def progress(self, now: float) -> DownloadProgress:
        since, had = self._marks[0]
        rate = (self._done - had) / (now - since) if now > since else 0.0
        return DownloadProgress(self._done, self._total, rate, (self._total - self._done) / rate if rate > 0 else None)


@dataclass(slots=True)
class StallWatch:
    """A transfer may take `patience_s` for every `min_bytes`, and no longer."""

    patience_s: float
    min_bytes: int
    deadline: float = 0.0
    _owed: int = field(default=0)

    def start(self, now: float) -> None:
        self._owed = self.min_bytes
        self.deadline = now + self.patience_s

    def feed(self, n_bytes: int, now: float) -> None:
        self._owed -= n_bytes
        if self._owed <= 0:
            self.start(now)


@dataclass(slots=True)
class Retries:
    """How often and how long to try. Anything new that came makes up for all failures before it."""

    max_at_first: int = 3
    """Failures that are borne while nothing ever came: a wrong name, say, or no network at all."""
    max_in_a_row: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    longest_asked_s: float = 120.0
    """A server that wants us to wait longer than that is not waited for."""
    n_in_a_row: int = 0
    has_progressed: bool = False

    def progressed(self) -> None:
        self.n_in_a_row = 0
        self.has_progressed = True

    def wait_s(self, asked_s: float | None, rng: random.Random) -> float | None:
        """Seconds to wait after another failure, of which the server itself asked for `asked_s`; None: give up."""
        self.n_in_a_row += 1
        borne = self.max_in_a_row if self.has_progressed else self.max_at_first
        if self.n_in_a_row > borne or (asked_s is not None and asked_s > self.longest_asked_s):
            return None
        backoff = min(self.longest_wait_s, self.first_wait_s * 2.0 ** (self.n_in_a_row - 1))
        return max(backoff * rng.uniform(0.5, 1.0), asked_s or 0.0)
