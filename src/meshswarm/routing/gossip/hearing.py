"""What others passed on, read and believed or not: the one door for every signed word.

The rule this file keeps: the order of the checks is the order of their cost: shape, swarm, number, then the signature.
A word that fails the first, the second or the last was sent on by somebody who did not check it, which ends that
neighbourship; one that is merely old ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshswarm.dht.wire import WireError
from meshswarm.identity import PeerId
from meshswarm.routing.gossip.loads import Loads
from meshswarm.routing.gossip.messages import Word, WordKind, tag
from meshswarm.routing.gossip.neighbours import Neighbours
from meshswarm.routing.gossip.report import SignedReport
from meshswarm.routing.gossip.standing import Standings, Weight
from meshswarm.routing.gossip.summaries import Summaries
from meshswarm.routing.gossip.summary import Summary
from meshswarm.routing.gossip.words import Accusation, Appointment, Farewell

MAX_FORGETFUL = 64


@dataclass(frozen=True, slots=True)
class Effect:
    """What a believed word asks for. `spreads`: others should hear of it at once. `accusation`: as it stands now, with
    what was known before. `own_number`: this very peer said it, once."""

    about: PeerId
    word: Word
    spreads: bool = False
    accusation: Accusation | None = None
    own_number: int = -1


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
        self._forgetful: set[PeerId] = set()  # who uses lower numbers than it once did

    def forgotten(self, peer: PeerId) -> Word | None:
        """What a peer that uses lower numbers than it once did should see again."""
        if peer not in self._forgetful:
            return None
        farewell, signed = self._standings.farewell(peer), self._loads.get(peer)
        if farewell is not None and (signed is None or signed.report.seq < farewell.number):
            return Word(WordKind.FAREWELL, farewell.wire)
        return None if signed is None else Word(WordKind.REPORT, signed.wire)

    def take(self, word: Word, sender: PeerId, now: float) -> Effect | None:
        """None when it changes nothing that anybody else must do something about. Raises WireError."""
        match word.kind:
            case WordKind.REPORT:
                return self._report(word, sender, now)
            case WordKind.FAREWELL:
                return self._farewell(word, now)
            case WordKind.APPOINTMENT:
                return self._appointment(word, now)
            case WordKind.ACCUSATION:
                return self._accusation(word, now)
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
        self._require(signed.verify(), "load report", sender)
        self._loads.take(signed, now, self._neighbours.active, self.interests())
        if report.model_id is not None and report.model_id in self.cares:
            self._neighbours.kin.add(report.peer)
        self._standings.take_alive(report.peer, report.seq)
        return None

    def _farewell(self, word: Word, now: float) -> Effect | None:
        farewell = Farewell.decode(word.data)
        peer = farewell.peer
        self._require(farewell.scope == self._scope, "farewell", peer)
        if peer == self._own:
            self._require(farewell.verify(), "farewell", peer)
            return Effect(peer, word, own_number=farewell.number)
        if farewell.number <= max(self._loads.number(peer), self._standings.farewell_number(peer)):
            return None
        self._require(farewell.verify(), "farewell", peer)
        if not self._admits(peer) or not self._standings.take_farewell(farewell, now):
            return None
        self._loads.drop(peer)
        return Effect(peer, word, spreads=True)

    def _appointment(self, word: Word, now: float) -> Effect | None:
        appointment = Appointment.decode(word.data)
        peer = appointment.peer
        self._require(appointment.scope == self._scope, "appointment", peer)
        if peer == self._own or appointment.number <= self._standings.appointed(peer) or not self._admits(peer):
            return None
        self._require(appointment.verify(), "appointment", peer)
        answers = self._standings.take_alive(peer, appointment.number, appointment=True)
        return Effect(peer, word, spreads=answers)

    def _accusation(self, word: Word, now: float) -> Effect | None:
        accusation = Accusation.decode(word.data)
        peer = accusation.peer
        self._require(accusation.appointment.scope == self._scope, "accusation", peer)
        if peer == self._own:
            self._require(accusation.verify(), "accusation", peer)
            return Effect(peer, word, accusation=accusation, own_number=accusation.number)
        if not self._admits(peer) or self._standings.weigh(accusation) is Weight.STALE:
            return None
        self._require(accusation.verify(), "accusation", peer)
        return self.accuse(accusation, now)

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

    def _note_number(self, peer: PeerId, number: int, highest: int) -> None:
        if number >= highest:
            self._forgetful.discard(peer)
        elif len(self._forgetful) < MAX_FORGETFUL:
            self._forgetful.add(peer)

    @staticmethod
    def _require(condition: bool, what: str, about: PeerId) -> None:
        if not condition:
            raise WireError(f"a {what} about {about.short} that is forged or of another swarm")
