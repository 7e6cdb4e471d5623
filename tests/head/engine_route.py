"""A route for answers in tests: one engine in this process, as far away as a test wants."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np

from meshswarm.stage.engine.engine import Job, JobResult, SpanEngine
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.messages import Row


class EngineRoute:
    """Greedy steps on a whole model of `n_layers`, in a slot of its own; they come back `delay_s` late."""

    def __init__(self, engine: SpanEngine, n_layers: int, *, delay_s: float = 0.0) -> None:
        slot = engine.acquire_slot()
        assert slot is not None
        self.slot = slot
        self.listener: Any = None
        self._engine = engine
        self._n_layers = n_layers
        self._delay_s = delay_s
        self._length = 0
        self._seq = -1

    def push(self, tokens: list[int], *, truncate_to: int | None = None, n_draft: int = 0) -> None:
        if truncate_to is not None:
            self._length = truncate_to
        self._seq += 1
        job = Job(
            slot=self.slot,
            pos0=self._length,
            truncate_to=truncate_to,
            tokens=np.array(tokens, np.int32),
            hidden=None,
            stop_layer=self._n_layers,
            outputs=tuple(range(len(tokens) - 1 - n_draft, len(tokens))),
            top_k=1,
            temperature=0.0,
            profile=Profile.EXACT,
            is_window=n_draft > 0,
        )
        self._length += len(tokens)
        self._engine.submit(job, partial(self._on_done, self._seq))

    def request_full_row(self, seq: int, row: int) -> None:
        raise AssertionError("a greedy answer needs no whole row")

    def close(self) -> None:
        self._engine.release_slot(self.slot)

    def _on_done(self, seq: int, outcome: JobResult | Exception) -> None:
        assert isinstance(outcome, JobResult) and outcome.rows is not None, outcome
        rows = tuple(Row(top.ids.tobytes(), top.logits.tobytes(), 0.0) for top in outcome.rows)
        asyncio.get_running_loop().call_later(self._delay_s, self.listener.on_rows, seq, rows)
