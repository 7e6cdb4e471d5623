"""How fast this peer computes its span, measured at load: what its coverage records say and routes are priced by.

The rule this file keeps: it stays well under half a second, whatever the size of the layers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from meshswarm.stage.engine_compute import SpanComputer
from meshswarm.stage.engine_jobs import Job, JobResult, SliceShape
from meshswarm.stage.profile import Profile

_MAX_STEPS = 5
_BUDGET_S = 0.1
_PREFILL_ROWS = (64, 32, 16, 8, 4, 2, 1)
_PREFILL_GAIN = 3  # a row of a chunk costs about a third of a row alone: only to choose a chunk that fits the budget


@dataclass(frozen=True, slots=True)
class Speed:
    """Microseconds a layer: of one decode row, and of one row of a prefill chunk. A last span's include its output."""

    us_per_layer: int
    prefill_us_per_row_layer: int


def measure(computer: SpanComputer, shape: SliceShape) -> Speed:
    """Time a few steps in slot 0, which must be empty and is left empty. Raises what computing raises."""
    _timed(computer, shape, 1)  # touches the weights
    steps: list[float] = []
    while len(steps) < _MAX_STEPS and sum(steps) < _BUDGET_S:
        steps.append(_timed(computer, shape, 1))
    step_s = float(np.median(steps))
    room = min(shape.max_rows, shape.n_ctx)
    fitting = (n for n in _PREFILL_ROWS if n <= room and n * step_s / _PREFILL_GAIN < _BUDGET_S)
    n_rows = next(fitting, 1)
    chunk_s = _timed(computer, shape, n_rows)
    n_layers = len(shape.span)
    return Speed(max(1, round(step_s / n_layers * 1e6)), max(1, round(chunk_s / n_rows / n_layers * 1e6)))


def _timed(computer: SpanComputer, shape: SliceShape, n_rows: int) -> float:
    """Seconds that `n_rows` rows take from position 0 on."""
    is_first, is_last = shape.is_first, shape.is_last
    job = Job(
        slot=0,
        pos0=0,
        truncate_to=0,
        tokens=np.zeros(n_rows, np.int32) if is_first else None,
        hidden=None if is_first else np.full((n_rows, shape.n_embd), 0.1, np.float32),
        stop_layer=shape.span.stop,
        outputs=(n_rows - 1,) if is_last else (),
        top_k=1,
        temperature=1.0,
        profile=Profile.FAST,
    )
    began = time.perf_counter()
    (outcome,) = computer.compute([job])
    elapsed_s = time.perf_counter() - began
    computer.clear(0)
    if not isinstance(outcome, JobResult):
        raise outcome
    return elapsed_s
