"""The congestion window and the pacer by hand: what they let through, and what they learn."""

from __future__ import annotations

import pytest
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.tls import Epoch

from meshswarm.net.congestion import (
    FLOOR_DATAGRAMS,
    INITIAL_WINDOW_DATAGRAMS,
    MAX_WINDOW_BYTES,
    BurstPacer,
    WindowControl,
)


def packet(size: int, sent_at: float = 1.0, number: int = 0) -> QuicSentPacket:
    return QuicSentPacket(
        epoch=Epoch.ONE_RTT, in_flight=True, is_ack_eliciting=True, is_crypto_packet=False, packet_number=number,
        packet_type=QuicPacketType.ONE_RTT, sent_time=sent_at, sent_bytes=size,
    )  # fmt: skip


def sent(window: WindowControl, size: int, count: int) -> list[QuicSentPacket]:
    packets = [packet(size) for _ in range(count)]
    for each in packets:
        window.on_packet_sent(packet=each)
    return packets


def test_the_first_window_holds_a_row_of_a_large_model() -> None:
    assert WindowControl(max_datagram_size=1200).congestion_window == INITIAL_WINDOW_DATAGRAMS * 1200 > 24_576


def test_a_window_that_is_used_grows_and_one_that_is_not_stays() -> None:
    window = WindowControl(max_datagram_size=1200)
    start = window.congestion_window
    for each in sent(window, 1200, 3):
        window.on_packet_acked(now=1.1, packet=each)
    assert window.congestion_window == start and window.bytes_in_flight == 0
    packets = sent(window, 1200, INITIAL_WINDOW_DATAGRAMS)
    window.on_packet_acked(now=1.1, packet=packets[0])
    assert window.congestion_window == start + 1200


def test_it_never_grows_above_its_limit() -> None:
    window = WindowControl(max_datagram_size=1200)
    window.widen(1440, MAX_WINDOW_BYTES - 100, MAX_WINDOW_BYTES)
    packets = sent(window, 1440, MAX_WINDOW_BYTES // 1440)
    for each in packets[:5]:
        window.on_packet_acked(now=1.1, packet=each)
    assert window.congestion_window == MAX_WINDOW_BYTES


def test_a_probe_holds_nothing_up_and_its_loss_is_not_congestion() -> None:
    window = WindowControl(max_datagram_size=1200)
    start = window.congestion_window
    ordinary, probes = packet(1200), [packet(61_440, number=number) for number in (1, 2, 3)]
    window.on_packet_sent(packet=ordinary)
    window.is_probing = True
    for probe in probes:
        window.on_packet_sent(packet=probe)
    window.is_probing = False
    assert window.bytes_in_flight == 1200
    window.widen(1440, 0, MAX_WINDOW_BYTES)  # what is a probe stays one, whatever the size has become
    window.on_packet_acked(now=1.1, packet=probes[0])
    window.on_packets_expired(packets=iter(probes[1:2]))
    window.on_packets_lost(now=1.2, packets=iter(probes[2:]))
    assert window.congestion_window == start and window.bytes_in_flight == 1200
    assert window.large_losses_in_a_row == 0
    window.on_packets_lost(now=1.2, packets=iter([ordinary]))
    assert window.congestion_window == max(int(0.7 * start), FLOOR_DATAGRAMS * 1440)
    assert window.bytes_in_flight == 0


def test_however_much_is_lost_one_row_still_fits() -> None:
    window = WindowControl(max_datagram_size=1200)
    window.widen(1440, 100_000, MAX_WINDOW_BYTES)
    for number in range(20):
        lost = packet(1440, sent_at=1.0 + number)
        window.on_packet_sent(packet=lost)
        window.on_packets_lost(now=1.5 + number, packets=[lost])
    assert window.congestion_window == FLOOR_DATAGRAMS * 1440 > 24_576
    window.on_persistent_congestion()
    assert window.congestion_window == FLOOR_DATAGRAMS * 1440


def test_losses_of_one_flight_count_once() -> None:
    window = WindowControl(max_datagram_size=1200)
    window.widen(1440, 200_000, MAX_WINDOW_BYTES)
    packets = sent(window, 1440, 10)
    window.on_packets_lost(now=1.2, packets=packets[:5])
    window.on_packets_lost(now=1.3, packets=packets[5:])
    assert window.congestion_window == 140_000


def test_large_losses_are_counted_until_a_large_packet_arrives() -> None:
    window = WindowControl(max_datagram_size=1200)
    window.widen(1440, 0, MAX_WINDOW_BYTES)
    packets = sent(window, 1440, 6)
    window.on_packets_lost(now=1.2, packets=packets[:2])
    window.on_packets_expired(packets=packets[2:4])
    assert window.large_losses_in_a_row == 4
    window.on_packet_acked(now=1.3, packet=packet(100))
    assert window.large_losses_in_a_row == 4
    window.on_packet_acked(now=1.3, packet=packets[4])
    assert window.large_losses_in_a_row == 0


def test_a_burst_of_one_first_window_goes_out_at_once_and_what_follows_is_spaced_out() -> None:
    pacer = BurstPacer(max_datagram_size=1200)
    assert pacer.next_send_time(now=0.0) is None  # nothing is known about the path yet
    pacer.update_rate(congestion_window=48_000, smoothed_rtt=0.05)
    now, burst = 10.0, 0
    while pacer.next_send_time(now=now) is None:
        pacer.update_after_send(now=now)
        burst += 1
    assert burst == pytest.approx(INITIAL_WINDOW_DATAGRAMS, abs=1)
    per_second = 1 / (pacer.packet_time or 0.0)
    assert per_second * 1200 == pytest.approx(1.25 * 48_000 / 0.05)


def test_on_loopback_nothing_is_spaced_out() -> None:
    pacer = BurstPacer(max_datagram_size=1200)
    pacer.update_rate(congestion_window=48_000, smoothed_rtt=0.05)
    pacer.widen(16_384, unpaced=True)
    pacer.update_rate(congestion_window=48_000, smoothed_rtt=0.05)
    for _ in range(10_000):
        assert pacer.next_send_time(now=1.0) is None
        pacer.update_after_send(now=1.0)
