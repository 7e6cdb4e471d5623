"""Urgent words: who hears of them at once, who when he asks, and what it may cost."""

from __future__ import annotations

import random
from collections.abc import Collection

from meshswarm.identity import PeerId
from meshswarm.routing.gossip.events import BUDGET_BURST, BUDGET_PER_S, KEPT_S, MESSAGE_BYTES, RESERVE, Events
from meshswarm.routing.gossip.messages import MAX_WORDS, Word, WordKind
from meshswarm.routing.gossip.neighbours import Neighbours


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32))


def events(n_neighbours: int = 12) -> Events:
    neighbours = Neighbours(peer(0), random.Random(1))
    for number in range(1, n_neighbours + 1):
        neighbours.accept(peer(number), is_lonely=False, keep=(), now=0.0)
    return Events(neighbours)


def word(number: int, n_bytes: int = 500) -> Word:
    return Word(WordKind.ACCUSATION, number.to_bytes(4) + bytes(n_bytes - 4))


def lacking(said: Events, tags: Collection[int], asker: PeerId, now: float) -> list[Word]:
    return [event.word for event in said.lacking(tags, asker, now)]


def test_words_that_come_together_go_out_together() -> None:
    said = events()
    said.send(word(1), [peer(1), peer(2)], 0.0)
    said.send(word(2), [peer(2)], 0.0)
    assert said.due(0.01) == []
    assert dict(said.due(0.06)) == {peer(1): (word(1),), peer(2): (word(1), word(2))}
    assert said.due(9.0) == []


def test_the_peer_it_is_about_and_whoever_told_it_are_not_told() -> None:
    said = events(4)
    said.spread(peer(1), word(1), 0.0, fanout=9, skip=(peer(2),))
    assert {to for to, _ in said.due(1.0)} == {peer(3), peer(4)}


def test_who_asks_gets_what_he_lacks_the_newest_first() -> None:
    said = events()
    for number in (1, 2, 3):
        said.add(peer(100 + number), word(number), float(number))
    known = said.tags(4.0)[2:]  # the oldest
    assert lacking(said, known, peer(5), 4.0) == [word(3), word(2)]
    assert lacking(said, (), peer(103), 4.0) == [word(2), word(1)], "not what it is itself accused of"
    said.add(peer(103), word(9), 5.0)
    assert lacking(said, (), peer(5), 5.0) == [word(9), word(2), word(1)], "one word about one peer"
    assert lacking(said, (), peer(5), 3.5 + KEPT_S) == [word(9)]


def test_what_goes_out_of_turn_is_bounded() -> None:
    said, spent = events(), 0
    for step in range(6000):  # a minute of ten words a second to six neighbours each
        now = step / 100
        if step % 10 == 0:
            said.send(word(step), [peer(1 + (step + each) % 12) for each in range(6)], now)
        spent += sum(MESSAGE_BYTES + sum(len(each.data) for each in words) for _, words in said.due(now))
    assert spent <= BUDGET_BURST - RESERVE + 60 * BUDGET_PER_S
    for number in range(20):
        said.add(peer(100 + number), word(number), 60.0)
    asked = said.lacking((), peer(1), 60.0)
    got = 0
    for _ in range(500):
        got += sum(len(each.data) for each in said.paid(asked, MAX_WORDS, 60.0))
    assert RESERVE * 0.9 <= got <= RESERVE + 1, "what is kept for those who ask is there, and is all"
