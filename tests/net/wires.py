"""Two QUIC connections joined by hand: no sockets, no waiting, a clock that the test turns."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import QuicEvent, StreamDataReceived

from meshswarm.identity import Identity
from meshswarm.net.certificate import make_certificate
from meshswarm.net.express import ExpressConnection
from meshswarm.net.quic import PeerConnection, quic_configuration

CLIENT_ADDRESS = ("192.0.2.1", 1)
SERVER_ADDRESS = ("192.0.2.2", 2)
TICK_S = 1e-6  # timers fire just after their time, as on every real clock: at that very instant nothing may be due yet
Drop = Callable[[bytes], bool]


def configuration(identity: Identity, *, is_client: bool) -> QuicConfiguration:
    certificate = make_certificate(identity, datetime.datetime.now(datetime.UTC))
    return quic_configuration(identity, certificate, is_client=is_client)


@dataclass
class Wire:
    """A client, a server and a path with a one-way delay. `drop` sees every datagram and says which vanish."""

    client: PeerConnection
    server: PeerConnection
    delay_s: float = 0.01
    drop: Drop = lambda _datagram: False
    now: float = 0.0
    sizes: list[int] = field(default_factory=list)
    events: dict[int, list[QuicEvent]] = field(default_factory=lambda: {0: [], 1: []})
    _queue: list[tuple[float, int, bytes]] = field(default_factory=list)
    _server_started: bool = False

    @classmethod
    def connect(cls, client: Identity, server: Identity, **settings: Any) -> Wire:
        return cls.join(configuration(client, is_client=True), configuration(server, is_client=False), **settings)

    @classmethod
    def join(
        cls,
        client: QuicConfiguration,
        server: QuicConfiguration,
        *,
        client_kind: type[PeerConnection] = ExpressConnection,
        server_kind: type[PeerConnection] = ExpressConnection,
        **settings: Any,
    ) -> Wire:
        first = client_kind(client)
        second = server_kind(server, original_destination=first.original_destination_connection_id)
        first.connect(SERVER_ADDRESS, 0.0)
        return cls(first, second, **settings)

    def collect(self) -> None:
        """Take what both sides want to send now."""
        for side, connection in self._sides():
            self.carry(side, [datagram for datagram, _ in connection.datagrams_to_send(self.now)])

    def carry(self, side: int, datagrams: list[bytes]) -> None:
        for datagram in datagrams:
            self.sizes.append(len(datagram))
            if not self.drop(datagram):
                self._queue.append((self.now + self.delay_s, 1 - side, datagram))

    def _sides(self) -> list[tuple[int, PeerConnection]]:
        """Both sides, less a server that has not heard from its client yet."""
        return [(0, self.client), (1, self.server)] if self._server_started else [(0, self.client)]

    def step(self, stop: float = math.inf) -> bool:
        """Go to the next thing that happens, an arrival or a timer, unless it lies beyond `stop`."""
        self.collect()
        timers = [timer + TICK_S for _, side in self._sides() if (timer := side.get_timer()) is not None]
        upcoming = min(timers + [at for at, _, _ in self._queue], default=math.inf)
        if upcoming > stop:
            self.now = max(self.now, stop)
            return False
        self.now = max(self.now, upcoming)
        due = [entry for entry in self._queue if entry[0] <= self.now]
        self._queue = [entry for entry in self._queue if entry[0] > self.now]
        for _, side, datagram in due:
            self._server_started = self._server_started or side == 1
            target, source = (self.server, CLIENT_ADDRESS) if side == 1 else (self.client, SERVER_ADDRESS)
            target.receive_datagram(datagram, source, self.now)
        for side, connection in self._sides():
            timer = connection.get_timer()
            if timer is not None and timer <= self.now:
                connection.handle_timer(self.now)
            while (event := connection.next_event()) is not None:
                self.events[side].append(event)
                if isinstance(event, StreamDataReceived):
                    connection.delivered(len(event.data))
        return True

    def run(self, until: Callable[[], bool], limit_s: float = 30.0) -> bool:
        """Step until `until()`; False when it never came true within `limit_s` of the virtual clock."""
        stop = self.now + limit_s
        while not until():
            if not self.step(stop):
                return until()
        return True

    def rest(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.run(lambda: False, limit_s=seconds)

    def received(self, side: int, stream_id: int = 0) -> bytes:
        """What side (0 client, 1 server) got on a stream."""
        return b"".join(
            event.data
            for event in self.events[side]
            if isinstance(event, StreamDataReceived) and event.stream_id == stream_id
        )
