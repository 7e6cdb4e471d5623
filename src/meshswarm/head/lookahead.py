"""What one answer sends along with its next token: a draft from the text so far, cut to the size that pays.

The rule this file keeps: it is asked before a step leaves and told what came of it, and nothing else; whether a guess
was right is decided by the answer's own sampler.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from meshswarm.head.drafting import Draft, SuffixDrafter
from meshswarm.head.speculation import MAX_WINDOW, WindowChooser


class Lookahead:
    """The drafts of one answer. `drafter` has read the prompt; a draft stops before a token that `ends` the answer."""

    def __init__(self, drafter: SuffixDrafter, chooser: WindowChooser, ends: Callable[[int], bool]) -> None:
        self._drafter = drafter
        self._chooser = chooser
        self._ends = ends
        self._draft = Draft()
        self._window = 0

    def window(self, limit: int) -> tuple[int, ...]:
        """The guesses to send with the next step, at most `limit`; often none."""
        draft = self._drafter.draft(MAX_WINDOW)
        going_on = itertools.takewhile(lambda token: not self._ends(token), draft.tokens)
        self._draft = Draft(tuple(going_on), draft.match)
        self._window = self._chooser.window(self._draft.match, min(limit, len(self._draft.tokens)))
        return self._draft.tokens[: self._window]

    def said(self, tokens: tuple[int, ...], seconds: float | None) -> None:
        """The step gave `tokens`, and took `seconds`; None for the prompt's own."""
        if seconds is not None:
            self._chooser.stepped(self._window, seconds, len(tokens))
            self._chooser.judge(self._draft, tokens)
        for token in tokens:
            self._drafter.push(token)
