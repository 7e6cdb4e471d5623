"""How many times as long as on an idle machine the last decode steps took: whoever shares the machine wants to know.

The rule this file keeps: it compares with what was measured at load and forgets what it was asked about.
"""

from __future__ import annotations

import statistics
from collections import deque

from meshswarm.stage.engine.benchmark import Speed

MAX_STEPS = 64


class Slowdown:
    """Of an engine with `n_layers` layers that were as fast as `speed` says when they were loaded."""

    def __init__(self, speed: Speed, n_layers: int) -> None:
        self._speed = speed
        self._n_layers = n_layers
        self._ratios: deque[float] = deque(maxlen=MAX_STEPS)

    def observe(self, n_rows: int, compute_s: float) -> None:
        """A turn of `n_rows` single rows, each of another session, through all layers took so long."""
        usual_s = self._usual_s(n_rows)
        if usual_s > 0:
            self._ratios.append(compute_s / usual_s)

    def take(self) -> float | None:
        """The middle one of the steps since the last call; None without any."""
        if not self._ratios:
            return None
        ratio = statistics.median(self._ratios)
        self._ratios.clear()
        return ratio

    def _usual_s(self, n_rows: int) -> float:
        """From the two counts beside it that were measured; 0 where there are none."""
        speed = self._speed
        measured = [(1, speed.us_per_layer), (4, speed.us_per_layer_4), (16, speed.us_per_layer_16)]
        known = [(rows, us) for rows, us in measured if us > 0]
        below = [each for each in known if each[0] <= n_rows]
        above = [each for each in known if each[0] >= n_rows]
        if not below or not above:
            return 0.0
        (low, low_us), (high, high_us) = below[-1], above[0]
        share = 0.0 if high == low else (n_rows - low) / (high - low)
        return (low_us + share * (high_us - low_us)) * self._n_layers / 1e6
