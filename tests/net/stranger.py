"""A client that does what it likes: real QUIC to a real endpoint, without our manners."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import HandshakeCompleted, QuicEvent, StreamDataReceived
from tests.net.eventually import eventually
from tests.net.wires import configuration

from meshswarm.config import Address
from meshswarm.identity import Identity, PeerId
from meshswarm.net.certificate import certificate_hash
from meshswarm.net.frames import FrameDecoder, frame_header
from meshswarm.net.handshake import Action, ClientHello, Self, Send
from meshswarm.net.quic import PeerConnection
from meshswarm.net.swarm import Swarm


class Stranger(asyncio.DatagramProtocol):
    """`connect` makes one. It only sends what the test tells it to."""

    def __init__(self, identity: Identity, settings: QuicConfiguration) -> None:
        self.identity = identity
        self.quic = PeerConnection(settings)
        self.events: list[QuicEvent] = []
        self.seen: list[bytes] = []
        self.timer: asyncio.TimerHandle | None = None

    @classmethod
    async def connect(
        cls,
        address: Address,
        identity: Identity | None = None,
        *,
        settings: QuicConfiguration | None = None,
        wait: bool = True,
    ) -> Stranger:
        identity = identity or Identity.generate()
        stranger = cls(identity, settings or configuration(identity, is_client=True))
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: stranger, remote_addr=(address.host, address.port))
        stranger.transport: Any = transport
        stranger.peer = (address.host, address.port)
        stranger.quic.connect(stranger.peer, monotonic())
        stranger.pump()
        if wait:
            await eventually(lambda: any(isinstance(event, HandshakeCompleted) for event in stranger.events)
                             or stranger.quic.is_over)  # fmt: skip
        return stranger

    def datagram_received(self, data: bytes, _addr: Any) -> None:
        self.seen.append(data)
        self.quic.receive_datagram(data, self.peer, monotonic())
        self.pump()

    def error_received(self, _error: OSError) -> None:
        pass

    def pump(self) -> None:
        now = monotonic()
        if (timer := self.quic.get_timer()) is not None and timer <= now:
            self.quic.handle_timer(now)
        for datagram, _ in self.quic.datagrams_to_send(now):
            self.transport.sendto(datagram)
        while (event := self.quic.next_event()) is not None:
            self.events.append(event)
            if isinstance(event, StreamDataReceived):
                self.quic.delivered(len(event.data))
        if self.timer is not None:
            self.timer.cancel()
        if (timer := self.quic.get_timer()) is not None:
            self.timer = asyncio.get_running_loop().call_later(max(0.0005, timer - now), self.pump)

    def write(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Raw bytes on a QUIC stream."""
        self.quic.send_stream_data(stream_id, data, end)
        self.pump()

    def frame(self, stream_id: int, frame: bytes) -> None:
        self.write(stream_id, frame_header(len(frame)) + frame)

    def received(self, stream_id: int = 0) -> list[bytes]:
        """The frames that came on a stream."""
        decoder = FrameDecoder(1 << 24)
        return [frame for event in self.events if isinstance(event, StreamDataReceived) and event.stream_id == stream_id
                for frame in decoder.feed(event.data)]  # fmt: skip

    async def hello(self, swarm: Swarm, server: PeerId) -> None:
        """Go through HELLO as a well-behaved client would."""
        certificate, _ = self.quic.peer_certificates
        assert certificate is not None
        machine = ClientHello(
            Self(self.identity, swarm, "stranger"), server, certificate_hash(certificate), b"n" * 32, 0
        )
        self._say(machine.start())
        await eventually(lambda: self.received() or self.quic.is_over)
        self._say(machine.receive(self.received()[0], 0.1))
        await eventually(lambda: len(self.received()) > 1 or self.quic.is_over)
        self.quic.open_window()

    def _say(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.frame(0, action.frame)

    async def closed(self, timeout_s: float = 10.0) -> int:
        """The code that the endpoint closed with."""
        await eventually(lambda: self.quic.close_event is not None, timeout_s)
        assert self.quic.close_event is not None
        return self.quic.close_event.error_code

    def leave(self) -> None:
        """Without a word."""
        if self.timer is not None:
            self.timer.cancel()
        self.transport.close()
