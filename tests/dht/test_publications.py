"""What a peer says of itself: rising numbers, fresh ends, and nothing left behind."""

from collections.abc import Callable

import pytest

from meshswarm.dht.keys import Topics
from meshswarm.dht.publications import Publications
from meshswarm.dht.signed import LIFETIME_S, RecordKind, RecordSet, SignedRecord
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity

MODEL = bytes(range(32))


@pytest.fixture
def own(identity: Callable[[int], Identity], topics: Topics) -> Publications:
    return Publications(identity(1), topics)


def say(own: Publications, now: float, layers: tuple[int, int] = (0, 10), body: bytes = b"body") -> list[SignedRecord]:
    return own.say(RecordKind.COVERAGE, MODEL, body, now, layers=layers)


def test_a_statement_is_signed_of_this_swarm_and_lives_half_an_hour(
    own: Publications, topics: Topics, now: float
) -> None:
    [record] = say(own, now)
    assert record.verify()
    assert record.scope == topics.scope
    assert record.expires_ms == int((now + LIFETIME_S) * 1000)
    assert own.current(now) == [record]


def test_numbers_rise_whatever_the_clock_does(own: Publications, now: float) -> None:
    numbers = [say(own, at)[-1].seq for at in (now, now, now - 3600, now + 5)]
    assert numbers == sorted(set(numbers))


def test_numbers_rise_over_a_restart(own: Publications, identity: Callable[[int], Identity], topics: Topics) -> None:
    before = say(own, 1000.0)[-1]
    after = say(Publications(identity(1), topics), 1001.0)[-1]
    assert after.seq > before.seq


def test_moving_to_other_layers_takes_back_the_old_ones_first(own: Publications, topics: Topics, now: float) -> None:
    [old] = say(own, now, (0, 10))
    gone, new = say(own, now, (10, 20))
    assert gone.is_tombstone
    assert topics.of_record(gone) == topics.of_record(old)
    assert old.seq < gone.seq < new.seq
    assert RecordSet([old, gone, new]).live(now) == [new]
    assert own.current(now) == [new]


def test_growing_needs_no_tombstone(own: Publications, now: float) -> None:
    say(own, now, (4, 10))
    assert [record.is_tombstone for record in say(own, now, (0, 12))] == [False]


def test_withdrawing_says_so_once(own: Publications, now: float) -> None:
    say(own, now)
    [gone] = own.withdraw(RecordKind.COVERAGE, MODEL, now)
    assert gone.is_tombstone
    assert own.withdraw(RecordKind.COVERAGE, MODEL, now) == []
    assert own.withdraw(RecordKind.CARD, MODEL, now) == []
    assert own.due(now + 10_000, every_s=1.0) == []
    [again] = say(own, now)
    assert RecordSet([again, gone]).live(now) == [again]


def test_statements_are_due_after_their_time(own: Publications, now: float) -> None:
    say(own, now)
    own.say(RecordKind.CARD, MODEL, b"card", now + 300)
    assert own.due(now + 599, every_s=600) == []
    assert [record.kind for record in own.due(now + 600, every_s=600)] == [RecordKind.COVERAGE]
    say(own, now + 600)
    assert [record.kind for record in own.due(now + 900, every_s=600)] == [RecordKind.CARD]
    assert [record.kind for record in own.current(now + LIFETIME_S + 301)] == [RecordKind.COVERAGE]


def test_too_large_a_statement_is_refused_and_changes_nothing(own: Publications, now: float) -> None:
    [record] = say(own, now)
    with pytest.raises(WireError):
        say(own, now, body=bytes(2000))
    assert own.current(now) == [record]
