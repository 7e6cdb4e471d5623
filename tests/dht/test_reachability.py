"""Server or client: what a peer concludes."""

from meshswarm.config import Address
from meshswarm.dht.messages import Verdict
from meshswarm.dht.reachability import RECHECK_S, RETRY_S, Reachability

LAN = [Address("192.168.1.5", 4810)]
PUBLIC = [Address("203.0.113.5", 4810)]
OUTSIDE = "198.51.100.7:61000"


def test_on_one_machine_or_lan_everybody_is_a_server_and_nothing_is_asked() -> None:
    here = Reachability(None)
    here.observed(LAN, ["127.0.0.1:4810", "192.168.1.5:4810", "", "nonsense"])
    assert here.is_server
    assert not here.wants_check(0.0)


def test_behind_a_translator_a_peer_is_a_client_until_a_third_peer_has_dialled_it() -> None:
    here = Reachability(None)
    here.observed(LAN, [OUTSIDE])
    assert not here.is_server
    assert here.extra_addresses == ()
    assert here.wants_check(0.0)
    here.checked(Verdict.UNKNOWN, 0.0)
    assert not here.is_server
    assert not here.wants_check(RETRY_S - 1) and here.wants_check(RETRY_S)
    here.checked(Verdict.REACHED, 1000.0)
    assert here.is_server
    assert here.extra_addresses == (Address("198.51.100.7", 61000),)
    assert not here.wants_check(1000.0 + RECHECK_S - 1) and here.wants_check(1000.0 + RECHECK_S)


def test_what_worked_once_ends_with_the_address_or_after_two_failures() -> None:
    here = Reachability(None)
    here.observed(LAN, [OUTSIDE])
    here.checked(Verdict.REACHED, 0.0)
    here.checked(Verdict.SILENT, 10.0)
    assert here.is_server
    here.checked(Verdict.SILENT, 20.0)
    assert not here.is_server
    here.checked(Verdict.REACHED, 30.0)
    here.observed(LAN, ["198.51.100.99:61000"])
    assert not here.is_server
    assert here.wants_check(31.0)


def test_with_a_public_address_of_its_own_a_peer_is_a_server_until_two_could_not_reach_it() -> None:
    here = Reachability(None)
    here.observed(PUBLIC, ["203.0.113.5:4810"] * 3)
    assert here.is_server
    assert here.wants_check(0.0)
    here.checked(Verdict.SILENT, 0.0)
    assert here.is_server
    here.checked(Verdict.SILENT, 400.0)
    assert not here.is_server
    here.checked(Verdict.REACHED, 800.0)
    assert here.is_server
    assert here.extra_addresses == ()


def test_one_liar_among_others_changes_nothing() -> None:
    here = Reachability(None)
    here.observed(PUBLIC, [OUTSIDE, "203.0.113.5:4810", "203.0.113.5:4810"])
    assert here.is_server
    behind = Reachability(None)
    behind.observed(LAN, [OUTSIDE, OUTSIDE, "192.0.2.1:1"])
    behind.checked(Verdict.REACHED, 0.0)
    assert behind.extra_addresses == (Address("198.51.100.7", 61000),)


def test_what_a_person_decided_holds() -> None:
    for fixed in (True, False):
        here = Reachability(fixed)
        here.observed(LAN, [OUTSIDE])
        here.checked(Verdict.SILENT, 0.0)
        here.checked(Verdict.SILENT, 0.0)
        assert here.is_server is fixed
        assert not here.wants_check(0.0)
