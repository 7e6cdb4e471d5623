"""One QUIC connection as the rest of `net` sees it; only this file and `express` touch aioquic's private parts.

What aioquic does not offer and peers need: the server asks for the client's certificate; the datagram size changes with
the path (aioquic pads its first packet to the configured size and never probes); windows follow what was *delivered*,
so that a peer cannot make us hold more than a fixed amount (aioquic doubles them for ever); ACKs are batched.
The rule this file keeps: every private name the two use is listed in `_PRIVATE_PARTS` and looked for at import, so a
release that moved one is refused with a sentence instead of failing in the middle of a conversation.
No sockets and no clock: `now` comes in, datagrams go out.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, cast

from aioquic import tls
from aioquic._crypto import HeaderProtection
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.connection import (
    CONNECTION_LIMIT_FRAME_CAPACITY,
    END_STATES,
    MAX_STREAM_DATA_FRAME_CAPACITY,
    QuicConnection,
)
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.events import ConnectionTerminated
from aioquic.quic.packet import QuicFrameType, QuicPacketType, QuicProtocolVersion
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream
from cryptography import x509

from meshswarm.errors import LocalError
from meshswarm.identity import Identity
from meshswarm.net.congestion import ALGORITHM, BASE_DATAGRAM_BYTES, MAX_WINDOW_BYTES, BurstPacer, WindowControl

ALPN = "meshswarm/1"
CID_BYTES = 8
STREAM_WINDOW_BYTES = 16 * 1024 * 1024
CONNECTION_WINDOW_BYTES = 24 * 1024 * 1024
STRANGER_WINDOW_BYTES = 64 * 1024  # before HELLO is over
AIOQUIC_MAX_DATAGRAM_BYTES = 16384  # it writes the length of a STREAM frame in 14 bits: more would corrupt it silently
MAX_STREAMS = 128  # aioquic's own limit of streams that a peer may have open at once
ACK_EVERY_PACKETS = 4
ACK_EVERY_BYTES = 64 * 1024
ACK_DELAY_S = 0.002  # an ACK costs its receiver as much as a small message: it leaves while a span computes
PEER_ACK_DELAY_S = 0.008  # waited for before a lone packet is sent again; aioquic announces 25 ms and never uses them
IDLE_TIMEOUT_S = 60.0  # a backstop: liveness decides long before

_PRIVATE_PARTS: dict[str, tuple[str, ...]] = {
    "QuicConnection": (
        "_ack_delay", "_ack_eliciting_sent_since_receipt", "_close_at", "_close_event", "_cryptos", "_events",
        "_flush_builder", "_handshake_confirmed", "_handshake_done_pending", "_host_cids", "_idle_timeout",
        "_initialize", "_local_max_data", "_local_max_streams_bidi", "_local_max_streams_uni", "_loss",
        "_max_datagram_size", "_network_paths", "_on_connection_limit_delivery",
        "_on_max_stream_data_delivery", "_pacing_at", "_packet_number", "_payload_received", "_peer_cid",
        "_ping_pending", "_probe_pending", "_remote_max_data", "_remote_max_data_used",
        "_remote_max_streams_bidi", "_retire_connection_ids", "_spaces", "_spin_bit", "_state", "_streams",
        "_streams_blocked_pending", "_streams_queue", "_version", "_write_connection_limits",
        "_write_stream_limits",
    ),
    "QuicConnection._loss": ("_cc", "_pacer", "_rtt_initialized", "_rtt_smoothed", "max_ack_delay"),
    "QuicStream.receiver": ("_buffer_start", "highest_offset"),
    "QuicStream.sender": (
        "_buffer", "_buffer_fin", "_buffer_start", "_buffer_stop", "_pending", "_pending_eof", "_reset_error_code",
    ),
    "CryptoPair": ("_update_key_requested", "recv", "send"),
    "HeaderProtection": ("_mask",),
    "tls.Context": ("_peer_certificate", "_peer_certificate_chain", "_request_client_certificate"),
}  # fmt: skip


class IncompatibleAioquicError(LocalError):
    """The installed aioquic is not one that this package was tested with."""


def check_private_parts(parts: dict[str, Any]) -> None:
    """Raises IncompatibleAioquicError, naming each private name that the objects in `parts` lack."""
    missing = [
        f"{owner}.{name}"
        for owner, names in _PRIVATE_PARTS.items()
        for name in names
        if not hasattr(parts[owner], name)
    ]
    if missing:
        raise IncompatibleAioquicError(
            f"aioquic {version('aioquic')} has no {', '.join(missing)} any more; "
            "install a release that meshswarm was tested with: pip install 'aioquic>=1.7.1,<1.8'"
        )


def sample_parts() -> dict[str, Any]:
    """One live object of each kind that `_PRIVATE_PARTS` names."""
    connection = QuicConnection(configuration=QuicConfiguration(is_client=True))
    stream = QuicStream(stream_id=0)
    return {
        "QuicConnection": connection,
        "QuicConnection._loss": getattr(connection, "_loss", None),
        "QuicStream.receiver": stream.receiver,
        "QuicStream.sender": stream.sender,
        "CryptoPair": CryptoPair(),
        "HeaderProtection": HeaderProtection,
        "tls.Context": tls.Context(is_client=False),
    }


check_private_parts(sample_parts())
logging.getLogger("quic").setLevel(logging.CRITICAL)  # what matters becomes an error of ours; the rest is noise


def quic_configuration(identity: Identity, certificate: x509.Certificate, *, is_client: bool) -> QuicConfiguration:
    """Settings of every connection of a peer. No server name: a dial must not tell the path whom it asks for."""
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=[ALPN],
        certificate=certificate,
        private_key=identity.private_key,
        verify_mode=ssl.CERT_NONE,  # `certificate.certificate_key` decides, not a certificate authority
        cipher_suites=[tls.CipherSuite.AES_128_GCM_SHA256, tls.CipherSuite.CHACHA20_POLY1305_SHA256],
        supported_versions=[QuicProtocolVersion.VERSION_1],
        congestion_control_algorithm=ALGORITHM,
        connection_id_length=CID_BYTES,
        idle_timeout=IDLE_TIMEOUT_S,
        max_data=STRANGER_WINDOW_BYTES,
        max_stream_data=STREAM_WINDOW_BYTES,
        max_datagram_size=SMALLEST_MAX_DATAGRAM_SIZE,
    )


class PeerConnection(QuicConnection):
    """aioquic's connection with the changes that the head of this file lists.

    `original_destination` and `retry_source` are connection ids that a server got from the client's first packet.
    """

    def __init__(
        self,
        configuration: QuicConfiguration,
        *,
        original_destination: bytes | None = None,
        retry_source: bytes | None = None,
    ) -> None:
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination,
            retry_source_connection_id=retry_source,
        )
        self._window_bytes = STRANGER_WINDOW_BYTES
        self._delivered_bytes = 0
        self._packets_to_ack = self._bytes_to_ack = 0
        self._datagram_bytes = BASE_DATAGRAM_BYTES
        self._space: QuicPacketSpace | None = None  # of 1-RTT packets, and their keys: both looked up for every packet
        self._keys = CryptoPair()
        self._ack_delay = ACK_DELAY_S
        self._local_max_streams_uni.value = self._local_max_streams_uni.sent = 0
        self._pacer = self._loss._pacer = BurstPacer(max_datagram_size=SMALLEST_MAX_DATAGRAM_SIZE)
        self.window = cast(WindowControl, self._loss._cc)

    # -- what a connection knows

    @property
    def is_over(self) -> bool:
        """True from the moment either side closed it."""
        return self._state in END_STATES or self._close_event is not None

    @property
    def close_event(self) -> ConnectionTerminated | None:
        """How it ended; known as soon as the other side's close arrives, long before aioquic's own event."""
        return self._close_event

    @property
    def peer_certificates(self) -> tuple[x509.Certificate | None, list[x509.Certificate]]:
        """The other side's certificate, whose key TLS has proved, and whatever came with it."""
        return self.tls._peer_certificate, self.tls._peer_certificate_chain

    @property
    def last_received_at(self) -> float | None:
        """When the last packet that really came from the peer arrived: a forged datagram does not count."""
        return None if self._space is None else self._space.largest_received_time

    @property
    def connection_ids(self) -> list[bytes]:
        return [connection_id.cid for connection_id in self._host_cids]

    def may_open(self, stream_id: int) -> bool:
        """False while the peer has as many of our streams open as it allows: aioquic would break the protocol when
        such a stream is reset before it may start."""
        return stream_id // 4 < self._remote_max_streams_bidi

    def unacked_bytes(self, stream_id: int) -> int:
        """Bytes written to a stream that the other side has not acknowledged."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.sender._buffer_stop - stream.sender._buffer_start

    def is_stopped(self, stream_id: int) -> bool:
        """Whether sending on a stream was given up, as the other side may have asked in this very datagram."""
        stream = self._streams.get(stream_id)
        return stream is not None and stream.sender._reset_error_code is not None

    def write_buffer(self, stream_id: int, data: bytes | bytearray | memoryview, end_stream: bool) -> None:
        """`send_stream_data` for any buffer: aioquic copies it once, into the stream's send buffer."""
        flat = data if isinstance(data, bytes | bytearray) else memoryview(data).cast("B")
        self.send_stream_data(stream_id, cast(bytes, flat), end_stream)

    # -- TLS

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self._space = self._spaces[tls.Epoch.ONE_RTT]
        self._keys = self._cryptos[tls.Epoch.ONE_RTT]
        if not self._is_client:
            self.tls._request_client_certificate = True

    # -- windows: what the peer may send is what was delivered plus a fixed amount

    def open_window(self) -> None:
        """HELLO is over: the peer may send what a peer needs, and acknowledges as fast as we do."""
        self._window_bytes = CONNECTION_WINDOW_BYTES
        self._loss.max_ack_delay = PEER_ACK_DELAY_S

    def delivered(self, count: int) -> None:
        """`count` bytes of stream data were taken in order."""
        self._delivered_bytes += count

    def abandon_rest(self, stream_id: int) -> None:
        """A stream was reset by the peer: what it announced but never delivered no longer fills the window."""
        if (stream := self._streams.get(stream_id)) is not None:
            self._delivered_bytes += stream.receiver.highest_offset - stream.receiver._buffer_start

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        data = self._local_max_data
        allowed = self._delivered_bytes + self._window_bytes
        if allowed - data.value >= self._window_bytes // 4:
            data.value = allowed
        streams = self._local_max_streams_bidi
        for limit in (data, streams):
            if limit.value == limit.sent or (
                limit is streams and limit.sent - limit.used >= limit.value - limit.sent  # batched, as aioquic does
            ):
                continue
            buffer = builder.start_frame(
                limit.frame_type,
                capacity=CONNECTION_LIMIT_FRAME_CAPACITY,
                handler=self._on_connection_limit_delivery,
                handler_args=(limit,),
            )
            buffer.push_uint_var(limit.value)
            limit.sent = limit.value

    def _write_stream_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream) -> None:
        allowed = stream.receiver._buffer_start + STREAM_WINDOW_BYTES
        if allowed - stream.max_stream_data_local >= STREAM_WINDOW_BYTES // 4:
            stream.max_stream_data_local = allowed
        if stream.max_stream_data_local_sent != stream.max_stream_data_local:
            buffer = builder.start_frame(
                QuicFrameType.MAX_STREAM_DATA,
                capacity=MAX_STREAM_DATA_FRAME_CAPACITY,
                handler=self._on_max_stream_data_delivery,
                handler_args=(stream,),
            )
            buffer.push_uint_var(cast(int, stream.stream_id))
            buffer.push_uint_var(stream.max_stream_data_local)
            stream.max_stream_data_local_sent = stream.max_stream_data_local

    # -- acknowledgements: every few packets and at once when something is missing, never on the back of an answer

    def receive_datagram(self, data: bytes, addr: Any, now: float) -> None:
        space = self._space
        if space is None or space.ack_at is None:
            self._packets_to_ack = self._bytes_to_ack = 0
        self._receive(data, addr, now)
        if space is not None and space.ack_at is not None:
            self._packets_to_ack += 1
            self._bytes_to_ack += len(data)
            many = self._packets_to_ack >= ACK_EVERY_PACKETS or self._bytes_to_ack >= ACK_EVERY_BYTES
            if many or len(space.ack_queue) > 1:
                space.ack_at = now - 1e-9  # aioquic paces packets whose ACK is due at this very instant

    def _receive(self, data: bytes, addr: Any, now: float) -> None:
        super().receive_datagram(data, addr, now)

    def has_duties(self, now: float) -> bool:
        """Something other than stream data is to be sent. False spares the search for it after every packet."""
        space = self._space
        return (
            space is None
            or (space.ack_at is not None and space.ack_at <= now)
            or self._probe_pending
            or self._handshake_done_pending
            or self._streams_blocked_pending
            or bool(self._ping_pending or self._retire_connection_ids or self._network_paths[0].remote_challenges)
            or self._delivered_bytes + self._window_bytes - self._local_max_data.value >= self._window_bytes // 4
            or self._local_max_data.sent != self._local_max_data.value
            or not all(connection_id.was_sent for connection_id in self._host_cids)
            or len(self._network_paths) > 1
            or any(_has_duties(stream) for stream in self._streams_queue)
        )

    # -- path

    @property
    def datagram_bytes(self) -> int:
        """The size of datagrams that the path was seen to carry; `express` uses it all, aioquic up to its own limit."""
        return self._datagram_bytes

    @property
    def bytes_sent(self) -> int:
        """On the path, handshake included."""
        return sum(path.bytes_sent for path in self._network_paths[:1])

    def widen(self, datagram_bytes: int, *, window_bytes: int) -> None:
        """The path was seen to carry `datagram_bytes`."""
        self._set_size(datagram_bytes)
        self.window.widen(datagram_bytes, window_bytes, MAX_WINDOW_BYTES)
        self._pacer.widen(datagram_bytes, unpaced=False)

    def widen_to_loopback(self, datagram_bytes: int, *, window_bytes: int) -> None:
        """Both ends are on this machine: no pacing, and never more in flight than the receiving socket can buffer."""
        self._set_size(datagram_bytes)
        self.window.widen(datagram_bytes, window_bytes, window_bytes)
        self._pacer.widen(datagram_bytes, unpaced=True)

    def narrow(self) -> None:
        """The path does not carry more than the minimum any longer."""
        self._set_size(BASE_DATAGRAM_BYTES)
        self.window.narrow()
        self._pacer.widen(BASE_DATAGRAM_BYTES, unpaced=False)

    def _set_size(self, datagram_bytes: int) -> None:
        self._datagram_bytes = datagram_bytes
        self._max_datagram_size = min(datagram_bytes, AIOQUIC_MAX_DATAGRAM_BYTES)

    def path_probe(self, size: int, now: float, on_result: Callable[[bool], None]) -> list[tuple[bytes, Any]]:
        """A datagram of exactly `size` bytes (PING and PADDING); `on_result(arrived)` is called once, some time later.

        Empty when nothing can be sent yet or any more.
        """
        if self.is_over or not self._keys.send.is_valid():
            return []
        builder = QuicPacketBuilder(
            host_cid=self.host_cid,
            is_client=self._is_client,
            max_datagram_size=size,
            packet_number=self._packet_number,
            peer_cid=self._peer_cid.cid,
            spin_bit=self._spin_bit,
            version=cast(int, self._version),
        )
        builder.start_packet(QuicPacketType.ONE_RTT, self._keys)
        buffer = builder.start_frame(
            QuicFrameType.PING, handler=lambda delivery: on_result(delivery is QuicDeliveryState.ACKED)
        )
        buffer.push_bytes(bytes(builder.remaining_buffer_space))
        self.window.is_probing = True
        try:
            return self._flush_builder(
                builder=builder, network_path=self._network_paths[0], peer_cid=self._peer_cid.cid, now=now
            )
        finally:
            self.window.is_probing = False


def _has_duties(stream: QuicStream) -> bool:
    """A stream wants to be reset, stopped, forgotten, or to let the peer send more."""
    receiver = stream.receiver
    return (
        stream.sender.reset_pending
        or receiver.stop_pending
        or stream.is_finished
        or stream.max_stream_data_local_sent != stream.max_stream_data_local
        or receiver._buffer_start + STREAM_WINDOW_BYTES - stream.max_stream_data_local >= STREAM_WINDOW_BYTES // 4
    )
