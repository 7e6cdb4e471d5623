"""Which waiting jobs the engine computes next: the queue of every slot, and the choice of one turn.

The rule this file keeps: no I/O, no clock, no thread. One turn is one run of the graph, so its jobs have equal row
counts, profile, entry and exit. Short jobs (decode steps) of all sessions go together, as far as one run takes them; a
long job (a prefill chunk) goes alone, and between two long ones every short job that waits gets its turn. Otherwise
turns are shared out by start-time fair queueing (Goyal, Vin, Cheng 1996), by rows computed and by the slots' weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, TypeVar

from meshswarm.stage.engine.jobs import MAX_OUTPUTS
from meshswarm.stage.engine.profile import EXACT_MAX_ROWS, EXACT_MIN_ROWS, Profile

T = TypeVar("T")
SHORT_ROWS = 16
"""A job up to this many rows is a decode step, or the check of a draft, and shares its turn."""
_FILL_FACTOR = 2
"""With at most this many rows a real one, filling the gaps in a turn costs less than a graph run for each side of them:
measured on a random model of 1 billion weights, 4 slots with a gap behind each took 3.5 times as long as 4 neighbours,
and 8 neighbours 1.4 to 1.7 times."""


class Shape(NamedTuple):
    """What the jobs of one turn have in common: rows computed for each, profile, kind of input, layer of the exit."""

    n_rows: int
    profile: Profile
    takes_hidden: bool
    stop_layer: int

    @property
    def is_short(self) -> bool:
        return self.n_rows <= SHORT_ROWS


class Waiting(NamedTuple, Generic[T]):
    """One job in its slot's queue. `item` is whatever the engine keeps for it."""

    slot: int
    shape: Shape
    n_outputs: int
    item: T


class Turn(NamedTuple, Generic[T]):
    """The jobs of one turn, by rising slot, and the slots between theirs that are computed along for nothing."""

    items: list[T]
    slots: list[int]
    fills: list[int]
    shape: Shape


class _FairShare:
    """Who is next among slots that all want the same thing."""

    def __init__(self) -> None:
        self._now = 0.0
        self._start: dict[int, float] = {}
        self._finish: dict[int, float] = {}

    def wants(self, slot: int) -> None:
        self._start[slot] = max(self._now, self._finish.get(slot, 0.0))

    def got(self, slot: int, cost: float) -> None:
        start = self._start.pop(slot)
        self._now = max(self._now, start)
        self._finish[slot] = start + cost

    def key(self, slot: int) -> tuple[float, float, int]:
        """The smallest is next. Among equals, who finished earlier, then the lower slot."""
        return self._start[slot], self._finish.get(slot, 0.0), slot

    def forget(self, slot: int) -> None:
        self._start.pop(slot, None)
        self._finish.pop(slot, None)


class Backlog(Generic[T]):
    """The jobs that wait, in order for every slot.

    `max_rows` bounds the rows of one turn. `can_fill(slot)`: a slot without a job in the turn may be computed along,
    since it can drop the rows again.
    """

    def __init__(self, max_rows: int, *, can_fill: Callable[[int], bool] = lambda _slot: False) -> None:
        self._max_rows = max_rows
        self._can_fill = can_fill
        self._queues: dict[int, deque[Waiting[T]]] = {}
        self._weights: dict[int, float] = {}
        self._short = _FairShare()
        self._long = _FairShare()
        self._served_at: dict[int, int] = {}
        self._turn = 0
        self._last_long_turn = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, job: Waiting[T]) -> bool:
        """Queue a job behind the others of its slot. Whether it is the only one."""
        queue = self._queues.setdefault(job.slot, deque())
        queue.append(job)
        if len(queue) > 1:
            return False
        self._share_of(job).wants(job.slot)
        return True

    def set_weight(self, slot: int, weight: float) -> None:
        """How large the slot's share is, beside 1 for the others, until it is dropped. Above 0."""
        self._weights[slot] = weight

    def drop(self, slot: int) -> list[T]:
        """Forget a slot and return what waited in it."""
        for forgotten in (self._served_at, self._weights):
            forgotten.pop(slot, None)
        self._short.forget(slot)
        self._long.forget(slot)
        return [job.item for job in self._queues.pop(slot, ())]

    def next_shape(self, slot: int) -> Shape | None:
        """Of the slot's next job."""
        queue = self._queues.get(slot)
        return None if queue is None else queue[0].shape

    def waiting_kinds(self) -> tuple[bool, bool]:
        """Whether any slot's next job is a short one, and whether any is a long one."""
        kinds = {queue[0].shape.is_short for queue in self._queues.values()}
        return True in kinds, False in kinds

    def next_turn(self, groups: Sequence[Collection[int]] | None = None) -> Turn[T]:
        """Take the jobs of the next turn off their queues; something must be waiting.

        `groups`: the slots whose short jobs may be computed now, and which of them together; None: any, and all. A long
        job may go always.
        """
        self._turn += 1
        heads = {slot: queue[0] for slot, queue in self._queues.items()}
        group_of = {slot: number for number, group in enumerate(groups or [heads]) for slot in group}
        all_short = {slot: job for slot, job in heads.items() if job.shape.is_short}
        short = {slot: job for slot, job in all_short.items() if slot in group_of} or all_short
        long = [slot for slot in heads if slot not in all_short]
        due = [slot for slot in short if self._served_at.get(slot, 0) <= self._last_long_turn]
        if long and not due:
            slots = [min(long, key=self._long.key)]
        else:
            first = min(due if long else short, key=self._short.key)
            same = {slot: job for slot, job in short.items() if group_of.get(slot) == group_of.get(first)}
            slots = self._together(same, first)
        shape = heads[slots[0]].shape
        fills = [slot for slot in range(slots[0], slots[-1]) if slot not in slots]
        return Turn([self._take(slot) for slot in slots], slots, fills, shape)

    def _together(self, short: dict[int, Waiting[T]], first: int) -> list[int]:
        """The slots that join `first`. llama.cpp computes a gap in the slots as two graph runs, so there is none, or
        one so small that it is filled."""
        shape = short[first].shape
        slots = sorted(slot for slot, job in short.items() if job.shape == shape)
        while len(slots) > 1 and not self._is_one_run(slots, short):
            slots.pop(0 if first - slots[0] > slots[-1] - first else -1)
        return slots

    def _is_one_run(self, slots: Sequence[int], short: dict[int, Waiting[T]]) -> bool:
        shape = short[slots[0]].shape
        n_across = slots[-1] - slots[0] + 1
        if n_across > len(slots):
            gaps = set(range(slots[0], slots[-1])).difference(slots)
            may_fill = n_across <= _FILL_FACTOR * len(slots) and shape.n_rows <= EXACT_MIN_ROWS
            if not (may_fill and all(map(self._can_fill, gaps))):
                return False
        most_rows = min(EXACT_MAX_ROWS, self._max_rows) if shape.profile is Profile.EXACT else self._max_rows
        n_outputs = sum(short[slot].n_outputs for slot in slots)
        return n_across * shape.n_rows <= most_rows and n_outputs <= MAX_OUTPUTS

    def _take(self, slot: int) -> T:
        queue = self._queues[slot]
        job = queue.popleft()
        self._share_of(job).got(slot, job.shape.n_rows / self._weights.get(slot, 1.0))
        if queue:
            self._share_of(queue[0]).wants(slot)
        else:
            del self._queues[slot]
        self._served_at[slot] = self._turn
        if not job.shape.is_short:
            self._last_long_turn = self._turn
        return job.item

    def _share_of(self, job: Waiting[T]) -> _FairShare:
        return self._short if job.shape.is_short else self._long
