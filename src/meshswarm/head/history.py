"""What a session holds: its tokens, and where they were cut into steps.

The rule this file keeps: a later prompt takes over only what an own computation would have given in the same bits. The
rows of a step are computed together and their bits may depend on that, so what is taken over ends where a step ended,
at the very end, or inside the last draft, whose rows a next step would take back anyway. Where layers keep a running
state, not behind every step: only at one of the few checkpoints, where the spans have saved their states.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from meshswarm.stage.families.family import Rollback


@dataclass(slots=True)
class History:
    """`tokens[p]` stands at position p. `ends`: positions after the last row of a step, rising. `checkpoints`: those of
    them that the spans were told to keep."""

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    pinned: int | None = None
    """The checkpoint before the end of the last prompt that did not just go on from what was there."""
    n_open: int = 0
    """How many of the last tokens are a draft that no later step has settled."""

    def add(self, tokens: list[int], n_draft: int = 0) -> None:
        """A step was sent."""
        self.tokens += tokens
        self.ends.append(len(self.tokens))
        self.n_open = n_draft

    def add_checkpoint(self, n_kept: int) -> None:
        """The next one is here. Of more than `n_kept` the oldest goes, but for the pinned one: an agent's many short
        turns lead back to where the user spoke last, once the template leaves out what the model thought in them."""
        self.checkpoints.append(len(self.tokens))
        if len(self.checkpoints) > n_kept:
            self.checkpoints.remove(next(place for place in self.checkpoints if place != self.pinned or n_kept == 1))

    def truncate(self, position: int) -> None:
        """The positions from there on were taken back; the next step begins there."""
        del self.tokens[position:]
        del self.ends[bisect_right(self.ends, position - 1) :]
        del self.checkpoints[bisect_right(self.checkpoints, position) :]
        if self.pinned not in self.checkpoints:
            self.pinned = None
        if position:
            self.ends.append(position)
        self.n_open = 0

    def reusable(self, prompt: list[int], rollback: Rollback) -> int:
        """How many positions a session that goes on with `prompt` can keep; at least one token is left to compute,
        because its logits are wanted."""
        common = _common(self.tokens, prompt)
        most = min(common, len(prompt) - 1)
        if most >= len(self.tokens) - self.n_open:
            return most
        places = self.checkpoints if rollback is Rollback.STATE else self.ends
        at = bisect_right(places, most)
        return places[at - 1] if at else 0

    def beginning(self, n_positions: int) -> History:
        """The history of a copy of the first `n_positions`, which has no checkpoints."""
        copy = History(list(self.tokens), list(self.ends))
        copy.truncate(n_positions)
        return copy


def _common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, halving what is unknown: lists compare much faster than a loop over them."""
    known, limit = 0, min(len(a), len(b))
    while known < limit:
        middle = (known + limit + 1) // 2
        if a[known:middle] == b[known:middle]:
            known = middle
        else:
            limit = middle - 1
    return known
