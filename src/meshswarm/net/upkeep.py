"""What an open connection does when nobody asks: signs of life, round-trip times, and the datagram size of its path.

A thin shell around `liveness`, `pathmtu` and `control`, driven by the link's one timer. The rule this file keeps: a
connection that rests costs one small exchange every 15 s, one that somebody holds every second, and nothing between.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from meshswarm.errors import MeshswarmError
from meshswarm.net.congestion import INITIAL_WINDOW_DATAGRAMS
from meshswarm.net.control import Ping, Pong, RttEstimate, unpack
from meshswarm.net.liveness import Liveness, Verdict
from meshswarm.net.pathmtu import BLACK_HOLE_LOSSES, LOOPBACK_BYTES, PathMtu, is_near, rungs_for
from meshswarm.net.quic import PeerConnection

IDLE_CLOSE_S = 300.0
CROWDED_IDLE_CLOSE_S = 30.0
"""The same for who has more than `MAX_RESTING` connections. In a large swarm most carried one question of the table, to
a peer that is not needed again soon; signs of life on all of them would be most of what a peer sends (docs/scale.md).
"""
MAX_RESTING = 32
PROBE_AFTER_BYTES = 32 * 1024
"""What a connection beyond the local network has sent before larger datagrams are tried there, unless somebody holds
it: a probe either way would be a third of what it costs to ask a stranger one question of the table (docs/scale.md).
"""
HELD_BY_PEER_S = 20.0  # a peer that holds the connection says so at least every 15 s
_MAX_PINGS = 64
_MAX_FIRST_WINDOW_BYTES = 96 * 1024  # ten jumbo datagrams: what TCP starts with there


class Upkeep:
    """The upkeep of one open connection. `say` sends a control frame; `probe(size)` sends a path probe and returns
    False when this machine refuses that size. `loopback_window_bytes` is what a receiver on this machine can buffer."""

    def __init__(
        self,
        quic: PeerConnection,
        host: str,
        say: Callable[[bytes], None],
        probe: Callable[[int], bool],
        loopback_window_bytes: int,
        now: float,
    ) -> None:
        self.rtt = RttEstimate()
        self.liveness = Liveness(now)
        self.mtu = PathMtu(tuple(rung for rung in rungs_for(host) if 4 * rung <= loopback_window_bytes))
        if is_near(host):
            self.mtu.begin(now)
        self._quic = quic
        self._say = say
        self._probe = probe
        self._loopback_window_bytes = loopback_window_bytes
        self._held_by_peer_at = -math.inf
        self._used_at = now
        self._pings: dict[int, tuple[float, asyncio.Future[float] | None]] = {}
        self._next_token = 0

    @property
    def next_at(self) -> float:
        """When `check` should be called next."""
        probe_at = self.mtu.next_at
        return self.liveness.next_at if probe_at is None else min(self.liveness.next_at, probe_at)

    def used(self, now: float) -> None:
        """Somebody here or there used the connection."""
        self._used_at = now

    def sent(self, n_bytes: int, now: float) -> None:
        """The connection has sent so many bytes in all."""
        if n_bytes >= PROBE_AFTER_BYTES or self._is_held(now):
            self.mtu.begin(now)

    def _is_held(self, now: float) -> bool:
        """Here or by the peer."""
        return self.liveness.is_held or now - self._held_by_peer_at < HELD_BY_PEER_S

    def is_idle(self, now: float, *, n_connections: int = 1) -> bool:
        """Nobody here or there has needed the connection for long, which is less where there are many."""
        rest_s = IDLE_CLOSE_S if n_connections <= MAX_RESTING else CROWDED_IDLE_CLOSE_S
        return not self._is_held(now) and now - self._used_at >= rest_s

    def check(self, now: float) -> Verdict:
        """Do what is due. LOST means that the peer is gone."""
        if (heard := self._quic.last_received_at) is not None:
            self.liveness.heard(heard)
        verdict = self.liveness.check(now)
        if verdict is Verdict.PROBE:
            self.ping(now)
        for size in self.mtu.due(now):
            if not self._probe(size):
                self.too_large(size)
        if self._quic.window.large_losses_in_a_row >= BLACK_HOLE_LOSSES:
            self.mtu.black_hole(now)
            self._quic.narrow()
        return verdict

    def ping(self, now: float, answer: asyncio.Future[float] | None = None) -> None:
        """Ask for a sign of life; the round-trip time goes to `answer`."""
        self._next_token += 1
        while len(self._pings) >= _MAX_PINGS:
            self._pings.pop(next(iter(self._pings)))
        self._pings[self._next_token] = (now, answer)
        self._say(Ping(self._next_token, self.liveness.is_held).pack())

    def receive(self, frame: bytes, now: float) -> None:
        """A control frame from the peer."""
        match unpack(frame):
            case Ping(token, held):
                if held:
                    self._held_by_peer_at = now
                self._say(Pong(token).pack())
            case Pong(token) if token in self._pings:
                sent_at, answer = self._pings.pop(token)
                self.rtt.add(now - sent_at)
                if answer is not None and not answer.done():
                    answer.set_result(now - sent_at)

    def end(self, error: MeshswarmError) -> None:
        for _, answer in self._pings.values():
            if answer is not None and not answer.done():
                answer.set_exception(error)
        self._pings.clear()

    # -- path

    def probe_result(self, size: int, arrived: bool, now: float) -> None:
        """What became of a path probe."""
        if not arrived:
            self.mtu.missed(size, now)
        elif self.mtu.arrived(size):
            if size in LOOPBACK_BYTES:
                self._quic.widen_to_loopback(size, window_bytes=self._loopback_window_bytes)
            else:
                window_bytes = min(INITIAL_WINDOW_DATAGRAMS * size, _MAX_FIRST_WINDOW_BYTES)
                self._quic.widen(size, window_bytes=window_bytes)

    def too_large(self, size: int) -> None:
        """This machine refused to send a datagram of `size` bytes."""
        before = self.mtu.size
        self.mtu.too_large(size)
        if self.mtu.size < before:
            self._quic.narrow()
