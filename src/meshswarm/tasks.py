"""Background tasks that belong to somebody, and whose failures are one task's own.

A bare `asyncio.TaskGroup` ends everything in it when one task fails. A peer must not die of one session's mistake, so
what runs here reports its failure and ends alone; leaving the group still waits for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """Tasks of one `asyncio.TaskGroup`. `on_failure` hears of every exception that left a task."""

    def __init__(self, group: asyncio.TaskGroup, on_failure: Callable[[Exception], None]) -> None:
        self._group = group
        self._on_failure = on_failure

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` until it ends, fails or the group is left."""
        return self._group.create_task(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._on_failure(error)
