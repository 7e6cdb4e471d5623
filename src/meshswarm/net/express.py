"""The short way through QUIC for what a peer sends and receives all day: packets with one piece of one stream.

aioquic builds and reads every packet as if it could hold anything; for a decode step that is most of the latency. When
a connection is open and nothing unusual is going on, a packet with a single STREAM frame is written and read here
directly, with aioquic's own keys, counters and loss recovery, so that both ways can alternate packet by packet, and
either end may be plain aioquic. The rule this file keeps: at the first sign of anything else it does nothing, and
aioquic's own way is taken.

The STREAM frame is the last in its packet and has no length field (RFC 9000, 19.8). Each packet leaves before the next
is built and before the books are written, so a long message is on its way while the rest of it is still being cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from aioquic import tls
from aioquic._crypto import CryptoError
from aioquic.quic.connection import QuicConnectionError, QuicConnectionState, QuicNetworkPath, QuicReceiveContext
from aioquic.quic.crypto import CryptoContext
from aioquic.quic.packet import QuicPacketType, QuicStreamFrame, decode_packet_number
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import MAX_ACK_RANGES, QuicPacketSpace
from aioquic.quic.stream import FinalSizeError, QuicStream

from meshswarm.net.quic import CID_BYTES, PeerConnection

_TAG_BYTES = 16
_NUMBER_BYTES = 2
_OVERHEAD_BYTES = 1 + _NUMBER_BYTES + 1 + 8 + 8 + _TAG_BYTES  # beside data and connection id, at most
_LONG_HEADER, _FIXED, _RESERVED, _KEY_PHASE = 0x80, 0x40, 0x18, 0x04
_PING = 0x01
_STREAM, _OFFSET, _LENGTH, _FIN = 0x08, 0x04, 0x02, 0x01
_SAMPLE_IN_PAYLOAD = 4 - _NUMBER_BYTES
_SAMPLE_AT = 1 + CID_BYTES + 4
_SAMPLE_END = _SAMPLE_AT + 16

Datagrams = list[tuple[bytes, Any]]


def _has_data(stream: QuicStream) -> bool:
    sender = stream.sender
    return (
        not stream.is_blocked and sender._reset_error_code is None and (len(sender._pending) > 0 or sender._pending_eof)
    )


def varint(value: int) -> bytes:
    """QUIC's variable-length integer (RFC 9000, 16)."""
    if value < 0x40:
        return value.to_bytes(1, "big")
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x40000000:
        return (value | 0x80000000).to_bytes(4, "big")
    return (value | 0xC000000000000000).to_bytes(8, "big")


class ExpressConnection(PeerConnection):
    """A `PeerConnection` with the short way. `express_sent` and `express_received` count the packets that went it.

    `emit(datagram, address)` is called with each of them; until somebody sets it, they wait for `datagrams_to_send`.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.emit: Callable[[bytes, Any], None] = lambda datagram, address: self._unsent.append((datagram, address))
        self._unsent: Datagrams = []
        self.express_sent = 0
        self.express_received = 0

    # -- sending

    def send_at_once(self, stream_id: int, data: bytes, end_stream: bool, now: float) -> bool:
        """Write a small piece to a stream, and emit the one packet that carries it.

        False, and nothing is written, when it does not fit one packet, when something else is to leave before it, or
        when it may not leave now.
        """
        stream = self._streams.get(stream_id)
        if stream is None or not self._is_plain():
            return False
        sender, loss, size = stream.sender, self._loss, len(data)
        start = sender._buffer_stop
        stop = start + size
        largest = size + _OVERHEAD_BYTES + len(self._peer_cid.cid)
        if (
            _has_data(stream)
            or stream.is_blocked
            or sender._reset_error_code is not None
            or sender._buffer_fin is not None
            or largest > self._datagram_bytes
            or loss.bytes_in_flight + largest > loss.congestion_window
            or stop > stream.max_stream_data_remote
            or self._remote_max_data_used + size > self._remote_max_data
            or self._pacer.next_send_time(now=now) is not None
        ):
            return False
        self._send_packet(stream, start, data, end_stream, now)
        sender._buffer += data
        sender._buffer_stop = sender.highest_offset = stop
        if end_stream:
            sender._buffer_fin = stop
        self._remote_max_data_used += size
        return True

    def datagrams_to_send(self, now: float) -> Datagrams:
        """As aioquic's, but what streams have to say leaves first, and the rest only when there is any."""
        if not self._is_plain():
            return super().datagrams_to_send(now)
        busy = [stream for stream in self._streams_queue if _has_data(stream)]
        if busy and self._send_express(busy, now):
            self._probe_pending = False  # what was sent again is the best probe
        datagrams, self._unsent = self._unsent, []
        if self.has_duties(now):
            datagrams += super().datagrams_to_send(now)
        else:
            self._pacing_at = self._pacer.next_send_time(now=now) if busy else None
        return datagrams

    def _is_plain(self) -> bool:
        """The connection is open, on a path that is known to lead to the peer, and no change of keys is due."""
        return (
            self._handshake_confirmed
            and self._state is QuicConnectionState.CONNECTED
            and self._close_event is None
            and self._network_paths[0].is_validated
            and not self._keys._update_key_requested
        )

    def _send_express(self, busy: list[QuicStream], now: float) -> bool:
        """One packet of each stream in turn, until all is said, or the congestion window or the pacer says stop.

        What is left over stays in `busy`, and whoever was served goes to the end of the queue for the next time.
        """
        served: dict[QuicStream, None] = {}
        while busy and self._send_round(busy, served, now):
            pass
        if len(served) > 1 or (served and self._streams_queue[-1] not in served):
            self._streams_queue = [stream for stream in self._streams_queue if stream not in served] + list(served)
        return bool(served)

    def _send_round(self, busy: list[QuicStream], served: dict[QuicStream, None], now: float) -> bool:
        """One packet of each; False when no more may leave now."""
        loss, pacer, overhead = self._loss, self._pacer, _OVERHEAD_BYTES + len(self._peer_cid.cid)
        for stream in list(busy):
            sender, before = stream.sender, stream.sender.highest_offset
            waiting = len(sender._pending[0]) if len(sender._pending) else 0
            room = min(self._datagram_bytes, waiting + overhead)
            if loss.bytes_in_flight + room > loss.congestion_window or pacer.next_send_time(now=now) is not None:
                return False  # also when a part would fit: small packets only add to what is in flight
            allowed = before + self._remote_max_data - self._remote_max_data_used
            frame = sender.get_frame(room - overhead, min(allowed, stream.max_stream_data_remote))
            if frame is not None:
                self._remote_max_data_used += sender.highest_offset - before
                self._send_packet(stream, frame.offset, frame.data, frame.fin, now)
                served.pop(stream, None)
                served[stream] = None
            if frame is None or not _has_data(stream):
                busy.remove(stream)
        return True

    def _send_packet(self, stream: QuicStream, offset: int, data: bytes, fin: bool, now: float) -> None:
        """Emit the packet with one STREAM frame, and enter it into aioquic's books."""
        path, number = self._network_paths[0], self._packet_number
        frame_type, stream_id = _STREAM | (_OFFSET if offset else 0) | fin, varint(cast(int, stream.stream_id))
        frame = b"".join((bytes((frame_type,)), stream_id, varint(offset) if offset else b"", data))
        datagram = _seal(frame, self._keys.send, self._peer_cid.cid, number, self._spin_bit)
        self.emit(datagram, path.addr)
        self._packet_number = number + 1
        self._loss.on_packet_sent(
            packet=QuicSentPacket(
                epoch=tls.Epoch.ONE_RTT,
                in_flight=True,
                is_ack_eliciting=True,
                is_crypto_packet=False,
                packet_number=number,
                packet_type=QuicPacketType.ONE_RTT,
                sent_time=now,
                sent_bytes=len(datagram),
                delivery_handlers=[(stream.sender.on_data_delivery, (offset, offset + len(data), fin))],
            ),
            space=cast(QuicPacketSpace, self._space),
        )
        self._pacer.update_after_send(now=now)
        path.bytes_sent += len(datagram)
        if not self._ack_eliciting_sent_since_receipt:
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = True
        self.express_sent += 1

    # -- receiving

    def _receive(self, data: bytes, addr: Any, now: float) -> None:
        if not self._receive_express(data, addr, now):
            super()._receive(data, addr, now)

    def _receive_express(self, data: bytes, addr: Any, now: float) -> bool:
        """True when the datagram was dealt with. Anything but a plain 1-RTT packet on the known path is left alone."""
        space, path = self._space, self._network_paths[0] if self._network_paths else None
        if (
            space is None
            or path is None
            or not self._handshake_confirmed
            or len(data) < _SAMPLE_END
            or data[0] & _LONG_HEADER
            or data[1 : 1 + CID_BYTES] != self.host_cid
            or path.addr != addr
            or not path.is_validated
            or self._state is not QuicConnectionState.CONNECTED
            or self._close_event is not None
        ):
            return False
        opened = _open(data, self._keys.recv, space)
        if opened is None:
            return False
        number, payload = opened
        if number in space.received_packets:
            return True
        if number > space.expected_packet_number:
            space.expected_packet_number = number + 1
        self.express_received += 1
        is_ack_eliciting = (
            self._read_stream_frame(payload) or _is_path_probe(payload) or self._read_frames(payload, path, now)
        )
        if self._close_event is None:
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = False
            self._note_received(space, number, is_ack_eliciting, now)
        return True

    def _read_stream_frame(self, payload: bytes) -> bool:
        """Read a payload that is one STREAM frame of a known stream, within its limits; False leaves it alone."""
        frame_type = payload[0]
        if frame_type & ~0x07 != _STREAM:
            return False
        stream_id, at = _pull(payload, 1)
        stream = self._streams.get(stream_id)
        offset, at = _pull(payload, at) if frame_type & _OFFSET else (0, at)
        if frame_type & _LENGTH:
            length, at = _pull(payload, at)
            if at + length != len(payload):
                return False
        if stream is None or at > len(payload):
            return False
        end = offset + len(payload) - at
        receiver = stream.receiver
        news = max(0, end - receiver.highest_offset)
        limit = self._local_max_data
        if end > stream.max_stream_data_local or limit.used + news > limit.value:
            return False
        try:
            event = receiver.handle_frame(
                QuicStreamFrame(data=payload[at:], fin=bool(frame_type & _FIN), offset=offset)
            )
        except FinalSizeError:
            return False
        if event is not None:
            self._events.append(event)
        limit.used += news
        return True

    def _read_frames(self, payload: bytes, path: QuicNetworkPath, now: float) -> bool:
        """Read any other payload as aioquic does; True when it is to be acknowledged."""
        context = QuicReceiveContext(
            epoch=tls.Epoch.ONE_RTT,
            host_cid=self.host_cid,
            network_path=path,
            quic_logger_frames=None,
            time=now,
            version=self._version,
        )
        try:
            is_ack_eliciting, _ = self._payload_received(context, payload)
        except QuicConnectionError as error:
            self.close(error_code=error.error_code, frame_type=error.frame_type, reason_phrase=error.reason_phrase)
            return False
        return is_ack_eliciting

    def _note_received(self, space: QuicPacketSpace, number: int, is_ack_eliciting: bool, now: float) -> None:
        if number > space.largest_received_packet:
            space.largest_received_packet = number
            space.largest_received_time = now
        space.ack_queue.add(number)
        space.received_packets.add(number)
        if len(space.ack_queue) > MAX_ACK_RANGES:
            space.ack_queue.shift()
        if is_ack_eliciting and space.ack_at is None:
            space.ack_at = now + self._ack_delay


def _pull(data: bytes, at: int) -> tuple[int, int]:
    """The variable-length integer at `at`, and where it ends; an end beyond `data` when it is cut off."""
    if at >= len(data):
        return 0, len(data) + 1
    length = 1 << (data[at] >> 6)
    value = int.from_bytes(data[at : at + length], "big")
    return value & (1 << (8 * length - 2)) - 1, at + length


def _is_path_probe(payload: bytes) -> bool:
    """Nothing but PING and then PADDING, which aioquic would read byte by byte: milliseconds for a large probe."""
    return payload[0] == _PING and not payload.lstrip(b"\x01").lstrip(b"\x00")


def _seal(payload: bytes, keys: CryptoContext, connection_id: bytes, number: int, spin_bit: bool) -> bytes:
    """A protected 1-RTT packet (RFC 9001, 5.3 and 5.4)."""
    assert keys.aead is not None and keys.hp is not None
    first = _FIXED | spin_bit << 5 | keys.key_phase << 2 | _NUMBER_BYTES - 1
    truncated = number & 0xFFFF
    header = b"".join((bytes((first,)), connection_id, truncated.to_bytes(_NUMBER_BYTES, "big")))
    sealed = keys.aead.encrypt(payload, header, number)
    mask = keys.hp._mask(sealed[_SAMPLE_IN_PAYLOAD : _SAMPLE_IN_PAYLOAD + 16])
    first ^= mask[0] & 0x1F
    truncated ^= mask[1] << 8 | mask[2]
    return b"".join((bytes((first,)), connection_id, truncated.to_bytes(_NUMBER_BYTES, "big"), sealed))


def _open(data: bytes, keys: CryptoContext, space: QuicPacketSpace) -> tuple[int, bytes] | None:
    """Packet number and plain payload; None for another key phase, reserved bits, or what does not decrypt."""
    if keys.hp is None or keys.aead is None:
        return None
    mask = keys.hp._mask(data[_SAMPLE_AT:_SAMPLE_END])
    first = data[0] ^ (mask[0] & 0x1F)
    if first & _RESERVED or (first & _KEY_PHASE) >> 2 != keys.key_phase:
        return None
    length = (first & 0x03) + 1
    payload_at = 1 + CID_BYTES + length
    truncated = int.from_bytes(data[1 + CID_BYTES : payload_at], "big") ^ int.from_bytes(mask[1 : 1 + length], "big")
    number = decode_packet_number(truncated, 8 * length, space.expected_packet_number)
    header = b"".join((bytes((first,)), data[1 : 1 + CID_BYTES], truncated.to_bytes(length, "big")))
    try:
        payload = keys.aead.decrypt(data[payload_at:], header, number)
    except CryptoError:
        return None
    return (number, payload) if payload else None
