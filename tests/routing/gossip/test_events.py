"""Urgent words: who hears of them at once, who when he asks, and what it may cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from meshswarm.identity import PeerId
from meshswarm.routing.gossip.events import (
    BUDGET_BURST,
    BUDGET_PER_S,
    KEPT_S,
    MESSAGE_BYTES,
    OTHERS_TAGS,
    RESERVED,
    Events,
)
from meshswarm.routing.gossip.messages import MAX_EVENT_TAGS, MAX_WORDS, Word, WordKind
from meshswarm.routing.gossip.neighbours import Neighbours


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32))


def events(n_neighbours: int = 12, known: Callable[[PeerId], bool] = lambda peer: True) -> Events:
    neighbours = Neighbours(peer(0), random.Random(1))
    for number in range(1, n_neighbours + 1):
        neighbours.accept(peer(number), is_lonely=False, keep=(), now=0.0)
    return Events(neighbours, known)


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
    assert spent <= BUDGET_BURST * (1 - RESERVED) + 60 * BUDGET_PER_S
    for number in range(20):
        said.add(peer(100 + number), word(number), 60.0)
    asked = said.lacking((), peer(1), 60.0)
    got = 0
    for _ in range(500):
        got += sum(len(each.data) for each in said.paid(asked, MAX_WORDS, 60.0))
    reserved = BUDGET_BURST * RESERVED
    assert reserved * 0.9 <= got <= reserved + 1, "what is kept for those who ask is there, and is all"


def is_known(who: PeerId) -> bool:
    return who.key < peer(1000).key


def test_what_is_told_of_unknown_peers_comes_after_all_else_and_has_room_of_its_own() -> None:
    said = events(known=is_known)
    for number in range(40):
        said.add(peer(100 + number), word(number), 1.0)
    for number in range(300):
        said.add(peer(5000 + number), word(5000 + number), 2.0)
    told = lacking(said, (), peer(5), 2.0)
    assert len(told) == MAX_EVENT_TAGS == len(said.tags(2.0))
    n_known = MAX_EVENT_TAGS - OTHERS_TAGS
    assert told[:n_known] == [word(number) for number in range(39, 39 - n_known, -1)], "known ones first, newest first"
    assert told[n_known:] == [word(5000 + number) for number in range(299, 299 - OTHERS_TAGS, -1)]
    assert len(lacking(said, (), peer(5), 1.5 + KEPT_S)) == MAX_EVENT_TAGS, "and all the room where there is no other"


def test_words_of_unknown_peers_never_spend_what_others_need() -> None:
    said = events(known=is_known)
    for step in range(400):
        said.spread(peer(5000 + step), word(step), step / 100, fanout=6)
        said.due(step / 100 + 0.06)
    assert said.due(9.0) == []
    said.spread(peer(1001), word(1), 4.1, fanout=6)
    assert said.due(4.2) == [], "nothing is left for them"
    (other, *_) = said.lacking((), peer(1), 4.2)
    while said.paid([other], 1, 4.2):
        pass
    n_sent = 0
    for step in range(20):
        said.spread(peer(100 + step % 2), word(step), 4.2, fanout=6)
        said.spread(peer(1002), word(3), 4.2, fanout=6)
        sent = said.due(4.3)
        assert all(words == (word(step),) for _, words in sent)
        n_sent += len(sent)
    assert n_sent == BUDGET_BURST * (1 - RESERVED) // (MESSAGE_BYTES + 500), "all of what is theirs is still there"
    (known, *_) = said.lacking((), peer(1), 4.3)
    assert known.is_known and said.paid([known], 1, 4.3), "and who asks still gets it"
