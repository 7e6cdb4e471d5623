"""A small model at the head that guesses the next tokens where the text itself gives no guess.

The rule this file keeps: nobody waits for it unless they asked to. It computes on its engine's thread; what is asked
for last is what it works on, and what was asked for before is forgotten. It may only ever guess, so it must have the
very vocabulary of the model it guesses for, and nothing else about it matters to the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from meshswarm.artifacts.gguf.tokenizer import token_list_mark
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.sources import Say
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ConfigError
from meshswarm.span import Span
from meshswarm.stage.engine.engine import Job, JobResult, SpanEngine
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.slices.store import Slices

MAX_SESSIONS = 4
"""Answers that have drafts of a model at the same time; further ones go without."""
MAX_ROWS = 128
"""Of one job: what is asked for next waits for no more than that."""

Then = Callable[[tuple[int, ...], float], None]
"""Takes a draft and the seconds it took, without the reading of what had been missing of the text; an empty one when
none can be made."""


class Engine(Protocol):
    """What drafting needs of an engine that holds a whole model."""

    def acquire_slot(self) -> int | None: ...
    def release_slot(self, slot: int) -> None: ...
    def submit(self, job: Job, on_done: Callable[[JobResult | Exception], None]) -> None: ...


class DraftModel:
    """A loaded draft model. `token_list` marks its vocabulary (`token_list_mark`)."""

    @classmethod
    async def load(
        cls, ref: str, store: Store, slices: Slices, *, n_ctx: int, n_threads: int, say: Say = lambda sentence: None
    ) -> DraftModel:
        """Load the model `ref`, whole, for texts of up to `n_ctx` tokens. Raises ConfigError for one that cannot take a
        draft back, and what getting and loading it raise."""
        info = await asyncio.to_thread(store.obtain, ref, say=say)
        span = Span(0, info.n_layers)
        whole = await asyncio.to_thread(slices.file, info.model_id, span)
        n_ctx = min(n_ctx, info.n_ctx_train)
        engine = await asyncio.to_thread(
            SpanEngine.load,
            whole.path,
            span,
            info.n_layers,
            n_ctx=n_ctx,
            n_slots=MAX_SESSIONS,
            n_threads=n_threads,
            max_rows=MAX_ROWS,
        )
        if engine.rollback is Rollback.STATE:
            await engine.stop()
            raise ConfigError(
                f"{info.name} ({info.architecture}) cannot be a draft model: it keeps a state that a rejected guess "
                "would spoil; choose one that keeps keys and values only"
            )
        loop = asyncio.get_running_loop()
        engine.start(loop)
        mark = token_list_mark(store.header(info.model_id))
        return cls(info.name, mark, engine, info.n_layers, n_ctx, time.perf_counter)

    def __init__(
        self,
        name: str,
        token_list: bytes,
        engine: SpanEngine,
        n_layers: int,
        n_ctx: int,
        clock: Callable[[], float],
    ) -> None:
        """Use `load`."""
        self.name = name
        self.token_list = token_list
        self._engine = engine
        self._n_layers = n_layers
        self._n_ctx = n_ctx
        self._clock = clock

    def check_vocabulary(self, token_list: bytes, name: str) -> None:
        """Raises ConfigError unless the model `name`, whose vocabulary has the mark `token_list`, has this one's."""
        _check_same(self.token_list, token_list, self.name, name)

    def begin(self, prompt: Sequence[int]) -> DraftSession | None:
        """The drafts of one answer; None while as many answers as there is room for have theirs."""
        slot = self._engine.acquire_slot()
        return (
            None if slot is None else DraftSession(self._engine, slot, self._n_layers, self._n_ctx, prompt, self._clock)
        )

    async def stop(self) -> None:
        """End its thread. Drafts under way come back empty."""
        await self._engine.stop()


def check_draft_model(store: Store, draft: ModelInfo, model: ModelInfo) -> None:
    """Before anything is loaded: raises ConfigError unless `draft` has the vocabulary of `model`. Both are in `store`.
    Blocks for some milliseconds."""
    drafts, models = (token_list_mark(store.header(each.model_id)) for each in (draft, model))
    _check_same(drafts, models, draft.name, model.name)


def _check_same(drafts: bytes, models: bytes, draft: str, model: str) -> None:
    if drafts != models:
        raise ConfigError(
            f"{draft} cannot guess for {model}: their vocabularies differ, so a token of one means something else to "
            "the other; choose a draft model of the same family"
        )


@dataclass(slots=True)
class _Wish:
    """A draft in the making. `begun_s`: when the text was read up to its last rows."""

    n_tokens: int
    then: Then
    begun_s: float = 0.0
    made: list[int] = field(default_factory=list)


class DraftSession:
    """One answer's text, and drafts of how it goes on: the model's most likely tokens. It begins to read the prompt at
    once. `clock` gives seconds."""

    def __init__(
        self, engine: Engine, slot: int, n_layers: int, n_ctx: int, prompt: Sequence[int], clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._slot = slot
        self._n_layers = n_layers
        self._n_ctx = n_ctx
        self._text = list(prompt)
        self._held: list[int] = []  # what the slot has computed: a start of the text, and guesses behind it
        self._agreed = 0  # so many tokens of both are known to be the same
        self._wish: _Wish | None = None
        self._computing = False
        self._closed = False
        self._clock = clock
        self.draft(1, lambda tokens, seconds: None)

    @property
    def n_unread(self) -> int:
        """Tokens of the text to be read before a draft can begin."""
        self._agree()
        return len(self._text) - self._agreed

    def said(self, tokens: Sequence[int]) -> None:
        """The text goes on with `tokens`."""
        self._text += tokens

    def draft(self, n_tokens: int, then: Then) -> None:
        """Guess the next `n_tokens`; `then` gets them on the loop, at once or later. A draft asked for before is given
        up: its `then` is not called any more."""
        self._wish = _Wish(n_tokens, then)
        if not self._computing:
            self._go_on()

    def close(self) -> None:
        """Give the slot back. Nothing is called any more."""
        if not self._closed:
            self._closed = True
            self._wish = None
            self._engine.release_slot(self._slot)

    def _go_on(self) -> None:
        """Compute what the wish needs next: rows of the text that are missing, or the row of the last guess."""
        wish = self._wish
        if wish is None:
            return
        if len(self._text) + wish.n_tokens > self._n_ctx:
            self._settle(wish, (), 0.0)
        elif wish.made:
            self._compute(len(self._text) + len(wish.made) - 1, wish.made[-1:], wish)
        else:
            self._agree()
            start = min(self._agreed, len(self._text) - 1)  # one row at least: its logits are the guess
            self._compute(start, self._text[start : start + MAX_ROWS], wish)

    def _agree(self) -> None:
        both = min(len(self._held), len(self._text))
        while self._agreed < both and self._held[self._agreed] == self._text[self._agreed]:
            self._agreed += 1

    def _compute(self, start: int, rows: list[int], wish: _Wish) -> None:
        is_last = start + len(rows) == len(self._text) + len(wish.made)
        job = Job(
            slot=self._slot,
            pos0=start,
            truncate_to=start if start < len(self._held) else None,
            tokens=np.array(rows, np.int32),
            hidden=None,
            stop_layer=self._n_layers,
            outputs=(len(rows) - 1,) if is_last else (),
            top_k=1,
            temperature=0.0,
            profile=Profile.FAST,
        )
        del self._held[start:]
        self._held += rows
        if is_last and not wish.made:
            wish.begun_s = self._clock()
        self._computing = True
        self._engine.submit(job, partial(self._on_done, wish))

    def _on_done(self, wish: _Wish, outcome: JobResult | Exception) -> None:
        self._computing = False
        if self._closed:
            return
        if isinstance(outcome, Exception):
            self._held.clear()  # whatever the slot holds now, position 0 is where it can start again
            self._agreed = 0
            if self._wish is not None:
                self._settle(self._wish, (), 0.0)
            return
        if wish is self._wish and outcome.rows:
            wish.made.append(int(outcome.rows[0].ids[0]))
            if len(wish.made) == wish.n_tokens:
                self._settle(wish, tuple(wish.made), self._clock() - wish.begun_s)
                return
        self._go_on()

    def _settle(self, wish: _Wish, tokens: tuple[int, ...], seconds: float) -> None:
        self._wish = None
        wish.then(tokens, seconds)
