"""What this peer signs about itself: its load, whom it chose to watch it, its farewell.

The rule this file keeps: one number rises through all of them. It follows Unix time in ms, so that it goes on rising
when the peer starts again; when it does not (a clock that was set back), others show this peer what it said before, and
the number jumps above that.
"""

from __future__ import annotations

from dataclasses import replace

from meshswarm.dht.wire import MAX_INT
from meshswarm.identity import Identity, PeerId
from meshswarm.routing.gossip.messages import Word, WordKind
from meshswarm.routing.gossip.meter import DemandMeter
from meshswarm.routing.gossip.neighbours import Neighbour
from meshswarm.routing.gossip.report import LoadReport, SignedReport, is_news
from meshswarm.routing.gossip.words import Appointment, Farewell

REPORT_S = 5.0  # a report is said again at least this often
REPORT_MIN_S = 0.5  # and at most this often
RETELL_S = 8.0  # a neighbour whose report is this old gets the new one, even if it says nothing new
JUMP_S = 5.0  # at most one jump of the number in this time: two peers with one key must not chase each other


class OwnWords:
    """`now` is any clock that only rises; `started_ms`: Unix time at `now`."""

    def __init__(self, identity: Identity, scope: bytes, meter: DemandMeter, now: float, started_ms: int) -> None:
        self.report: SignedReport | None = None
        self.appointment: Appointment | None = None
        self.said = LoadReport(identity.peer_id)
        self._identity = identity
        self._scope = scope
        self._meter = meter
        self._started, self._started_ms = now, started_ms
        self._number = 0
        self._told = self.said
        self._said_at = self._jumped_at = float("-inf")
        self._news_number = -1

    def say_load(self, now: float) -> LoadReport | None:
        """Signs a new report if it is time; what was said before it when it says something of weight."""
        since_s = now - self._said_at
        if since_s < REPORT_MIN_S or (since_s < REPORT_S and self.said == self._told):
            return None
        before, self._told, self._said_at = self._told, self.said, now
        seq = self._next(now)
        at_ms = min(self._started_ms + max(0, round((now - self._started) * 1000)), MAX_INT)
        report = replace(self.said, seq=seq, at_ms=at_ms, demand=self._meter.most(now))
        is_first = self.report is None
        self.report = SignedReport.sign(self._identity, self._scope, report)
        if is_first or is_news(report, before):
            self._news_number = seq
            return None if is_first else before
        return None

    def report_for(self, neighbour: Neighbour | None, now: float) -> Word | None:
        """This peer's report, if that neighbour should have it by now. A stranger gets it at once."""
        if self.report is None:
            return None
        seq = self.report.report.seq
        if neighbour is not None:
            knows_news = neighbour.told_number >= self._news_number
            if neighbour.told_number >= seq or (knows_news and now - neighbour.told_at < RETELL_S):
                return None
        return Word(WordKind.REPORT, self.report.wire)

    def appoint(self, watchers: tuple[PeerId, ...], now: float) -> Appointment:
        self.appointment = Appointment.sign(self._identity, self._scope, self._next(now), watchers)
        return self.appointment

    def farewell(self, now: float) -> Word:
        return Word(WordKind.FAREWELL, Farewell.sign(self._identity, self._scope, self._next(now)).wire)

    def exceed(self, number: int, now: float) -> bool:
        """This peer once said something under `number`: go on above it. True when the number jumped."""
        if number < self._number or number >= MAX_INT or now < self._jumped_at + JUMP_S:
            return False
        self._jumped_at = now
        self._number = number
        self._said_at = float("-inf")
        return True

    def next_number(self, now: float) -> int:
        return self._next(now)

    def _next(self, now: float) -> int:
        elapsed_ms = max(0, int((now - self._started) * 1000))
        self._number = min(max(self._number + 1, self._started_ms + elapsed_ms), MAX_INT)
        return self._number
