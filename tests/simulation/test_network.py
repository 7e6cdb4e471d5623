"""The simulator itself: it repeats, it counts what real connections cost, and its links do what links do."""

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.clock import NothingLeftError, VirtualLoop, simulate
from tests.simulation.network import Costs, Network, VirtualConnection
from tests.simulation.peers import SWARM, Crowd, Peer
from tests.simulation.scenarios import live

from meshswarm.errors import PeerUnreachableError
from meshswarm.identity import Identity
from meshswarm.net.swarm import Swarm
from meshswarm.net.upkeep import CROWDED_IDLE_CLOSE_S, IDLE_CLOSE_S, MAX_RESTING

SEED = int(os.environ.get("MESHSWARM_SEED", "20261130"))
ROOT = Path(__file__).parents[2]
DIGEST = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    "from tests.simulation.test_network import digest; print(digest(int(sys.argv[2])))"
)


def digest(seed: int) -> str:
    """Everything that was measured of a small swarm that lives."""
    seen = live(30, seed, per_hour=30.0, virtual_s=60.0, n_lookups=30, loss=0.05, liars=0.2, settling_s=5.0)
    assert seen.n_gone > 3, "a life without churn proves nothing"
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def test_a_seed_repeats_a_whole_life_in_any_process() -> None:
    def run(seed: int, hash_seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", DIGEST, str(ROOT), str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
        return done.stdout

    once = run(SEED, "1")
    assert once == run(SEED, "2"), f"seed {SEED}"
    assert once != run(SEED + 1, "1")


def run(main: Coroutine[Any, Any, None], loop: VirtualLoop) -> None:
    simulate(main, loop)


async def linked(network: Network) -> tuple[Peer, Peer, VirtualConnection]:
    crowd = Crowd(network)
    one, other = crowd.make(), crowd.make()
    link = await one.endpoint.dial(other.peer_id, [other.endpoint.address])
    return one, other, link


def test_hours_pass_at_once_and_a_wait_for_nothing_is_an_error() -> None:
    loop = VirtualLoop()
    simulate(asyncio.sleep(7200.0), loop)
    assert loop.now_s == pytest.approx(7200.0)

    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingLeftError):
        VirtualLoop().run_until_complete(forever())


def test_a_connection_rests_at_the_price_of_signs_of_life_and_then_ends() -> None:
    loop = VirtualLoop()
    network = Network(loop, SEED)

    async def main() -> None:
        one, other, link = await linked(network)
        assert one.endpoint.traffic.dials == network.costs.dial_bytes
        assert other.endpoint.traffic.dials == network.costs.dialled_bytes
        await asyncio.sleep(100.0)
        network.settle()
        assert one.endpoint.traffic.pings == other.endpoint.traffic.pings == 6 * network.costs.ping_bytes
        assert not link.closed
        await asyncio.sleep(250.0)
        network.settle()
        assert link.closed and one.endpoint.connection(other.peer_id) is None
        assert one.endpoint.traffic.pings == 20 * network.costs.ping_bytes + network.costs.close_bytes

    run(main(), loop)


def test_where_many_are_open_those_that_rest_end_sooner() -> None:
    loop = VirtualLoop()
    network = Network(loop, SEED)

    async def main() -> None:
        crowd = Crowd(network)
        one, *others = [crowd.make() for _ in range(MAX_RESTING + 8)]
        for other in others:
            await one.endpoint.dial(other.peer_id, [other.endpoint.address])
        await asyncio.sleep(CROWDED_IDLE_CLOSE_S + 1)
        assert len(one.endpoint.connections) == MAX_RESTING
        await asyncio.sleep(IDLE_CLOSE_S)
        assert not one.endpoint.connections

    run(main(), loop)


def test_the_vanished_are_silent_and_missed_after_a_while() -> None:
    loop = VirtualLoop()
    network = Network(loop, SEED)

    async def main() -> None:
        _one, other, link = await linked(network)
        assert await link.request("dht/ping", _ping(other)) != b""
        other.vanish()
        began = loop.now_s
        with pytest.raises(PeerUnreachableError):
            await link.request("dht/ping", _ping(other), timeout_s=2.0)
        assert loop.now_s - began == pytest.approx(2.0)
        assert not link.closed
        await asyncio.sleep(30.0)
        assert link.closed

    run(main(), loop)


def test_a_rift_parts_and_heals_and_another_swarm_is_never_reached() -> None:
    loop = VirtualLoop()
    network = Network(loop, SEED)

    async def main() -> None:
        one, other, link = await linked(network)
        network.rift = lambda source, target: True
        with pytest.raises(PeerUnreachableError):
            await link.request("dht/ping", _ping(other), timeout_s=1.0)
        network.rift = None
        assert await link.request("dht/ping", _ping(other)) != b""
        stranger = network.bind(Identity.from_seed(bytes(32)), Swarm("simulation", bytes(32)))
        with pytest.raises(PeerUnreachableError):
            await stranger.dial(one.peer_id, [one.endpoint.address], timeout_s=1.0)
        with pytest.raises(PeerUnreachableError):  # the right address, another key
            await one.endpoint.dial(Identity.from_seed(b"k" * 32).peer_id, [other.endpoint.address], timeout_s=1.0)

    run(main(), loop)


def test_loss_delays_and_loses_nothing() -> None:
    loop = VirtualLoop()
    network = Network(loop, SEED, loss=0.3)

    async def main() -> None:
        _one, other, link = await linked(network)
        times = []
        for _ in range(200):
            began = loop.now_s
            await link.request("dht/ping", _ping(other), timeout_s=60.0)
            times.append(loop.now_s - began)
        assert max(times) > 4 * min(times), f"seed {SEED}"

    run(main(), loop)


def _ping(peer: Peer) -> bytes:
    from meshswarm.dht import messages

    return messages.encode_ping(peer.dht._core.sender)


def test_costs_are_what_real_endpoints_send() -> None:
    """Within a quarter: on loopback, with one datagram size probed as towards any other host."""
    from tests.simulation.real_costs import measure

    assert SWARM.name == "simulation"
    real, assumed = asyncio.run(measure(rest_s=0.0)), Costs()
    for name in ("dial_bytes", "dialled_bytes", "request_bytes", "reply_bytes"):
        assert getattr(assumed, name) == pytest.approx(getattr(real, name), rel=0.25), name
