"""Gossip's decisions: what to say to whom, what to believe, who is gone. Events and the time go in, asks come out.

Every second this peer swaps with one of its watchers, every two seconds with another neighbour; both sides then have
each other's newest report and what they lacked of other news. Urgent words also go out at once. The rule this file
keeps: what is sent in a second is bounded, whatever happens in the swarm.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from meshswarm.config import Address
from meshswarm.dht.contact import Contact
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.routing.gossip import messages
from meshswarm.routing.gossip.ask import Ask, Asks
from meshswarm.routing.gossip.events import Event, Events
from meshswarm.routing.gossip.hearing import Hearing
from meshswarm.routing.gossip.messages import PROBE, PUSH, SWAP, WATCH, WITNESS, Swap, Swapped, Word, WordKind, tag
from meshswarm.routing.gossip.neighbours import DECLINED_S, FAILED_S, LONELY, MISBEHAVED_S, Neighbours
from meshswarm.routing.gossip.own import OwnWords
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.gossip.summary import Holding
from meshswarm.routing.gossip.surveys import Surveys
from meshswarm.routing.gossip.swarm_clock import SwarmClock
from meshswarm.routing.gossip.views import Views
from meshswarm.routing.gossip.vigil import Vigil
from meshswarm.routing.gossip.watch import BEAT_S, OwnWatchers

EXCHANGE_S = 2.0
DIGEST_S = 1.9
SUMMARY_DIGEST_S = 6.0
WORDS_BYTES = 600  # of what a neighbour lacked, in one message
SWAP_TIMEOUT_S = 1.5
DIAL_TIMEOUT_S = 3.0
CHORES_S = 5.0
REVISIT_S = 30.0
ASK_BACK_S = 0.5  # at most so often is asked out of turn, because a neighbour knows of something urgent
MAX_KIN = 1024


class Gossip(Views):
    """One peer's gossip. `now` is any clock that only rises, the same in every call; `started_ms`: Unix time at its
    making. `secret`: 16 bytes that nobody else knows. `admits`: who may be spoken of. `known`: whom this peer knows
    in other ways than by gossip, as by its table; the core adds those it has met itself."""

    def __init__(
        self,
        identity: Identity,
        scope: bytes,
        *,
        rng: random.Random,
        now: float,
        started_ms: int,
        secret: bytes,
        admits: Callable[[PeerId], bool] = lambda peer: True,
        known: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        super().__init__(identity.peer_id, secret, self.knows)
        self.neighbours = Neighbours(self.own, rng)
        self.words = OwnWords(identity, scope, self.meter, now, started_ms)
        self._identity = identity
        self._scope = scope
        self._rng = rng
        self._admits = admits
        self._known = known
        self._hearing = Hearing(
            self.own,
            scope,
            self.standings,
            self.loads,
            self.summaries,
            self.neighbours,
            self._admits,
            self.knows,
            SwarmClock(now, started_ms),
        )
        self._events = Events(self.neighbours, self.knows)
        self._asks = Asks(self.neighbours)
        self._surveys = Surveys(rng)
        self.vigil = Vigil(
            identity,
            scope,
            self.standings,
            self.neighbours,
            self.words,
            self._hearing,
            self._events,
            self._asks,
            OwnWatchers(rng),
            now,
        )
        self._revisit_at = now + rng.uniform(0.0, REVISIT_S)
        self._beat_at = now + rng.uniform(0.0, BEAT_S)
        self._exchange_at = now + rng.uniform(0.0, EXCHANGE_S)
        self._chores_at = now + rng.uniform(0.0, CHORES_S)
        self._ask_back_at = self._digest_at = self._summary_digest_at = float("-inf")
        self._expected_at = now
        self._has_left = False

    def knows(self, peer: PeerId) -> bool:
        """Whether this peer knows of it by more than what neighbours say."""
        is_met = self.neighbours.has_met(peer) or peer in self.vigil.wards
        return is_met or self._surveys.holds(peer) or self._known(peer)

    # -- what the shell tells

    def publish(self, report: LoadReport) -> None:
        """What is true of this peer now. Number, time and demand are set here, each time it is said."""
        self.words.said = report
        self._care()

    def survey(self, model_id: bytes, n_layers: int, holdings: Iterable[Holding]) -> None:
        """Who holds layers of a model, by the DHT."""
        self._surveys.take(model_id, n_layers, holdings)
        self.neighbours.kin |= self._surveys.holders() - {self.own}

    def asked(self, model_id: bytes, now: float) -> None:
        """A client of this peer asked for a model."""
        self.meter.count(model_id, now)
        self._care(now)

    def met(self, peer: PeerId, addresses: Iterable[Address], *, is_kin: bool = False) -> None:
        """A peer exists that may become a neighbour."""
        if self._admits(peer):
            self.neighbours.met(peer, addresses)
            if is_kin and peer != self.own:
                self.neighbours.kin.add(peer)

    def expel(self) -> None:
        """Some peers are not admitted any more: forget them, and what they said."""
        for peer in [peer for peer in self.neighbours.known() if not self._admits(peer)]:
            self.neighbours.forget(peer)
        for peer in [peer for peer in self.loads.peers() if not self._admits(peer)]:
            self.loads.drop(peer)
        self.vigil.expel(self._admits)
        self.summaries.expel(self._admits)

    def connected(self, peer: PeerId, address: Address | None, now: float) -> None:
        """A connection is there, in either direction."""
        self.neighbours.met(peer, () if address is None else (address,))
        self.vigil.alive(peer, now)

    def lost(self, peer: PeerId, now: float) -> None:
        """The last connection to it ended, for whatever reason."""
        if peer in self.neighbours.active or peer in self.vigil.wards or peer in self.neighbours.routes:
            self.vigil.doubt(peer, now)

    def leave(self, now: float) -> None:
        """Say farewell: `take_asks` gives the last messages."""
        payload = messages.encode_push((self.words.farewell(now),))
        self._asks.take()
        for peer in self.neighbours.active:
            self._asks.add(peer, PUSH, payload, SWAP_TIMEOUT_S, now, dials=False)
        self._has_left = True

    def take_asks(self) -> list[Ask]:
        """What is to be asked now; each once. Every one of them ends in `took`, `failed` or `refused`."""
        return self._asks.take()

    @property
    def has_asks(self) -> bool:
        return bool(self._asks)

    @property
    def next_at(self) -> float:
        """When `tick` should be called next."""
        if self._has_left:
            return float("inf")
        return min(self._beat_at, self._exchange_at, self._events.next_at, self.vigil.wards.next_at())

    def tick(self, now: float) -> None:
        """Do what is due. It may be called at any time."""
        if self._has_left:
            return
        self.vigil.overslept(now - self._expected_at, now)
        self._say_load(now)
        self.vigil.watch(now)
        self.vigil.appoint(now)
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S * self._rng.uniform(0.95, 1.05)
            self._beat(now)
        if now >= self._exchange_at:
            self._exchange_at = now + EXCHANGE_S * self._rng.uniform(0.8, 1.2)
            self._exchange(now)
        if now >= self._chores_at:
            self._chores_at = now + CHORES_S
            self._chores(now)
        for peer, words in self._events.due(now):
            self._asks.add(peer, PUSH, messages.encode_push(words), SWAP_TIMEOUT_S, now, dials=False)
        self._expected_at = max(now, self.next_at)

    # -- questions of others

    def answer(self, kind: str, peer: PeerId, data: bytes, now: float) -> bytes:
        """Raises WireError for bytes that break the protocol; their sender is no neighbour any more."""
        self.vigil.alive(peer, now, is_beat=kind == SWAP)
        try:
            return self._answer(kind, peer, data, now)
        except WireError:
            self.neighbours.drop(peer, now, not_before=now + MISBEHAVED_S)
            raise

    def _answer(self, kind: str, peer: PeerId, data: bytes, now: float) -> bytes:
        match kind:
            case messages.SWAP:
                return self._answer_swap(peer, messages.decode_swap(data), now)
            case messages.PUSH:
                for word in messages.decode_push(data):
                    self.vigil.take(word, peer, now)
            case messages.WATCH:
                return self.vigil.answer_watch(peer, data, now)
            case messages.WITNESS:
                return self.vigil.answer_witness(peer, data, now)
            case messages.PROBE:
                messages.decode_empty(data)
            case _:
                raise WireError(f"{kind[:40]!r} is not a kind of gossip")
        return messages.encode_empty()

    def _answer_swap(self, peer: PeerId, swap: Swap, now: float) -> bytes:
        keep = {*self.vigil.watchers.chosen, *self.neighbours.routes}
        accepted = not self._has_left and self.neighbours.accept(peer, is_lonely=swap.is_lonely, keep=keep, now=now)
        for word in swap.words:
            self.vigil.take(word, peer, now)
        words = self.vigil.charges(peer)
        urgent: list[Event] = []
        if accepted:
            urgent = self._events.lacking(set(swap.events), peer, now)
            if urgent and urgent[0].is_known:  # one is part of every answer; the others are paid for
                words.append(urgent.pop(0).word)
            words += self._own_report(peer, now)
            if swap.reports is not None:
                lacking = self.loads.lacking(swap.reports, swap.interests, peer, now)
                words += [Word(WordKind.REPORT, signed.wire) for signed in lacking[:2]]
            if swap.summaries is not None:
                found = self.summaries.lacking(swap.summaries, now, self._rng)
                words += [Word(WordKind.SUMMARY, summary.wire) for summary in found[:2]]
        contacts: tuple[Contact, ...] = ()
        if swap.wants_contacts or not accepted:
            contacts = self.neighbours.contacts(2 if accepted else 4, {peer, *self.gone(now)})
        chosen = _within(words)
        chosen += self._events.paid(urgent, messages.MAX_WORDS - len(chosen), now)
        if accepted and now >= self._ask_back_at and self._events.is_news(swap.events):
            self._ask_back_at = now + ASK_BACK_S
            self._swap(peer, now)
        return messages.encode_swapped(Swapped(accepted, chosen, contacts))

    # -- answers of others

    def took(self, ask: Ask, reply: bytes, now: float) -> None:
        """`ask` was answered. Raises WireError as `answer` does."""
        self.vigil.alive(ask.peer, now)
        try:
            if ask.kind == SWAP:
                self._took_swap(ask, messages.decode_swapped(reply), now)
            elif ask.kind == WATCH and not messages.decode_watched(reply):
                self.vigil.declined(ask.peer, now)
            elif ask.kind == WITNESS and ask.about is not None:
                self.vigil.took_witness(ask.about, reply, now)
            elif ask.kind == PROBE:
                self.vigil.probed.discard(ask.peer)
        except WireError:
            self.neighbours.drop(ask.peer, now, not_before=now + MISBEHAVED_S)
            raise

    def _took_swap(self, ask: Ask, swapped: Swapped, now: float) -> None:
        self.neighbours.answered(ask.peer, swapped.accepted, now)
        neighbour = self.neighbours.active.get(ask.peer)
        if neighbour is not None and ask.number > neighbour.told_number:
            neighbour.told_number, neighbour.told_at = ask.number, now
        for contact in swapped.contacts:
            if self._admits(contact.peer):
                self.neighbours.met(contact.peer, contact.addresses, is_hearsay=True)
        for word in swapped.words:
            self.vigil.take(word, ask.peer, now)

    def failed(self, ask: Ask, now: float) -> None:
        """No answer came in time, or there was no connection."""
        if ask.kind == PROBE:
            self.vigil.probe_failed(ask, now)
        elif self.vigil.spoke_since(ask.peer, ask.asked_at):
            return
        elif ask.peer in self.neighbours.active or ask.peer in self.vigil.wards:
            self.vigil.doubt(ask.peer, now)
        else:
            self.neighbours.drop(ask.peer, now, not_before=now + FAILED_S)

    def refused(self, ask: Ask, now: float) -> None:
        """It lives, and will not answer such questions now."""
        self.vigil.alive(ask.peer, now)
        self.vigil.probed.discard(ask.peer)
        if ask.kind in (SWAP, WATCH):
            self.neighbours.drop(ask.peer, now, not_before=now + DECLINED_S)

    # -- beats, exchanges, chores

    def _beat(self, now: float) -> None:
        watcher = self.vigil.watchers.next()
        if watcher is not None and watcher in self.neighbours.active:
            self._swap(watcher, now)

    def _exchange(self, now: float) -> None:
        """With another neighbour than the watchers, who hear of this peer anyway; with somebody new if one is missing;
        and now and then with one that is thought dead, since a network that was parted may have healed."""
        partner = self.neighbours.next_partner({*self.vigil.watchers.chosen, *self.vigil.probed})
        if partner is not None:
            self._swap(partner.peer, now)
        gone = self.gone(now)
        peer = self.neighbours.wanted(now, gone)
        if now >= self._revisit_at:
            self._revisit_at = now + REVISIT_S
            peer = self.neighbours.lost_one(now, gone) or peer
        if peer is not None:
            self.neighbours.asked(peer)
            self._swap(peer, now)

    def _swap(self, peer: PeerId, now: float) -> None:
        own = self._own_report(peer, now)
        reports = summaries = None
        interests: tuple[int, ...] = ()
        if now >= self._digest_at:
            self._digest_at = now + DIGEST_S
            interests = tuple(tag(model_id) for model_id in sorted(self._hearing.cares))[: messages.MAX_INTERESTS]
            reports = self.loads.digest(interests, now, self._rng)
        elif now >= self._summary_digest_at:
            self._summary_digest_at = now + SUMMARY_DIGEST_S
            summaries = self.summaries.digest(now, self._rng)
        swap = Swap(
            words=_within([*self.vigil.charges(peer), *own]),
            events=self._events.tags(now),
            reports=reports,
            summaries=summaries,
            interests=interests,
            wants_contacts=self.neighbours.knows_few,
            is_lonely=len(self.neighbours.active) < LONELY,
        )
        number = self.words.report.report.seq if own and self.words.report is not None else -1
        timeout_s = SWAP_TIMEOUT_S if peer in self.neighbours.active else DIAL_TIMEOUT_S
        self._asks.add(peer, SWAP, messages.encode_swap(swap), timeout_s, now, number=number)

    def _chores(self, now: float) -> None:
        self.standings.forget(now)
        self.neighbours.forget_silent(now)
        self.vigil.forget(now)
        self._care(now)
        if len(self.neighbours.kin) > MAX_KIN:
            self.neighbours.kin = self._surveys.holders() - {self.own}
        summary = self._surveys.sum_up(
            self._identity,
            self._scope,
            self.words.said,
            self.reports(now),
            self.gone(now),
            self.summaries,
            self.heard_demand(now),
            self.words.next_number(now),
            now,
        )
        if summary is not None:
            self.summaries.take(summary, now, self._hearing.cares)

    def _say_load(self, now: float) -> None:
        before = self.words.say_load(now)
        signed = self.words.report
        if before is None or signed is None:
            return
        word = Word(WordKind.REPORT, signed.wire)
        report = signed.report
        if report.draining and not before.draining:
            self._events.send(word, self.neighbours.active, now)
        elif (report.free_kv_tokens == 0) != (before.free_kv_tokens == 0):
            self._events.send(word, self.neighbours.kin & self.neighbours.active.keys(), now)

    def _own_report(self, peer: PeerId, now: float) -> list[Word]:
        word = self.words.report_for(self.neighbours.active.get(peer), now)
        return [] if word is None else [word]

    # -- inside

    def _care(self, now: float | None = None) -> None:
        """Reports matter of the model served here, and of those asked for lately."""
        served = self.words.said.model_id
        asked = set(self.meter.rates(now)) if now is not None else set(self._hearing.cares)
        self._hearing.cares = frozenset(asked | ({served} if served is not None else set()))


def _within(words: Sequence[Word]) -> tuple[Word, ...]:
    """The first of `words` that fit into one message; one always does."""
    chosen: list[Word] = []
    room = WORDS_BYTES
    for word in words[: messages.MAX_WORDS]:
        if chosen and len(word.data) > room:
            continue
        room -= len(word.data)
        chosen.append(word)
    return tuple(chosen)
