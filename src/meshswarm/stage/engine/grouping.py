"""Which sessions' decode steps go together in one turn, and when a turn waits a moment for the rest of its group.

One turn of 4 rows costs little more than one of 1 row, so sessions should go together. But in a route of several spans
a turn that takes everyone leaves the other spans idle, and itself when they work: groups that follow each other through
the spans keep all of them busy. How many groups are best follows from three things measured here: what a turn of n
sessions takes, how long a session is away before its next step arrives, and how many sessions there are. The first span
of a route waits for the whole of a group; those behind it take what there is, and only wait for steps that are just
coming in one after the other.

The rule this file keeps: no I/O, no clock, no thread: all times are seconds that are passed in. Nobody is waited for
who is not expected, or who has turned out to be slower than those with whom it left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_LEARNED = 0.2  # weight of a new figure in an average
_FIXED_SESSIONS = 4.0
"""What a turn takes apart from its rows, in rows: measured on one thread, 1 row took as long as about 4 more. It only
serves for sizes that were not measured here yet."""
_MOST_SURPRISE = 2.0  # times what was expected: a turn that takes longer counts as that
_FORGOTTEN_TURNS = 500  # after so many turns a size that was not seen is guessed from others, and so tried again
_BESIDE_S = 0.0005  # what a turn costs beside computing
_MAX_GROUPS = 8
_WORTH = 1.02  # more groups are formed when they promise this much
_LATE = 1.5  # a session away this many times longer than usual is no longer waited for
_SLOW = 0.5  # of a turn: whoever comes back so much later than the first of its group is slow
_SLOW_ROUNDS = 3  # so often in a row, and it is not waited for any more
_FIRST_PARDON_ROUNDS, _MAX_PARDON_ROUNDS = 16, 1024  # until it is tried again, twice as long each time
_GAP = 0.1  # of a turn: steps that follow each other so closely came out of one turn of the span before
_GAP_BOUNDS_S = (0.0005, 0.01)


@dataclass(frozen=True, slots=True)
class Plan:
    """`groups`: those whose decode steps may be computed now, each in one turn. With none of them, `wait_until` says
    when to ask again, unless another step arrives before."""

    groups: Sequence[Collection[int]]
    wait_until: float


@dataclass(slots=True)
class _Session:
    """What is known of one slot. `ready_at`: its step waits since then; None: it is away, since `left_at`. `is_called`:
    its group was complete, so it goes, whoever else could not go in the same turn.

    `came_with`: those whose steps came in one after the other with its own; `came_before_with`: the time before.
    """

    ready_at: float | None = None
    is_called: bool = False
    left_at: float = 0.0
    left_with: frozenset[int] = frozenset()
    came_with: Collection[int] = ()
    came_before_with: Collection[int] = ()
    usual_away_s: float = 0.0
    n_late: int = 0
    slow_rounds: int = 0
    pardon_rounds: int = _FIRST_PARDON_ROUNDS

    @property
    def is_slow(self) -> bool:
        return self.slow_rounds > 0

    def late_at(self) -> float:
        return self.left_at + _LATE * self.usual_away_s

    def is_expected(self, now: float) -> bool:
        return self.ready_at is None and now < self.late_at()


class Grouping:
    """Watches the decode steps of one engine. A slot that is released must be forgotten.

    `turn_s`: what turns of so many sessions took when they were timed at load.
    """

    def __init__(self, *, is_first: bool, turn_s: Mapping[int, float]) -> None:
        self._is_first = is_first
        self._sessions: dict[int, _Session] = {}
        self._turn_s = dict(turn_s)
        self._timed_at_load = frozenset(turn_s)
        self._measured_at: dict[int, int] = {}
        self._n_turns = 0
        self._away_s = 0.0
        self._last_arrival = 0.0
        self._burst: set[int] = set()

    def arrived(self, slot: int, now: float) -> None:
        """The next thing that `slot` wants is a decode step."""
        session = self._sessions.setdefault(slot, _Session())
        if session.left_with:
            away_s = now - session.left_at
            self._away_s = _averaged(self._away_s, away_s)
            session.usual_away_s = _averaged(session.usual_away_s, away_s)
            self._judge(session, now)
        if now > self._last_arrival + self._gap_s():
            self._burst = set()
        self._burst.add(slot)
        session.came_with, session.came_before_with = self._burst, session.came_with
        session.ready_at = self._last_arrival = now

    def computed(self, slots: Sequence[int], ended: float) -> None:
        """A turn of one step for each of `slots` was computed."""
        together = frozenset(slots)
        for slot in slots:
            session = self._sessions.setdefault(slot, _Session())
            session.ready_at, session.left_at, session.left_with = None, ended, together
            session.is_called = False
            session.usual_away_s = session.usual_away_s or self._away_s
            session.slow_rounds = max(0, session.slow_rounds - 1)

    def took(self, n_sessions: int, turn_s: float) -> None:
        """That turn, of the usual steps of so many sessions, gaps included, took so long."""
        before = self._estimate(n_sessions)
        # A turn that another program has interrupted would keep sessions from this size, and so be believed for ever.
        now = min(turn_s, _MOST_SURPRISE * before) if before else turn_s
        if n_sessions in self._turn_s:  # a machine that becomes slower does so at sizes that are not seen for long, too
            now = _averaged(before, now)
            for other in self._turn_s:
                self._turn_s[other] *= now / before
        self._turn_s[n_sessions] = now
        self._n_turns += 1
        self._measured_at[n_sessions] = self._n_turns
        for size in [size for size, at in self._measured_at.items() if at < self._n_turns - _FORGOTTEN_TURNS]:
            del self._measured_at[size]
            if size not in self._timed_at_load:
                del self._turn_s[size]

    def forget(self, slot: int) -> None:
        """The slot has no session any more, or one that is about something else than decoding."""
        self._sessions.pop(slot, None)

    def plan(self, now: float) -> Plan:
        """What to do with the decode steps that are there; at least one is."""
        if len(self._sessions) == 1:
            return Plan((self._sessions,), now)
        ready = {slot for slot, session in self._sessions.items() if session.ready_at is not None}
        if not self._is_first:
            wait_until = self._last_arrival + self._gap_s()
            return Plan((ready,), now) if self._are_all_back(ready) or now >= wait_until else Plan((), wait_until)
        coming = {slot for slot, session in self._sessions.items() if session.is_expected(now)}
        present = sorted(ready | coming)
        size = self._best_size(len(present))
        groups = [present[at : at + size] for at in range(0, len(present), size)]
        groups = [group for group in groups if not ready.isdisjoint(group)]
        complete = [group for group in groups if not self._is_worth_waiting(group, coming)]
        for slot in ready.intersection(slot for group in complete for slot in group):
            self._sessions[slot].is_called = True
        return Plan(complete, max(now, min((self._sessions[slot].late_at() for slot in coming), default=now)))

    def _is_worth_waiting(self, group: Sequence[int], coming: Collection[int]) -> bool:
        sessions = [(slot, self._sessions[slot]) for slot in group]
        is_called = any(session.is_called for _, session in sessions)
        return not is_called and any(slot in coming and not session.is_slow for slot, session in sessions)

    def _are_all_back(self, ready: Collection[int]) -> bool:
        """Whether everyone is here who came in together with one of those who are, the time before."""
        mates = {mate for slot in ready for mate in self._sessions[slot].came_before_with}
        return all(mate in ready or mate not in self._sessions for mate in mates)

    def _judge(self, session: _Session, now: float) -> None:
        """See how much later than its group it came back."""
        mates = [self._sessions[mate] for mate in session.left_with if mate in self._sessions]
        backs = [mate.ready_at for mate in mates if mate.ready_at is not None and mate.left_at == session.left_at]
        if not backs or session.is_slow:
            return
        if now - min(backs) <= _SLOW * self._estimate(len(mates)):
            session.n_late = 0
            return
        session.n_late += 1
        if session.n_late == _SLOW_ROUNDS:
            session.n_late = 0
            session.slow_rounds = session.pardon_rounds
            session.pardon_rounds = min(_MAX_PARDON_ROUNDS, 2 * session.pardon_rounds)

    def _gap_s(self) -> float:
        low, high = _GAP_BOUNDS_S
        return min(max(_GAP * self._estimate(1), low), high)

    def _best_size(self, n_present: int) -> int:
        """How many sessions a turn should take."""
        if n_present < 2 or not self._turn_s:
            return max(1, n_present)
        rounds = {size: self._round_s(size, n_present) for size in _sizes(n_present)}
        fastest = min(rounds.values())
        return next(size for size, round_s in rounds.items() if round_s <= _WORTH * fastest)

    def _round_s(self, size: int, n_present: int) -> float:
        """Seconds in which everyone gets one turn, in turns of `size`: computing them all, or waiting for one."""
        turn_s = self._estimate(size) + _BESIDE_S
        n_turns = -(-n_present // size)
        return max(n_turns * turn_s, turn_s + self._away_s)

    def _estimate(self, size: int) -> float:
        known = self._turn_s.get(size)
        if known is not None or not self._turn_s:
            return known or 0.0
        nearest = min(self._turn_s, key=lambda other: (abs(other - size), other))
        return self._turn_s[nearest] * (size + _FIXED_SESSIONS) / (nearest + _FIXED_SESSIONS)


def _sizes(n_present: int) -> list[int]:
    """Sizes that make even groups, the largest first."""
    return sorted({-(-n_present // groups) for groups in range(1, min(n_present, _MAX_GROUPS) + 1)}, reverse=True)


def _averaged(average: float, figure: float) -> float:
    return figure if average == 0.0 else average + _LEARNED * (figure - average)
