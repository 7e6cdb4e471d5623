"""Answers with guesses on real engines, also of families that undo a rejected guess by computing again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.head.engine_route import EngineRoute
from tests.stage.tiny_models import N_VOCAB, write_tiny

from meshswarm.artifacts.gguf.check import check_hyperparameters, read_header
from meshswarm.head.answer import Answer, Limits
from meshswarm.head.request import Finished
from meshswarm.head.sampler import Sampler
from meshswarm.head.sampling_params import SamplingParams
from meshswarm.head.text_stream import TextStream
from meshswarm.span import Span
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.families.family import Rollback

pytestmark = pytest.mark.usefixtures("unmeasured")

N_CTX = 255
N_TOKENS = 96
PROMPT = list(range(1, 20))


class Endless:
    def is_end_of_generation(self, token: int) -> bool:
        return False

    def token_bytes(self, token: int) -> bytes:
        return b"x"


class MostlyRight:
    """Guesses of any length, each right with the chance `right`."""

    def __init__(self, truth: Sequence[int], right: float) -> None:
        self._truth = truth
        self._right = right
        self._n_said = 0
        self._rng = random.Random(right)

    def window(self, limit: int, send: Callable[[tuple[int, ...]], None]) -> None:
        ahead = self._truth[self._n_said : self._n_said + min(limit, self._rng.randrange(16))]
        send(tuple(token if self._rng.random() < self._right else (token + 1) % N_VOCAB for token in ahead))

    def said(self, tokens: tuple[int, ...], seconds: float | None) -> None:
        self._n_said += len(tokens)

    def close(self) -> None: ...


async def answered(engine: SpanEngine, n_layers: int, lookahead: MostlyRight | None) -> tuple[list[int], Finished]:
    route = EngineRoute(engine, n_layers)
    sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB, PROMPT)
    limits = Limits(N_TOKENS, N_CTX, False, False)
    answer = Answer(PROMPT, route, Endless(), sampler, TextStream(), limits, "fp", lookahead)  # type: ignore[arg-type]
    route.listener = answer
    answer.start()
    async with asyncio.timeout(120):
        events = [event async for event in answer.events()]
    route.close()
    assert isinstance(events[-1], Finished)
    return answer.tokens, events[-1]


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "qwen35", "granitehybrid"])
async def test_no_guess_changes_a_greedy_answer(name: str, tmp_path: Path) -> None:
    path = write_tiny(name, tmp_path / "tiny.gguf")
    n_layers = check_hyperparameters(read_header(path)).n_layers
    engine = SpanEngine.load(path, Span(0, n_layers), n_layers, n_ctx=N_CTX, n_slots=1, n_threads=1, max_rows=128)
    assert engine.exact_obstacle is None
    assert engine.rollback is (Rollback.KV if name in ("llama", "gemma3") else Rollback.STATE)
    engine.start(asyncio.get_running_loop())
    try:
        plain, _ = await answered(engine, n_layers, None)
        for right in (1.0, 0.8, 0.3, 0.0):
            guessed, finished = await answered(engine, n_layers, MostlyRight(plain, right))
            assert guessed == plain, f"guesses that were right in {right:.0%}"
            assert (finished.timings.draft_n_accepted > 0) is (right > 0)
    finally:
        await engine.stop()
