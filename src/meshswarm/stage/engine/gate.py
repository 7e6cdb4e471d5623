"""Where strangers' work waits while the machine's owner comes first.

The rule this file keeps: what belongs to this peer's own head never waits here, and what waits keeps its order. The
clock comes in as an argument; the engine's thread alone calls it.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

T = TypeVar("T")


class Gate(Generic[T]):
    """Lets strangers' jobs through in `share` of the time: all of them at 1, none at 0."""

    def __init__(self) -> None:
        self._share = 1.0
        self._shut_until = -math.inf
        self._waiting: list[tuple[int, T]] = []

    def set_share(self, share: float, now: float) -> None:
        """0 to 1; what is shut opens at once where the share is 1."""
        self._share = share
        self._shut_until = math.inf if share <= 0 else -math.inf if share >= 1 else now

    def arrive(self, slot: int, item: T) -> None:
        """A stranger's job wants through, after those that wait already."""
        self._waiting.append((slot, item))

    def passed(self, now: float) -> list[T]:
        """Those that are let through now, in order."""
        if now < self._shut_until or not self._waiting:
            return []
        items = [item for _, item in self._waiting]
        self._waiting.clear()
        return items

    def worked(self, seconds: float, now: float) -> None:
        """The engine has computed for strangers until `now`: at a share below 1 they wait for the rest of the time."""
        if 0 < self._share < 1:
            self._shut_until = now + seconds * (1 / self._share - 1)

    def wait_s(self, now: float) -> float | None:
        """When something that waits will be let through, None: not before the share changes or something arrives."""
        if not self._waiting or self._shut_until == math.inf:
            return None
        return max(0.0, self._shut_until - now)

    def drop(self, slot: int) -> list[T]:
        """Forget a slot and return what waited of it."""
        dropped = [item for waiting, item in self._waiting if waiting == slot]
        self._waiting = [entry for entry in self._waiting if entry[0] != slot]
        return dropped
