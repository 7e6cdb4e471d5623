"""A link against somebody who does not play by the rules, and against a network that goes quiet."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.net.conftest import Bind
from tests.net.eventually import Collector, echo, eventually
from tests.net.stranger import Stranger
from tests.net.wires import configuration

from meshswarm.errors import MeshswarmError, RemoteProtocolError
from meshswarm.identity import Identity
from meshswarm.net import greeting as greeting_module
from meshswarm.net import lanes as lanes_module
from meshswarm.net import liveness as liveness_module
from meshswarm.net import upkeep as upkeep_module
from meshswarm.net.codes import CloseCode, StreamCode
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.frames import frame_header
from meshswarm.net.liveness import Pace
from meshswarm.net.pathmtu import LOOPBACK_BYTES
from meshswarm.net.quic import MAX_STREAMS
from meshswarm.net.stream import Stream
from meshswarm.net.swarm import Swarm

LIMIT = 100_000
Meet = Callable[..., Awaitable[Stranger]]


@pytest.fixture
async def bob(bind: Bind) -> Endpoint:
    endpoint = await bind()
    endpoint.handle_stream("echo", echo, max_frame_bytes=LIMIT)
    return endpoint


@pytest.fixture
async def meet(bob: Endpoint) -> AsyncIterator[Meet]:
    """`await meet()` is a stranger who has done TLS with Bob and nothing else."""
    strangers: list[Stranger] = []

    async def connect(identity: Identity | None = None, **settings: object) -> Stranger:
        stranger = await Stranger.connect(bob.address, identity, **settings)  # type: ignore[arg-type]
        strangers.append(stranger)
        return stranger

    yield connect
    for stranger in strangers:
        stranger.leave()


async def still_works(bind: Bind, bob: Endpoint) -> None:
    """An honest peer is served as if nothing had happened."""
    alice = await bind()
    stream = (await alice.dial(bob.peer_id, [bob.address])).open_stream("echo", max_frame_bytes=LIMIT)
    stream.send(b"fine")
    assert await stream.receive(timeout_s=5) == b"fine"


# -- before HELLO is over


async def test_a_peer_without_a_certificate_proves_itself_by_hello_alone(
    bob: Endpoint, meet: Meet, swarm: Swarm
) -> None:
    identity = Identity.generate()
    settings = configuration(identity, is_client=True)
    settings.certificate = settings.private_key = None
    stranger = await meet(identity, settings=settings)
    await stranger.hello(swarm, bob.peer_id)
    await eventually(lambda: bob.connections)
    assert bob.connections[0].peer_id == identity.peer_id
    stranger.frame(4, b"echo")
    stranger.frame(4, b"hi")
    await eventually(lambda: stranger.received(4) == [b"hi"])


async def test_a_stolen_certificate_ends_in_tls(bob: Endpoint, meet: Meet) -> None:
    settings = configuration(Identity.generate(), is_client=True)
    settings.private_key = Identity.generate().private_key
    stranger = await meet(settings=settings)
    assert await stranger.closed() == 0x133  # decrypt_error
    assert bob.connections == []


async def test_a_certificate_of_one_key_and_a_hello_of_another(bob: Endpoint, meet: Meet, swarm: Swarm) -> None:
    signer = Identity.generate()
    stranger = await meet(signer, settings=configuration(Identity.generate(), is_client=True))
    await stranger.hello(swarm, bob.peer_id)
    assert await stranger.closed() == CloseCode.HELLO_FAILED
    assert bob.connections == []


async def test_a_replayed_hello(bob: Endpoint, meet: Meet, swarm: Swarm) -> None:
    identity = Identity.generate()
    first = await meet(identity)
    sent: list[bytes] = []
    write = first.frame
    first.frame = lambda stream_id, frame: (sent.append(frame), write(stream_id, frame))  # type: ignore[assignment, return-value]
    await first.hello(swarm, bob.peer_id)
    assert len(sent) == 2 and len(first.received()) >= 2
    again = await meet(identity)
    for frame in sent:
        again.frame(0, frame)
    assert await again.closed() == CloseCode.HELLO_FAILED


async def test_the_wrong_swarm_gets_the_same_answer_as_garbage(bob: Endpoint, meet: Meet) -> None:
    outsider = await meet()
    await outsider.hello(Swarm("elsewhere"), bob.peer_id)
    babbler = await meet()
    babbler.frame(0, b"\xc1garbage")
    assert await outsider.closed() == await babbler.closed() == CloseCode.HELLO_FAILED


@pytest.mark.parametrize(
    "say",
    [
        lambda stranger: stranger.frame(4, b"echo"),
        lambda stranger: stranger.write(0, frame_header(1 << 31)),
        lambda stranger: stranger.write(0, b"", end=True),
        lambda stranger: stranger.write(0, os.urandom(2000)),
    ],
    ids=["a stream", "an oversize frame", "an end", "noise"],
)
async def test_anything_but_hello_ends_the_connection(
    bind: Bind, bob: Endpoint, meet: Meet, say: Callable[[Stranger], None]
) -> None:
    stranger = await meet()
    say(stranger)
    assert await stranger.closed() == CloseCode.HELLO_FAILED
    await still_works(bind, bob)


async def test_silence_after_tls_ends_and_frees_the_place(
    bob: Endpoint, meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting_module, "HELLO_TIMEOUT_S", 0.2)
    stranger = await meet()
    assert await stranger.closed() == CloseCode.HELLO_FAILED
    assert vars(bob._admission)["_total"] == vars(bob._admission)["_half_open"] == 0


async def test_a_first_packet_and_then_nothing_frees_the_place_too(
    bob: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting_module, "HELLO_TIMEOUT_S", 0.2)
    stranger = await Stranger.connect(bob.address, wait=False)
    stranger.leave()
    await eventually(lambda: vars(bob._admission)["_total"] == 1)
    await eventually(lambda: vars(bob._admission)["_total"] == 0)
    assert bob._links == {}


async def test_what_a_server_says_ahead_of_its_last_hello_message_is_kept(bind: Bind) -> None:
    """Packets overtake each other: here the one with the server's proof is lost, and sent again after its stream."""
    alice, bob = await bind(), await bind()
    greeted: list[Collector] = []
    alice.handle_stream("greet", lambda stream: greeted.append(Collector(stream)), max_frame_bytes=100)

    def greet(connection: Connection) -> None:
        connection.open_stream("greet", max_frame_bytes=100).send(b"welcome")

    bob.on_connection(greet)
    send, held = bob._udp.send, []

    def hold_the_proof(data: bytes, sockaddr: object) -> int:
        if bob.connections and not held:
            held.append(data)
            return 0
        return send(data, sockaddr)

    bob._udp.send = hold_the_proof  # type: ignore[method-assign]
    await alice.dial(bob.peer_id, [bob.address])
    await eventually(lambda: greeted and greeted[0].frames == [b"welcome"])
    assert held


# -- after HELLO


@pytest.fixture
async def friend(bob: Endpoint, meet: Meet, swarm: Swarm) -> Stranger:
    """A member of the swarm who misbehaves from here on."""
    stranger = await meet()
    await stranger.hello(swarm, bob.peer_id)
    await eventually(lambda: bob.connections)
    return stranger


@pytest.mark.parametrize(
    "opening",
    [frame_header(0), frame_header(65) + b"x" * 65, b"\xff" * 40, frame_header(4) + b"\xff\xfe\xfd\xfc"],
    ids=["empty", "long", "huge", "no text"],
)
async def test_a_stream_that_does_not_begin_with_a_kind_is_refused(
    bind: Bind, bob: Endpoint, friend: Stranger, opening: bytes
) -> None:
    friend.write(4, opening)
    await eventually(lambda: any(getattr(event, "stream_id", None) == 4 for event in friend.events))
    friend.frame(8, b"echo")
    friend.frame(8, b"on this one")
    await eventually(lambda: friend.received(8) == [b"on this one"])
    await still_works(bind, bob)


async def test_a_kind_cut_into_single_bytes_is_read(friend: Stranger) -> None:
    for byte in frame_header(4) + b"echo" + frame_header(2) + b"ok":
        friend.write(4, bytes([byte]))
        await asyncio.sleep(0)
    await eventually(lambda: friend.received(4) == [b"ok"])


async def test_a_stream_that_ends_inside_a_frame_is_an_error(bob: Endpoint, friend: Stranger) -> None:
    served: list[Collector] = []
    bob.handle_stream("kept", lambda stream: served.append(Collector(stream)), max_frame_bytes=LIMIT)
    friend.frame(4, b"kept")
    friend.write(4, frame_header(10) + b"half", end=True)
    await eventually(lambda: served)
    end = await served[0].end()
    assert isinstance(end, RemoteProtocolError) and "ended a 'kept' stream inside a frame" in str(end)


async def test_a_flood_of_streams_costs_the_sender_its_connection_not_us(
    bind: Bind, bob: Endpoint, friend: Stranger
) -> None:
    bob.handle_stream("kept", lambda stream: stream.receive_with(lambda _f: None, lambda _e: None), max_frame_bytes=10)
    friend.quic._remote_max_streams_bidi = 10**6  # it ignores what it was allowed
    for number in range(1, MAX_STREAMS + 10):
        friend.frame(4 * number, b"kept")
    assert await friend.closed() == 0x4  # QUIC's STREAM_LIMIT_ERROR
    await still_works(bind, bob)


async def test_streams_can_be_opened_for_ever_as_long_as_they_end(bob: Endpoint, bind: Bind) -> None:
    alice = await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    for _ in range(2 * MAX_STREAMS + 50):
        collector = Collector(connection.open_stream("echo", max_frame_bytes=LIMIT))
        collector.stream.send(b"x", finish=True)
        assert await collector.end() is None
        assert collector.frames == [b"x"]
    (here,) = alice._roster.preferred()
    (there,) = bob._roster.preferred()
    await eventually(lambda: len(here._lanes) == len(there._lanes) == 0)


async def test_one_stream_too_many_is_refused_here_and_the_connection_goes_on(bob: Endpoint, bind: Bind) -> None:
    alice = await bind()
    bob.handle_stream("kept", lambda stream: stream.receive_with(lambda _f: None, lambda _e: None), max_frame_bytes=10)
    connection = await alice.dial(bob.peer_id, [bob.address])
    streams = [connection.open_stream("kept", max_frame_bytes=10) for _ in range(MAX_STREAMS - 1)]
    end = await Collector(connection.open_stream("kept", max_frame_bytes=10)).end()
    assert end is not None and "as many streams from us open as it allows" in str(end)
    for stream in streams:
        stream.reset()
    await asyncio.sleep(0.1)
    again = connection.open_stream("echo", max_frame_bytes=LIMIT)
    again.send(b"room again")
    assert await again.receive(timeout_s=5) == b"room again"


async def test_what_nobody_reads_is_held_up_to_a_limit_and_then_the_stream_goes(
    bind: Bind, bob: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "MAX_HELD_BYTES", 300_000)
    unread: list[Stream] = []
    bob.handle_stream("unread", unread.append, max_frame_bytes=LIMIT)
    alice = await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    collector = Collector(connection.open_stream("unread", max_frame_bytes=LIMIT))
    for _ in range(10):
        collector.stream.send(bytes(50_000))
    end = await collector.end()
    assert end is not None and "has no room for a 'unread' stream now" in str(end)
    assert unread[0].queued_bytes <= 350_000
    await still_works(bind, bob)


async def test_a_window_full_of_gaps_is_all_that_a_peer_can_make_us_hold(bob: Endpoint, friend: Stranger) -> None:
    """Every stream starts with a byte far ahead: aioquic would buffer the gaps, without a limit on their sum."""
    quic = bob._roster.preferred()[0]._quic
    for number in range(1, 6):
        friend.frame(4 * number, b"echo")
        stream = friend.quic._streams[4 * number]
        stream.sender._pending.add(15_000_000, 15_000_001)
        stream.sender._buffer += bytes(15_000_001 - len(stream.sender._buffer))
        stream.sender._buffer_stop = 15_000_001
        stream.sender._pending.subtract(8, 15_000_000)
        friend.pump()
        await asyncio.sleep(0.02)
    held = sum(len(stream.receiver._buffer) for stream in quic._streams.values())
    assert held <= 24 * 1024 * 1024


async def test_garbage_datagrams_are_dropped(bind: Bind, bob: Endpoint, friend: Stranger) -> None:
    ids = list(bob._links)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as noise:
        noise.connect((bob.address.host, bob.address.port))
        for connection_id in ids:
            for first in (0x40, 0x7F, 0xC0, 0xFF):
                for size in (0, 1, 9, 30, 1200, 9000):
                    noise.send(bytes([first]) + connection_id + os.urandom(size))
        for size in (*range(40), 1200, 1500, 60_000):
            noise.send(os.urandom(size))
    await asyncio.sleep(0.1)
    friend.frame(4, b"echo")
    friend.frame(4, b"hi")
    await eventually(lambda: friend.received(4) == [b"hi"])
    await still_works(bind, bob)


async def test_broken_control_frames_are_ignored_and_a_broken_control_stream_is_the_end(friend: Stranger) -> None:
    for garbage in (b"", b"\xc1", b"\x90", os.urandom(500)):
        friend.frame(0, garbage)
    friend.frame(4, b"echo")
    friend.frame(4, b"hi")
    await eventually(lambda: friend.received(4) == [b"hi"])
    friend.write(0, frame_header(1 << 20))
    assert await friend.closed() == CloseCode.PROTOCOL


async def test_a_bug_in_handling_a_datagram_costs_that_connection_only(
    bind: Bind, bob: Endpoint, friend: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = bob._roster.preferred()[0]

    def broken(*_arguments: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(link, "receive", broken)
    friend.frame(4, b"echo")
    assert await friend.closed() == CloseCode.PROTOCOL
    assert link.closed
    await still_works(bind, bob)


async def test_a_reset_with_an_unknown_code_is_a_plain_reset(bob: Endpoint, friend: Stranger) -> None:
    served: list[Collector] = []
    bob.handle_stream("kept", lambda stream: served.append(Collector(stream)), max_frame_bytes=LIMIT)
    friend.frame(4, b"kept")
    await eventually(lambda: served)
    friend.quic.reset_stream(4, 0xDEAD)
    friend.pump()
    end = await served[0].end()
    assert end is not None and "gave up a 'kept' stream" in str(end)
    assert StreamCode.CANCELLED == 0x100


# -- liveness, round trips, paths


async def test_a_held_peer_that_falls_silent_is_lost_and_named(
    bind: Bind, bob: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_module, "HELD", Pace(0.1, 0.4))
    alice = await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    collector = Collector(connection.open_stream("echo", max_frame_bytes=LIMIT))
    lost: list[MeshswarmError] = []
    connection.on_lost(lost.append)
    with connection.hold():
        await asyncio.sleep(0.6)
        assert not lost  # it answers probes
        bob._udp._loop.remove_reader(bob._udp._reader)
        await eventually(lambda: lost)
    assert str(lost[0]) == f"peer {bob.peer_id.short} at {bob.address} was silent for 0.4 s"
    assert await collector.end() is lost[0]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say who refused")
async def test_a_peer_whose_process_was_killed_is_missed_as_soon_as_its_machine_says_so(
    bind: Bind, bob: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_module, "HELD", Pace(0.1, 30.0))
    monkeypatch.setattr(liveness_module, "SUSPECT_S", 0.2)
    alice = await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    lost: list[MeshswarmError] = []
    connection.on_lost(lost.append)
    connection.hold()
    bob._udp.close()  # as the kernel does it: not a word to anybody
    await eventually(lambda: lost, timeout_s=5)
    assert str(lost[0]) == f"peer {bob.peer_id.short} at {bob.address} is gone: nothing listens there"
    monkeypatch.setattr(bob._udp, "send", lambda _data, _sockaddr: 0)
    monkeypatch.setattr(bob._udp, "close", lambda: None)


async def test_nobody_closes_what_the_other_side_holds(
    bind: Bind, bob: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_module, "HELD", Pace(0.05, 2.0))
    monkeypatch.setattr(liveness_module, "FREE", Pace(0.1, 2.0))
    monkeypatch.setattr(upkeep_module, "IDLE_CLOSE_S", 0.3)
    monkeypatch.setattr(upkeep_module, "HELD_BY_PEER_S", 0.2)
    alice = await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    lost: list[MeshswarmError] = []
    connection.on_lost(lost.append)
    hold = connection.hold()
    await asyncio.sleep(0.8)
    assert not lost
    hold.release()
    hold.release()
    await eventually(lambda: lost)
    assert "nobody used" in str(lost[0])


async def test_round_trips_are_measured_from_program_to_program(bind: Bind, bob: Endpoint) -> None:
    alice = await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    await eventually(lambda: connection.rtt_s is not None)
    samples = [await connection.measure_rtt() for _ in range(5)]
    assert all(0 < sample < 5 for sample in samples)
    assert connection.rtt_s is not None and 0 < connection.rtt_s <= max(*samples, connection.rtt_s)
    waiting = asyncio.create_task(connection.measure_rtt())
    await asyncio.sleep(0)
    connection.close()
    with pytest.raises(MeshswarmError):
        await waiting
    with pytest.raises(MeshswarmError):
        await connection.measure_rtt()


async def test_datagrams_grow_to_what_loopback_carries_on_both_sides(bind: Bind, bob: Endpoint) -> None:
    alice = await bind()
    await alice.dial(bob.peer_id, [bob.address])
    await eventually(lambda: bob.connections)
    links = [*alice._roster.preferred(), *bob._roster.preferred()]
    await eventually(lambda: all(link.datagram_bytes == LOOPBACK_BYTES[-1] for link in links))


async def test_a_machine_that_refuses_large_datagrams_is_believed(bind: Bind, bob: Endpoint) -> None:
    alice = await bind()
    send = alice._udp.send
    alice._udp.send = lambda data, sockaddr: 90 if len(data) > 9000 else send(data, sockaddr)  # type: ignore[method-assign]
    connection = await alice.dial(bob.peer_id, [bob.address])
    (link,) = alice._roster.preferred()
    await eventually(lambda: link.datagram_bytes == 8900)
    stream = connection.open_stream("echo", max_frame_bytes=LIMIT)
    stream.send(bytes(60_000))
    assert len(await stream.receive(timeout_s=10)) == 60_000
    alice._udp.send = lambda data, sockaddr: 90 if len(data) > 1300 else send(data, sockaddr)  # type: ignore[method-assign]
    stream.send(bytes(60_000))
    assert len(await stream.receive(timeout_s=10)) == 60_000
    assert link.datagram_bytes == 1200


async def test_eight_megabytes_in_one_frame_right_after_a_dial(bind: Bind, bob: Endpoint) -> None:
    """A prefill comes first thing on a new connection; heavy traffic must not keep the path probes from being sent."""
    bob.handle_stream("echo", echo, max_frame_bytes=8 << 20)
    alice = await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    stream = connection.open_stream("echo", max_frame_bytes=8 << 20)
    frame = os.urandom(1 << 20) * 8
    stream.send(frame)
    assert stream.unacked_bytes > 7 << 20
    assert await stream.receive(timeout_s=60) == frame
    await eventually(lambda: stream.unacked_bytes == 0)
    (link,) = alice._roster.preferred()
    assert link.datagram_bytes == LOOPBACK_BYTES[-1]


async def test_the_first_message_does_not_wait_for_path_probes(bind: Bind, bob: Endpoint) -> None:
    """The probes of a fresh connection together are larger than its window."""
    alice = await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    (link,) = alice._roster.preferred()
    await asyncio.sleep(0)
    link._on_timer()  # the probes leave, and are not answered before this turn of the loop ends
    assert link._quic.window.bytes_in_flight < 2000
    stream = connection.open_stream("echo", max_frame_bytes=LIMIT)
    sent: list[int] = []
    send = alice._udp.send
    alice._udp.send = lambda data, sockaddr: (sent.append(len(data)), send(data, sockaddr))[1]  # type: ignore[method-assign]
    stream.send(bytes(20_000))
    link.end_turn()
    assert sum(sent) > 20_000


async def test_frames_sent_in_one_turn_leave_together_and_the_first_at_once(bind: Bind, bob: Endpoint) -> None:
    alice = await bind()
    connection = await alice.dial(bob.peer_id, [bob.address])
    stream = connection.open_stream("echo", max_frame_bytes=LIMIT)
    collector = Collector(stream)
    stream.send(b"warm up")
    await eventually(lambda: collector.frames)
    await asyncio.sleep(0.1)
    sent: list[int] = []
    send = alice._udp.send
    alice._udp.send = lambda data, sockaddr: (sent.append(len(data)), send(data, sockaddr))[1]  # type: ignore[method-assign]
    stream.send(b"1")
    assert len(sent) == 1
    for _ in range(10):
        stream.send(b"more")
    assert len(sent) == 1
    await eventually(lambda: len(collector.frames) == 12)
    assert len([size for size in sent if size > 100]) <= 2


async def test_a_resting_connection_sends_nothing(bind: Bind, bob: Endpoint) -> None:
    alice = await bind()
    await alice.dial(bob.peer_id, [bob.address])
    await asyncio.sleep(0.5)
    sent: list[int] = []
    for endpoint in (alice, bob):
        send = endpoint._udp.send
        endpoint._udp.send = lambda data, sockaddr, send=send: (sent.append(len(data)), send(data, sockaddr))[1]  # type: ignore[method-assign, misc]
    timers = [link._timer for endpoint in (alice, bob) for link in endpoint._roster.preferred()]
    await asyncio.sleep(1.0)
    assert sent == []
    assert timers == [link._timer for endpoint in (alice, bob) for link in endpoint._roster.preferred()]
