"""How fast a connection may send: New Reno with a start that fits one row of a large model, and bursts let through.

aioquic starts at 10 datagrams and then spaces packets out by a timer, which costs a millisecond or more for the third
packet of a small message. Here the first window is 32 datagrams (what Chromium's QUIC uses), enough for a 24 KiB
float32 row at width 6144 in one flight, and a burst of that size goes out at once (RFC 9002, 7.7 allows bursts up to
the initial window). Losses shrink the window by CUBIC's factor and never below one such row, since a smaller window
would add a flight to every token; what is in flight, and so what queues on a slow path, stays bounded all the same. On
loopback nothing is spaced out, and the window stays below what the receiver's socket buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from aioquic.quic.congestion.base import register_congestion_control
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import QuicPacketPacer

ALGORITHM = "meshswarm"
INITIAL_WINDOW_DATAGRAMS = 32
BASE_DATAGRAM_BYTES = 1200
ETHERNET_BYTES = 1440  # 1500 less IPv6 and UDP headers, with a little room for tunnels
FLOOR_DATAGRAMS = 24
MAX_WINDOW_BYTES = 16 * 1024 * 1024
_REDUCTION = 0.7  # CUBIC's (RFC 9438, 4.6)
_PACING_GAIN = 1.25  # RFC 9002, 7.7
_TIMER_RESOLUTION_S = 0.002  # event loops wake up in whole milliseconds: let as much through as passes in two


class WindowControl(RenoCongestionControl):
    """New Reno, capped, with the larger start; counts losses of packets that only a wide path carries."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.congestion_window = INITIAL_WINDOW_DATAGRAMS * max_datagram_size
        self.max_window_bytes = MAX_WINDOW_BYTES
        self.large_losses_in_a_row = 0
        self.is_probing = False
        """What is sent while this is set are path probes: they hold no data up, and their loss is no congestion."""
        self._probes: set[int] = set()  # packet numbers

    def widen(self, datagram_bytes: int, window_bytes: int, max_window_bytes: int) -> None:
        """The path carries `datagram_bytes` a datagram; go on from `window_bytes` unless more was reached."""
        self._max_datagram_size = datagram_bytes
        self.max_window_bytes = max_window_bytes
        self.congestion_window = min(max(self.congestion_window, window_bytes), max_window_bytes)
        self.large_losses_in_a_row = 0

    def narrow(self) -> None:
        """Back to the datagram size that every path carries."""
        self.widen(BASE_DATAGRAM_BYTES, 0, MAX_WINDOW_BYTES)

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        if self.is_probing:
            self._probes.add(packet.packet_number)
        else:
            super().on_packet_sent(packet=packet)

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        if packet.packet_number in self._probes:
            self._probes.discard(packet.packet_number)
            return
        if 2 * self.bytes_in_flight >= self.congestion_window:
            super().on_packet_acked(now=now, packet=packet)
            self.congestion_window = min(self.congestion_window, self.max_window_bytes)
        else:  # a window that is not used is not proved, so it does not grow (RFC 9002, 7.8)
            self.bytes_in_flight -= packet.sent_bytes
        if packet.sent_bytes > BASE_DATAGRAM_BYTES:
            self.large_losses_in_a_row = 0

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        super().on_packets_expired(packets=self._without_probes(packets))

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        lost = self._without_probes(packets)
        super().on_packets_expired(packets=lost)
        if lost and cast(float, lost[-1].sent_time) > self._congestion_recovery_start_time:
            self._congestion_recovery_start_time = now
            self.congestion_window = self.ssthresh = max(int(_REDUCTION * self.congestion_window), self._floor_bytes)

    def _without_probes(self, packets: Iterable[QuicSentPacket]) -> list[QuicSentPacket]:
        """The packets that matter among those that did not arrive; large ones are counted."""
        packets = list(packets)
        ordinary = [packet for packet in packets if packet.packet_number not in self._probes]
        self._probes.difference_update(packet.packet_number for packet in packets)
        largest = self._max_datagram_size  # what was sent before it shrank is no news
        self.large_losses_in_a_row += sum(BASE_DATAGRAM_BYTES < packet.sent_bytes <= largest for packet in ordinary)
        return ordinary

    def on_persistent_congestion(self) -> None:
        self.congestion_window = self._floor_bytes
        self._congestion_recovery_start_time = 0.0

    @property
    def _floor_bytes(self) -> int:
        return min(FLOOR_DATAGRAMS * self._max_datagram_size, FLOOR_DATAGRAMS * ETHERNET_BYTES)


class BurstPacer(QuicPacketPacer):
    """Spaces out what goes beyond one initial window; nothing at all when `is_unpaced`."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.is_unpaced = False

    def widen(self, datagram_bytes: int, *, unpaced: bool) -> None:
        self._max_datagram_size = datagram_bytes
        self.is_unpaced = unpaced
        if unpaced:
            self.packet_time = None

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        if self.is_unpaced:
            return
        bytes_per_s = _PACING_GAIN * congestion_window / max(smoothed_rtt, 1e-6)
        self.packet_time = min(self._max_datagram_size / bytes_per_s, 1.0)
        self.bucket_max = max(INITIAL_WINDOW_DATAGRAMS * self._max_datagram_size / bytes_per_s, _TIMER_RESOLUTION_S)
        self.bucket_time = min(self.bucket_time, self.bucket_max)


register_congestion_control(ALGORITHM, WindowControl)
