"""Urgent words: accusations, farewells and answers to accusations, sent on at once and kept for those who missed them.

The rule this file keeps: a word about one peer replaces the one before it; what goes out at once is paid from a budget,
and when that is spent the word waits for the next exchange, which asks for what it has not seen. So a flood of events
makes them slower, never the traffic larger; and words about peers that nobody here knows otherwise have a part of room
and budget that is theirs, and come after all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from meshswarm.identity import PeerId
from meshswarm.routing.gossip.messages import MAX_EVENT_TAGS, MAX_WORDS, Word, tag
from meshswarm.routing.gossip.neighbours import Neighbours
from meshswarm.routing.gossip.remembered import Remembered

KEPT_S = 30.0
MAX_EVENTS, MAX_OTHERS = 384, 128  # about peers that are known here, and about others
OTHERS_TAGS = 8  # of the urgent words a neighbour is told of, so many are left for others; more when there are few
BUDGET_PER_S = 300.0  # bytes a second
BUDGET_BURST = 48_000.0
OTHERS_PER_S = 500.0  # of words about others, which get no free place in an answer as those about known peers do
OTHERS_BURST = 12_000.0
RESERVED = 0.5  # of each budget, for those who ask: they get only what they lack
EXTRA_BYTES = 2000  # of urgent words in one answer, beyond its usual size
MESSAGE_BYTES = 150  # what a message costs beyond its words, with its acknowledgement
FANOUT = 2  # to how many neighbours at random a word of others is sent on
FIRST_FANOUT = 16  # and by each of those who say it first
DELAY_S = 0.05  # words that come together go out together


@dataclass(frozen=True, slots=True)
class Event:
    about: PeerId
    word: Word
    tag: int
    at: float
    is_known: bool


@dataclass(frozen=True, slots=True)
class _Errand:
    """A word on its way to each of `to`."""

    word: Word
    to: tuple[PeerId, ...]
    is_known: bool


class _Purse:
    """A budget of bytes: `per_s` of them, and `burst` saved up."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left = burst
        self._paid_at = 0.0

    def pay(self, n_bytes: int, now: float, *, reserved: float = 0.0) -> bool:
        """Takes that much out if it is there, with `reserved` (a share of all that can be saved) left behind."""
        self._left = min(self._burst, self._left + max(0.0, now - self._paid_at) * self._per_s)
        self._paid_at = now
        if self._left < n_bytes + reserved * self._burst:
            return False
        self._left -= n_bytes
        return True


class Events:
    """What happened lately, and what of it is on its way out. `known`: whom this peer knows otherwise."""

    def __init__(self, neighbours: Neighbours, known: Callable[[PeerId], bool] = lambda peer: True) -> None:
        self.next_at = float("inf")
        """When `due` has something."""
        self._neighbours = neighbours
        self._known = known
        self._errands: list[_Errand] = []
        self._seen: OrderedDict[int, None] = OrderedDict()  # tags of those that were here, for longer than they are
        self._events: Remembered[Event] = Remembered(known, MAX_EVENTS, MAX_OTHERS)
        self._purses = {True: _Purse(BUDGET_PER_S, BUDGET_BURST), False: _Purse(OTHERS_PER_S, OTHERS_BURST)}

    def add(self, about: PeerId, word: Word, now: float, *, key: bytes | None = None) -> None:
        """Keep it for those who ask. Words with one `key` (their bytes, where there is none) say the same."""
        tag_of = tag(bytes([word.kind]) + (word.data if key is None else key))
        event = Event(about, word, tag_of, now, self._known(about))
        self._events.put(about, event)
        self._seen.pop(event.tag, None)
        self._seen[event.tag] = None
        if len(self._seen) > MAX_EVENTS + MAX_OTHERS:
            self._seen.popitem(last=False)

    def send(self, word: Word, to: Collection[PeerId], now: float, *, is_known: bool = True) -> None:
        """To each of these soon. `is_known`: whom it speaks of is."""
        self._errands.append(_Errand(word, tuple(to), is_known))
        self.next_at = min(self.next_at, now + DELAY_S)

    def spread(
        self,
        about: PeerId,
        word: Word,
        now: float,
        *,
        fanout: int,
        skip: Collection[PeerId] = (),
        key: bytes | None = None,
    ) -> None:
        """Keep it for those who ask, and tell some neighbours at once."""
        self.add(about, word, now, key=key)
        to = [neighbour.peer for neighbour in self._neighbours.sample(fanout, {*skip, about})]
        self.send(word, to, now, is_known=self._known(about))

    def due(self, now: float) -> list[tuple[PeerId, tuple[Word, ...]]]:
        """What goes out now, as far as the budget allows; the rest waits to be asked for."""
        if now < self.next_at:
            return []
        errands, self._errands, self.next_at = self._errands, [], float("inf")
        by_peer: dict[PeerId, list[Word]] = {}
        for is_known, purse in self._purses.items():
            more: dict[PeerId, list[Word]] = {}
            for errand in errands:
                for peer in errand.to if errand.is_known is is_known else ():
                    more.setdefault(peer, []).append(errand.word)
            for peer, waiting in more.items():
                n = min(len(waiting), MAX_WORDS - len(by_peer.get(peer, ())))
                words = waiting[len(waiting) - n :]
                n_bytes = sum(len(word.data) for word in words) + (0 if peer in by_peer else MESSAGE_BYTES)
                if words and purse.pay(n_bytes, now, reserved=RESERVED):
                    by_peer.setdefault(peer, []).extend(words)
        return [(peer, tuple(words)) for peer, words in by_peer.items()]

    def is_news(self, tags: Collection[int]) -> bool:
        """Whether somebody who knows these knows of something that was never heard of here."""
        return any(each not in self._seen for each in tags)

    def tags(self, now: float) -> tuple[int, ...]:
        """Of the newest ones."""
        return tuple(event.tag for event in self._lately(now))

    def lacking(self, tags: Collection[int], asker: PeerId, now: float) -> list[Event]:
        """What somebody who knows `tags` has not heard of: about known peers first, and there the newest."""
        return [event for event in self._lately(now) if event.tag not in tags and event.about != asker]

    def paid(self, events: Sequence[Event], n: int, now: float) -> tuple[Word, ...]:
        """The words of the first of `events` that the budget has room for, `n` at most and not too much for one
        message: what many events at once may cost beyond the usual."""
        chosen: list[Word] = []
        room = EXTRA_BYTES
        for event in events[: max(0, n)]:
            room -= len(event.word.data)
            if room < 0 or not self._purses[event.is_known].pay(len(event.word.data), now):
                break
            chosen.append(event.word)
        return tuple(chosen)

    def _lately(self, now: float) -> list[Event]:
        known, others = (
            list(islice(takewhile(lambda event: now - event.at <= KEPT_S, newest), MAX_EVENT_TAGS))
            for newest in (self._events.newest(known=True), self._events.newest(known=False))
        )
        n_known = min(len(known), MAX_EVENT_TAGS - min(len(others), OTHERS_TAGS))
        return known[:n_known] + others[: MAX_EVENT_TAGS - n_known]
