"""Engines behind each other in one process: what a route is, without the network.

The rule this file keeps: nothing is between two engines but what the wire does to a row.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from meshswarm.span import Span
from meshswarm.stage.engine.engine import MAX_OUTPUTS, Job, SpanEngine
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.sessions.messages import Dtype
from meshswarm.stage.sessions.rows_codec import over_the_wire


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens that are computed together. `goes_back`: what stood at `pos0` and after is forgotten first; `is_window`:
    the next chunk may go back into this one. Logits are wanted of its last `n_outputs` rows."""

    pos0: int
    tokens: NDArray[np.int32]
    profile: Profile = Profile.FAST
    goes_back: bool = False
    is_window: bool = False
    n_outputs: int = MAX_OUTPUTS

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(range(max(0, len(self.tokens) - self.n_outputs), len(self.tokens)))


class SpanChain:
    """The engines of `spans`, which are one behind the other, started and stopped together.

    `largest`: the largest |x| that has left an engine for the next one.
    """

    def __init__(self, engines: Sequence[SpanEngine], spans: Sequence[Span]) -> None:
        self._engines = engines
        self.spans = spans
        self.largest = 0.0
        self._slots: list[int] = []

    @property
    def numclass(self) -> str:
        return self._engines[0].numclass

    @property
    def rollback(self) -> Rollback:
        return self._engines[0].rollback

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """Those that all of them compute in."""
        has_exact = all(engine.exact_obstacle is None for engine in self._engines)
        return (Profile.FAST, Profile.EXACT) if has_exact else (Profile.FAST,)

    async def __aenter__(self) -> Self:
        for engine in self._engines:
            engine.start(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """One session on all of them, at a time."""
        slots = [engine.acquire_slot() for engine in self._engines]
        self._slots = [slot for slot in slots if slot is not None]
        try:
            yield
        finally:
            for engine, slot in zip(self._engines, self._slots, strict=True):
                engine.release_slot(slot)

    async def logits(self, chunk: Chunk, dtype: Dtype = Dtype.F32) -> NDArray[np.float32]:
        """Those the chunk wants, float32 [n, n_vocab]; between engines rows take `dtype`."""
        hidden: NDArray[np.float32] | None = None
        last = self._engines[-1]
        for engine, span, slot in zip(self._engines, self.spans, self._slots, strict=True):
            job = Job(
                slot=slot,
                pos0=chunk.pos0,
                truncate_to=chunk.pos0 if chunk.goes_back else None,
                tokens=chunk.tokens if hidden is None or engine.needs_tokens else None,
                hidden=hidden,
                stop_layer=span.stop,
                outputs=chunk.outputs if engine is last else (),
                top_k=1,
                temperature=0.0,
                profile=chunk.profile,
                is_window=chunk.is_window,
            )
            result = await engine.run(job)
            if result.hidden is not None:
                self.largest = max(self.largest, float(np.abs(result.hidden).max()))
                hidden = over_the_wire(result.hidden, dtype)
        return np.stack([last.full_row(self._slots[-1], row).copy() for row in range(len(chunk.outputs))])
