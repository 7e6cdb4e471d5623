"""Notices: each thing once, and no sort crowds out another or fills the log."""

import logging

import pytest

from meshswarm.dht.notices import MAX_OF_A_SORT, Notices


def test_each_thing_is_said_once() -> None:
    notices = Notices()
    for _ in range(3):
        notices.say("clocks of others", "it is wrong", "peer 1")
        notices.say("crowd", "there is a crowd")
    assert notices.sentences == ["it is wrong", "there is a crowd"]


def test_a_flood_of_one_sort_leaves_the_others_and_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A thousand keys with wrong clocks cost nothing; what is said about this peer's own clock is still heard."""
    notices = Notices()
    with caplog.at_level(logging.WARNING):
        notices.say("crowd", "there is a crowd")
        for number in range(1000):
            notices.say("clocks of others", f"the clock of {number} is wrong", number)
        notices.say("own clock", "this machine's clock is wrong")
    assert len(caplog.records) == MAX_OF_A_SORT + 3
    assert {"there is a crowd", "this machine's clock is wrong", "the clock of 0 is wrong"} <= set(notices.sentences)
    assert "more of the same (clocks of others) is not told one by one" in notices.sentences
    assert len(notices.sentences) == MAX_OF_A_SORT + 3
