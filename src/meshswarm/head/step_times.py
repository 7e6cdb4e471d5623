"""What the decode steps of a session take, from being sent to their result: all that a head sees of others' speed.

The rule this file keeps: the usual step counts, not the sum. A step that waited for somebody else's prompt says nothing
of its peers, and steps of different numbers of rows are not mixed.
"""

from __future__ import annotations

import statistics
from collections import deque

LEAST = 4  # steps of one kind: fewer say nothing
ENOUGH = 16  # steps after which it is worth asking
_KEPT = 64


class StepTimes:
    """Of one session. `n`: steps since the last `take`."""

    def __init__(self) -> None:
        self.n = 0
        self._by_rows: dict[int, deque[float]] = {}

    def note(self, n_rows: int, seconds: float) -> None:
        """One step of `n_rows` rows: the last token, and what was guessed behind it."""
        self.n += 1
        self._by_rows.setdefault(n_rows, deque(maxlen=_KEPT)).append(seconds)

    def take(self) -> tuple[int, float] | None:
        """The number of rows that most steps had, and the middle of what those took, in seconds; None while there were
        too few of them. What was taken is gone."""
        if not self._by_rows:
            return None
        n_rows, seconds = max(self._by_rows.items(), key=lambda each: (len(each[1]), -each[0]))
        if len(seconds) < LEAST:
            return None
        self.n = 0
        self._by_rows = {}
        return n_rows, statistics.median(seconds)
