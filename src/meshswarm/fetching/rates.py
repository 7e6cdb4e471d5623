"""How fast pieces may go out and come in, and how seeding makes way for inference.

The rule this file keeps: it decides from what it is told and the time, and touches no socket. Whoever asked for a limit
never gets more than that; while sessions compute here, what goes out is cut until steps are about as fast as without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FIRST_BUSY_BYTES_S = 4 << 20
"""What may go out when a session begins, before anything was measured beside it."""
LEAST_BUSY_BYTES_S = 128 << 10
"""Seeding never stops: a swarm that only computes could not grow."""
SLOW, FINE = 1.10, 1.05
"""Steps this many times as long as when nothing was sent mean: less. Below the second: a little more."""
CUT, RAISE = 0.6, 1.15
QUIET_S = 3.0
"""How long nobody must have computed here before seeding goes at full rate again."""
NO_LIMIT = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes a second that a person allows, in each direction; 0: as much as there is."""

    down_bytes_s: int = NO_LIMIT
    up_bytes_s: int = NO_LIMIT


class UploadShare:
    """What may go out now. Additive cuts would be too slow and none too rude: it is multiplied, both ways.

    Congestion control in a nutshell (D.-M. Chiu and R. Jain, 1989): the shared good is the machine's time, and a slow
    step is the sign that too much of it is taken.
    """

    def __init__(self, most_bytes_s: int = NO_LIMIT) -> None:
        self._most = most_bytes_s
        self._busy_bytes_s = float(FIRST_BUSY_BYTES_S)
        self._busy_at: float | None = None

    def observe(self, now: float, *, is_busy: bool, slowdown: float | None) -> int:
        """The limit from now on, in bytes a second; 0: none. `slowdown`: how many times as long as on an idle machine
        the last steps took, None where none was timed since."""
        if is_busy:
            if self._busy_at is None:
                self._busy_bytes_s = max(self._busy_bytes_s, LEAST_BUSY_BYTES_S)
            self._busy_at = now
        elif self._busy_at is not None and now - self._busy_at >= QUIET_S:
            self._busy_at = None
        if self._busy_at is None:
            return self._most
        if is_busy and slowdown is not None:
            self._busy_bytes_s *= CUT if slowdown > SLOW else RAISE if slowdown < FINE else 1.0
            self._busy_bytes_s = min(max(self._busy_bytes_s, LEAST_BUSY_BYTES_S), float(1 << 34))
        limit = int(self._busy_bytes_s)
        return limit if self._most == NO_LIMIT else min(limit, self._most)


class Rates:
    """Tells whoever sends pieces how fast, whenever that changes. `limit(down, up)` sets bytes a second, 0 for none;
    `is_busy()`: sessions compute here; `slowdown()`: as `UploadShare.observe` takes it."""

    PERIOD_S = 0.5

    def __init__(
        self,
        limits: Limits,
        limit: Callable[[int, int], None],
        is_busy: Callable[[], bool],
        slowdown: Callable[[], float | None],
    ) -> None:
        self._limits = limits
        self._limit = limit
        self._is_busy = is_busy
        self._slowdown = slowdown
        self._share = UploadShare(limits.up_bytes_s)
        self._told: tuple[int, int] | None = None

    @property
    def up_bytes_s(self) -> int:
        """The limit that holds now; 0: none."""
        return 0 if self._told is None else self._told[1]

    def look(self, now: float) -> None:
        """To be called every `PERIOD_S`."""
        up = self._share.observe(now, is_busy=self._is_busy(), slowdown=self._slowdown())
        told = (self._limits.down_bytes_s, up)
        if told != self._told:
            self._told = told
            self._limit(*told)


class Pacer:
    """Spreads bytes over time: at most `bytes_s` a second, a second's worth at once; 0: no limit."""

    def __init__(self, bytes_s: int) -> None:
        self._bytes_s = bytes_s
        self._free_at = float("-inf")

    def wait_s(self, n_bytes: int, now: float) -> float:
        """How long to wait before more bytes are taken, `n_bytes` having come at `now`."""
        if self._bytes_s == NO_LIMIT:
            return 0.0
        self._free_at = max(self._free_at, now - 1.0) + n_bytes / self._bytes_s
        return max(0.0, self._free_at - now)
