"""How fast this peer computes its span, measured at load: what its coverage records say and routes are priced by.

The rule this file keeps: the time it takes is bounded, whatever the size of the layers. A step that would not fit into
the budget is not taken, and its figure is 0.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from meshswarm.stage.engine.compute import SpanComputer
from meshswarm.stage.engine.jobs import Job, JobResult, SliceShape
from meshswarm.stage.engine.profile import Profile

LOAD_BUDGET_S = 0.1
"""For each of the figures, when a peer starts."""
_MAX_STEPS = 5
_LARGE_BATCHES = (4, 16)
_PREFILL_ROWS = (128, 64, 32, 16, 8, 4, 2, 1)
_GAIN = 3  # a row among many costs about a third of a row alone: only to see beforehand what fits the budget


@dataclass(frozen=True, slots=True)
class Speed:
    """Microseconds a layer takes; a last span's include its output. 0: not measured.

    `us_per_layer`, `us_per_layer_4`, `us_per_layer_16`: for a turn of 1, 4 and 16 decode rows, of as many sessions
    where the engine has room for them. `prefill_us_per_row_layer`: for one row of a long prompt.
    """

    us_per_layer: int
    us_per_layer_4: int
    us_per_layer_16: int
    prefill_us_per_row_layer: int


def measure(computer: SpanComputer, shape: SliceShape, budget_s: float = LOAD_BUDGET_S) -> Speed:
    """Time a few steps from position 0 on, in slots that are empty before and after. Raises what computing raises."""
    step_s = decode_step_s(computer, shape, budget_s)
    batches = {1: step_s, **{n_rows: _batch_s(computer, shape, n_rows, step_s, budget_s) for n_rows in _LARGE_BATCHES}}
    room = min(shape.max_rows, shape.n_ctx)
    n_rows = next((n for n in _PREFILL_ROWS if n <= room and _fits(n, step_s, budget_s)), 1)
    chunk_s = _median_s(computer, shape, 1, n_rows, budget_s)
    n_layers = len(shape.span)

    def us(seconds: float) -> int:
        return 0 if seconds == 0 else max(1, round(seconds / n_layers * 1e6))

    return Speed(us(batches[1]), us(batches[4]), us(batches[16]), us(chunk_s / n_rows))


def decode_step_s(computer: SpanComputer, shape: SliceShape, budget_s: float = LOAD_BUDGET_S) -> float:
    """Seconds of one decode row, after one that touches the weights and starts the threads."""
    _timed(computer, shape, 1, 1)
    return _median_s(computer, shape, 1, 1, budget_s)


def _batch_s(computer: SpanComputer, shape: SliceShape, n_rows: int, step_s: float, budget_s: float) -> float:
    """Seconds of a turn of `n_rows` rows, of as many sessions as can be; 0 where they do not fit."""
    n_slots = next(n for n in range(min(n_rows, len(computer.n_held)), 0, -1) if n_rows % n == 0)
    if n_rows > shape.max_rows or n_rows // n_slots > shape.n_ctx or not _fits(n_rows, step_s, 4 * budget_s):
        return 0.0
    return _median_s(computer, shape, n_slots, n_rows // n_slots, budget_s)


def _fits(n_rows: int, step_s: float, budget_s: float) -> bool:
    return n_rows * step_s / _GAIN < budget_s


def _median_s(computer: SpanComputer, shape: SliceShape, n_slots: int, n_rows: int, budget_s: float) -> float:
    """The middle one of a few turns; one where the budget has no room for more."""
    turns: list[float] = []
    while not turns or (len(turns) < _MAX_STEPS and sum(turns) + turns[-1] < budget_s):
        turns.append(_timed(computer, shape, n_slots, n_rows))
    return float(np.median(turns))


def _timed(computer: SpanComputer, shape: SliceShape, n_slots: int, n_rows: int) -> float:
    """Seconds that `n_rows` rows in each of the first slots take from position 0 on."""
    jobs = [_job(shape, slot, n_rows) for slot in range(n_slots)]
    began = time.perf_counter()
    outcomes = computer.compute(jobs)
    elapsed_s = time.perf_counter() - began
    for job in jobs:
        computer.clear(job.slot)
    for outcome in outcomes:
        if not isinstance(outcome, JobResult):
            raise outcome
    return elapsed_s


def _job(shape: SliceShape, slot: int, n_rows: int) -> Job:
    is_first, is_last = shape.is_first, shape.is_last
    return Job(
        slot=slot,
        pos0=0,
        truncate_to=0,
        tokens=np.zeros(n_rows, np.int32) if is_first or shape.needs_tokens else None,
        hidden=None if is_first else np.full((n_rows, shape.row_width), 0.1, np.float32),
        stop_layer=shape.span.stop,
        outputs=(n_rows - 1,) if is_last else (),
        top_k=1,
        temperature=1.0,
        profile=Profile.FAST,
    )
