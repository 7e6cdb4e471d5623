"""Sessions that wait for room on a span: a queue without I/O.

The rule this file keeps: fair between heads, not between sessions. Each head's first waiting session stands before
anybody's second, and what a head has running counts as if it stood in line already, so nobody gets more by asking
more often. The queue is bounded, for all and for each head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from meshswarm.identity import PeerId

MAX_WAITING = 64
MAX_WAITING_PER_HEAD = 16
UNMEASURED_TURN_S = 10.0
NEWEST_SHARE = 0.25  # of the mean, so that it follows what sessions ask for now


@dataclass(eq=False, slots=True)
class Ticket:
    """One session in line. `until`: when its head gives up."""

    head: PeerId
    until: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where a session stands, 1 is next, and how long that is likely to take."""

    number: int
    estimate_s: float


class WaitingRoom:
    """`n_slots`: how many sessions run at once. `now` is on any clock that rises; `running` names the head of each
    session that is at work, once per session."""

    def __init__(self, n_slots: int) -> None:
        self._n_slots = n_slots
        self._tickets: list[Ticket] = []  # by arrival
        self._turn_s: float | None = None

    def __len__(self) -> int:
        return len(self._tickets)

    def enter(self, head: PeerId, until: float) -> Ticket | None:
        """A ticket at the end of this head's line; None when there is no more room to wait."""
        of_head = sum(ticket.head == head for ticket in self._tickets)
        if len(self._tickets) >= MAX_WAITING or of_head >= MAX_WAITING_PER_HEAD:
            return None
        ticket = Ticket(head, until)
        self._tickets.append(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Room was found, or the head does not wait any more."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)

    def line(self, running: Iterable[PeerId]) -> list[Ticket]:
        """Everybody in line, the next one first."""
        ahead = Counter(running)
        ranked = []
        for ticket in self._tickets:
            ranked.append((ahead[ticket.head], ticket))
            ahead[ticket.head] += 1
        return [ticket for _, ticket in sorted(ranked, key=lambda each: each[0])]  # stable: else by arrival

    def places(self, running: Iterable[PeerId]) -> dict[Ticket, Place]:
        return {
            ticket: Place(number, self.estimate_s(number)) for number, ticket in enumerate(self.line(running), start=1)
        }

    def estimate_s(self, number: int) -> float:
        """How long the session at this place will wait: rooms become free one after another, evenly over a turn."""
        return number * (UNMEASURED_TURN_S if self._turn_s is None else self._turn_s) / self._n_slots

    def lasted(self, turn_s: float) -> None:
        """A session was at work for so long before its room could be had again."""
        old = turn_s if self._turn_s is None else self._turn_s
        self._turn_s = old + NEWEST_SHARE * (turn_s - old)

    def expired(self, now: float) -> list[Ticket]:
        """Those who do not want to wait any longer."""
        return [ticket for ticket in self._tickets if ticket.until <= now]

    @property
    def next_expiry(self) -> float | None:
        return min((ticket.until for ticket in self._tickets), default=None)
