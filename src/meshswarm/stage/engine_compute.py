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
from meshswarm.stage.engine_jobs import EngineError, Job, JobResult, SliceShape, TopK, check_position
from meshswarm.stage.engine_topk import TopKReducer
from meshswarm.stage.families.family import Family
from meshswarm.stage.llama import LlamaSpan
from meshswarm.stage.profile import Profile
from meshswarm.stage.tap import Port

Outcome = JobResult | MeshswarmError
_RC_CANCELLED = 2


class SpanComputer:
    """Computes jobs on a loaded slice of `family` (None: an architecture that is served whole).

    `n_held`: positions each slot holds. `full_rows`: for a slot, the logits of its last job's outputs, float32
    [n_outputs, n_vocab], once `keep_rows` was called and until its next job.
    """

    def __init__(self, llama: LlamaSpan, shape: SliceShape, family: Family | None, n_slots: int) -> None:
        self.n_held = [0] * n_slots
        self.full_rows: dict[int, NDArray[np.float32]] = {}
        self._llama = llama
        self._shape = shape
        self._family = family
        self._input = np.zeros((llama.max_rows, llama.n_embd), np.float32)
        self._output = np.zeros((llama.max_rows, llama.n_embd), np.float32)
        self._inject = None if family is None else Port(family.inject_node, self._input)
        self._captures: dict[int, Port] = {}
        self._ascending = np.arange(llama.max_rows, dtype=np.int32)
        self._top_k = TopKReducer(llama.n_vocab)
        self._unkept: list[tuple[int, NDArray[np.float32]]] = []

    def compute(self, jobs: Sequence[Job]) -> list[Outcome]:
        """One outcome for each job, in order. Jobs rise by slot and share rows computed, profile, input and exit."""
        self._unkept.clear()
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

    def keep_rows(self) -> None:
        """Copy the logits of the last `compute` to `full_rows`. Apart from it, since answers need not wait for that."""
        for slot, rows in self._unkept:
            kept = self.full_rows.get(slot)
            if kept is None or len(kept) != len(rows):
                kept = self.full_rows[slot] = np.empty_like(rows)
            np.copyto(kept, rows)
        self._unkept.clear()

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
            first_output = self._mark_outputs(jobs, n_rows)
            compute_s = self._decode(n_rows, jobs[0].hidden is not None, None)
            return self._reduce_logits(jobs, first_output, compute_s)
        self._mark_all(jobs[0].stop_layer, n_rows)
        compute_s = self._decode(n_rows, jobs[0].hidden is not None, self._capture(jobs[0].stop_layer))
        outcomes: dict[int, Outcome] = {}
        start = 0
        for job in jobs:
            hidden = self._output[start : start + job.n_rows].copy()
            outcomes[job.slot] = self._settled(job, JobResult(hidden, None, compute_s))
            start += job.n_computed
        return outcomes

    def _fill(self, jobs: list[Job]) -> int:
        """Write the jobs into the batch; returns its rows. A dummy row repeats the real one at the next position."""
        llama = self._llama
        start = 0
        for job in jobs:
            real, stop = start + job.n_rows, start + job.n_computed
            llama.slots[start:stop] = job.slot
            np.add(self._ascending[: stop - start], job.pos0, out=llama.positions[start:stop])
            if job.hidden is not None:
                llama.tokens[start:stop] = 0
                self._input[start:real] = job.hidden
                self._input[real:stop] = job.hidden[-1]
            elif job.tokens is not None:
                llama.tokens[start:real] = job.tokens
                llama.tokens[real:stop] = job.tokens[-1]
            start = stop
        return start

    def _mark_all(self, stop_layer: int, n_rows: int) -> None:
        """The last layer of a graph drops the rows whose logits nobody wants: want all where they leave through it.

        Elsewhere none, which saves the logits and their buffer.
        """
        self._llama.wanted[:n_rows] = stop_layer - self._shape.span.start == self._llama.n_layers

    def _mark_outputs(self, jobs: list[Job], n_rows: int) -> int:
        """Want the logits of the jobs' outputs; returns the index of the first one among all computed.

        In `EXACT` a lone one gets company, as lone rows do everywhere.
        """
        wanted = self._llama.wanted
        wanted[:n_rows] = 0
        rows = [index * job.n_computed + row for index, job in enumerate(jobs) for row in job.outputs]
        for row in rows:
            wanted[row] = 1
        if len(rows) != 1 or jobs[0].profile is Profile.FAST:
            return 0
        has_next = rows[0] + 1 < n_rows
        wanted[rows[0] + 1 if has_next else rows[0] - 1] = 1
        return 0 if has_next else 1

    def _capture(self, stop_layer: int) -> Port:
        """Where the rows leave that exit before `stop_layer`."""
        port = self._captures.get(stop_layer)
        if port is None:
            assert self._family is not None, "a model without a family is served whole"
            node = self._family.capture_name(stop_layer - self._shape.span.start - 1)
            port = self._captures[stop_layer] = Port(node, self._output)
        return port

    def _decode(self, n_rows: int, is_injected: bool, capture: Port | None) -> float:
        """Run the graph for the batch; returns the seconds it took. Raises EngineError or TapError."""
        llama = self._llama
        llama.tap.start(n_rows, inject=self._inject if is_injected else None, capture=capture)
        began = time.perf_counter()
        rc = llama.decode(n_rows)
        compute_s = time.perf_counter() - began
        if rc == _RC_CANCELLED:
            raise EngineError("the engine was stopped while it computed")
        if rc != 0:
            raise EngineError(f"llama.cpp failed to compute {n_rows} rows of the layers {self._shape.span} (code {rc})")
        llama.tap.finish()
        return compute_s

    def _reduce_logits(self, jobs: list[Job], first_output: int, compute_s: float) -> dict[int, Outcome]:
        n_outputs = sum(len(job.outputs) for job in jobs)
        logits = self._llama.logits(first_output + n_outputs)[first_output:] if n_outputs else None
        outcomes: dict[int, Outcome] = {}
        start = 0
        for job in jobs:
            rows: tuple[TopK, ...] = ()
            if logits is not None and job.outputs:
                own = logits[start : start + len(job.outputs)]
                start += len(job.outputs)
                try:
                    rows = tuple(self._top_k.reduce(row, job.top_k, job.temperature) for row in own)
                except EngineError as error:
                    outcomes[job.slot] = self._rolled_back(job, error)
                    continue
                self._unkept.append((job.slot, own))
            outcomes[job.slot] = self._settled(job, JobResult(None, rows, compute_s))
        return outcomes

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
