"""From TLS to the end of HELLO under a virtual clock."""

from __future__ import annotations

import datetime

import pytest

from meshswarm.identity import Identity
from meshswarm.net.certificate import make_certificate
from meshswarm.net.codes import CloseCode
from meshswarm.net.greeting import MAX_EARLY_BYTES, Greeting
from meshswarm.net.handshake import Action, Established, Failed, Self, Send
from meshswarm.net.swarm import Swarm

NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
ALICE, BOB, MALLORY = (Identity.from_seed(letter * 32) for letter in (b"a", b"b", b"m"))
SWARM = Swarm("office", b"k" * 32)
CERTIFICATES = {identity.peer_id: make_certificate(identity, NOW) for identity in (ALICE, BOB, MALLORY)}


def draw(count: int) -> bytes:
    return bytes(count)


def client() -> Greeting:
    return Greeting(Self(ALICE, SWARM, "alice"), BOB.peer_id, "peer bob at 192.0.2.2:2", draw, 0.0)


def client_of_anybody() -> Greeting:
    return Greeting(Self(ALICE, SWARM, "alice"), None, "whoever is at 192.0.2.2:2", draw, 0.0, takes_anybody=True)


def server() -> Greeting:
    return Greeting(Self(BOB, SWARM, "bob"), None, "a client at 192.0.2.1:1", draw, 0.0)


def frames(actions: list[Action]) -> list[bytes]:
    return [action.frame for action in actions if isinstance(action, Send)]


def failure(actions: list[Action]) -> str:
    (failed,) = actions
    assert isinstance(failed, Failed) and failed.code is CloseCode.HELLO_FAILED
    return str(failed.error)


def test_both_sides_get_there() -> None:
    c, s = client(), server()
    assert s.tls_done(CERTIFICATES[BOB.peer_id], CERTIFICATES[ALICE.peer_id], [], 0.1) == []
    (first,) = frames(c.tls_done(CERTIFICATES[ALICE.peer_id], CERTIFICATES[BOB.peer_id], [], 0.1))
    (second,) = frames(s.receive(first, 0.2))
    assert not c.is_shown
    (third,) = frames(c.receive(second, 0.3))
    assert c.is_shown
    at_server = s.receive(third, 0.4)
    (fourth,) = frames(at_server)
    at_client = c.receive(fourth, 0.5)
    assert [action.peer for action in at_client + at_server if isinstance(action, Established)] == [
        BOB.peer_id,
        ALICE.peer_id,
    ]
    assert c.expire(99) == s.expire(99) == []


def test_a_client_says_nothing_to_a_server_with_another_key_or_none() -> None:
    mine = CERTIFICATES[ALICE.peer_id]
    said = failure(client().tls_done(mine, CERTIFICATES[MALLORY.peer_id], [], 0.1))
    assert f"is somebody else: peer {MALLORY.peer_id.short} answers there" in said
    assert "nobody with a certificate" in failure(client().tls_done(mine, None, [], 0.1))


@pytest.mark.parametrize("make", [client, server])
def test_a_chain_of_certificates_is_refused_by_both(make: type[Greeting]) -> None:
    theirs = CERTIFICATES[BOB.peer_id]
    said = failure(make().tls_done(theirs, theirs, [CERTIFICATES[MALLORY.peer_id]], 0.1))
    assert "one certificate, not 2" in said


def test_silence_at_either_step_ends_at_five_seconds_and_names_the_step() -> None:
    for make in (client, server):
        fresh = make()
        assert fresh.expire(4.99) == []
        assert "was silent in TLS for 5 s" in failure(fresh.expire(5.0))
        later = make()
        later.tls_done(CERTIFICATES[BOB.peer_id], CERTIFICATES[BOB.peer_id], [], 3.0)
        assert later.expire(4.99) == []
        assert "was silent in HELLO for 5 s" in failure(later.expire(5.0))


def test_a_server_takes_nothing_early_and_a_client_a_little_once_it_has_shown_itself() -> None:
    assert "sent data before HELLO was over" in failure(server().receive_early(4, b"x", False))
    assert "sent data before HELLO was over" in failure(server().receive(b"before tls", 0.1))
    c, s = client(), server()
    s.tls_done(CERTIFICATES[BOB.peer_id], None, [], 0.1)
    (first,) = frames(c.tls_done(CERTIFICATES[ALICE.peer_id], CERTIFICATES[BOB.peer_id], [], 0.1))
    assert "before HELLO was over" in failure(client().receive_early(1, b"x", False))
    c.receive(frames(s.receive(first, 0.1))[0], 0.1)
    assert c.receive_early(1, bytes(MAX_EARLY_BYTES), False) == []
    assert c.early == [(1, bytes(MAX_EARLY_BYTES), False)]
    assert "before HELLO was over" in failure(c.receive_early(1, b"x", False))


def test_a_client_that_knows_no_key_learns_the_one_that_was_proved() -> None:
    c, s = client_of_anybody(), server()
    s.tls_done(CERTIFICATES[BOB.peer_id], CERTIFICATES[ALICE.peer_id], [], 0.1)
    (first,) = frames(c.tls_done(CERTIFICATES[ALICE.peer_id], CERTIFICATES[BOB.peer_id], [], 0.1))
    (second,) = frames(s.receive(first, 0.2))
    (third,) = frames(c.receive(second, 0.3))
    (fourth,) = frames(s.receive(third, 0.4))
    (established,) = c.receive(fourth, 0.5)
    assert isinstance(established, Established) and established.peer == BOB.peer_id


def test_nobody_and_oneself_are_no_peers_to_a_client_that_knows_no_key() -> None:
    own = CERTIFICATES[ALICE.peer_id]
    assert "nobody with a certificate" in failure(client_of_anybody().tls_done(own, None, [], 0.1))
    assert "this very peer" in failure(client_of_anybody().tls_done(own, own, [], 0.1))
