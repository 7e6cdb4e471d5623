"""The engine: a loaded span of layers that serves several sessions, on a thread of its own.

The rule this file keeps: the event loop never waits for a computation, and the engine's thread alone touches llama.cpp.
Work goes to the thread through one queue, in order; answers come back to the loop, all of a turn in one wake-up.
Everything here is called on the event loop, except `load` (anywhere, it blocks) and what is marked as the thread's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshswarm.artifacts.gguf.check import read_headers
from meshswarm.artifacts.gguf.split import part_paths
from meshswarm.errors import ConfigError
from meshswarm.span import Span
from meshswarm.stage.engine.attention import with_attention
from meshswarm.stage.engine.benchmark import LOAD_BUDGET_S, Speed, decode_step_s, measure
from meshswarm.stage.engine.checkpoints import n_checkpoints, saved_bytes
from meshswarm.stage.engine.compute import SpanComputer
from meshswarm.stage.engine.devices import ON_CPU, Offload
from meshswarm.stage.engine.jobs import (
    MAX_ACTIVATION,
    MAX_OUTPUTS,
    EngineError,
    EngineInputError,
    Job,
    JobResult,
    SliceShape,
    TopK,
    check_job,
)
from meshswarm.stage.engine.kv_layers import layer_kvs, session_cells
from meshswarm.stage.engine.llama import MAX_SLOTS, LlamaSpan, foreseen_memory, numclass
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS, LlamaOptions
from meshswarm.stage.engine.memory import EngineMemory, check_room, room
from meshswarm.stage.engine.paging import ALL_FITS
from meshswarm.stage.engine.profile import exact_obstacle
from meshswarm.stage.engine.slowdown import Slowdown
from meshswarm.stage.engine.thread import Answer, CopyOrder, EngineThread, Order, Released, Shared, Submitted, Weighed
from meshswarm.stage.engine.threads import ThreadTimes, ThreadWatch, time_counts
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.families.table import FAMILIES

__all__ = [
    "MAX_ACTIVATION",
    "MAX_OUTPUTS",
    "EngineError",
    "EngineInputError",
    "Job",
    "JobResult",
    "SpanEngine",
    "Speed",
    "TopK",
]

OnDone = Callable[[JobResult | Exception], None]


class SpanEngine:
    """Computes the layers `span` of a model for up to `n_slots` sessions at once, each in a slot of its own.

    A slot's jobs are computed in the order of their submission. `numclass` names what its bits depend on, `speed` what
    was measured at load, `memory` what llama.cpp says it took, `exact_obstacle` why the profile `EXACT` is not to be
    had here (None: it is), `rollback` how a session can go back, `n_checkpoints` to how many places it may mark.
    """

    @classmethod
    def load(
        cls,
        slice_path: Path,
        span: Span,
        n_layers: int,
        *,
        n_ctx: int,
        n_slots: int,
        n_threads: int,
        max_rows: int = 512,
        native: bool | None = None,
        thread_counts: Sequence[int] = (),
        llama_options: LlamaOptions = DEFAULT_OPTIONS,
        offload: Offload = ON_CPU,
    ) -> SpanEngine:
        """Load a slice (or the model's own file, for the whole of it) and measure its speed. Blocks.

        `n_layers` is the whole model's. Every slot holds `n_ctx` positions; one step has up to `max_rows` rows.
        `native` picks the tap (None: the native one where it was built). `thread_counts`, descending: the best of them
        is found and taken instead of `n_threads`; `thread_times` then tells what was measured. Raises ConfigError for
        sizes that cannot be, OutOfMemoryError for what does not fit, LlamaError when llama.cpp refuses the file,
        ArtifactError when its header is malformed, EngineError when it is not this span.
        """
        if not (n_ctx >= 1 and n_threads >= 1 and 1 <= n_slots <= min(MAX_SLOTS, max_rows) and max_rows >= 2):
            raise ConfigError(
                f"an engine cannot have a context of {n_ctx}, {n_slots} slots, {n_threads} threads and steps of "
                f"{max_rows} rows: at least 1, 1, 1 and 2, and not more than {MAX_SLOTS} slots or one a row"
            )
        header = read_headers(part_paths(slice_path))
        n_cells = session_cells(n_ctx)
        max_rows = min(max_rows, n_cells)
        types = llama_options.type_k, llama_options.type_v
        state_bytes = sum(layer.saved_bytes(*types) for layer in layer_kvs(header))

        def settled(n_cells: int) -> LlamaOptions:
            return with_attention(llama_options, header, n_rows=max_rows, n_cells=n_cells, offload=offload)

        if not offload.devices:

            def foresee(n_sessions: int, n_ctx: int) -> EngineMemory:
                n_cells = session_cells(n_ctx)
                foreseen = foreseen_memory(
                    slice_path, n_cells=n_cells, n_slots=n_sessions, max_rows=max_rows, options=settled(n_cells)
                )
                return replace(foreseen, saved_bytes=n_sessions * saved_bytes(state_bytes))

            check_room(foresee, room(), n_sessions=n_slots, n_ctx=n_ctx)
        llama = LlamaSpan(
            slice_path,
            n_cells=n_cells,
            n_slots=n_slots,
            n_threads=n_threads,
            max_rows=max_rows,
            native=native,
            options=settled(n_cells),
            offload=offload,
        )
        try:
            encodings = {tensor.type.name for tensor in header.tensors.values()}
            obstacle = exact_obstacle(encodings) or offload.exact_obstacle()
            engine = cls(llama, span, n_layers, n_ctx, n_slots, obstacle, n_checkpoints(state_bytes))
            engine.memory = replace(llama.memory, saved_bytes=n_slots * saved_bytes(state_bytes))
            engine.numclass = numclass(settled(n_cells), offload)
            engine.n_threads = n_threads
            engine.offload = offload
            if thread_counts:
                engine._choose_threads(llama, thread_counts)
            engine.speed = engine.measure(LOAD_BUDGET_S)
            engine._slowdown = Slowdown(engine.speed, len(span))
            return engine
        except BaseException:
            llama.close()
            raise

    def __init__(
        self,
        llama: LlamaSpan,
        span: Span,
        n_layers: int,
        n_ctx: int,
        n_slots: int,
        obstacle: str | None,
        n_checkpoints: int,
    ) -> None:
        """Use `load`."""
        family = FAMILIES.get(llama.architecture)
        if llama.n_layers < len(span) or (family is None and llama.n_layers != n_layers):
            raise EngineError(f"the loaded file has {llama.n_layers} layers: it is not the layers {span} of {n_layers}")
        self._shape = SliceShape(
            span,
            n_layers,
            llama.n_embd,
            llama.n_vocab,
            n_ctx,
            llama.max_rows,
            takes_hidden=family is not None,
            exact_obstacle=obstacle,
            row_streams=1 if family is None else family.row_streams,
            needs_tokens=family is not None and family.needs_tokens,
        )
        self.exact_obstacle = obstacle
        self.memory: EngineMemory
        self.n_embd = llama.n_embd
        self.row_width = self._shape.row_width
        self.needs_tokens = self._shape.needs_tokens
        self.n_vocab = llama.n_vocab
        self.is_first = self._shape.is_first
        self.is_last = self._shape.is_last
        self.numclass: str
        self.n_threads: int
        self.offload: Offload
        self.thread_times: ThreadTimes | None = None
        self.paging = ALL_FITS
        self.speed: Speed
        self._slowdown: Slowdown | None = None
        self._cancel = llama.tap.cancel
        self._computer = SpanComputer(llama, self._shape, family, n_slots, n_checkpoints=n_checkpoints)
        self.rollback: Rollback = self._computer.slots.rollback
        self.n_checkpoints = self._computer.slots.n_checkpoints
        self._free = set(range(n_slots))
        self._n_slots = n_slots
        self._n_rows_kept: dict[int, int] = {}
        self._own_slots: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: EngineThread | None = None
        self._is_stopping = False

    def _choose_threads(self, llama: LlamaSpan, counts: Sequence[int]) -> None:
        def step_s(n_threads: int) -> float:
            llama.set_threads(n_threads)
            return decode_step_s(self._computer, self._shape)

        self.thread_times = time_counts(counts, step_s)
        self.n_threads = self.thread_times.best
        llama.set_threads(self.n_threads)

    def measure(self, budget_s: float) -> Speed:
        """Time the span, `budget_s` for each figure. Blocks; only before `start`."""
        return measure(self._computer, self._shape, budget_s)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the engine's thread; answers are delivered on `loop`."""
        self._loop = loop
        self._watch = ThreadWatch(self.n_threads)
        self._computer.watch_threads(self._watch)
        self._thread = EngineThread(self._computer, self._shape, self.speed, self._deliver)

    async def stop(self) -> None:
        """End the thread and free the slice. A running computation is cut short; waiting jobs fail with EngineError."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._thread is None:
            self._computer.close()
            return
        self._cancel()
        self._thread.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def n_threads_now(self) -> int:
        """Fewer than `n_threads` while they stall each other."""
        return self._watch.n_threads

    def set_share(self, share: float) -> None:
        """Compute for strangers, that is in all slots that are not `own`, in this share of the time: 0 to 1."""
        self._put(Shared(share))

    def own(self, slot: int) -> None:
        """A slot that was acquired is for this peer's own head: its jobs are never held back. Until it is released."""
        self._own_slots.add(slot)

    @property
    def n_free_slots(self) -> int:
        return 0 if self._is_broken else len(self._free)

    @property
    def _is_broken(self) -> bool:
        """Its thread met a fault of ours: no session can be had here any more."""
        return self._thread is not None and self._thread.is_over

    def acquire_slot(self) -> int | None:
        """An empty slot, None when all are taken."""
        if not self._free or self._is_stopping or self._is_broken:
            return None
        slot = min(self._free)
        self._free.remove(slot)
        return slot

    def release_slot(self, slot: int) -> None:
        """Give a slot back. Its waiting jobs fail with EngineError; what it holds is forgotten before its next use."""
        if slot in self._free or not 0 <= slot < self._n_slots:
            raise ValueError(f"slot {slot} is not taken")
        self._n_rows_kept.pop(slot, None)
        self._own_slots.discard(slot)
        self._free.add(slot)
        self._put(Released(slot))

    def submit(self, job: Job, on_done: OnDone) -> None:
        """Compute `job`; `on_done` is called on the loop, later, with its result or with EngineInputError (the job was
        refused) or EngineError. Jobs of one slot may be submitted without waiting for the ones before."""
        assert self._loop is not None, "the engine was not started"
        try:
            if self._is_stopping:
                raise EngineError("the engine was stopped")
            if job.slot in self._free or not 0 <= job.slot < self._n_slots:
                raise EngineInputError(f"there is no session in slot {job.slot}")
            check_job(job, self._shape)
        except (EngineError, EngineInputError) as error:
            self._loop.call_soon(on_done, error)
            return
        self._put(Submitted(job, on_done, job.slot in self._own_slots))

    def copy_slot(
        self, source: int, target: int, n_positions: int, on_done: Callable[[Exception | None], None]
    ) -> None:
        """Let `target`, acquired and not used yet, hold the first `n_positions` of `source`, which has no jobs waiting.

        `on_done` is called on the loop, later, with None, or with EngineInputError where that cannot be: there are not
        so many positions, or the family keeps a running state that was not saved there. Jobs may be submitted at once.
        """
        self._put(CopyOrder(source, target, n_positions, on_done))

    def set_weight(self, slot: int, weight: float) -> None:
        """Give a slot another share of the turns than the usual 1, until it is released."""
        assert weight > 0
        self._put(Weighed(slot, weight))

    def _put(self, order: Order) -> None:
        assert self._thread is not None, "the engine was not started"
        self._thread.put(order)

    async def run(self, job: Job) -> JobResult:
        """`submit`, awaited. Raises what the job failed with."""
        done: asyncio.Future[JobResult] = asyncio.get_running_loop().create_future()

        def settle(outcome: JobResult | Exception) -> None:
            if done.cancelled():
                return
            if isinstance(outcome, Exception):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

        self.submit(job, settle)
        return await done

    def full_row(self, slot: int, row: int) -> NDArray[np.float32]:
        """All logits, float32 [n_vocab], of the `row`-th output of the slot's last job. Valid until its next job.

        Raises EngineInputError when there is no such row.
        """
        if not 0 <= row < self._n_rows_kept.get(slot, 0):
            raise EngineInputError(f"slot {slot} keeps no logits of an output {row}")
        assert self._thread is not None
        return self._thread.full_row(slot, row)

    def _deliver(self, answers: list[Answer]) -> None:
        """Hand the answers over to the loop; called on the engine's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._hand_out, answers)

    def take_slowdown(self) -> float | None:
        """How many times as long as at load the decode steps since the last call took; None without any."""
        return None if self._slowdown is None else self._slowdown.take()

    def _notice_pace(self, answers: list[Answer]) -> None:
        """Of a turn of decode steps through all layers."""
        n_rows, compute_s = 0, 0.0
        for answer in answers:
            order, outcome = answer.order, answer.outcome
            if not isinstance(order, Submitted) or not isinstance(outcome, JobResult):
                return
            if order.job.n_rows != 1 or order.job.stop_layer != self._shape.span.stop:
                return
            n_rows += order.job.n_computed
            compute_s = outcome.compute_s
        if n_rows and self._slowdown is not None:
            self._slowdown.observe(n_rows, compute_s)

    def _hand_out(self, answers: list[Answer]) -> None:
        self._notice_pace(answers)
        for answer in answers:
            try:
                self._settle(answer)
            except Exception as error:  # one session's handler must not lose the others' answers
                assert self._loop is not None
                self._loop.call_exception_handler({"message": "a session's handler failed", "exception": error})

    def _settle(self, answer: Answer) -> None:
        order, outcome = answer.order, answer.outcome
        if isinstance(order, CopyOrder):
            assert not isinstance(outcome, JobResult)
            order.on_done(outcome)
            return
        assert outcome is not None
        if order.job.slot not in self._free:
            self._n_rows_kept[order.job.slot] = len(order.job.outputs) if isinstance(outcome, JobResult) else 0
        order.on_done(outcome)
