"""Urgent words: accusations, farewells and answers to accusations, sent on at once and kept for those who missed them.

The rule this file keeps: a word about one peer replaces the one before it; what goes out at once is paid from a budget,
and when that is spent the word waits for the next exchange, which asks for what it has not seen. So a flood of events
makes them slower, never the traffic larger.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshswarm.identity import PeerId
from meshswarm.routing.gossip.messages import MAX_EVENT_TAGS, MAX_WORDS, Word, tag
from meshswarm.routing.gossip.neighbours import Neighbours

KEPT_S = 30.0
MAX_EVENTS = 512
BUDGET_PER_S = 300.0  # bytes a second
BUDGET_BURST = 48_000.0
RESERVE = BUDGET_BURST / 2  # of the budget, for those who ask: they get only what they lack
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


@dataclass(frozen=True, slots=True)
class _Errand:
    """A word on its way to each of `to`."""

    word: Word
    to: tuple[PeerId, ...]


class Events:
    """What happened lately, and what of it is on its way out."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.next_at = float("inf")
        """When `due` has something."""
        self._neighbours = neighbours
        self._errands: list[_Errand] = []
        self._seen: OrderedDict[int, None] = OrderedDict()  # tags of those that were here, for longer than they are
        self._events: OrderedDict[PeerId, Event] = OrderedDict()  # oldest first
        self._budget = BUDGET_BURST
        self._paid_at = 0.0

    def add(self, about: PeerId, word: Word, now: float, *, key: bytes | None = None) -> None:
        """Keep it for those who ask. Words with one `key` (their bytes, where there is none) say the same."""
        event = Event(about, word, tag(bytes([word.kind]) + (word.data if key is None else key)), now)
        self._events.pop(about, None)
        self._events[about] = event
        self._seen.pop(event.tag, None)
        self._seen[event.tag] = None
        if len(self._seen) > MAX_EVENTS:
            self._seen.popitem(last=False)
        if len(self._events) > MAX_EVENTS:
            self._events.popitem(last=False)

    def send(self, word: Word, to: Collection[PeerId], now: float) -> None:
        """To each of these soon."""
        self._errands.append(_Errand(word, tuple(to)))
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
        self.send(word, [neighbour.peer for neighbour in self._neighbours.sample(fanout, {*skip, about})], now)

    def due(self, now: float) -> list[tuple[PeerId, tuple[Word, ...]]]:
        """What goes out now, as far as the budget allows; the rest waits to be asked for."""
        if now < self.next_at:
            return []
        errands, self._errands, self.next_at = self._errands, [], float("inf")
        by_peer: dict[PeerId, list[Word]] = {}
        for errand in errands:
            for peer in errand.to:
                by_peer.setdefault(peer, []).append(errand.word)
        return [
            (peer, tuple(words[-MAX_WORDS:]))
            for peer, words in by_peer.items()
            if self._pay(MESSAGE_BYTES + sum(len(word.data) for word in words[-MAX_WORDS:]), now, leaving=RESERVE)
        ]

    def is_news(self, tags: Collection[int]) -> bool:
        """Whether somebody who knows these knows of something that was never heard of here."""
        return any(each not in self._seen for each in tags)

    def tags(self, now: float) -> tuple[int, ...]:
        """Of the newest ones."""
        return tuple(event.tag for event in self._lately(now))

    def lacking(self, tags: Collection[int], asker: PeerId, now: float) -> list[Word]:
        """What somebody who knows `tags` has not heard of, the newest first."""
        return [event.word for event in self._lately(now) if event.tag not in tags and event.about != asker]

    def paid(self, words: Sequence[Word], n: int, now: float) -> tuple[Word, ...]:
        """The first of `words` that the budget has room for, `n` at most and not too much for one message: what many
        events at once may cost beyond the usual."""
        chosen: list[Word] = []
        room = EXTRA_BYTES
        for word in words[: max(0, n)]:
            room -= len(word.data)
            if room < 0 or not self._pay(len(word.data), now):
                break
            chosen.append(word)
        return tuple(chosen)

    def _pay(self, n_bytes: int, now: float, *, leaving: float = 0.0) -> bool:
        """Takes that much out of the budget for messages out of turn, if it is there."""
        self._budget = min(BUDGET_BURST, self._budget + max(0.0, now - self._paid_at) * BUDGET_PER_S)
        self._paid_at = now
        if self._budget < n_bytes + leaving:
            return False
        self._budget -= n_bytes
        return True

    def _lately(self, now: float) -> list[Event]:
        found: list[Event] = []
        for event in reversed(self._events.values()):
            if now - event.at > KEPT_S or len(found) == MAX_EVENT_TAGS:
                break
            found.append(event)
        return found
