"""The short way through QUIC: the same conversation as aioquic's own, packet for packet, or none at all."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
from aioquic import tls
from aioquic.quic.events import StreamDataReceived
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.net.wires import CLIENT_ADDRESS, Wire

from meshswarm.identity import Identity
from meshswarm.net.express import ExpressConnection, varint
from meshswarm.net.quic import PeerConnection

ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)
KINDS = [
    pytest.param(client, server, id=f"{client.__name__[:4]}-{server.__name__[:4]}")
    for client in (PeerConnection, ExpressConnection)
    for server in (PeerConnection, ExpressConnection)
]


def connected(client: type = ExpressConnection, server: type = ExpressConnection, **more: Any) -> Wire:
    wire = Wire.connect(ALICE, BOB, client_kind=client, server_kind=server, **more)
    assert wire.run(lambda: wire.client._handshake_confirmed and wire.server._handshake_confirmed)
    for side in (wire.client, wire.server):
        side.open_window()
    wire.rest(0.3)
    return wire


@pytest.mark.parametrize(("client", "server"), KINDS)
@pytest.mark.parametrize("size", [1200, 1440, 16384, 61440])
def test_both_ends_understand_each_other_over_a_lossy_path(client: type, server: type, size: int) -> None:
    rng = random.Random(size)
    wire = connected(client, server, delay_s=0.003)
    wire.client.widen(size, window_bytes=0)
    wire.drop = lambda _datagram: rng.random() < 0.03
    expected: dict[tuple[int, int], bytes] = {}
    for side, connection in ((0, wire.client), (1, wire.server)):
        for stream_id in ([0, 4, 8], [1, 5])[side]:
            connection.send_stream_data(stream_id, b"first")
            expected[(1 - side, stream_id)] = b"first"
    for step in range(60):
        for side, connection in ((0, wire.client), (1, wire.server)):
            stream_id = rng.choice([0, 4, 8]) if side == 0 else rng.choice([1, 5])
            data = rng.randbytes(rng.choice([1, 60, 900, 2304, 5000, 24_576]))
            connection.send_stream_data(stream_id, data)
            expected[(1 - side, stream_id)] += data
        if step % 3:
            wire.rest(rng.choice([0.0, 0.001, 0.02]))
    assert wire.run(lambda: all(len(wire.received(*key)) == len(data) for key, data in expected.items()))
    assert all(wire.received(*key) == data for key, data in expected.items())
    for connection in (wire.client, wire.server):
        if isinstance(connection, ExpressConnection):
            assert connection.express_sent > 40 and connection.express_received > 40


@given(
    pieces=st.lists(st.tuples(st.integers(0, 3000), st.booleans()), min_size=1, max_size=12),
    at_once=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_size_arrive_with_their_end(pieces: list[tuple[int, bool]], at_once: bool) -> None:
    wire = connected()
    wire.client.send_stream_data(0, b"opening")
    wire.step()
    client = cast(ExpressConnection, wire.client)
    sent = b"opening"
    for number, (size, pause) in enumerate(pieces):
        data, last = bytes([number]) * size, number == len(pieces) - 1
        if not (at_once and client.send_at_once(0, data, last, wire.now)):
            client.send_stream_data(0, data, last)
        sent += data
        if pause:
            wire.rest(0.004)

    def ended() -> bool:
        return any(isinstance(event, StreamDataReceived) and event.end_stream for event in wire.events[1])

    assert wire.run(ended)
    assert wire.received(1) == sent
    wire.server.send_stream_data(0, b"", True)
    wire.rest(1.0)
    assert 0 not in wire.client._streams and 0 not in wire.server._streams  # both ends have forgotten it


def test_a_small_piece_leaves_in_one_packet_with_nothing_else() -> None:
    wire = connected()
    client = cast(ExpressConnection, wire.client)
    client.send_stream_data(0, b"x")
    wire.rest(0.3)
    assert client.send_at_once(0, b"y" * 100, False, wire.now)
    ((datagram, address),) = client.datagrams_to_send(wire.now)
    assert len(datagram) < 140 and address == client._network_paths[0].addr
    assert client.datagrams_to_send(wire.now) == []
    wire.carry(0, [datagram])
    assert wire.run(lambda: wire.received(1) == b"x" + b"y" * 100)
    assert wire.run(lambda: client.unacked_bytes(0) == 0)


def test_the_short_way_is_closed_when_it_would_break_a_rule() -> None:
    wire = connected()
    client = cast(ExpressConnection, wire.client)
    assert not client.send_at_once(0, b"first", False, wire.now)  # the stream does not exist yet
    client.send_stream_data(0, b"x")
    assert not client.send_at_once(0, b"overtaking", False, wire.now)
    wire.rest(0.3)
    assert not client.send_at_once(0, bytes(1200), False, wire.now)  # more than one packet
    window, client._remote_max_data = client._remote_max_data, client._remote_max_data_used + 4
    assert not client.send_at_once(0, b"12345", False, wire.now)  # above the peer's window
    client._remote_max_data = window
    flight, client.window.congestion_window = client.window.congestion_window, 40
    assert not client.send_at_once(0, b"12345", False, wire.now)  # above the congestion window
    client.window.congestion_window = flight
    assert client.send_at_once(0, b"last", True, wire.now)
    assert not client.send_at_once(0, b"after the end", False, wire.now)
    client.close()
    assert not client.send_at_once(0, b"after the close", False, wire.now)


def test_acknowledgements_and_other_duties_still_leave() -> None:
    wire = connected()
    wire.client.send_stream_data(0, b"question")
    wire.run(lambda: wire.received(1) == b"question")
    assert wire.run(lambda: wire.client.unacked_bytes(0) == 0, limit_s=0.1)
    wire.client.send_stream_data(4, bytes(5000))
    wire.client.reset_stream(0, 7)
    wire.client.send_ping(1)
    assert wire.run(lambda: len(wire.received(1, 4)) == 5000, limit_s=0.2)
    wire.rest(0.2)
    names = [type(event).__name__ for event in wire.events[0] + wire.events[1]]
    assert "StreamReset" in names and "PingAcknowledged" in names


def test_a_small_message_does_not_wait_for_the_end_of_a_large_one() -> None:
    """A decode step beside another session's prefill: the two take turns however narrow the window is."""
    wire = connected(delay_s=0.01)
    wire.client.send_stream_data(0, b"x")
    wire.client.send_stream_data(4, bytes(3_000_000))
    wire.rest(0.1)
    for turn in range(1, 6):
        wire.client.send_stream_data(0, b"y" * 2304)
        assert wire.run(lambda turn=turn: len(wire.received(1)) == 1 + 2304 * turn, limit_s=0.045)  # type: ignore[misc]
    assert len(wire.received(1, 4)) < 3_000_000


def test_keys_change_in_the_middle_of_a_conversation() -> None:
    wire = connected()
    for turn in range(6):
        if turn == 2:
            wire.client.request_key_update()
        if turn == 4:
            wire.server.request_key_update()
        wire.client.send_stream_data(0, b"ask")
        wire.server.send_stream_data(1, b"say")
        assert wire.run(lambda turn=turn: wire.received(1) == b"ask" * (turn + 1))  # type: ignore[misc]
        assert wire.run(lambda turn=turn: wire.received(0, 1) == b"say" * (turn + 1))  # type: ignore[misc]
    assert wire.client._keys.recv.key_phase == 0  # twice round
    assert cast(ExpressConnection, wire.client).express_received > 4


def packet_with(wire: Wire, data: bytes) -> bytes:
    """The packet in which the client sends `data` on stream 0."""
    assert cast(ExpressConnection, wire.client).send_at_once(0, data, False, wire.now)
    ((datagram, _),) = wire.client.datagrams_to_send(wire.now)
    return datagram


def test_each_packet_is_emitted_before_the_next_is_built() -> None:
    wire = connected()
    client = cast(ExpressConnection, wire.client)
    emitted: list[tuple[int, int]] = []
    client.emit = lambda datagram, _address: emitted.append((len(datagram), client._packet_number))
    first = client._packet_number
    client.send_stream_data(0, bytes(5000))
    assert client.datagrams_to_send(wire.now) == []
    assert [number for _, number in emitted] == [first, first + 1, first + 2, first + 3, first + 4]


def test_the_same_packet_twice_is_one_packet() -> None:
    wire = connected()
    wire.client.send_stream_data(0, b"x")
    wire.rest(0.1)
    datagram = packet_with(wire, b"y")
    for _ in range(3):
        wire.server.receive_datagram(datagram, CLIENT_ADDRESS, wire.now)
    wire.rest(0.1)
    assert wire.received(1) == b"xy"


@given(position=st.integers(0, 200), flip=st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_changed_packet_is_no_packet(position: int, flip: int) -> None:
    wire = connected()
    wire.client.send_stream_data(0, b"x")
    wire.rest(0.1)
    datagram = packet_with(wire, b"y" * 50)
    at = position % len(datagram)
    changed = datagram[:at] + bytes([datagram[at] ^ flip]) + datagram[at + 1 :]
    wire.server.receive_datagram(changed, CLIENT_ADDRESS, wire.now)
    assert wire.server.next_event() is None and not wire.server.is_over


def outcome(kind: type, payload: bytes) -> tuple[object, ...]:
    """What a server makes of a 1-RTT packet with this plain payload, after 5 bytes on stream 0 and the end of 4."""
    wire = connected(server=kind)
    wire.client.send_stream_data(0, b"known")
    wire.client.send_stream_data(4, b"ended", True)
    wire.rest(0.2)
    number = wire.client._packet_number
    header = bytes((0x41,)) + wire.client._peer_cid.cid + number.to_bytes(2, "big")
    packet = wire.client._cryptos[tls.Epoch.ONE_RTT].send.encrypt_packet(header, payload, number)
    wire.server.receive_datagram(packet, CLIENT_ADDRESS, wire.now)
    received = []
    while (event := wire.server.next_event()) is not None:
        received.append(event)
    close = wire.server.close_event
    space = wire.server._space
    assert space is not None
    return (
        None if close is None else (close.error_code, close.frame_type),
        received,
        wire.server._local_max_data.used,
        sorted((stream_id, stream.receiver.highest_offset, stream.receiver._final_size)
               for stream_id, stream in wire.server._streams.items()),
        list(space.ack_queue) if close is None else None,
        space.ack_at is not None if close is None else None,
    )  # fmt: skip


STREAM_FRAME = st.builds(
    lambda flags, stream_id, offset, length, data: bytes((0x08 | flags,)) + varint(stream_id)
    + (varint(offset) if flags & 4 else b"") + (varint(length) if flags & 2 else b"") + data,
    st.integers(0, 7), st.sampled_from([0, 1, 2, 3, 4, 8, 600]),
    st.sampled_from([0, 1, 4, 5, 6, 100, 2**24, 2**61]), st.integers(0, 20), st.binary(max_size=12),
)  # fmt: skip


PINGS = st.lists(st.sampled_from([b"\0", b"\1", b"\1" + bytes(50), b"\2"]), max_size=5).map(b"".join)


@given(st.one_of(STREAM_FRAME, st.lists(STREAM_FRAME, max_size=3).map(b"".join), PINGS, st.binary(max_size=30)))
@settings(max_examples=150, deadline=None)
def test_any_payload_means_the_same_on_both_ways(payload: bytes) -> None:
    payload = payload.ljust(4, b"\0")  # shorter ones cannot be protected
    assert outcome(ExpressConnection, payload) == outcome(PeerConnection, payload)


@given(st.integers(0, 2**62 - 1))
def test_variable_length_integers_are_quics(value: int) -> None:
    from aioquic.buffer import Buffer

    buffer = Buffer(capacity=8)
    buffer.push_uint_var(value)
    assert varint(value) == buffer.data
