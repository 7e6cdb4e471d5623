"""The shell around `ActivationLog`: spills off the event loop, and wipes on time."""

from __future__ import annotations

import asyncio

from meshswarm.stage.sessions.activation_log import ActivationLog, HopLog, Retention, spill
from meshswarm.stage.sessions.messages import Step
from meshswarm.tasks import Tasks


class SentRows:
    """Keeps what this peer's spans sent to the next ones. `tasks` owns the writing to disk."""

    def __init__(self, log: ActivationLog, tasks: Tasks) -> None:
        self.log = log
        self._tasks = tasks
        self._spilling: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def open(self, n_copied: int = 0) -> HopLog:
        """A log for one session's hop, which begins with `n_copied` positions of which the rows are not kept."""
        return self.log.open(Retention.DISK, n_copied)

    def keep(self, hop: HopLog, step: Step) -> None:
        """`step` was just sent."""
        assert step.hidden is not None
        if step.truncate_to is not None:
            hop.truncate_to(step.truncate_to)
        hop.append(step.seq, step.pos0, step.n_rows, step.hidden)
        if self.log.memory_bytes > self.log.limits.memory_bytes // 2:
            self._spill()

    def close(self, hop: HopLog) -> None:
        """The session ended in good order: its rows stay for the audit window."""
        hop.close(asyncio.get_running_loop().time())
        self._arm()

    def wipe(self, hop: HopLog) -> None:
        """The session broke or was cancelled: nothing was signed, so there is nothing to audit."""
        on_disk = hop.disk_bytes > 0
        hop.wipe()
        if on_disk:
            self._spill()

    async def stop(self) -> None:
        """Forget everything, the disk's part included."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._spilling is not None:
            await asyncio.wait({self._spilling})
        await asyncio.to_thread(self.log.wipe_all)

    def _spill(self) -> None:
        if self._spilling is None or self._spilling.done():
            self._spilling = self._tasks.create_task(spill(self.log))

    def _arm(self) -> None:
        due = self.log.next_expiry
        if due is not None and self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        on_disk = self.log.disk_bytes > 0
        self.log.expire(asyncio.get_running_loop().time())
        if on_disk:
            self._spill()
        self._arm()
