"""Whose clock is said to be wrong."""

from meshswarm.dht.clocks import OWN, Clocks, duration
from meshswarm.identity import PeerId

NOW = 1_800_000_000.0
PEERS = [PeerId(bytes([n]) * 32) for n in range(9)]


def heard(clocks: Clocks, peer: PeerId, ahead_s: float) -> tuple[object, str] | None:
    return clocks.heard(peer, int((NOW + ahead_s) * 1000), NOW)


def test_clocks_that_agree_and_peers_that_say_nothing_are_no_news() -> None:
    clocks = Clocks()
    for number, peer in enumerate(PEERS):
        assert heard(clocks, peer, 20 * number - 80) is None
        assert clocks.heard(peer, 0, NOW) is None


def test_between_two_nobody_can_say_which_one_it_is() -> None:
    told = heard(Clocks(), PEERS[0], 3 * 3600)
    assert told is not None
    about, sentence = told
    assert about == PEERS[0]
    assert "3 h ahead of this machine's" in sentence and "one of them is wrong" in sentence


def test_one_of_many_is_named() -> None:
    clocks = Clocks()
    for peer in PEERS[1:]:
        heard(clocks, peer, 1.0)
    told = heard(clocks, PEERS[0], -7200)
    assert told is not None
    assert told[0] == PEERS[0]
    assert f"peer {PEERS[0].short} is about 2 h behind this machine's and those of other peers" in told[1]


def test_when_most_are_elsewhere_it_is_this_machine_and_the_side_is_said() -> None:
    for ahead_s, side in ((5 * 3600.0, "behind"), (-5 * 3600.0, "ahead of")):
        clocks = Clocks()
        for peer in PEERS[:2]:
            heard(clocks, peer, ahead_s)
        told = heard(clocks, PEERS[2], ahead_s)
        assert told is not None
        assert told[0] == OWN
        assert f"this machine's clock is about 5 h {side} the clocks of 3 of 3 peers" in told[1]


def test_a_few_liars_make_nobody_doubt_his_own_clock() -> None:
    clocks = Clocks()
    for peer in PEERS[:5]:
        heard(clocks, peer, 0.0)
    for liar in PEERS[5:]:
        told = heard(clocks, liar, 86_400.0)
        assert told is not None and told[0] == liar


def test_lengths_of_time_in_words() -> None:
    assert [duration(s) for s in (300, -3600, 7200, 100 * 3600)] == ["5 min", "60 min", "2 h", "4 days"]
