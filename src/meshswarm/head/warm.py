"""The sessions a head keeps between its requests: which one a new prompt goes on from, and how.

The rule this file keeps: a kept session is a gift. Spans end it when they need the room, peers are lost, and nothing of
that is an error: what is not there any more is left out, and the prompt is computed afresh. A request takes a session
for itself, so no two ever write to the same one.

Sans-IO: `now` is on any clock that rises.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from meshswarm.head.history import History
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.sessions.messages import Dtype

MAX_WARM = 8
MAX_WARM_S = 600.0
MIN_TAKEN_OVER = 16  # fewer positions are not worth a conversation's place
MAX_CUT_OFF = 64  # a conversation loses so many positions without much ado: the next turn computes them again


class Kept(Protocol):
    """What must be known of a session."""

    @property
    def is_parked(self) -> bool: ...
    @property
    def history(self) -> History: ...
    @property
    def rollback(self) -> Rollback: ...


S = TypeVar("S", bound=Kept)


@dataclass(frozen=True, slots=True)
class Likeness:
    """Sessions alike in this hold the same bits for the same tokens, as far as the model and the wire go."""

    model_id: bytes
    profile: Profile
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class Found(Generic[S]):
    """A session whose first `n_positions` the prompt shares; going on with it cuts off `n_cut_off` others."""

    session: S
    n_positions: int
    n_cut_off: int

    @property
    def wants_copy(self) -> bool:
        """The conversation is worth more than the room a copy takes."""
        return self.n_cut_off > MAX_CUT_OFF

    @property
    def may_be_cut(self) -> bool:
        """Where there is no room for a copy: more is saved now than must be computed again later."""
        return self.n_cut_off <= max(self.n_positions, MAX_CUT_OFF)


@dataclass(frozen=True, slots=True)
class _Entry(Generic[S]):
    session: S
    likeness: Likeness
    n_ctx: int
    until: float


class WarmSessions(Generic[S]):
    """At most `MAX_WARM` sessions, none older than `MAX_WARM_S`."""

    def __init__(self) -> None:
        self._entries: list[_Entry[S]] = []  # the longest kept first

    def __len__(self) -> int:
        return sum(entry.session.is_parked for entry in self._entries)

    def keep(self, session: S, likeness: Likeness, n_ctx: int, now: float) -> list[S]:
        """`session` was parked. Returns those that must be closed for it."""
        self._forget_the_gone()
        self._entries.append(_Entry(session, likeness, n_ctx, now + MAX_WARM_S))
        excess, self._entries = self._entries[:-MAX_WARM], self._entries[-MAX_WARM:]
        return [entry.session for entry in excess]

    def take(self, likenesses: Set[Likeness], prompt: list[int], n_ctx: int) -> Found[S] | None:
        """The session of one of these likenesses that saves the most, if any does; it is not kept any more. `n_ctx`:
        positions it must have."""
        self._forget_the_gone()
        best: tuple[_Entry[S], Found[S]] | None = None
        for entry in self._entries:
            if entry.likeness not in likenesses or entry.n_ctx < n_ctx:
                continue
            history = entry.session.history
            n_positions = history.reusable(prompt, entry.session.rollback)
            found = Found(entry.session, n_positions, max(0, len(history.tokens) - history.n_open - n_positions))
            if n_positions < MIN_TAKEN_OVER or not (found.wants_copy or found.may_be_cut):
                continue
            if best is None or (found.n_positions, -found.n_cut_off) > (best[1].n_positions, -best[1].n_cut_off):
                best = entry, found
        if best is None:
            return None
        self._entries.remove(best[0])
        return best[1]

    def remove(self, session: S) -> bool:
        """Take this one; False when it is gone."""
        self._forget_the_gone()
        n_before = len(self._entries)
        self._entries = [entry for entry in self._entries if entry.session is not session]
        return len(self._entries) < n_before

    def expire(self, now: float) -> list[S]:
        """Those kept long enough, to be closed."""
        self._forget_the_gone()
        old = [entry for entry in self._entries if entry.until <= now]
        self._entries = [entry for entry in self._entries if entry.until > now]
        return [entry.session for entry in old]

    @property
    def next_expiry(self) -> float | None:
        return min((entry.until for entry in self._entries), default=None)

    def drop_all(self) -> list[S]:
        """All of them, to be closed: the peer stops."""
        entries, self._entries = self._entries, []
        return [entry.session for entry in entries if entry.session.is_parked]

    def _forget_the_gone(self) -> None:
        self._entries = [entry for entry in self._entries if entry.session.is_parked]
