"""HELLO by hand, without sockets: right both ways, and every way it can be wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.errors import PeerUnreachableError, RemoteProtocolError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.codes import CloseCode
from meshswarm.net.handshake import (
    HELLO_TIMEOUT_S,
    MAX_HELLO_BYTES,
    Action,
    ClientHello,
    Established,
    Failed,
    Self,
    Send,
    ServerHello,
    VersionRange,
)
from meshswarm.net.swarm import MAX_SWARM_KEYS, Role, Swarm

ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)
MALLORY = Identity.from_seed(b"m" * 32)
SWARM = Swarm("office", b"k" * 32)
CERTIFICATE = hashlib.sha256(b"bob's certificate").digest()


def client(
    me: Self | None = None, server: PeerId = BOB.peer_id, certificate: bytes = CERTIFICATE, nonce: bytes = b"1" * 32
) -> ClientHello:
    return ClientHello(me or Self(ALICE, SWARM, "alice/1", "192.0.2.2:2", b"alice-1."), server, certificate, nonce, 0.0)


def server(
    me: Self | None = None,
    certificate_key: PeerId | None = ALICE.peer_id,
    certificate: bytes = CERTIFICATE,
    nonce: bytes = b"2" * 32,
) -> ServerHello:
    return ServerHello(
        me or Self(BOB, SWARM, "bob/1", "192.0.2.1:1", b"bob-1..."),
        certificate_key,
        certificate,
        lambda count: nonce[:count],
        0.0,
    )


Tamper = Callable[[int, bytes], bytes]


def converse(
    c: ClientHello, s: ServerHello, tamper: Tamper = lambda _number, frame: frame
) -> tuple[list[Action], list[Action], list[bytes]]:
    """Carry frames both ways until neither speaks; what each side ended with, and every frame as it arrived."""
    wire: list[bytes] = []
    ends: tuple[list[Action], list[Action]] = ([], [])
    to_server = [action.frame for action in c.start() if isinstance(action, Send)]
    to_client: list[bytes] = []
    while to_server or to_client:
        source, machine, end, back = (
            (to_server, s, ends[1], to_client) if to_server else (to_client, c, ends[0], to_server)
        )
        frame = tamper(len(wire), source.pop(0))
        wire.append(frame)
        for action in machine.receive(frame, 0.1):
            if isinstance(action, Send):
                back.append(action.frame)
            else:
                end.append(action)
    return ends[0], ends[1], wire


def assert_refused(ends: list[Action], code: CloseCode = CloseCode.HELLO_FAILED) -> str:
    (failed,) = ends
    assert isinstance(failed, Failed)
    assert failed.code is code
    return str(failed.error)


def test_right_both_ways_in_four_messages() -> None:
    c, s = client(), server()
    at_client, at_server, wire = converse(c, s)
    assert at_client == [Established(BOB.peer_id, 1, "bob/1", "192.0.2.1:1", b"bob-1...")]
    assert at_server == [Established(ALICE.peer_id, 1, "alice/1", "192.0.2.2:2", b"alice-1.")]
    assert len(wire) == 4
    assert c.is_over and s.is_over
    assert c.expire(99.0) == s.expire(99.0) == []


def test_no_client_certificate_the_signature_suffices() -> None:
    at_client, at_server, _ = converse(client(), server(certificate_key=None))
    assert isinstance(at_client[0], Established) and isinstance(at_server[0], Established)


def test_a_certificate_of_somebody_else_than_the_signer() -> None:
    at_client, at_server, wire = converse(client(), server(certificate_key=MALLORY.peer_id))
    assert_refused(at_server)
    assert at_client == [] and len(wire) == 3


def test_a_key_claimed_without_having_it() -> None:
    def claim_alice(number: int, frame: bytes) -> bytes:
        if number != 0:
            return frame
        message = msgpack.unpackb(frame)
        return bytes(msgpack.packb({**message, "key": ALICE.peer_id.key}))

    _, at_server, _ = converse(client(Self(MALLORY, SWARM, "m")), server(certificate_key=None), claim_alice)
    assert_refused(at_server)


def test_another_server_than_the_one_dialled() -> None:
    """A server that has Bob's certificate bytes in front of it but not his key cannot answer for him."""
    at_client, at_server, _ = converse(client(), server(Self(MALLORY, SWARM, "m")))
    assert_refused(at_server)
    assert at_client == []


def test_a_hello_relayed_to_another_server_is_worthless() -> None:
    """Alice dials Mallory in good faith; Mallory passes her messages on to Bob and gets nowhere."""
    at_client, at_server, _ = converse(client(server=MALLORY.peer_id), server(certificate_key=None))
    assert_refused(at_server)
    assert at_client == []


def test_bound_to_the_server_certificate() -> None:
    _, at_server, _ = converse(client(certificate=hashlib.sha256(b"other").digest()), server())
    assert_refused(at_server)


def test_a_replayed_hello() -> None:
    _, _, wire = converse(client(), server())
    replayed = server(nonce=b"3" * 32)
    assert isinstance(replayed.receive(wire[0], 0.1)[0], Send)
    assert_refused(replayed.receive(wire[2], 0.1))


def test_a_servers_proof_sent_back_to_it() -> None:
    """Reflection: what the server says as a server is not valid when a client says it."""
    s = server(certificate_key=None)
    _, _, wire = converse(client(), server(certificate_key=None))
    s.receive(wire[0], 0.1)
    assert_refused(s.receive(wire[3], 0.1))


@pytest.mark.parametrize("other", [Swarm("office", b"x" * 32), Swarm("office"), Swarm("public")])
def test_wrong_swarm_key_the_client_shows_first_and_learns_nothing(other: Swarm) -> None:
    at_client, at_server, wire = converse(client(Self(ALICE, other, "alice/1")), server())
    wrong_swarm = assert_refused(at_server)
    assert at_client == [] and len(wire) == 3
    _, bad_signature, _ = converse(client(), server(certificate_key=MALLORY.peer_id))
    assert assert_refused(bad_signature) == wrong_swarm


def test_a_server_of_another_swarm_never_convinces_the_client() -> None:
    """A rogue server skips its own check of the client and answers with its own tag."""
    other = Swarm("office", b"x" * 32)
    c, s = client(), server()
    _, _, wire = converse(client(Self(ALICE, other, "a")), server(Self(BOB, other, "b")))
    first = [action.frame for action in c.start() if isinstance(action, Send)]
    (answer,) = s.receive(first[0], 0.1)
    assert isinstance(answer, Send)
    c.receive(answer.frame, 0.1)
    assert_refused(c.receive(wire[3], 0.1))


# -- a swarm whose key is being changed, and members who were expelled


NEW_KEY, OLD_KEY = b"n" * 32, b"k" * 32


class Lax(Swarm):
    """A former member's: it does not care whom it answers."""

    def admits_tags(self, peer: PeerId, role: Role, fields: bytes, tags: Sequence[bytes]) -> bool:
        return True


def renewed(expelled: tuple[PeerId, ...] = (), holders: tuple[PeerId, ...] | None = None) -> Swarm:
    swarm = Swarm("office", OLD_KEY)
    swarm.renew([NEW_KEY, OLD_KEY], expelled=expelled, holders=holders)
    return swarm


@pytest.mark.parametrize(
    ("at_alice", "at_bob"),
    [
        (Swarm("office", OLD_KEY), renewed()),
        (renewed(), Swarm("office", OLD_KEY)),
        (renewed(), renewed()),
        (renewed(), Swarm.of_keys("office", [NEW_KEY], lineage=OLD_KEY)),
        (renewed(holders=(BOB.peer_id,)), Swarm("office", OLD_KEY)),
        (Swarm("office", OLD_KEY), renewed(holders=(ALICE.peer_id,))),
    ],
)
def test_members_meet_while_the_key_changes(at_alice: Swarm, at_bob: Swarm) -> None:
    at_client, at_server, _ = converse(client(Self(ALICE, at_alice, "a")), server(Self(BOB, at_bob, "b")))
    assert isinstance(at_client[0], Established) and isinstance(at_server[0], Established)


@pytest.mark.parametrize(
    "of_member",
    [renewed(expelled=(ALICE.peer_id,)), renewed(holders=()), Swarm.of_keys("office", [NEW_KEY], lineage=OLD_KEY)],
    ids=["expelled", "not a known holder of the older key", "the older key ran out"],
)
def test_a_former_member_is_refused_as_any_stranger_is_in_both_directions(of_member: Swarm) -> None:
    former = Self(ALICE, Swarm("office", OLD_KEY), "a")
    _, at_server, wire = converse(client(former), server(Self(BOB, of_member, "b")))
    stranger = client(Self(ALICE, Swarm("office", b"x" * 32), "a"))
    _, to_stranger, _ = converse(stranger, server(Self(BOB, of_member, "b")))
    assert assert_refused(at_server) == assert_refused(to_stranger) and len(wire) == 3
    dialler = ClientHello(Self(BOB, of_member, "b"), ALICE.peer_id, CERTIFICATE, b"1" * 32, 0.0)
    dialled = ServerHello(
        Self(ALICE, Lax("office", OLD_KEY), "a"), BOB.peer_id, CERTIFICATE, lambda count: b"2" * count, 0.0
    )
    at_member, _, _ = converse(dialler, dialled)
    assert_refused(at_member)


def test_the_expelled_with_the_newest_key_are_refused_too() -> None:
    _, at_server, _ = converse(client(), server(Self(BOB, renewed(expelled=(ALICE.peer_id,)), "b")))
    assert_refused(at_server)
    current = Self(ALICE, Swarm.of_keys("office", [NEW_KEY], lineage=OLD_KEY), "a")
    _, at_server, _ = converse(client(current), server(Self(BOB, renewed(expelled=(ALICE.peer_id,)), "b")))
    assert_refused(at_server)


@pytest.mark.parametrize("older", [b"x", ["short"], [b"y" * 31], [b"z" * 32] * 4, {"a": 1}, None])
def test_malformed_older_tags_end_it(older: object) -> None:
    def add(number: int, frame: bytes) -> bytes:
        return bytes(msgpack.packb({**msgpack.unpackb(frame), "older_tags": older})) if number == 2 else frame

    _, at_server, _ = converse(client(), server(), add)
    assert_refused(at_server)


def test_the_longest_proof_fits_the_limit() -> None:
    swarm = Swarm.of_keys("office", [bytes([n]) * 32 for n in range(MAX_SWARM_KEYS)])
    _, _, wire = converse(client(Self(ALICE, swarm, "é" * 99, "x" * 99)), server(Self(BOB, swarm, "b")))
    assert len(wire) == 4 and max(map(len, wire)) <= MAX_HELLO_BYTES


def test_a_frame_before_hello_ends() -> None:
    s = server()
    assert "before HELLO was over" in assert_refused(s.receive_early())
    assert s.is_over and s.receive(b"", 0.1) == []


@pytest.mark.parametrize("frames_before", [0, 1])
def test_silence_ends_at_five_seconds_on_either_side(frames_before: int) -> None:
    c, s = client(), server()
    hello = [action.frame for action in c.start() if isinstance(action, Send)]
    if frames_before:
        (answer,) = s.receive(hello[0], 1.0)
        assert isinstance(answer, Send)
        c.receive(answer.frame, 1.0)
    for machine in (c, s):
        assert machine.deadline == HELLO_TIMEOUT_S == 5.0
        assert machine.expire(4.999) == []
        (failed,) = machine.expire(5.0)
        assert isinstance(failed, Failed) and isinstance(failed.error, PeerUnreachableError)
        assert "silent in HELLO for 5 s" in str(failed.error)


def test_a_frame_after_the_deadline_is_too_late() -> None:
    c = client()
    (hello,) = c.start()
    assert isinstance(hello, Send)
    assert_refused(server().receive(hello.frame, 5.0))


def test_versions_are_negotiated_as_ranges() -> None:
    old, new = VersionRange(1, 2), VersionRange(2, 4)
    at_client, at_server, _ = converse(
        client(Self(ALICE, SWARM, "a", versions=old)), server(Self(BOB, SWARM, "b", versions=new))
    )
    assert isinstance(at_client[0], Established) and isinstance(at_server[0], Established)
    assert at_client[0].version == at_server[0].version == 2


def test_no_common_version_says_so_with_its_own_code() -> None:
    _, at_server, _ = converse(
        client(Self(ALICE, SWARM, "a", versions=VersionRange(3, 4))), server(Self(BOB, SWARM, "b"))
    )
    assert "versions 3 to 4, we speak 1" in assert_refused(at_server, CloseCode.NO_COMMON_VERSION)


def test_nobody_in_between_can_lower_the_version() -> None:
    def lower(number: int, frame: bytes) -> bytes:
        return bytes(msgpack.packb({**msgpack.unpackb(frame), "versions": [1, 1]})) if number == 0 else frame

    both = VersionRange(1, 2)
    _, at_server, _ = converse(
        client(Self(ALICE, SWARM, "a", versions=both)), server(Self(BOB, SWARM, "b", versions=both)), lower
    )
    assert_refused(at_server)


@given(number=st.integers(0, 3), position=st.integers(0, 400), flip=st.integers(1, 255))
def test_no_changed_byte_of_a_proof_is_accepted_as_another_peer(number: int, position: int, flip: int) -> None:
    def flip_byte(index: int, frame: bytes) -> bytes:
        if index != number:
            return frame
        at = position % len(frame)
        return frame[:at] + bytes([frame[at] ^ flip]) + frame[at + 1 :]

    at_client, at_server, _ = converse(client(), server(), flip_byte)
    ended_well = [end for end in (*at_client, *at_server) if isinstance(end, Established)]
    assert all(end.peer in (ALICE.peer_id, BOB.peer_id) and end.version == 1 for end in ended_well)
    assert number >= 2 or not ended_well  # messages 1 and 2 are signed to the last byte


@given(frames=st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_garbage_fails_once_with_the_one_code(frames: list[bytes]) -> None:
    for machine in (client(), server()):
        if isinstance(machine, ClientHello):
            machine.start()
        ends = [action for frame in frames for action in machine.receive(frame, 0.1) if not isinstance(action, Send)]
        assert len(ends) <= 1
        for end in ends:
            assert isinstance(end, Failed) and isinstance(end.error, RemoteProtocolError)
