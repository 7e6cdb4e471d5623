"""What a row of the families' table has to pass: a tiny model of it, cut in every legal way, computes the unsplit
model's bits.

The rule this file keeps: both sides compute the same chunks. What is compared is every logit of every row, so one
wrong number anywhere in a chain shows.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.stage.chain import Session, stop_all
from tests.stage.tiny_models import N_VOCAB, write_tiny
from tests.stage.unsplit import Unsplit

from meshswarm.artifacts.gguf.check import check_hyperparameters, read_header
from meshswarm.span import Span
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.engine.profile import EXACT_MAX_ROWS, EXACT_MIN_ROWS, Profile
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.slices.slicing import write_slice

N_CTX = 255
LONG_ANSWER, SHORT_ANSWER = 64, 4
SECOND_TURN = [(5 * n * n + 3 * n + 2) % N_VOCAB for n in range(13)]


def prompt_of(n_tokens: int) -> list[int]:
    return [(7 * n * n + 13 * n + 11) % N_VOCAB for n in range(n_tokens)]


@dataclass(frozen=True)
class Row:
    """A model to prove: its name in `TINY`, changed as told. `n_prompt`: tokens enough to reach all it can do."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    n_prompt: int = 70
    note: str = ""

    @property
    def id(self) -> str:
        return f"{self.name}, {self.note}" if self.note else self.name


@dataclass(frozen=True)
class Step:
    """One chunk of a conversation: what goes in from `pos0` on, and the logits of all its rows."""

    pos0: int
    tokens: Sequence[int]
    logits: NDArray[np.float32]


class Conversation:
    """A talk with the unsplit model, at the row counts `profile` computes: the steps, and the tokens it chose.

    In `EXACT` a lone row must not be computed alone. It gets a dummy row behind it, as in an engine, which is forgotten
    before the next step; where nothing can be forgotten, the row is computed anew with all lone rows before it, from a
    saved state. Not everywhere: of windows a saved state keeps what later rows see, not what going back needs.
    """

    def __init__(self, unsplit: Unsplit, profile: Profile, rollback: Rollback) -> None:
        self._unsplit = unsplit
        self._profile = profile
        self._rollback = rollback
        self._saved: bytes | None = None
        self._lone: list[int] = []
        self._unsplit.forget(0)
        self.steps: list[Step] = []
        self.answer: list[int] = []

    @property
    def end(self) -> int:
        return self.steps[-1].pos0 + len(self.steps[-1].tokens) if self.steps else 0

    def turn(self, prompt: Sequence[int], pos0: int, *, n_steps: int, size: int) -> None:
        """Forget what stands at `pos0` and after; a prompt in chunks of up to `size`, then greedy single steps."""
        for start in range(0, len(prompt), size):
            self._step(prompt[start : start + size], pos0 + start)
        for _ in range(n_steps):
            self.answer.append(int(self.steps[-1].logits[-1].argmax()))
            self._step(self.answer[-1:], self.end)

    def _step(self, tokens: Sequence[int], pos0: int) -> None:
        if len(tokens) == 1 and self._profile is Profile.EXACT and self._rollback is Rollback.STATE:
            logits = self._lone_row(tokens[0], pos0)
        elif len(tokens) == 1 and self._profile is Profile.EXACT:
            self._unsplit.forget(pos0)
            logits = self._unsplit.rows([*tokens, *tokens], pos0, range(2))[:1]
            self._unsplit.forget(pos0 + 1)
        else:
            self._settle_lone()
            if pos0 < self.end:
                self._unsplit.forget(pos0)
            logits = self._unsplit.rows(tokens, pos0, range(len(tokens)))
        self.steps.append(Step(pos0, tokens, logits))

    def _lone_row(self, token: int, pos0: int) -> NDArray[np.float32]:
        if len(self._lone) == EXACT_MAX_ROWS:
            self._settle_lone()
        if self._saved is None:
            self._saved = self._unsplit.save()
        else:
            self._unsplit.restore(self._saved)
        self._lone.append(token)
        computed = self._lone + self._lone[-1:] * (EXACT_MIN_ROWS - len(self._lone))
        rows = self._unsplit.rows(computed, pos0 + 1 - len(self._lone), range(len(computed)))
        return rows[len(self._lone) - 1 : len(self._lone)]

    def _settle_lone(self) -> None:
        """Hold the lone rows so far, without a dummy behind them."""
        assert len(self._lone) != 1, "the first lone row left a dummy row behind it"
        self._saved = None
        self._lone = []


class Proof:
    """One row's model, unsplit and in parts. Engines are loaded when a chain first needs them."""

    def __init__(self, row: Row, folder: Path) -> None:
        self.row = row
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.path = write_tiny(row.name, folder / "model.gguf", **row.changes)
        self.header = read_header(self.path)
        shape = check_hyperparameters(self.header)
        self.n_layers = shape.n_layers
        self.rollback = FAMILIES[shape.architecture].rollback
        self.starts = legal_cuts(self.header).starts
        self.unsplit = Unsplit(self.path, N_CTX)
        self._engines: dict[Span, SpanEngine] = {}

    def span_chains(self) -> list[list[Span]]:
        """Every way to cut it in two, and the finest cut of all, which has three spans or more if any has."""
        return [self.spans(at) for at in self.starts[1:]] + [self.spans(*self.starts[1:])]

    def spans(self, *cuts: int) -> list[Span]:
        edges = [0, *cuts, self.n_layers]
        return [Span(start, stop) for start, stop in pairwise(edges)]

    def three_spans(self) -> list[Span]:
        """About equal ones, as far as cuts are legal; two where only one cut is."""
        cuts = self.starts[1:]
        chosen = {cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3]}
        return self.spans(*sorted(chosen))

    @property
    def profiles(self) -> list[Profile]:
        """Those in which this model is served."""
        has_exact = all(self.engine(span).exact_obstacle is None for span in self.three_spans())
        return [Profile.FAST, Profile.EXACT] if has_exact else [Profile.FAST]

    def engine(self, span: Span) -> SpanEngine:
        if span not in self._engines:
            self._engines[span] = self._load(span)
        return self._engines[span]

    def _load(self, span: Span) -> SpanEngine:
        """An engine on the layers `span`."""
        target = self._folder / f"{span.start}-{span.stop}.gguf"
        write_slice(self.path, self.header, span, target)
        engine = SpanEngine.load(target, span, self.n_layers, n_ctx=N_CTX, n_slots=2, n_threads=1, max_rows=128)
        engine.start(asyncio.get_running_loop())
        target.unlink()
        return engine

    def hops(self, spans: Sequence[Span]) -> list[tuple[SpanEngine, int]]:
        return [(self.engine(span), span.stop) for span in spans]

    def conversation(
        self, profile: Profile, *, n_steps: int = SHORT_ANSWER, n_prompt: int | None = None
    ) -> Conversation:
        """Chunked prefill, greedy steps, and a second turn, which takes back most of the answer where it can."""
        talk = Conversation(self.unsplit, profile, self.rollback)
        size = 64 if profile is Profile.FAST else EXACT_MAX_ROWS
        n_prompt = n_prompt or self.row.n_prompt
        talk.turn(prompt_of(n_prompt), 0, n_steps=n_steps, size=size)
        at = min(n_prompt + 1, talk.end) if self.rollback is Rollback.KV else talk.end
        talk.turn(SECOND_TURN, at, n_steps=SHORT_ANSWER, size=9)
        return talk

    async def close(self) -> None:
        self.unsplit.close()
        await stop_all(list(self._engines.values()))
        shutil.rmtree(self._folder)


async def differences(session: Session, steps: Sequence[Step]) -> list[str]:
    """Take the steps through the session; where its logits are not those of the steps."""
    found = []
    for step in steps:
        truncate_to = step.pos0 if step.pos0 < session.n_held else None
        rows = await session.rows(step.tokens, range(len(step.tokens)), truncate_to=truncate_to)
        if not np.array_equal(rows, step.logits):
            found.append(f"{len(step.tokens)} rows at {step.pos0} differ by {np.abs(rows - step.logits).max():g}")
    return found


def route(spans: Sequence[Span]) -> str:
    return ", ".join(map(str, spans))
