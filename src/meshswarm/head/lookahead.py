"""What one answer sends along with its next token: a draft from the text so far, or from a small model, cut to the size
that pays.

The rule this file keeps: it is asked before a step leaves and told what came of it, and nothing else; whether a guess
was right is decided by the answer's own sampler. The text is asked first, since its guesses cost nothing; a model is
asked where it promises more, and otherwise now and then makes a draft that is only compared with what is said.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from meshswarm.head.drafting import Draft, Source, SuffixDrafter
from meshswarm.head.speculation import MAX_WINDOW, WINDOWS, WindowChooser

LISTENING_TOKENS = 4
MAX_UNREAD = 32
"""An answer does not wait for a model that has more of the text to read."""

Send = Callable[[tuple[int, ...]], None]
"""Takes the guesses to send with the next step; often none."""


class ModelDrafts(Protocol):
    """What a draft model does for one answer (`draft_model.DraftSession`)."""

    @property
    def n_unread(self) -> int: ...
    def said(self, tokens: tuple[int, ...]) -> None: ...
    def draft(self, n_tokens: int, then: Callable[[tuple[int, ...], float], None]) -> None: ...
    def close(self) -> None: ...


class Lookahead:
    """The drafts of one answer. `drafter` has read the prompt; a draft stops before a token that `ends` the answer.

    `clock` gives seconds; it is asked only around a model's drafts.
    """

    def __init__(
        self,
        drafter: SuffixDrafter,
        chooser: WindowChooser,
        ends: Callable[[int], bool],
        model: ModelDrafts | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._drafter = drafter
        self._chooser = chooser
        self._ends = ends
        self._model = model
        self._clock = clock
        self._window = 0  # of the step under way
        self._drafting_s = 0.0
        self._drafts: list[Draft] = []  # to be compared with what that step says
        self._heard: Draft | None = None  # a model's draft that was not sent
        self._since: list[int] | None = None  # what was said since it was asked for

    def window(self, limit: int, send: Send) -> None:
        """Call `send` with the guesses for the next step, at most `limit`: at once, or when a model has made them."""
        draft = self._drafter.draft(MAX_WINDOW)
        choice = self._chooser.choose(Source.TEXT, draft.match, min(limit, len(draft.tokens)))
        self._drafts = [draft]
        model = self._model
        if model is not None and model.n_unread <= MAX_UNREAD:
            offer = self._chooser.choose(Source.MODEL, 0, limit)
            if offer.rate > choice.rate:
                self._chooser.model_pays()
                self._since = None
                model.draft(offer.window, partial(self._on_drafted, self._clock(), send))
                return
        self._send(draft.tokens[: choice.window], 0.0, send)
        if model is not None and choice.window == 0 and self._chooser.wants_to_listen():
            self._heard, self._since = None, []
            model.draft(LISTENING_TOKENS, self._on_heard)

    def said(self, tokens: tuple[int, ...], seconds: float | None) -> None:
        """The step gave `tokens`, and took `seconds`; None for the prompt's own."""
        if seconds is not None:
            self._chooser.stepped(self._window, seconds, len(tokens), drafting_s=self._drafting_s)
            for draft in self._drafts:
                self._chooser.judge(draft, tokens)
        for token in tokens:
            self._drafter.push(token)
        if self._model is not None:
            self._model.said(tokens)
        if self._since is not None:
            self._since += tokens
            self._compare()

    def close(self) -> None:
        """The answer is over."""
        if self._model is not None:
            self._model.close()

    def _send(self, guesses: tuple[int, ...], drafting_s: float, send: Send) -> None:
        """Send them up to a token that ends the answer, and no other number of them than one of the sizes."""
        n_going_on = next((at for at, token in enumerate(guesses) if self._ends(token)), len(guesses))
        self._window = max(size for size in WINDOWS if size <= n_going_on)
        self._drafting_s = drafting_s
        send(guesses[: self._window])

    def _on_drafted(self, asked_s: float, send: Send, tokens: tuple[int, ...], seconds: float) -> None:
        if tokens:
            self._chooser.drafted(seconds, len(tokens))
        self._drafts.append(Draft(tokens, 0, Source.MODEL))
        self._send(tokens, self._clock() - asked_s, send)

    def _on_heard(self, tokens: tuple[int, ...], seconds: float) -> None:
        if tokens:
            self._chooser.drafted(seconds, len(tokens))
            self._heard = Draft(tokens, 0, Source.MODEL)
            self._compare()

    def _compare(self) -> None:
        if self._heard is not None and self._since is not None and len(self._since) >= len(self._heard.tokens):
            self._chooser.judge(self._heard, self._since)
            self._heard = self._since = None
