"""What this peer says of itself: when, and under which number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.routing.gossip.virtual import MODEL, SCOPE

from meshswarm.identity import Identity
from meshswarm.routing.gossip.meter import AVERAGED_S, DemandMeter
from meshswarm.routing.gossip.neighbours import Neighbour
from meshswarm.routing.gossip.own import JUMP_S, REPORT_S, RETELL_S, OwnWords
from meshswarm.routing.gossip.words import Farewell


@pytest.fixture
def words(who: Callable[[int], Identity]) -> OwnWords:
    return OwnWords(who(1), SCOPE, DemandMeter(), 100.0, 1_000_000)


def seq(words: OwnWords) -> int:
    assert words.report is not None and words.report.verify()
    return words.report.report.seq


def test_a_report_is_said_when_it_changes_and_every_few_seconds(words: OwnWords) -> None:
    words.say_load(100.0)
    first = seq(words)
    words.say_load(104.9)
    assert seq(words) == first, "nothing has changed"
    words.said = replace(words.said, sessions=3)
    words.say_load(105.0)
    second = seq(words)
    words.said = replace(words.said, sessions=4)
    words.say_load(105.4)
    assert first < second == seq(words), "at most every half second"
    words.say_load(105.5)
    third = seq(words)
    words.say_load(105.5 + REPORT_S)
    assert second < third < seq(words)


def test_what_has_weight_is_told_as_news(words: OwnWords) -> None:
    words.say_load(100.0)
    words.said = replace(words.said, sessions=1)
    assert words.say_load(101.0) is None
    words.said = replace(words.said, draining=True)
    before = words.say_load(102.0)
    assert before is not None and not before.draining


def test_a_neighbour_is_told_news_at_once_and_the_rest_now_and_then(
    words: OwnWords, who: Callable[..., Identity]
) -> None:
    words.say_load(100.0)
    neighbour = Neighbour(who(2).peer_id, (), True, 100.0, 100.0)
    assert words.report_for(neighbour, 100.0) is not None and words.report_for(None, 100.0) is not None
    neighbour.told_number, neighbour.told_at = seq(words), 100.0
    assert words.report_for(neighbour, 100.0) is None
    words.said = replace(words.said, sessions=1)
    words.say_load(101.0)
    assert words.report_for(neighbour, 101.0) is None
    assert words.report_for(neighbour, 100.0 + RETELL_S) is not None
    words.said = replace(words.said, draining=True)
    words.say_load(102.0)
    assert words.report_for(neighbour, 102.0) is not None


def test_one_number_rises_through_all_words_and_follows_the_clock(
    words: OwnWords, who: Callable[..., Identity]
) -> None:
    words.say_load(100.0)
    appointment = words.appoint((who(2).peer_id,), 100.0)
    farewell = Farewell.decode(words.farewell(100.0).data)
    assert seq(words) == 1_000_000 and appointment.number == 1_000_001 and farewell.number == 1_000_002
    assert words.next_number(200.0) == 1_100_000


def test_it_goes_on_above_what_it_once_said_and_not_too_often(words: OwnWords) -> None:
    assert words.exceed(5_000_000, 100.0)
    words.say_load(100.0)
    assert seq(words) > 5_000_000
    assert not words.exceed(4_000_000, 200.0), "no reason to"
    assert not words.exceed(9_000_000, 100.0 + JUMP_S / 2)
    assert words.exceed(9_000_000, 100.0 + JUMP_S)
    assert not words.exceed(2**53, 900.0), "there is nothing above"


def test_demand_is_an_average_over_a_minute() -> None:
    meter = DemandMeter()
    for second in range(600):
        meter.count(MODEL, float(second))
    assert meter.rates(600.0)[MODEL] == pytest.approx(1.0, rel=0.02)
    assert meter.rates(600.0 + AVERAGED_S)[MODEL] == pytest.approx(1 / 2.718, rel=0.02)
    assert meter.rates(10_000.0) == {}
    for number in range(400):
        meter.count(number.to_bytes(32), 10_000.0 + number / 100)
    assert len(meter.rates(10_004.0)) <= 256 and len(meter.most(10_004.0)) == 6
