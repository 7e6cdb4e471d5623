"""One span's engine in a process of its own, without network, head or other span: how long it computes a long prompt.

As a program it reads a number of rows and of rows a chunk from each line and answers with the seconds that took.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import numpy as np

from meshswarm.commands.serve import run_in_loop
from meshswarm.span import Span
from meshswarm.stage.engine.engine import Job, JobResult, SpanEngine
from meshswarm.stage.engine.profile import Profile

N_CTX = 4095


class SpanAlone:
    """The process, with the slice in `gguf`: the layers `span` of a model that has `n_layers`. One thread."""

    def __init__(self, gguf: Path, span: Span, n_layers: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(gguf), str(span), str(n_layers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def prefill_s(self, n_rows: int, chunk_rows: int) -> float:
        """Seconds for `n_rows` rows in chunks of at most `chunk_rows`, one straight after the other."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{n_rows} {chunk_rows}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def __enter__(self) -> SpanAlone:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("span", type=Span.parse)
    parser.add_argument("n_layers", type=int)
    options = parser.parse_args()
    run_in_loop(answer(options.gguf, options.span, options.n_layers))


async def answer(gguf: Path, span: Span, n_layers: int) -> None:
    engine = SpanEngine.load(gguf, span, n_layers, n_ctx=N_CTX, n_slots=1, n_threads=1)
    engine.start(asyncio.get_running_loop())
    slot = engine.acquire_slot()
    assert slot is not None
    while line := await asyncio.to_thread(sys.stdin.readline):
        n_rows, chunk_rows = map(int, line.split())
        started_s = time.perf_counter()
        for start in range(0, n_rows, chunk_rows):
            await compute(engine, chunk(engine, slot, span, n_layers, start, min(start + chunk_rows, n_rows), n_rows))
        print(time.perf_counter() - started_s, flush=True)
    await engine.stop()


def chunk(engine: SpanEngine, slot: int, span: Span, n_layers: int, start: int, stop: int, n_rows: int) -> Job:
    """Rows [start, stop) of the prompt. What stands in them does not matter to the time they take."""
    random = np.random.default_rng(start)
    is_first, is_end = span.start == 0, span.stop == n_layers and stop == n_rows
    return Job(
        slot=slot,
        pos0=start,
        truncate_to=0 if start == 0 else None,
        tokens=random.integers(100, 10_000, stop - start, np.int32) if is_first else None,
        hidden=None if is_first else random.normal(size=(stop - start, engine.n_embd)).astype(np.float32),
        stop_layer=span.stop,
        outputs=(stop - start - 1,) if is_end else (),
        top_k=64,
        temperature=0.0,
        profile=Profile.FAST,
    )


async def compute(engine: SpanEngine, job: Job) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_done(outcome: JobResult | Exception) -> None:
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(None)

    engine.submit(job, on_done)
    await done


if __name__ == "__main__":
    main()
