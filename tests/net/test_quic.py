"""Our QUIC connection on virtual paths: flights, windows, probes and acknowledgements, counted."""

from __future__ import annotations

import random

import pytest
from tests.net.wires import CLIENT_ADDRESS, SERVER_ADDRESS, Wire

from meshswarm.identity import Identity
from meshswarm.net.congestion import INITIAL_WINDOW_DATAGRAMS
from meshswarm.net.quic import ACK_DELAY_S, CONNECTION_WINDOW_BYTES, STRANGER_WINDOW_BYTES

ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)


def connected(**settings: float) -> Wire:
    wire = Wire.connect(ALICE, BOB, **settings)
    assert wire.run(lambda: wire.client._handshake_confirmed and wire.server._handshake_confirmed)
    for side in (wire.client, wire.server):
        side.open_window()
    wire.rest(0.3)
    return wire


def send(wire: Wire, size: int, stream_id: int = 0) -> float:
    """Seconds from sending `size` bytes at the client to having all of them at the server."""
    before, start = len(wire.received(1, stream_id)), wire.now
    wire.client.send_stream_data(stream_id, bytes(size))
    assert wire.run(lambda: len(wire.received(1, stream_id)) - before == size)
    return wire.now - start


def test_the_first_packets_have_the_size_that_every_path_carries() -> None:
    wire = connected()
    assert max(wire.sizes) == 1200


@pytest.mark.parametrize("size", [64, 2_304, 24_576])
def test_one_row_of_hidden_state_takes_one_flight_on_a_fresh_connection(size: int) -> None:
    """24,576 bytes are a float32 row at width 6144. One flight is one path delay: no waiting for an ACK or a pacer."""
    wire = connected(delay_s=0.025)
    assert send(wire, size) == pytest.approx(0.025)


def test_every_later_step_takes_one_flight_too() -> None:
    wire = connected(delay_s=0.025)
    for _ in range(20):
        assert send(wire, 24_576) == pytest.approx(0.025)
        wire.rest(0.03)  # the answer's flight back, and compute


def test_a_lost_step_costs_one_more_round_trip_and_little_else() -> None:
    """Nothing follows a lone packet, so nothing but a timer can miss it: that timer must be a short one."""
    wire = connected(delay_s=0.025)
    for _ in range(10):
        send(wire, 2_304)
        wire.rest(0.1)
    seen = 0

    def drop_the_last(datagram: bytes) -> bool:
        nonlocal seen
        seen += len(datagram) > 500
        return seen == 2 and len(datagram) > 500

    wire.drop = drop_the_last
    assert send(wire, 2_304) < 0.025 + 0.05 + 0.02


def test_a_prefill_warms_the_hop() -> None:
    """After a megabyte the window holds several rows: what took more than one flight before takes one now."""
    wire = connected(delay_s=0.025)
    cold = send(wire, 120_000)
    send(wire, 1_000_000)
    wire.rest(1.0)
    assert cold > 0.05
    assert send(wire, 120_000) < 0.04


def test_an_answer_is_not_slowed_down_by_acknowledgements_and_they_follow_soon() -> None:
    """A question and its answer are one small datagram each; the ACKs of both leave 2 ms later, by themselves."""
    wire = connected(delay_s=0.0001)
    send(wire, 100)
    wire.rest(0.5)
    wire.sizes.clear()
    wire.client.send_stream_data(0, bytes(100))
    assert wire.run(lambda: len(wire.received(1)) == 200)
    wire.server.send_stream_data(0, bytes(100))
    assert wire.run(lambda: len(wire.received(0)) == 100)
    assert [size < 160 for size in wire.sizes] == [True, True]
    started = wire.now
    assert wire.run(lambda: wire.client.unacked_bytes(0) == wire.server.unacked_bytes(0) == 0)
    assert wire.now - started == pytest.approx(ACK_DELAY_S, abs=0.0005)
    assert len(wire.sizes) == 4


def test_the_fourth_packet_in_a_row_is_acknowledged_at_once() -> None:
    wire = connected(delay_s=0.0001)
    send(wire, 100)
    wire.rest(0.5)
    for count in range(1, 5):
        send(wire, 100)
        timer = wire.server.get_timer()
        assert timer is not None
        assert (timer <= wire.now) == (count == 4)


def test_bulk_arrives_whole_over_a_lossy_path() -> None:
    rng = random.Random(7)
    wire = connected(delay_s=0.005)
    wire.drop = lambda _datagram: rng.random() < 0.02
    wire.client.send_stream_data(0, payload := rng.randbytes(400_000))
    assert wire.run(lambda: len(wire.received(1)) == len(payload))
    assert wire.received(1) == payload


def test_bulk_far_above_the_window_flows_and_the_window_follows_delivery() -> None:
    wire = connected(delay_s=0.0005)
    for side in (wire.client, wire.server):
        side.widen_to_loopback(16384, window_bytes=1 << 20)
    size = CONNECTION_WINDOW_BYTES + CONNECTION_WINDOW_BYTES // 2
    send(wire, size)
    wire.rest(0.2)
    allowed = wire.server._local_max_data.value - size
    assert CONNECTION_WINDOW_BYTES // 2 <= allowed <= CONNECTION_WINDOW_BYTES
    assert wire.client.unacked_bytes(0) == 0


def test_a_stranger_can_make_us_hold_little() -> None:
    wire = Wire.connect(ALICE, BOB)
    wire.run(lambda: wire.client._handshake_confirmed)
    for stream_id in (0, 4, 8):
        wire.client.send_stream_data(stream_id, bytes(1 << 20))
    wire.server.delivered = lambda count: None  # type: ignore[method-assign]  # nothing is taken before HELLO
    wire.rest(3.0)
    assert sum(len(wire.received(1, stream_id)) for stream_id in (0, 4, 8)) <= STRANGER_WINDOW_BYTES


def test_a_reset_stream_gives_its_share_of_the_window_back() -> None:
    wire = connected()
    wire.client.send_stream_data(0, b"x")
    lost = False

    def drop_one(datagram: bytes) -> bool:
        nonlocal lost
        if not lost and len(datagram) > 1000:
            lost = True
            return True
        return False

    wire.drop = drop_one
    wire.client.send_stream_data(4, bytes(20_000))
    wire.step()
    wire.client.reset_stream(4, 1)
    wire.rest(0.5)
    wire.server.abandon_rest(4)
    assert wire.server._delivered_bytes == wire.server._local_max_data.used


@pytest.mark.parametrize(("limit", "arrives"), [(1500, True), (1300, False)])
def test_a_probe_finds_out_what_the_path_carries_and_costs_no_congestion_window(limit: int, arrives: bool) -> None:
    wire = connected()
    send(wire, 50_000)
    wire.drop = lambda datagram: len(datagram) > limit
    window = wire.client.window.congestion_window
    results: list[bool] = []
    wire.carry(0, [datagram for datagram, _ in wire.client.path_probe(1440, wire.now, results.append)])
    assert wire.sizes[-1] == 1440
    assert wire.run(lambda: bool(results))
    assert results == [arrives]
    send(wire, 3_000)
    assert wire.client.window.congestion_window >= window


def test_no_probe_before_keys_or_after_the_end() -> None:
    wire = Wire.connect(ALICE, BOB)
    assert wire.client.path_probe(1440, 0.0, lambda _arrived: None) == []
    wire.run(lambda: wire.client._handshake_confirmed)
    wire.client.close()
    wire.step()
    assert wire.client.path_probe(1440, wire.now, lambda _arrived: None) == []


@pytest.mark.parametrize("size", [1440, 8900, 16384])
def test_a_wider_path_carries_full_datagrams_and_data_stays_intact(size: int) -> None:
    wire = connected()
    wire.client.widen(size, window_bytes=INITIAL_WINDOW_DATAGRAMS * size)
    payload = random.Random(size).randbytes(300_000)
    wire.client.send_stream_data(0, payload)
    assert wire.run(lambda: len(wire.received(1)) == len(payload))
    assert wire.received(1) == payload
    assert size - 16 <= max(wire.sizes) <= size


def test_a_black_hole_is_counted_and_left_by_narrowing() -> None:
    wire = connected()
    wire.client.widen(1440, window_bytes=0)
    send(wire, 10_000)
    assert wire.client.window.large_losses_in_a_row == 0
    wire.drop = lambda datagram: len(datagram) > 1200
    wire.client.send_stream_data(0, bytes(10_000))
    assert wire.run(lambda: wire.client.window.large_losses_in_a_row >= 4)
    wire.client.narrow()
    assert wire.run(lambda: len(wire.received(1)) == 20_000)


def test_the_other_sides_close_is_seen_the_moment_it_arrives() -> None:
    wire = connected(delay_s=0.01)
    closed_at = wire.now
    wire.client.close(error_code=7, reason_phrase="bye")
    assert wire.run(lambda: wire.server.close_event is not None)
    assert wire.now - closed_at == pytest.approx(0.01)
    assert wire.server.is_over and wire.client.is_over
    assert wire.server.close_event is not None and wire.server.close_event.error_code == 7


def test_forged_datagrams_are_no_sign_of_life() -> None:
    wire = connected()
    heard = wire.server.last_received_at
    for junk in (b"", b"\x40" + wire.server.host_cid + b"x" * 50, b"\xff" * 1200):
        wire.server.receive_datagram(junk, CLIENT_ADDRESS, wire.now + 5)
        wire.client.receive_datagram(junk, SERVER_ADDRESS, wire.now + 5)
    assert wire.server.last_received_at == heard
    assert not wire.server.is_over and not wire.client.is_over
