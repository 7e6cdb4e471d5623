"""What others passed on, read and believed or not: the one door for every signed word.

The rule this file keeps: the order of the checks is the order of their cost: shape, swarm, number, how much the sender
has brought, then the signature. A word that fails the first, the second or the last was sent on by somebody who did not
check it, which ends that neighbourship; one that is merely old, or one too many, ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from meshswarm.dht.wire import WireError
from meshswarm.identity import PeerId
from meshswarm.routing.gossip.gate import Gate
from meshswarm.routing.gossip.loads import Loads
from meshswarm.routing.gossip.messages import Word, WordKind, tag
from meshswarm.routing.gossip.neighbours import Neighbours
from meshswarm.routing.gossip.remembered import Remembered
from meshswarm.routing.gossip.report import SignedReport
from meshswarm.routing.gossip.standing import Standings, Weight
from meshswarm.routing.gossip.summaries import Summaries
from meshswarm.routing.gossip.summary import Summary
from meshswarm.routing.gossip.swarm_clock import SwarmClock
from meshswarm.routing.gossip.words import Accusation, Appointment, Farewell, Statement

MAX_FORGETFUL = 64
MAX_APPOINTMENTS, MAX_OTHER_APPOINTMENTS = 512, 64
SILENCE_AGE_S = 600.0
SILENCE_AHEAD_S = 300.0
"""A statement of silence counts while it is this old, or this far ahead, by the swarm's clock as this peer sees it: two
machines that are minutes apart understand each other."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What a believed word asks for. `spreads`: others should hear of it at once. `accusation`: as it stands now, with
    what was known before. `own_number`: this very peer said it, once. `is_answer`: `word` is what the sender lacked."""

    about: PeerId
    word: Word
    spreads: bool = False
    accusation: Accusation | None = None
    own_number: int = -1
    is_answer: bool = False


class Hearing:
    """Reads words for the peer `own` in the swarm `scope`."""

    def __init__(
        self,
        own: PeerId,
        scope: bytes,
        standings: Standings,
        loads: Loads,
        summaries: Summaries,
        neighbours: Neighbours,
        admits: Callable[[PeerId], bool],
        known: Callable[[PeerId], bool],
        clock: SwarmClock,
    ) -> None:
        self.cares: frozenset[bytes] = frozenset()
        """Models whose reports matter here."""
        self._own = own
        self._scope = scope
        self._standings = standings
        self._loads = loads
        self._summaries = summaries
        self._neighbours = neighbours
        self._admits = admits
        self._known = known
        self._clock = clock
        self._gate = Gate(own)
        self._appointments: Remembered[Word] = Remembered(known, MAX_APPOINTMENTS, MAX_OTHER_APPOINTMENTS)
        self._forgetful: set[PeerId] = set()  # who uses lower numbers than it once did

    def forgotten(self, peer: PeerId) -> Word | None:
        """What a peer that uses lower numbers than it once did should see again."""
        if peer not in self._forgetful:
            return None
        farewell, signed = self._standings.farewell(peer), self._loads.get(peer)
        if farewell is not None and (signed is None or signed.report.seq < farewell.number):
            return Word(WordKind.FAREWELL, farewell.wire)
        return None if signed is None else Word(WordKind.REPORT, signed.wire)

    def number(self, peer: PeerId) -> int:
        """The highest number under which it was heard to live, -1 when it was not."""
        return max(self._loads.number(peer), self._standings.number(peer))

    def time_s(self, now: float) -> float:
        """Unix time in seconds, by the clocks of the neighbours that were chosen here, and this machine's."""
        return self._clock.time_s(now, (one.peer for one in self._neighbours.active.values() if one.is_chosen))

    def take(self, word: Word, sender: PeerId, now: float, *, watches_same: Collection[PeerId] = ()) -> Effect | None:
        """None when it changes nothing that anybody must do something about. `watches_same`: peers that the sender was
        appointed to watch, as this one was. Raises WireError."""
        match word.kind:
            case WordKind.REPORT:
                return self._report(word, sender, now)
            case WordKind.FAREWELL:
                return self._farewell(word, sender, now)
            case WordKind.APPOINTMENT:
                return self._appointment(word, sender, now)
            case WordKind.ACCUSATION:
                return self._accusation(word, sender, now, watches_same)
            case WordKind.SUMMARY:
                return self._summary(word, now)

    def interests(self) -> frozenset[int]:
        return frozenset(tag(model_id) for model_id in self.cares)

    def _report(self, word: Word, sender: PeerId, now: float) -> Effect | None:
        signed = SignedReport.decode(word.data)
        report = signed.report
        self._require(signed.scope == self._scope, "load report", sender)
        if report.peer == self._own:
            self._require(signed.verify(), "load report", sender)
            return Effect(report.peer, word, own_number=report.seq)
        highest = max(self._loads.number(report.peer), self._standings.farewell_number(report.peer))
        if report.peer == sender:
            self._note_number(sender, report.seq, highest)
        if report.seq <= highest:
            return None
        if (report.peer != sender and report.model_id not in self.cares) or not self._admits(report.peer):
            return None  # nobody asked for it
        if not self._lets_in(sender, report.peer, now):
            return None
        self._require(signed.verify(), "load report", sender)
        if report.peer == sender:
            self._clock.heard(sender, report.at_ms, now)
        self._loads.take(signed, now, self._known, self.interests())
        if report.model_id is not None and report.model_id in self.cares:
            self._neighbours.kin.add(report.peer)
        self._standings.take_alive(report.peer, report.seq)
        return None

    def _farewell(self, word: Word, sender: PeerId, now: float) -> Effect | None:
        farewell = Farewell.decode(word.data)
        peer = farewell.peer
        self._require(farewell.scope == self._scope, "farewell", peer)
        if peer == self._own:
            self._require(farewell.verify(), "farewell", peer)
            return Effect(peer, word, own_number=farewell.number)
        if farewell.number <= max(self._loads.number(peer), self._standings.farewell_number(peer)):
            return None
        if not self._admits(peer) or not self._lets_in(sender, peer, now):
            return None
        self._require(farewell.verify(), "farewell", peer)
        if not self._standings.take_farewell(farewell, now):
            return None
        self._loads.drop(peer)
        return Effect(peer, word, spreads=True)

    def _appointment(self, word: Word, sender: PeerId, now: float) -> Effect | None:
        appointment = Appointment.decode(word.data)
        peer = appointment.peer
        self._require(appointment.scope == self._scope, "appointment", peer)
        if peer == self._own or appointment.number <= self._standings.appointed(peer) or not self._admits(peer):
            return None
        if not self._lets_in(sender, peer, now):
            return None
        self._require(appointment.verify(), "appointment", peer)
        self._appointments.put(peer, word)
        answers = self._standings.take_alive(peer, appointment.number, appointment=True)
        return Effect(peer, word, spreads=answers)

    def _accusation(self, word: Word, sender: PeerId, now: float, watches_same: Collection[PeerId]) -> Effect | None:
        accusation = Accusation.decode(word.data)
        peer = accusation.peer
        self._require(accusation.appointment.scope == self._scope, "accusation", peer)
        if peer == self._own:
            self._require(accusation.verify(), "accusation", peer)
            return Effect(peer, word, accusation=accusation, own_number=accusation.number)
        if not self._admits(peer):
            return None
        if accusation.number < self._standings.appointed(peer):
            newer = self._appointments.get(peer)
            lets_in = newer is not None and self._lets_in(sender, peer, now)
            return Effect(peer, newer, is_answer=True) if newer is not None and lets_in else None
        lately = accusation.only(partial(self._is_lately, self.time_s(now)))
        if lately is None or self._standings.weigh(lately) is Weight.STALE:
            return None
        if not self._lets_in(sender, peer, now, is_near=peer in watches_same):
            return None
        self._require(lately.verify(), "accusation", peer)
        return self.accuse(lately, now)

    def accuse(self, accusation: Accusation, now: float) -> Effect | None:
        """A verified accusation, of others or of this peer's own."""
        weight = self._standings.take_accusation(accusation, now)
        standing = self._standings.accusation(accusation.peer)
        if weight is Weight.STALE or standing is None:
            return None
        is_watcher = self._own in standing.appointment.watchers  # watchers hear each other before they tell the rest
        spreads = weight is Weight.FULL or (weight is Weight.NEW and not is_watcher)
        word = Word(WordKind.ACCUSATION, standing.encode())
        return Effect(accusation.peer, word, spreads=spreads, accusation=standing)

    def _summary(self, word: Word, now: float) -> Effect | None:
        summary = Summary.decode(word.data)
        self._require(summary.scope == self._scope, "summary", summary.author)
        if summary.author == self._own or not self._admits(summary.author):
            return None
        if self._summaries.is_wanted(summary, now, self.cares):
            self._require(summary.verify(), "summary", summary.author)
            self._summaries.take(summary, now, self.cares)
        return None

    def _lets_in(self, sender: PeerId, about: PeerId, now: float, *, is_near: bool = False) -> bool:
        is_near = is_near or sender == about or sender in self._neighbours.active
        return self._gate.lets_in(sender, now, is_near=is_near, is_known=sender == about or self._known(about))

    @staticmethod
    def _is_lately(time_s: float, statement: Statement) -> bool:
        return -SILENCE_AHEAD_S <= time_s - statement.at_s <= SILENCE_AGE_S

    def _note_number(self, peer: PeerId, number: int, highest: int) -> None:
        if number >= highest:
            self._forgetful.discard(peer)
        elif len(self._forgetful) < MAX_FORGETFUL:
            self._forgetful.add(peer)

    @staticmethod
    def _require(condition: bool, what: str, about: PeerId) -> None:
        if not condition:
            raise WireError(f"a {what} about {about.short} that is forged or of another swarm")
