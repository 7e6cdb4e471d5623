"""One turn of the engine: jobs in, results out, and what every slot holds afterwards.

The rule this file keeps: a job succeeds or leaves its slot as it was, minus what it truncated. All of it runs on one
thread; the jobs of a turn have passed `check_job` and come as `batching` groups them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshswarm.errors import MeshswarmError
from meshswarm.stage.engine.jobs import EngineError, EngineInputError, Job, JobResult, SliceShape, TopK
from meshswarm.stage.engine.llama import LlamaSpan
from meshswarm.stage.engine.profile import EXACT_MAX_ROWS, EXACT_MIN_ROWS, Profile
from meshswarm.stage.engine.slots import MAX_LEAD_ROWS, Rows, Slots
from meshswarm.stage.engine.tap import Port
from meshswarm.stage.engine.threads import ThreadWatch
from meshswarm.stage.engine.topk import TopKReducer
from meshswarm.stage.families.family import Family, Rollback

Outcome = JobResult | MeshswarmError
_RC_CANCELLED = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A job as it is computed: rows that are computed again, its own, and a dummy one behind them where one is due.

    `row`: its first one in the batch.
    """

    job: Job
    lead: Rows | None
    n_dummies: int
    row: int = 0

    @property
    def n_lead(self) -> int:
        return 0 if self.lead is None else len(self.lead)

    @property
    def n_rows(self) -> int:
        return self.n_lead + self.job.n_rows + self.n_dummies

    @property
    def first_own(self) -> int:
        return self.row + self.n_lead

    @property
    def wanted(self) -> list[int]:
        """Rows of the batch whose logits the job asks for."""
        return [self.first_own + row for row in self.job.outputs]


class SpanComputer:
    """Computes jobs on a loaded slice of `family` (None: an architecture that is served whole).

    `n_held`: positions each slot holds. `full_rows`: for a slot, the logits of its last job's outputs, float32
    [n_outputs, n_vocab], once `keep_rows` was called and until its next job.
    """

    def __init__(
        self, llama: LlamaSpan, shape: SliceShape, family: Family | None, n_slots: int, *, n_checkpoints: int = 0
    ) -> None:
        self.slots = Slots(
            llama,
            _rollback(llama, family),
            n_slots,
            shape.n_ctx,
            n_checkpoints=n_checkpoints,
            copies_checkpoints=family is None or family.copies_checkpoints,
        )
        self.n_held = self.slots.n_held
        self.full_rows: dict[int, NDArray[np.float32]] = {}
        self._llama = llama
        self._shape = shape
        self._family = family
        streams, n_embd = shape.row_streams, shape.n_embd
        self._input = np.zeros((llama.max_rows, streams * n_embd), np.float32)
        self._output = np.zeros((llama.max_rows, streams * n_embd), np.float32)
        self._inject = None if family is None else Port(family.inject_node, self._input.reshape(-1, n_embd))
        self._captures: dict[int, Port] = {}
        self._ascending = np.arange(llama.max_rows, dtype=np.int32)
        self._top_k = TopKReducer(llama.n_vocab)
        self._unkept: list[tuple[int, NDArray[np.float32]]] = []
        self._watch: ThreadWatch | None = None

    def watch_threads(self, watch: ThreadWatch) -> None:
        """From now on let `watch` see every graph run, and compute with as many threads as it says."""
        self._watch = watch

    def compute(self, jobs: Sequence[Job], fills: Sequence[int] = ()) -> list[Outcome]:
        """One outcome for each job, in order. Jobs rise by slot and share rows computed, profile, input and exit.

        `fills`: idle slots between theirs that get rows for nothing, so that one graph run does for all.
        """
        outcomes: dict[int, Outcome] = {}
        runs = []
        for job in jobs:
            try:
                runs.append(self._admit(job))
            except MeshswarmError as error:
                outcomes[job.slot] = error
        for together in _of_equal_rows(runs, self._llama.max_rows):
            slots = [run.job.slot for run in together]
            between = [slot for slot in fills if slots[0] < slot < slots[-1]]
            outcomes |= self._compute_safely(together, between)
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
        self.slots.clear(slot)
        self.full_rows.pop(slot, None)
        self._unkept = [kept for kept in self._unkept if kept[0] != slot]

    def close(self) -> None:
        """Free the slice."""
        self._llama.close()

    def _admit(self, job: Job) -> _Run:
        """Bring the slot to where the job starts. Raises EngineInputError when the job does not continue it."""
        lead = self.slots.admit(job)
        if lead is not None and self._should_catch_up(job, len(lead)):
            self._catch_up(job, lead)
            lead = None
        n_real = job.n_rows + (0 if lead is None else len(lead))
        if n_real > self._llama.max_rows:
            raise EngineInputError(f"a step of {job.n_rows} rows is too long after one that has to be computed again")
        n_dummies = max(0, EXACT_MIN_ROWS - n_real) if job.profile is Profile.EXACT else 0
        return _Run(job, lead, n_dummies)

    def _should_catch_up(self, job: Job, n_lead: int) -> bool:
        """Whether the lead is computed before the job, apart: it does not fit beside it, or would grow for ever."""
        if job.profile is Profile.EXACT:
            does_fit = n_lead + job.n_rows <= max(EXACT_MAX_ROWS, 1 + job.n_rows)  # a lone row never goes apart
        else:
            does_fit = n_lead + job.n_rows <= self._llama.max_rows
        return not does_fit or (job.is_window and n_lead > MAX_LEAD_ROWS)

    def _catch_up(self, job: Job, lead: Rows) -> None:
        """Raises what computing raises."""
        pos0 = job.pos0 - len(lead)
        again = replace(
            job,
            pos0=pos0,
            truncate_to=None,
            tokens=lead.tokens,
            hidden=lead.hidden,
            outputs=(),
            is_window=False,
            checkpoints=None,
        )
        outcome = self._compute_safely([_Run(again, None, 0)], ())[job.slot]
        if isinstance(outcome, MeshswarmError):
            raise outcome

    def _compute_safely(self, runs: Sequence[_Run], fills: Sequence[int]) -> dict[int, Outcome]:
        """Compute jobs of equal row counts in one graph run, with `fills` between their slots."""
        self.keep_rows()
        try:
            return self._compute_together(runs, fills)
        except MeshswarmError as error:
            return {run.job.slot: self._given_up(run.job, error) for run in runs}
        finally:
            for slot in fills:
                self.slots.remove_fill(slot)

    def _compute_together(self, runs: Sequence[_Run], fills: Sequence[int]) -> dict[int, Outcome]:
        for run in runs:
            self.slots.prepare(run.job, may_leave=run.job.is_window or run.n_dummies > 0)
        placed, n_rows = self._fill(runs, fills)
        job = placed[0].job
        if job.stop_layer == self._shape.n_layers:
            first_output = self._mark_outputs(placed, n_rows)
            compute_s = self._decode(n_rows, job.hidden is not None, None)
            return self._reduce_logits(placed, first_output, compute_s)
        self._mark_all(job.stop_layer, n_rows)
        compute_s = self._decode(n_rows, job.hidden is not None, self._capture(job.stop_layer))
        outcomes: dict[int, Outcome] = {}
        for run in placed:
            hidden = self._output[run.first_own : run.first_own + run.job.n_rows].copy()
            outcomes[run.job.slot] = self._settled(run, JobResult(hidden, None, compute_s))
        return outcomes

    def _fill(self, runs: Sequence[_Run], fills: Sequence[int]) -> tuple[list[_Run], int]:
        """Write everything into the batch, by rising slot; returns the runs with their places, and the batch's rows."""
        by_slot = {run.job.slot: run for run in runs}
        count = runs[0].n_rows
        placed: list[_Run] = []
        row = 0
        for slot in sorted({*by_slot, *fills}):
            run = by_slot.get(slot)
            if run is None:
                self._write_positions(slot, self.n_held[slot], row, row + count)
                self._write_dummies(Rows(runs[0].job.tokens, runs[0].job.hidden), row, row + count)
            else:
                placed.append(replace(run, row=row))
                self._write_run(placed[-1])
            row += count
        return placed, row

    def _write_run(self, run: _Run) -> None:
        job, stop = run.job, run.row + run.n_rows
        self._write_positions(job.slot, job.pos0 - run.n_lead, run.row, stop)
        own = Rows(job.tokens, job.hidden)
        if run.lead is not None:
            self._write_rows(run.lead, run.row)
        self._write_rows(own, run.first_own)
        self._write_dummies(own, stop - run.n_dummies, stop)

    def _write_positions(self, slot: int, pos0: int, start: int, stop: int) -> None:
        self._llama.slots[start:stop] = slot
        np.add(self._ascending[: stop - start], pos0, out=self._llama.positions[start:stop])

    def _write_rows(self, rows: Rows, start: int) -> None:
        stop = start + len(rows)
        if rows.hidden is not None:
            self._input[start:stop] = rows.hidden
        if rows.tokens is None:
            self._llama.tokens[start:stop] = 0
        elif rows.hidden is None:
            self._llama.tokens[start:stop] = rows.tokens
        else:  # a span whose vocabulary is cut away looks none of them up
            np.copyto(self._llama.tokens[start:stop], np.where(rows.tokens < self._llama.n_vocab, rows.tokens, 0))

    def _write_dummies(self, like: Rows, start: int, stop: int) -> None:
        """Rows nobody asked for: the last one of `like`, again and again."""
        last = like.last()
        for row in range(start, stop):
            self._write_rows(last, row)

    def _mark_all(self, stop_layer: int, n_rows: int) -> None:
        """The last layer of a graph drops the rows whose logits nobody wants: want all where they leave through it.

        Elsewhere none, which saves the logits and their buffer.
        """
        self._llama.wanted[:n_rows] = stop_layer - self._shape.span.start == self._llama.n_layers

    def _mark_outputs(self, runs: Sequence[_Run], n_rows: int) -> int:
        """Want the logits of the jobs' outputs; returns the index of the first one among all computed.

        In `EXACT` a lone one gets company, as lone rows do everywhere.
        """
        wanted = self._llama.wanted
        wanted[:n_rows] = 0
        rows = [row for run in runs for row in run.wanted]
        for row in rows:
            wanted[row] = 1
        if len(rows) != 1 or runs[0].job.profile is Profile.FAST:
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
            port = self._captures[stop_layer] = Port(node, self._output.reshape(-1, self._shape.n_embd))
        return port

    def _decode(self, n_rows: int, is_injected: bool, capture: Port | None) -> float:
        """Run the graph for the batch; returns the seconds it took. Raises EngineError or TapError."""
        llama = self._llama
        n_tapped = n_rows * self._shape.row_streams
        llama.tap.start(n_tapped, inject=self._inject if is_injected else None, capture=capture)
        began = time.perf_counter()
        rc = llama.decode(n_rows)
        compute_s = time.perf_counter() - began
        if rc == _RC_CANCELLED:
            raise EngineError("the engine was stopped while it computed")
        if rc != 0:
            raise EngineError(f"llama.cpp failed to compute {n_rows} rows of the layers {self._shape.span} (code {rc})")
        llama.tap.finish()
        n_threads = None if self._watch is None else self._watch.observe(n_rows, compute_s, began + compute_s)
        if n_threads is not None:
            llama.set_threads(n_threads)
        return compute_s

    def _reduce_logits(self, runs: Sequence[_Run], first_output: int, compute_s: float) -> dict[int, Outcome]:
        n_outputs = sum(len(run.job.outputs) for run in runs)
        logits = self._llama.logits(first_output + n_outputs)[first_output:] if n_outputs else None
        outcomes: dict[int, Outcome] = {}
        start = 0
        for run in runs:
            job = run.job
            rows: tuple[TopK, ...] = ()
            if logits is not None and job.outputs:
                own = logits[start : start + len(job.outputs)]
                start += len(job.outputs)
                try:
                    rows = tuple(self._top_k.reduce(row, job.top_k, job.temperature) for row in own)
                except EngineError as error:
                    outcomes[job.slot] = self._given_up(job, error)
                    continue
                self._unkept.append((job.slot, own))
            outcomes[job.slot] = self._settled(run, JobResult(None, rows, compute_s))
        return outcomes

    def _settled(self, run: _Run, result: JobResult) -> JobResult:
        self.slots.settle(run.job, run.n_dummies)
        return result

    def _given_up(self, job: Job, error: MeshswarmError) -> MeshswarmError:
        self.slots.give_up(job)
        return error


def _rollback(llama: LlamaSpan, family: Family | None) -> Rollback:
    """How slots go back; of an architecture without a row in the table, what llama.cpp says of its layers."""
    if family is not None:
        return family.rollback
    return Rollback.STATE if llama.has_state else Rollback.KV


def _of_equal_rows(runs: Sequence[_Run], max_rows: int) -> Iterator[list[_Run]]:
    """Runs that may be computed together, in order: llama.cpp changes the order of rows where the counts differ."""
    together: list[_Run] = []
    for run in runs:
        if together and (run.n_rows != together[0].n_rows or (len(together) + 1) * run.n_rows > max_rows):
            yield together
            together = []
        together.append(run)
    if together:
        yield together
