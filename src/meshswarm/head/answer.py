"""One answer being made: rows come in, tokens are sampled and sent on, text comes out.

The rule this file keeps: the next token leaves before its text is made. Detokenising and waking the client happen a
moment later, while the route already computes: on the peer that serves the first span they would otherwise hold the
interpreter's lock just when the engine's thread needs it. Only a request with stop strings looks at the text first,
because a stop decides whether there is a next token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from meshswarm.errors import MeshswarmError
from meshswarm.head.request import Finished, TextDelta, Timings, Usage
from meshswarm.head.sampler import NeedFullRow, Sampler
from meshswarm.head.text_stream import TextStream
from meshswarm.stage.engine import TopK
from meshswarm.stage.messages import Row

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


class Answer:
    """Listens to a route, drives the sampler, and yields `TextDelta`s and one `Finished`.

    `clock` returns seconds; it is asked at the first row and at the end, for the timings only.
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
    ) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.finished = False
        self._route = route
        self._vocabulary = vocabulary
        self._sampler = sampler
        self._text = text
        self._untold: list[int] = []  # tokens whose text is not made yet
        self._limits = limits
        self._fingerprint = fingerprint
        self._pending_row: TopK | None = None
        self._events: deque[TextDelta | Finished | MeshswarmError] = deque()
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._first_row_s: float | None = None

    def start(self) -> None:
        """Send the prompt, unless the route has broken before."""
        if not self.finished:
            self._route.push(self.prompt)

    # -- what the route brings

    def on_rows(self, seq: int, rows: tuple[Row, ...]) -> None:
        if self.finished:
            return
        if self._first_row_s is None:
            self._first_row_s = self._loop.time()
        (row,) = rows
        top = TopK(np.frombuffer(row.ids, "<i4"), np.frombuffer(row.logits, "<f4"), row.tail_log_mass)
        self._sample(seq, top, None)

    def on_full_row(self, seq: int, row: int, logits: bytes) -> None:
        if self.finished or self._pending_row is None:
            return
        self._sample(seq, self._pending_row, np.frombuffer(logits, "<f4"))

    def on_broken(self, error: MeshswarmError) -> None:
        if not self.finished:
            self.finished = True
            self._tell()
            self._put(error)

    def _sample(self, seq: int, row: TopK, full_row: NDArray[np.float32] | None) -> None:
        try:
            drawn = self._sampler.next(row, full_row)
        except MeshswarmError as error:
            self.on_broken(error)
            return
        if isinstance(drawn, NeedFullRow):
            self._pending_row = row
            self._route.request_full_row(seq, 0)
            return
        self._pending_row = None
        self._sampler.accept(drawn.id)
        self._accept(drawn.id)

    def _accept(self, token: int) -> None:
        if self._vocabulary.is_end_of_generation(token) and not self._limits.ignore_eos:
            self._finish("stop")
            return
        self.tokens.append(token)
        self._untold.append(token)
        if len(self.tokens) == self._limits.max_tokens or len(self.prompt) + len(self.tokens) >= self._limits.n_ctx:
            self._finish("length")
        elif self._limits.looks_for_stops:
            self._tell()
            if self._text.matched is None:
                self._route.push([token])
            else:
                self._finish("stop")
        else:
            self._route.push([token])
            if len(self._untold) == 1:
                self._loop.call_later(TEXT_DELAY_S, self._tell)

    # -- what the client gets

    def _tell(self) -> None:
        """Make the text of the tokens that are waiting for it."""
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
        now = self._loop.time()
        first = self._first_row_s or now
        self._put(
            Finished(
                reason,
                Usage(len(self.prompt), len(self.tokens)),
                Timings(
                    prompt_n=len(self.prompt),
                    prompt_ms=(first - self._started_s) * 1000,
                    predicted_n=len(self.tokens),
                    predicted_ms=(now - first) * 1000,
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
