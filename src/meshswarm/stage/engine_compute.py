"""One turn of the engine: jobs in, results out, and what every slot holds afterwards.

The rule this file keeps: a job succeeds or leaves its slot as it was, minus what it truncated. All of it runs on one
thread; the jobs of a turn have passed `check_job` and come as `batching` groups them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshswarm.errors import MeshswarmError
from meshswarm.stage.engine_jobs import EngineError, Job, JobResult, SliceShape, check_position, is_sound
from meshswarm.stage.engine_topk import TopKReducer
from meshswarm.stage.families import Family
from meshswarm.stage.llama import LlamaSpan
from meshswarm.stage.profile import Profile

Outcome = JobResult | MeshswarmError
_RC_CANCELLED = 2


class SpanComputer:
    """Computes jobs on a loaded slice of `family` (None: an architecture that is served whole).

    `n_held`: positions each slot holds. `full_rows`: for a slot, the logits of its last job's outputs, float32
    [n_outputs, n_vocab], overwritten by its next job.
    """

    def __init__(self, llama: LlamaSpan, shape: SliceShape, family: Family | None, n_slots: int) -> None:
        self.n_held = [0] * n_slots
        self.full_rows: dict[int, NDArray[np.float32]] = {}
        self._llama = llama
        self._shape = shape
        self._family = family
        self._input = np.zeros((llama.max_rows, llama.n_embd), np.float32)
        self._top_k = TopKReducer(llama.n_vocab)

    def compute(self, jobs: Sequence[Job]) -> list[Outcome]:
        """One outcome for each job, in order. Jobs rise by slot and share rows computed, profile, input and exit."""
        outcomes: dict[int, Outcome] = {}
        admitted = []
        for job in jobs:
            try:
                self._admit(job)
                admitted.append(job)
            except MeshswarmError as error:
                outcomes[job.slot] = error
        if admitted:
            try:
                outcomes |= self._compute_together(admitted)
            except MeshswarmError as error:
                outcomes |= {job.slot: self._rolled_back(job, error) for job in admitted}
        return [outcomes[job.slot] for job in jobs]

    def clear(self, slot: int) -> None:
        """Forget all positions and rows of a slot."""
        self._llama.remove(slot, 0)
        self.n_held[slot] = 0
        self.full_rows.pop(slot, None)

    def close(self) -> None:
        """Free the slice."""
        self._llama.close()

    def _admit(self, job: Job) -> None:
        """Truncate the slot as the job says. Raises EngineInputError when the job does not continue it."""
        check_position(job, self.n_held[job.slot], self._shape.n_ctx)
        if job.pos0 < self.n_held[job.slot]:
            self._go_back(job.slot, job.pos0)

    def _compute_together(self, jobs: list[Job]) -> dict[int, Outcome]:
        n_rows = self._fill(jobs)
        if jobs[0].stop_layer == self._shape.n_layers:
            compute_s = self._decode(jobs[0], n_rows, None)
            return self._reduce_logits(jobs, n_rows, compute_s)
        captured = np.empty((n_rows, self._shape.n_embd), np.float32)
        compute_s = self._decode(jobs[0], n_rows, captured)
        outcomes: dict[int, Outcome] = {}
        for index, job in enumerate(jobs):
            start = index * job.n_computed
            hidden = captured[start : start + job.n_rows]
            if is_sound(hidden):
                outcomes[job.slot] = self._settled(job, JobResult(hidden, None, compute_s))
            else:
                error = EngineError(f"the layers {self._shape.span} computed hidden states that are not numbers")
                outcomes[job.slot] = self._rolled_back(job, error)
        return outcomes

    def _fill(self, jobs: list[Job]) -> int:
        """Write the jobs into the batch; returns its rows. A dummy row repeats the real one at the next position."""
        llama = self._llama
        start = 0
        for job in jobs:
            real, stop = start + job.n_rows, start + job.n_computed
            llama.slots[start:stop] = job.slot
            llama.positions[start:stop] = np.arange(job.pos0, job.pos0 + stop - start, dtype=np.int32)
            if job.hidden is not None:
                llama.tokens[start:stop] = 0
                self._input[start:real] = job.hidden
                self._input[real:stop] = job.hidden[-1]
            elif job.tokens is not None:
                llama.tokens[start:real] = job.tokens
                llama.tokens[real:stop] = job.tokens[-1]
            start = stop
        self._mark_wanted(jobs, start)
        return start

    def _mark_wanted(self, jobs: list[Job], n_rows: int) -> None:
        """Say which rows the last layer of the graph keeps: it drops all others before its feed-forward part.

        Rows leave through it, or logits are asked of them. A lone row in `EXACT` gets company, as everywhere.
        """
        wanted = self._llama.wanted[:n_rows]
        if jobs[0].stop_layer < self._shape.n_layers:
            wanted[:] = jobs[0].stop_layer - self._shape.span.start == self._llama.n_layers
            return
        wanted[:] = 0
        for index, job in enumerate(jobs):
            for row in job.outputs:
                wanted[index * job.n_computed + row] = 1
        if jobs[0].profile is Profile.EXACT and wanted.sum() == 1:
            wanted[np.flatnonzero(wanted == 0)[0]] = 1

    def _decode(self, job: Job, n_rows: int, captured: NDArray[np.float32] | None) -> float:
        """Run the graph for the batch; returns the seconds it took. Raises EngineError or TapError."""
        inject = capture = None
        if self._family is not None:
            if job.hidden is not None:
                inject = (self._family.inject_node, self._input)
            if captured is not None:
                capture = (self._family.capture_name(job.stop_layer - self._shape.span.start - 1), captured)
        self._llama.tap.start(n_rows, inject=inject, capture=capture)
        began = time.perf_counter()
        rc = self._llama.decode(n_rows)
        compute_s = time.perf_counter() - began
        if rc == _RC_CANCELLED:
            raise EngineError("the engine was stopped while it computed")
        if rc != 0:
            raise EngineError(f"llama.cpp failed to compute {n_rows} rows of the layers {self._shape.span} (code {rc})")
        self._llama.tap.finish()
        return compute_s

    def _reduce_logits(self, jobs: list[Job], n_rows: int, compute_s: float) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        place = np.cumsum(self._llama.wanted[:n_rows])  # the batch's row r has logits row place[r] - 1
        logits = self._llama.logits(int(place[-1])) if place[-1] else None
        for index, job in enumerate(jobs):
            rows = []
            if logits is not None and job.outputs:
                kept = self._room_for_rows(job)
                for at, row in enumerate(job.outputs):
                    kept[at] = logits[place[index * job.n_computed + row] - 1]
                try:
                    rows = [self._top_k.reduce(row, job.top_k, job.temperature) for row in kept]
                except EngineError as error:
                    outcomes[job.slot] = self._rolled_back(job, error)
                    continue
            outcomes[job.slot] = self._settled(job, JobResult(None, tuple(rows), compute_s))
        return outcomes

    def _room_for_rows(self, job: Job) -> NDArray[np.float32]:
        kept = self.full_rows.get(job.slot)
        if kept is None or len(kept) != len(job.outputs):
            kept = self.full_rows[job.slot] = np.empty((len(job.outputs), self._shape.n_vocab), np.float32)
        return kept

    def _settled(self, job: Job, result: JobResult) -> JobResult:
        """The slot now holds the job's positions, without the dummy row's."""
        self.n_held[job.slot] = job.pos0 + job.n_rows
        if job.n_computed > job.n_rows:
            self._go_back(job.slot, job.pos0 + job.n_rows)
        return result

    def _rolled_back(self, job: Job, error: MeshswarmError) -> MeshswarmError:
        """The slot holds what it held before the job's own positions."""
        self._go_back(job.slot, job.pos0)
        return error

    def _go_back(self, slot: int, position: int) -> None:
        """Forget the positions from `position` on. Raises EngineError where the model's memory cannot."""
        if not self._llama.remove(slot, position):
            raise EngineError(f"this model cannot go back to position {position}")
        self.n_held[slot] = position
