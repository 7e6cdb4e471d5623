"""Which waiting jobs the engine computes next: the queue of every slot, and the choice of one turn.

The rule this file keeps: no I/O, no clock, no thread. One turn is one run of the graph, so its jobs have equal row
counts, profile, entry and exit. Short jobs (decode steps) of all sessions go together; a long job (a prefill chunk)
goes alone, and between two long ones every short job that waits gets its turn. Among equals, who was served longest ago
is next.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from meshswarm.stage.engine_jobs import MAX_OUTPUTS
from meshswarm.stage.profile import EXACT_MAX_ROWS, Profile

T = TypeVar("T")
SHORT_ROWS = 16
"""A job up to this many rows is a decode step, or the check of a draft, and shares its turn."""


class Shape(NamedTuple):
    """What the jobs of one turn have in common: rows computed for each, profile, kind of input, layer of the exit."""

    n_rows: int
    profile: Profile
    takes_hidden: bool
    stop_layer: int


class Waiting(NamedTuple, Generic[T]):
    """One job in its slot's queue. `item` is whatever the engine keeps for it."""

    slot: int
    shape: Shape
    n_outputs: int
    item: T


class Backlog(Generic[T]):
    """The jobs that wait, in order for every slot. `max_rows` bounds the rows of one turn."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._queues: dict[int, deque[Waiting[T]]] = {}
        self._served_at: dict[int, int] = {}
        self._turn = 0
        self._last_long_turn = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, job: Waiting[T]) -> None:
        """Queue a job behind the others of its slot."""
        self._queues.setdefault(job.slot, deque()).append(job)

    def drop(self, slot: int) -> list[T]:
        """Forget a slot and return what waited in it."""
        self._served_at.pop(slot, None)
        return [job.item for job in self._queues.pop(slot, ())]

    def next_turn(self) -> list[T]:
        """Take the jobs of the next turn off their queues, by rising slot. Empty only when nothing waits."""
        self._turn += 1
        heads = {slot: queue[0] for slot, queue in self._queues.items()}
        if len(heads) <= 1:
            return [self._take(slot) for slot in heads]
        short = {slot: job for slot, job in heads.items() if job.shape.n_rows <= SHORT_ROWS}
        long = [slot for slot in heads if slot not in short]
        due = [slot for slot in short if self._served_at.get(slot, 0) <= self._last_long_turn]
        if long and not due:
            slots = [min(long, key=self._longest_ago)]
        else:
            slots = self._together(short, min(due or short, key=self._longest_ago))
        return [self._take(slot) for slot in slots]

    def _longest_ago(self, slot: int) -> tuple[int, int]:
        return self._served_at.get(slot, 0), slot

    def _together(self, short: dict[int, Waiting[T]], first: int) -> list[int]:
        """The slots that join `first`: neighbours, since llama.cpp computes a gap in the slots as two graph runs."""
        shape = short[first].shape
        most_rows = EXACT_MAX_ROWS if shape.profile is Profile.EXACT else self._max_rows
        rows_left = most_rows - shape.n_rows
        outputs_left = MAX_OUTPUTS - short[first].n_outputs
        slots = [first]
        for step in (1, -1):
            slot = first + step
            while (job := short.get(slot)) is not None and job.shape == shape:
                rows_left -= shape.n_rows
                outputs_left -= job.n_outputs
                if rows_left < 0 or outputs_left < 0:
                    return sorted(slots)
                slots.append(slot)
                slot += step
        return sorted(slots)

    def _take(self, slot: int) -> T:
        queue = self._queues[slot]
        job = queue.popleft()
        if not queue:
            del self._queues[slot]
        self._served_at[slot] = self._turn
        if job.shape.n_rows > SHORT_ROWS:
            self._last_long_turn = self._turn
        return job.item
