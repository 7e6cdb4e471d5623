"""Life and death: who watches whom, what a missed beat leads to, and how this peer answers when it is accused itself.

The rule this file keeps: this peer's own failed probes decide what it thinks itself; what others are to think takes the
statements of those whom the silent peer chose, and the silent peer is always asked and told first.
"""

from __future__ import annotations

from collections.abc import Callable

from meshswarm.config import Address
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.routing.gossip import messages
from meshswarm.routing.gossip.ask import Ask, Asks
from meshswarm.routing.gossip.events import FANOUT, FIRST_FANOUT, Events
from meshswarm.routing.gossip.hearing import Effect, Hearing
from meshswarm.routing.gossip.messages import PROBE, PUSH, WATCH, WITNESS, Word, WordKind
from meshswarm.routing.gossip.neighbours import FAILED_S, Neighbours
from meshswarm.routing.gossip.own import OwnWords
from meshswarm.routing.gossip.standing import Standings, is_full, weight_key
from meshswarm.routing.gossip.watch import HEARD_LATELY_S, OwnWatchers, Ward, Wards
from meshswarm.routing.gossip.words import Accusation, Appointment

PROBE_TIMEOUT_S = 1.2
WATCH_TIMEOUT_S = 1.5
OVERSLEPT_S = 1.0
DECLINED_S = 60.0
WITNESSES_S = 30.0  # between two calls for one ward's other watchers: it alone says where they are
MAX_WHERE = 1  # of the addresses that a ward says a watcher has
MAX_HEARD = 1024
_HEARD_KEPT_S = 5.0  # longer than any question takes


class Vigil:
    """One peer's part in watching. It speaks through `asks` and `events`."""

    def __init__(
        self,
        identity: Identity,
        scope: bytes,
        standings: Standings,
        neighbours: Neighbours,
        words: OwnWords,
        hearing: Hearing,
        events: Events,
        asks: Asks,
        watchers: OwnWatchers,
        now: float,
    ) -> None:
        self.watchers = watchers
        self.wards = Wards(identity.peer_id)
        self.probed: set[PeerId] = set()
        self._own = identity.peer_id
        self._identity = identity
        self._scope = scope
        self._standings = standings
        self._neighbours = neighbours
        self._words = words
        self._hearing = hearing
        self._events = events
        self._asks = asks
        self._heard_at: dict[PeerId, float] = {}
        self._called_at: dict[PeerId, float] = {}  # when a ward's other watchers were asked last
        self._declined: dict[PeerId, float] = {}  # who would not watch this peer, until when
        self._charge: Accusation | None = None  # against this peer, not answered yet
        self._must_appoint = False
        self._overslept_at = now

    # -- signs of life and of its end

    def alive(self, peer: PeerId, now: float, *, is_beat: bool = False) -> None:
        """It spoke to this peer. `is_beat`: by a swap of its own."""
        self._heard_at[peer] = now
        self.wards.heard(peer, now, is_beat=is_beat)
        self._standings.heard(peer, now)

    def spoke_since(self, peer: PeerId, at: float) -> bool:
        return self._heard_at.get(peer, float("-inf")) > at

    def doubt(self, peer: PeerId, now: float) -> None:
        """Something with it failed: ask it once more, and its other watchers if it is watched here."""
        ward = self.wards.get(peer)
        if ward is not None and self.wards.probe(peer):
            self._call_witnesses(ward, now)
        self._probe(peer, now)

    def probe_failed(self, ask: Ask, now: float) -> None:
        self.probed.discard(ask.peer)
        if self.spoke_since(ask.peer, ask.asked_at):
            return
        if self._overslept_at >= ask.asked_at:
            self._probe(ask.peer, now)  # this process was held up: its own failure proves nothing
        else:
            self._silent(ask.peer, now)

    def overslept(self, lateness_s: float, now: float) -> None:
        """This process did not run for that long."""
        if lateness_s > OVERSLEPT_S:
            self._overslept_at = now
            self.wards.forgive(lateness_s)

    def watch(self, now: float) -> None:
        """Look after those whose beat is overdue, and tell everybody of silent ones when their other watchers do not
        speak."""
        for ward in self.wards.overdue(now):
            self._probe(ward.peer, now)
            self._call_witnesses(ward, now)
        for ward in self.wards.unanswered(now):
            accusation = self._standings.accusation(ward.peer)
            if accusation is not None:
                word = Word(WordKind.ACCUSATION, accusation.encode())
                self._events.spread(ward.peer, word, now, fanout=FIRST_FANOUT, key=weight_key(accusation))

    def forget(self, now: float) -> None:
        self.wards.forget(now)
        if len(self._heard_at) > MAX_HEARD:
            self._heard_at = {peer: at for peer, at in self._heard_at.items() if now - at < _HEARD_KEPT_S}

    def expel(self, admits: Callable[[PeerId], bool]) -> None:
        """Watch nobody who is not admitted; own watchers go with their neighbourship."""
        self.wards.keep(admits)

    # -- this peer's own watchers

    def appoint(self, now: float) -> None:
        """Choose watchers anew when one is lost, when there is room for more, and when this peer has to answer."""
        charge, self._charge = self._charge, None
        if charge is not None:
            self.watchers.distrust(charge.witnesses(), now)
        force, self._must_appoint = self._must_appoint or charge is not None, False
        self._declined = {peer: until for peer, until in self._declined.items() if until > now}
        before = self.watchers.chosen
        addresses = {peer: one.addresses for peer, one in self._neighbours.active.items()}
        if not self.watchers.choose(addresses, self._declined, now, force=force):
            return
        appointment = self._words.appoint(self.watchers.chosen, now)
        payload = messages.encode_watch(appointment.wire, tuple(addresses[peer] for peer in appointment.watchers))
        for peer in dict.fromkeys((*appointment.watchers, *before)):
            if peer in self._neighbours.active:
                self._asks.add(peer, WATCH, payload, WATCH_TIMEOUT_S, now)
        if charge is not None:
            word = Word(WordKind.APPOINTMENT, appointment.wire)
            self._events.spread(self._own, word, now, fanout=len(self._neighbours.active))

    def declined(self, peer: PeerId, now: float) -> None:
        """It will not watch this peer."""
        self._declined[peer] = now + DECLINED_S

    # -- questions of others

    def answer_watch(self, peer: PeerId, data: bytes, now: float) -> bytes:
        raw, where = messages.decode_watch(data)
        appointment = Appointment.decode(raw)
        if appointment.peer != peer or appointment.scope != self._scope or not appointment.verify():
            raise WireError(f"{peer.short} sent an appointment that is not its own, of this swarm and signed")
        self.take(Word(WordKind.APPOINTMENT, raw), peer, now)
        addresses = dict(zip(appointment.watchers, where, strict=False))
        return messages.encode_watched(self.wards.take(appointment, addresses, now, self._neighbours.active))

    def answer_witness(self, peer: PeerId, data: bytes, now: float) -> bytes:
        subject, number = messages.decode_witness(data)
        ward = self.wards.get(subject)
        if ward is None or ward.appointment.number != number or peer not in ward.appointment.watchers:
            return messages.encode_heard(None)
        if now - ward.heard_at > HEARD_LATELY_S and self.wards.probe(subject):
            self._probe(subject, now)
        return messages.encode_heard(now - ward.heard_at)

    def took_witness(self, about: PeerId, reply: bytes, now: float) -> None:
        ago_s = messages.decode_heard(reply)
        if ago_s is not None and ago_s <= HEARD_LATELY_S:
            self.wards.heard(about, now - ago_s)

    # -- words

    def take(self, word: Word, sender: PeerId, now: float) -> None:
        """A signed word that `sender` passed on. Raises WireError."""
        effect = self._hearing.take(word, sender, now, watches_same=self.wards.shared_with(sender))
        if effect is None:
            return
        if effect.is_answer:  # it has missed what the accused said to that
            if sender in self._neighbours.active:
                self._events.send(effect.word, (sender,), now)
        elif effect.about == self._own:
            self._heard_of_itself(effect, sender, now)
        else:
            self._act(effect, (sender,), now)

    def charges(self, peer: PeerId) -> list[Word]:
        """What the peer itself should hear: what it is accused of, and what it has said under a higher number than it
        uses now."""
        accusation = self._standings.accusation(peer)
        words = [] if accusation is None else [Word(WordKind.ACCUSATION, accusation.encode())]
        forgotten = self._hearing.forgotten(peer)
        return words if forgotten is None else [*words, forgotten]

    # -- inside

    def _probe(self, peer: PeerId, now: float) -> None:
        if peer not in self.probed:
            self.probed.add(peer)
            self._asks.add(peer, PROBE, messages.encode_empty(), PROBE_TIMEOUT_S, now)

    def _call_witnesses(self, ward: Ward, now: float) -> None:
        if now - self._called_at.get(ward.peer, float("-inf")) < WITNESSES_S:
            return
        self._called_at = {peer: at for peer, at in self._called_at.items() if now - at < WITNESSES_S}
        self._called_at[ward.peer] = now
        payload = messages.encode_witness(ward.peer, ward.appointment.number)
        gone = self._standings.gone(now)
        for watcher, where in self._others(ward):
            if watcher not in gone:
                self._asks.add(watcher, WITNESS, payload, PROBE_TIMEOUT_S, now, where=where, about=ward.peer)

    def _silent(self, peer: PeerId, now: float) -> None:
        """This peer's own probe of it failed."""
        self._standings.unreachable(peer, now)
        self._neighbours.drop(peer, now, not_before=now + FAILED_S)
        ward = self.wards.failed(peer, now)
        if ward is None:
            return
        at_s, number = int(self._hearing.time_s(now)), self._hearing.number(peer)
        effect = self._hearing.accuse(Accusation.state(self._identity, ward.appointment, at_s, number), now)
        if effect is None or effect.accusation is None:
            return
        if len(effect.accusation.statements) == len(ward.appointment.watchers):
            effect = Effect(effect.about, effect.word, spreads=True, accusation=effect.accusation)
        if not effect.spreads:
            payload = messages.encode_push((effect.word,))
            for watcher, where in self._others(ward):
                self._asks.add(watcher, PUSH, payload, PROBE_TIMEOUT_S, now, where=where)
        self._act(effect, (), now)

    def _others(self, ward: Ward) -> list[tuple[PeerId, tuple[Address, ...]]]:
        """The other watchers of a ward, and where it said that they are."""
        others = [watcher for watcher in ward.appointment.watchers if watcher != self._own]
        return [(watcher, ward.where.get(watcher, ())[:MAX_WHERE]) for watcher in others]

    def _act(self, effect: Effect, skip: tuple[PeerId, ...], now: float) -> None:
        peer, accusation = effect.about, effect.accusation
        is_watcher = accusation is not None and self._own in accusation.appointment.watchers
        key = None if accusation is None else weight_key(accusation)
        if effect.spreads:
            fanout = FIRST_FANOUT if is_watcher else FANOUT
            self._events.spread(peer, effect.word, now, fanout=fanout, skip=skip, key=key)
        elif accusation is not None and not is_watcher:
            self._events.add(peer, effect.word, now, key=key)
        if accusation is None:
            if effect.spreads and self._standings.is_unreachable(peer) and effect.word.kind is WordKind.APPOINTMENT:
                self._probe(peer, now)  # it lives: can it be reached again?
            return
        ward = self.wards.get(peer)
        if ward is not None and effect.spreads:
            ward.is_told = True
        if peer in self._neighbours.active:  # then it can be told, and asked
            self._events.send(effect.word, (peer,), now)
            self.doubt(peer, now)
        elif ward is not None and not is_full(accusation) and self.wards.probe(peer):
            self._probe(peer, now)

    def _heard_of_itself(self, effect: Effect, sender: PeerId, now: float) -> None:
        """Somebody accuses this living peer, or knows a word of it that it has forgotten. An accusation that a newer
        appointment has answered already comes from where nobody knows of that, as after a rift."""
        if self._words.exceed(effect.own_number, now):
            self._must_appoint = True
        appointment = self._words.appointment
        if effect.accusation is None or appointment is None:
            return
        if effect.own_number >= appointment.number:
            self._charge = effect.accusation
        else:
            word = Word(WordKind.APPOINTMENT, appointment.wire)
            self._events.add(self._own, word, now)
            self._events.send(word, (sender,), now)
