"""One answer being made: rows come in, tokens are sampled and sent on, text comes out.

The rule this file keeps: the next token leaves before its text is made. Detokenising and waking the client happen a
moment later, while the route already computes: on the peer that serves the first span they would otherwise hold the
interpreter's lock just when the engine's thread needs it. Only a request with stop strings looks at the text first,
because a stop decides whether there is a next token.

A step may carry guesses after its token. Its rows are then sampled in order, each as if it had come alone, as long as
the guess that led to the next row is the token that was drawn; the first other token is the last one of the step, and
the next step's header takes back the rows behind it. So guesses change when tokens come, never which.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from meshswarm.errors import MeshswarmError
from meshswarm.head.lookahead import Lookahead
from meshswarm.head.request import Finished, TextDelta, Timings, Usage
from meshswarm.head.sampler import NeedFullRow, Sampler
from meshswarm.head.text_stream import TextStream
from meshswarm.stage.engine.engine import TopK
from meshswarm.stage.sessions.messages import Row

TEXT_DELAY_S = 0.001  # by then the engine's thread is inside llama.cpp, which needs no interpreter


class Route(Protocol):
    """What an answer needs of a route."""

    def push(self, tokens: list[int], *, truncate_to: int | None = None, n_draft: int = 0) -> None: ...
    def request_full_row(self, seq: int, row: int) -> None: ...


class EndTokens(Protocol):
    """What an answer needs of a vocabulary."""

    def is_end_of_generation(self, token: int) -> bool: ...
    def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """When an answer ends: after `max_tokens`, when `n_ctx` positions are used, at an end token unless `ignore_eos`,
    or at a stop string (`looks_for_stops`)."""

    max_tokens: int | None
    n_ctx: int
    ignore_eos: bool
    looks_for_stops: bool


@dataclass(slots=True)
class _Step:
    """A step whose rows came back, and how far they are sampled. `draft`: the guesses it carried; `seconds`: it took,
    None for the prompt's; `said`: the tokens drawn so far."""

    seq: int
    rows: tuple[Row, ...]
    draft: tuple[int, ...]
    seconds: float | None
    said: list[int] = field(default_factory=list)


class Answer:
    """Listens to a route, drives the sampler, and yields `TextDelta`s and one `Finished`.

    `lookahead` None: nothing is guessed. `n_cached`: positions of the prompt that the route holds already; what it
    holds beyond them is taken back.
    """

    def __init__(
        self,
        prompt: list[int],
        route: Route,
        vocabulary: EndTokens,
        sampler: Sampler,
        text: TextStream,
        limits: Limits,
        fingerprint: str,
        lookahead: Lookahead | None = None,
        n_cached: int = 0,
    ) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.finished = False
        self._route = route
        self._vocabulary = vocabulary
        self._sampler = sampler
        self._text = text
        self._untold: list[int] = []  # tokens whose text is not made yet
        self._telling: asyncio.TimerHandle | None = None
        self._limits = limits
        self._fingerprint = fingerprint
        self._lookahead = lookahead
        self._n_cached = n_cached
        self._draft: tuple[int, ...] = ()  # the guesses under way
        self._step: _Step | None = None  # a step that waits for a whole row
        self._n_drafted = self._n_accepted = self._n_flights = 0
        self._events: deque[TextDelta | Finished | MeshswarmError] = deque()
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._started_s = (
            time.perf_counter()
        )  # finer than the loop's clock, whose milliseconds are a fast step's length
        self._sent_s = self._started_s
        self._first_row_s: float | None = None

    def start(self) -> None:
        """Send the prompt, unless the route has broken before."""
        if not self.finished:
            self._route.push(self.prompt[self._n_cached :], truncate_to=self._n_cached or None)

    # -- what the route brings

    def on_rows(self, seq: int, rows: tuple[Row, ...]) -> None:
        if self.finished:
            return
        now = time.perf_counter()
        self._n_flights += 1
        if self._first_row_s is None:
            self._first_row_s = now
            step = _Step(seq, rows, (), None)
        else:
            step = _Step(seq, rows, self._draft, now - self._sent_s)
        self._sample(step, None)

    def on_full_row(self, seq: int, row: int, logits: bytes) -> None:
        if self.finished or self._step is None:
            return
        self._n_flights += 1
        step, self._step = self._step, None
        self._sample(step, np.frombuffer(logits, "<f4"))

    def on_broken(self, error: MeshswarmError) -> None:
        if not self.finished:
            self.finished = True
            self._tell()
            self._put(error)

    # -- what is made of it

    def _sample(self, step: _Step, full_row: NDArray[np.float32] | None) -> None:
        """Draw from the step's rows in order, as long as the guesses that led to them come true."""
        while not self.finished:
            at = len(step.said)
            row = step.rows[at]
            top = TopK(np.frombuffer(row.ids, "<i4"), np.frombuffer(row.logits, "<f4"), row.tail_log_mass)
            try:
                drawn = self._sampler.next(top, full_row)
            except MeshswarmError as error:
                self.on_broken(error)
                return
            if isinstance(drawn, NeedFullRow):
                self._step = step
                self._route.request_full_row(step.seq, at)
                return
            full_row = None
            step.said.append(drawn.id)
            self._sampler.accept(drawn.id)
            came_true = at < len(step.draft) and drawn.id == step.draft[at]
            self._n_accepted += came_true
            self._accept(drawn.id)
            if not came_true:
                break
        if not self.finished:
            self._send_on(step)

    def _accept(self, token: int) -> None:
        """`token` belongs to the answer, unless it ends it."""
        if self._vocabulary.is_end_of_generation(token) and not self._limits.ignore_eos:
            self._finish("stop")
            return
        self.tokens.append(token)
        self._untold.append(token)
        if self._room == 0:
            self._finish("length")
        elif self._limits.looks_for_stops:
            self._tell()
            if self._text.matched is not None:
                self._finish("stop")

    @property
    def _room(self) -> int:
        """How many more tokens the answer may have."""
        room = self._limits.n_ctx - len(self.prompt) - len(self.tokens)
        if self._limits.max_tokens is not None:
            room = min(room, self._limits.max_tokens - len(self.tokens))
        return max(0, room)

    def _send_on(self, step: _Step) -> None:
        """The next step: the last token drawn, and what is guessed to follow."""
        if self._lookahead is None:
            self._push(step, ())
        else:
            self._lookahead.said(tuple(step.said), step.seconds)
            self._lookahead.window(self._room - 1, partial(self._push, step))
        if self._untold and self._telling is None:
            self._telling = self._loop.call_later(TEXT_DELAY_S, self._tell)

    def _push(self, step: _Step, draft: tuple[int, ...]) -> None:
        if self.finished:  # the route broke while a draft was made
            return
        self._draft = draft
        self._n_drafted += len(draft)
        rejected = len(step.said) <= len(step.draft)
        self._sent_s = time.perf_counter()
        self._route.push(
            [step.said[-1], *draft],
            truncate_to=len(self.prompt) + len(self.tokens) - 1 if rejected else None,
            n_draft=len(draft),
        )

    # -- what the client gets

    def _tell(self) -> None:
        """Make the text of the tokens that are waiting for it."""
        self._telling = None
        if self._untold:
            tokens, self._untold = tuple(self._untold), []
            text = "".join(self._text.push(self._vocabulary.token_bytes(token)) for token in tokens)
            self._put(TextDelta(text, tokens))

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        self.finished = True
        self._tell()
        if self._text.matched is not None:
            reason = "stop"
        elif rest := self._text.finish():
            self._put(TextDelta(rest, ()))
        now = time.perf_counter()
        first = self._first_row_s or now
        self._put(
            Finished(
                reason,
                Usage(
                    prompt_tokens=len(self.prompt),
                    completion_tokens=len(self.tokens),
                    cached_tokens=self._n_cached,
                    accepted_prediction_tokens=self._n_accepted,
                    rejected_prediction_tokens=self._n_drafted - self._n_accepted,
                ),
                Timings(
                    prompt_n=len(self.prompt) - self._n_cached,
                    prompt_ms=(first - self._started_s) * 1000,
                    predicted_n=len(self.tokens),
                    predicted_ms=(now - first) * 1000,
                    draft_n=self._n_drafted,
                    draft_n_accepted=self._n_accepted,
                    flights=self._n_flights,
                ),
                self._fingerprint,
            )
        )

    def _put(self, event: TextDelta | Finished | MeshswarmError) -> None:
        self._events.append(event)
        self._wake.set()

    async def events(self) -> AsyncGenerator[TextDelta | Finished, None]:
        """The answer as it is made. Raises the error that broke the route."""
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, MeshswarmError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
            self._wake.clear()
            await self._wake.wait()
