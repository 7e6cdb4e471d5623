"""An event loop whose time is virtual: it jumps to the next thing that is due, so hours pass in seconds.

The rule this file keeps: with one seed there is one run. Time moves by timers alone, tasks are ordered by their making
and never by where they lie in memory, and a loop on which nothing can ever happen any more says so at once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

START_S = 1_800_000_000.0
"""Unix time at the start of every simulation."""

_T = TypeVar("_T")
_numbers = itertools.count()


class NothingLeftError(RuntimeError):
    """Somebody waits, and nothing is left that could ever wake him."""


class _Task(asyncio.Task[Any]):
    """A task with a hash of its own: sets of tasks are then walked in the same order in every run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Selector:
    """Where a real loop sleeps until its next timer, this one moves the clock there."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise NothingLeftError("nothing is left to happen, and the simulation still waits")
        if timeout > 0:
            self._loop.now_s += timeout
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """`now_s`: virtual seconds since the start."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._selector = _Selector(self)
        self._clock_resolution = 1e-6  # sums of floats end a little before what they should reach
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        """What a wall clock would show."""
        return START_S + self.now_s

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def _make_task(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, _T], **kwargs: Any) -> asyncio.Task[_T]:
    return _Task(coro, loop=loop, **kwargs)


def simulate(main: Coroutine[Any, Any, _T], loop: VirtualLoop) -> _T:
    """Runs `main` to its end in virtual time, then cancels whatever it left behind."""
    try:
        return loop.run_until_complete(main)
    finally:
        left = sorted(asyncio.all_tasks(loop), key=hash)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
