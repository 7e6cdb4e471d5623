"""Upkeep of a connection over a virtual path: sizes, signs of life, idleness."""

from __future__ import annotations

import asyncio

import pytest
from tests.net.wires import Wire

from meshswarm.errors import PeerUnreachableError
from meshswarm.identity import Identity
from meshswarm.net.control import Ping, Pong, unpack
from meshswarm.net.liveness import Verdict
from meshswarm.net.upkeep import CROWDED_IDLE_CLOSE_S, IDLE_CLOSE_S, MAX_RESTING, PROBE_AFTER_BYTES, Upkeep

ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)


class Side:
    """The client's upkeep on a wire; `said` are its control frames."""

    def __init__(self, host: str = "192.168.1.2", limit: int = 16_384, refused: int = 1 << 20) -> None:
        self.wire = Wire.connect(ALICE, BOB)
        assert self.wire.run(lambda: self.wire.client._handshake_confirmed)
        self.wire.drop = lambda datagram: len(datagram) > limit
        self.refused = refused
        self.said: list[Ping | Pong | None] = []
        self.probed: list[int] = []
        self.upkeep = Upkeep(self.wire.client, host, self.say, self.probe, 200_000, self.wire.now)

    def say(self, frame: bytes) -> None:
        self.said.append(unpack(frame))
        self.wire.client.send_ping(0)  # as good as the frame itself: the server's QUIC answers

    def probe(self, size: int) -> bool:
        self.probed.append(size)
        if size > self.refused:
            return False
        self.wire.carry(
            0,
            [
                datagram
                for datagram, _ in self.wire.client.path_probe(
                    size, self.wire.now, lambda arrived: self.upkeep.probe_result(size, arrived, self.wire.now)
                )
            ],
        )
        return True

    def rest(self, seconds: float) -> list[Verdict]:
        """Let time pass, checking when asked to."""
        verdicts = []
        stop = self.wire.now + seconds
        while self.upkeep.next_at < stop and Verdict.LOST not in verdicts:
            self.wire.rest(max(0.0, self.upkeep.next_at - self.wire.now))
            verdicts.append(self.upkeep.check(self.wire.now))
        self.wire.rest(stop - self.wire.now)
        return [verdict for verdict in verdicts if verdict is not Verdict.QUIET]


def test_on_a_lan_the_largest_size_that_arrives_is_used() -> None:
    assert Side(limit=9000).wire.client.datagram_bytes == 1200
    for limit, size in ((9000, 8900), (1500, 1440), (1300, 1200)):
        side = Side(limit=limit)
        side.rest(8.0)
        assert side.wire.client.datagram_bytes == size
        assert max(side.probed) == 8900


def test_on_loopback_nothing_is_paced_and_the_window_fits_the_receivers_buffer() -> None:
    side = Side("127.0.0.1")
    side.rest(1.0)
    assert side.wire.client.datagram_bytes == 16_384  # four of the next size would not fit the window
    assert side.wire.client.window.congestion_window == side.wire.client.window.max_window_bytes == 200_000
    assert side.wire.client._pacer.is_unpaced


def test_far_away_nothing_is_tried_for_a_question_or_two() -> None:
    side = Side("8.8.8.8")
    side.upkeep.sent(PROBE_AFTER_BYTES - 1, side.wire.now)
    side.rest(60.0)
    assert side.probed == []
    side.upkeep.sent(PROBE_AFTER_BYTES, side.wire.now)
    side.rest(1.0)
    assert side.probed == [1440]


def test_far_away_a_peer_that_holds_the_connection_is_reason_enough() -> None:
    side = Side("8.8.8.8")
    side.upkeep.receive(Ping(7, True).pack(), side.wire.now)
    side.upkeep.sent(0, side.wire.now)
    side.rest(1.0)
    assert side.probed == [1440]


def test_far_away_only_what_the_internet_carries_is_tried() -> None:
    side = Side("8.8.8.8")
    side.upkeep.liveness.hold(side.wire.now)
    side.upkeep.sent(0, side.wire.now)
    side.rest(1.0)
    assert side.probed == [1440] and side.wire.client.datagram_bytes == 1440
    assert not side.wire.client._pacer.is_unpaced


def test_a_size_that_this_machine_refuses_is_not_tried_again() -> None:
    side = Side(refused=1500)
    side.rest(30.0)
    assert side.probed == [1440, 8900] and side.wire.client.datagram_bytes == 1440


def test_when_the_path_shrinks_the_size_goes_back_and_data_flows_again() -> None:
    side = Side(limit=9000)
    side.rest(1.0)
    assert side.wire.client.datagram_bytes == 8900
    side.wire.drop = lambda datagram: len(datagram) > 1300
    side.wire.client.send_stream_data(0, bytes(60_000))
    for _ in range(200):
        side.wire.rest(0.1)
        side.upkeep.check(side.wire.now)
        if len(side.wire.received(1)) == 60_000:
            break
    assert len(side.wire.received(1)) == 60_000
    assert side.wire.client.datagram_bytes == 1200
    side.wire.drop = lambda _datagram: False
    side.rest(120.0)
    assert side.wire.client.datagram_bytes == 8900


def test_a_ping_is_answered_and_its_round_trip_counted() -> None:
    side = Side()
    side.upkeep.ping(10.0)
    assert side.said == [Ping(1, False)]
    side.upkeep.receive(Pong(99).pack(), 10.02)
    assert side.upkeep.rtt.smoothed_s is None
    side.upkeep.receive(Pong(1).pack(), 10.04)
    side.upkeep.receive(Pong(1).pack(), 10.9)
    assert side.upkeep.rtt.smoothed_s == pytest.approx(0.04)
    side.upkeep.receive(Ping(7, True).pack(), 11.0)
    assert side.said[-1] == Pong(7)


async def test_whoever_waits_for_a_round_trip_hears_of_the_end() -> None:
    side = Side()
    answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    side.upkeep.ping(0.0, answer)
    side.upkeep.end(PeerUnreachableError("gone"))
    with pytest.raises(PeerUnreachableError, match="gone"):
        await answer


def test_pings_that_are_never_answered_take_bounded_room() -> None:
    side = Side()
    for _ in range(1000):
        side.upkeep.ping(0.0)
    assert len(vars(side.upkeep)["_pings"]) == 64


def test_a_silent_peer_is_probed_and_then_lost() -> None:
    side = Side(limit=0)
    side.upkeep.liveness.hold(side.wire.now)
    assert side.rest(9.0)[-1] is Verdict.LOST
    assert Ping(1, True) in side.said


def test_idle_means_that_neither_side_needs_it() -> None:
    side = Side()
    now = side.wire.now
    assert not side.upkeep.is_idle(now + IDLE_CLOSE_S - 1)
    assert side.upkeep.is_idle(now + IDLE_CLOSE_S)
    side.upkeep.receive(Ping(1, True).pack(), now + IDLE_CLOSE_S)
    assert not side.upkeep.is_idle(now + IDLE_CLOSE_S + 15)
    side.upkeep.used(now + IDLE_CLOSE_S + 60)
    assert not side.upkeep.is_idle(now + IDLE_CLOSE_S + 61)
    side.upkeep.liveness.hold(now)
    assert not side.upkeep.is_idle(now + 10 * IDLE_CLOSE_S)


def test_who_has_many_connections_ends_those_that_rest_sooner() -> None:
    side = Side()
    now = side.wire.now
    soon = now + CROWDED_IDLE_CLOSE_S
    assert not side.upkeep.is_idle(soon, n_connections=MAX_RESTING)
    assert side.upkeep.is_idle(soon, n_connections=MAX_RESTING + 1)
    assert not side.upkeep.is_idle(soon - 1, n_connections=MAX_RESTING + 1)
    side.upkeep.liveness.hold(now)
    assert not side.upkeep.is_idle(soon, n_connections=MAX_RESTING + 1)
