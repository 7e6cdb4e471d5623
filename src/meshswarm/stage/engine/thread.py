"""The engine's thread: takes work in, chooses what is computed together, computes, answers.

The rule this file keeps: this thread alone touches llama.cpp. Work comes through one inbox, in order; answers leave
through `deliver`, all of a turn at once. Inside, a session has a sequence of llama.cpp's, not its slot: sequences are
given out in the order of the sessions' first jobs, which is about the same on every span of a route, so that sessions
that are neighbours here are neighbours everywhere.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshswarm.errors import MeshswarmError
from meshswarm.stage.engine.batching import Backlog, Shape, Turn, Waiting
from meshswarm.stage.engine.benchmark import Speed
from meshswarm.stage.engine.compute import SpanComputer
from meshswarm.stage.engine.gate import Gate
from meshswarm.stage.engine.grouping import Grouping
from meshswarm.stage.engine.jobs import EngineError, EngineInputError, Job, JobResult, SliceShape
from meshswarm.stage.engine.profile import EXACT_MIN_ROWS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job, and who is told of its outcome. `is_own`: of this peer's own head."""

    job: Job
    on_done: Callable[[JobResult | Exception], None]
    is_own: bool


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """The slot `target`, which has had no job yet, is to hold the first `n_positions` of `source`."""

    source: int
    target: int
    n_positions: int
    on_done: Callable[[Exception | None], None]


@dataclass(frozen=True, slots=True)
class Released:
    slot: int


@dataclass(frozen=True, slots=True)
class Weighed:
    slot: int
    weight: float


@dataclass(frozen=True, slots=True)
class Shared:
    """Strangers' part of the time."""

    share: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an order: its result, what it failed with, or None for a copy that is made."""

    order: Submitted | CopyOrder
    outcome: JobResult | Exception | None


Order = Submitted | CopyOrder | Released | Weighed | Shared


class EngineThread:
    """`speed`: what was measured at load. `deliver` is called on the thread, and must not block."""

    def __init__(
        self, computer: SpanComputer, shape: SliceShape, speed: Speed, deliver: Callable[[list[Answer]], None]
    ) -> None:
        self._computer = computer
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._gate: Gate[Submitted] = Gate()
        self._backlog: Backlog[Submitted] = Backlog(shape.max_rows, can_fill=computer.slots.can_fill)
        self._grouping = Grouping(is_first=shape.is_first, turn_s=_turn_s(speed, len(shape.span)))
        self._sequence_of: dict[int, int] = {}
        self._free_sequences = list(range(len(computer.n_held)))
        self._rows_lock = threading.Lock()
        self._end_lock = threading.Lock()
        self._end: EngineError | None = None  # why it computes no more
        self._under_way: Sequence[Submitted] = ()
        self._thread = threading.Thread(target=self._serve, name=f"engine {shape.span}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """It computes no more, because it was told to end or because it broke."""
        return self._end is not None

    def put(self, order: Order | None) -> None:
        """Hand in an order, from any thread; None ends the thread."""
        with self._end_lock:
            if self._end is None:
                self._inbox.put(order)
                return
        self._give_up([order], self._end)

    def join(self) -> None:
        self._thread.join()

    def full_row(self, slot: int, row: int) -> NDArray[np.float32]:
        """All logits of the `row`-th output of the slot's last job, which was answered; from any thread."""
        with self._rows_lock:  # an answer may arrive a moment before its rows are kept
            kept: NDArray[np.float32] = self._computer.full_rows[self._sequence_of[slot]][row]
        return kept

    # -- the thread

    def _serve(self) -> None:
        end = EngineError("the engine was stopped")
        try:
            while (turn := self._next_turn()) is not None:
                self._under_way = turn.items
                began = time.monotonic()
                outcomes = self._compute(turn)
                ended = time.monotonic()
                with self._rows_lock:
                    self._answer([Answer(order, outcome) for order, outcome in zip(turn.items, outcomes, strict=True)])
                    self._under_way = ()
                    self._computer.keep_rows()
                self._note_turn(turn, began, ended)
        except Exception as error:  # a fault of ours must not leave sessions waiting for ever
            logger.exception("the engine's thread broke")
            end = EngineError(f"the engine failed in a way it should not, and computes no more: {error!r}")
        self._computer.close()
        with self._end_lock:
            self._end = end
        left: list[Order | None] = [*self._under_way]
        left += [submitted for slot in range(len(self._computer.n_held)) for submitted in self._drop(slot)]
        while not self._inbox.empty():
            left.append(self._inbox.get())
        self._give_up(left, end)

    def _give_up(self, orders: Sequence[Order | None], end: EngineError) -> None:
        """Answer those that wait for one."""
        self._answer([Answer(order, end) for order in orders if isinstance(order, Submitted | CopyOrder)])

    def _note_turn(self, turn: Turn[Submitted], began: float, ended: float) -> None:
        if turn.shape.is_short:
            self._grouping.computed(turn.slots, ended)
            if turn.shape.n_rows <= EXACT_MIN_ROWS:
                self._grouping.took(len(turn.slots) + len(turn.fills), ended - began)
        self._note_next(turn.slots, ended)
        if not all(submitted.is_own for submitted in turn.items):
            self._gate.worked(ended - began, ended)

    def _compute(self, turn: Turn[Submitted]) -> Sequence[JobResult | Exception]:
        jobs = [replace(submitted.job, slot=slot) for submitted, slot in zip(turn.items, turn.slots, strict=True)]
        try:
            return self._computer.compute(jobs, turn.fills)
        except Exception as error:  # a fault of ours must not leave sessions waiting for ever
            for job in jobs:
                self._computer.clear(job.slot)
            return [EngineError(f"the engine failed in a way it should not: {error!r}")] * len(jobs)

    def _next_turn(self) -> Turn[Submitted] | None:
        """Wait until there is something to compute; None when told to stop."""
        while True:
            now = time.monotonic()
            for submitted in self._gate.passed(now):
                self._enqueue(submitted, now)
            timeout_s = self._gate.wait_s(now)
            if self._backlog and self._inbox.empty():
                has_short, has_long = self._backlog.waiting_kinds()
                plan = self._grouping.plan(now) if has_short else None
                if plan is None or plan.groups or has_long or plan.wait_until <= now:
                    return self._backlog.next_turn(plan.groups if plan is not None and plan.groups else None)
                timeout_s = max(0.0, min(plan.wait_until - now, np.inf if timeout_s is None else timeout_s))
            elif self._backlog:
                timeout_s = None
            try:
                order = self._inbox.get(timeout=timeout_s)
            except queue.Empty:
                continue
            if order is None:
                return None
            self._take(order)

    def _take(self, order: Order) -> None:
        match order:
            case Submitted(job, _, is_own):
                if is_own:
                    self._enqueue(order, time.monotonic())
                else:
                    self._gate.arrive(job.slot, order)
            case CopyOrder():
                self._answer([Answer(order, self._copy(order))])
            case Released(slot):
                self._release(slot)
            case Weighed(slot, weight):
                self._backlog.set_weight(self._sequence(slot), weight)
            case Shared(share):
                self._gate.set_share(share, time.monotonic())

    def _enqueue(self, submitted: Submitted, now: float) -> None:
        job = submitted.job
        shape = Shape(job.n_computed, job.profile, job.hidden is not None, job.stop_layer)
        sequence = self._sequence(job.slot)
        if self._backlog.add(Waiting(sequence, shape, len(job.outputs), submitted)):
            self._note_next([sequence], now)

    def _note_next(self, sequences: Sequence[int], now: float) -> None:
        """Tell the grouping what these sequences want next, if they want anything yet."""
        for sequence in sequences:
            shape = self._backlog.next_shape(sequence)
            if shape is not None and shape.is_short:
                self._grouping.arrived(sequence, now)
            elif shape is not None:
                self._grouping.forget(sequence)

    def _copy(self, order: CopyOrder) -> Exception | None:
        source = self._sequence_of.get(order.source)
        if source is None:
            return EngineInputError(f"there is nothing in slot {order.source} to copy")
        try:
            self._computer.slots.copy(source, self._sequence(order.target), order.n_positions)
        except MeshswarmError as error:
            return error
        except Exception as error:  # a fault of ours must not end the thread
            return EngineError(f"the engine failed in a way it should not: {error!r}")
        return None

    def _release(self, slot: int) -> None:
        dropped = self._drop(slot)
        self._answer([Answer(submitted, EngineError("the session was ended")) for submitted in dropped])
        with self._rows_lock:
            sequence = self._sequence_of.pop(slot, None)
        if sequence is not None:
            self._computer.clear(sequence)
            self._grouping.forget(sequence)
            heapq.heappush(self._free_sequences, sequence)

    def _sequence(self, slot: int) -> int:
        """The slot's sequence, the lowest free one when it has none yet."""
        sequence = self._sequence_of.get(slot)
        if sequence is None:
            sequence = self._sequence_of[slot] = heapq.heappop(self._free_sequences)
        return sequence

    def _drop(self, slot: int) -> list[Submitted]:
        """Forget what waits of a slot and return it."""
        sequence = self._sequence_of.get(slot)
        return [*(() if sequence is None else self._backlog.drop(sequence)), *self._gate.drop(slot)]

    def _answer(self, answers: list[Answer]) -> None:
        if answers:
            self._deliver(answers)


def _turn_s(speed: Speed, n_layers: int) -> dict[int, float]:
    """Seconds of a turn, by the number of sessions in it."""
    us = {1: speed.us_per_layer, 4: speed.us_per_layer_4, 16: speed.us_per_layer_16}
    return {n_sessions: each * n_layers / 1e6 for n_sessions, each in us.items() if each}
