"""Spans of one model behind each other in one process: what a route is, without the network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from meshswarm.stage.engine.engine import Job, SpanEngine
from meshswarm.stage.engine.profile import Profile


def job(slot: int, pos0: int, stop_layer: int, **changes: object) -> Job:
    """A job with the usual values, changed by name."""
    plain = Job(slot, pos0, None, None, None, stop_layer, outputs=(), top_k=1, temperature=0.0, profile=Profile.FAST)
    return replace(plain, **changes)  # type: ignore[arg-type]


class Session:
    """One session on a chain of engines: `(engine, the layer it exits at)` in order, a slot in each."""

    def __init__(
        self, hops: Sequence[tuple[SpanEngine, int]], profile: Profile, *, tokens_beside: Sequence[int] | None = None
    ) -> None:
        """`tokens_beside`: by position, the tokens that stand beside hidden states where a family needs them, for
        negative controls (None: the right ones)."""
        self._hops = hops
        self._profile = profile
        self._tokens_beside = tokens_beside
        slots = [engine.acquire_slot() for engine, _ in hops]
        self.slots = [slot for slot in slots if slot is not None]
        assert len(self.slots) == len(hops)
        self.n_held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for (engine, _), slot in zip(self._hops, self.slots, strict=True):
            engine.release_slot(slot)

    async def rows(
        self,
        tokens: Sequence[int],
        outputs: Sequence[int],
        *,
        truncate_to: int | None = None,
        is_window: bool = False,
        bend: float = 0.0,
    ) -> NDArray[np.float32]:
        """Compute one chunk; the whole logits of its rows `outputs`. `bend` is added to one number of the first hop's
        hidden states, for negative controls."""
        pos0 = self.n_held if truncate_to is None else truncate_to
        hidden = None
        taken: Sequence[int] | None = tokens
        for (engine, stop), slot in zip(self._hops, self.slots, strict=True):
            is_end = engine is self._hops[-1][0]
            result = await engine.run(
                job(
                    slot,
                    pos0,
                    stop,
                    truncate_to=truncate_to,
                    tokens=None if taken is None else np.array(taken, np.int32),
                    hidden=hidden,
                    outputs=tuple(outputs) if is_end else (),
                    profile=self._profile,
                    is_window=is_window,
                )
            )
            taken = self._tokens_for_next(tokens, pos0) if engine.needs_tokens else None
            if result.hidden is not None:
                hidden = result.hidden.copy()
                hidden[-1, 0] += np.float32(bend)
                bend = 0.0
        self.n_held = pos0 + len(tokens)
        engine, slot = self._hops[-1][0], self.slots[-1]
        return np.stack([engine.full_row(slot, index).copy() for index in range(len(outputs))])

    @staticmethod
    async def together(sessions: Sequence[Session], tokens: Sequence[int]) -> NDArray[np.float32]:
        """One more token for each of some sessions of the same hops, all computed in one run on every hop: the engines
        are held until they have all. The logits, float32 [n_sessions, n_vocab]."""
        hops = sessions[0]._hops
        hidden: list[NDArray[np.float32] | None] = [None] * len(sessions)
        for at, (engine, stop) in enumerate(hops):
            is_end = engine is hops[-1][0]
            engine.set_share(0.0)
            computing = [
                asyncio.ensure_future(
                    engine.run(
                        job(
                            session.slots[at],
                            session.n_held,
                            stop,
                            tokens=np.array([token], np.int32) if rows is None or engine.needs_tokens else None,
                            hidden=rows,
                            outputs=(0,) if is_end else (),
                            profile=session._profile,
                        )
                    )
                )
                for session, token, rows in zip(sessions, tokens, hidden, strict=True)
            ]
            await asyncio.sleep(0)
            engine.set_share(1.0)
            results = await asyncio.gather(*computing)
            assert len({result.compute_s for result in results}) == 1, "they were not computed together"
            hidden = [None if result.hidden is None else result.hidden.copy() for result in results]
        for session in sessions:
            session.n_held += 1
        return np.stack([hops[-1][0].full_row(session.slots[-1], 0).copy() for session in sessions])

    async def copy(self, other: Session, n_positions: int) -> None:
        """Hold the first positions of another session of the same hops, instead of nothing."""
        told: list[asyncio.Future[Exception | None]] = []
        for (engine, _), source, target in zip(self._hops, other.slots, self.slots, strict=True):
            told.append(asyncio.get_running_loop().create_future())
            engine.copy_slot(source, target, n_positions, told[-1].set_result)
        assert await asyncio.gather(*told) == [None] * len(told)
        self.n_held = n_positions

    def _tokens_for_next(self, tokens: Sequence[int], pos0: int) -> Sequence[int]:
        """What stands beside the hidden states of `tokens`."""
        return tokens if self._tokens_beside is None else self._tokens_beside[pos0 : pos0 + len(tokens)]


async def stop_all(engines: Sequence[SpanEngine]) -> None:
    await asyncio.gather(*(engine.stop() for engine in engines))
