"""Gossip between real endpoints on loopback."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest
from tests.routing.gossip.virtual import MODEL

from meshswarm.config import Address
from meshswarm.errors import RefusedError, RemoteProtocolError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.routing.gossip import messages
from meshswarm.routing.gossip.messages import PROBE, PUSH, Word, WordKind
from meshswarm.routing.gossip.node import GossipNode
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.span import Span


class Peer:
    def __init__(self, identity: Identity, endpoint: Endpoint, swarm: Swarm) -> None:
        self.identity, self.endpoint = identity, endpoint
        self.node = GossipNode(endpoint, identity, swarm, rng=random.Random(identity.peer_id.key))
        self.task = asyncio.get_running_loop().create_task(self.node.run())

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def reach(self) -> tuple[PeerId, tuple[Address, ...]]:
        return self.peer, (self.endpoint.address,)

    def serve(self, **more: object) -> None:
        fields: dict[str, object] = {"model_id": MODEL, "span": Span(0, 10), "n_layers": 30, "role": "server"}
        self.node.publish(LoadReport(self.peer, **(fields | more)))  # type: ignore[arg-type]

    async def end(self) -> None:
        """Its connections end, and no farewell is said."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.endpoint.close()


@pytest.fixture
async def three() -> AsyncIterator[list[Peer]]:
    """Three peers that know each other."""
    swarm = Swarm(f"test-{random.SystemRandom().randbytes(8).hex()}")
    peers = []
    for number in range(3):
        identity = Identity.from_seed((7000 + number).to_bytes(32))
        endpoint = await Endpoint.bind(identity, Address("127.0.0.1", 0), swarm=swarm)
        peers.append(Peer(identity, endpoint, swarm))
        peers[-1].node.met(peer.reach for peer in peers[:-1])
        peers[-1].serve(queue_s=float(number))
    yield peers
    for peer in peers:
        peer.task.cancel()
    await asyncio.gather(*(peer.task for peer in peers), return_exceptions=True)
    for peer in peers:
        await peer.endpoint.close()


async def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """Waits for it; how long that took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not holds():
        assert loop.time() - began < timeout_s, "it did not happen in time"
        await asyncio.sleep(0.02)
    return loop.time() - began


def all_know(peers: list[Peer]) -> bool:
    return all(len(peer.node.loads()) == len(peers) - 1 and peer.node.n_watchers == len(peers) - 1 for peer in peers)


async def test_loads_are_known_the_dead_are_missed_and_the_leaving_say_so(three: list[Peer]) -> None:
    one, two, three_ = three
    await until(lambda: all_know(three))
    assert one.node.loads()[three_.peer].queue_s == 2.0
    two.serve(draining=True)
    await until(lambda: two.peer in one.node.draining() and two.peer in three_.node.draining(), 3.0)
    await two.node.leave()
    await until(lambda: two.peer in one.node.gone() and two.peer in three_.node.gone(), 1.0)
    await three_.end()
    await until(lambda: three_.peer in one.node.gone(), 6.0)
    assert not one.node.loads()


async def test_who_asks_too_much_waits_and_who_lies_is_refused(three: list[Peer]) -> None:
    one, two, _ = three
    await until(lambda: all_know(three))
    connection = await two.endpoint.dial(one.peer, (one.endpoint.address,))
    with pytest.raises(RemoteProtocolError):
        lie = messages.encode_push((Word(WordKind.REPORT, b"nonsense"),))
        await connection.request(PUSH, lie, max_reply_bytes=4096)
    with pytest.raises(RemoteProtocolError):
        await connection.request(PROBE, b"\xff" * 20, max_reply_bytes=4096)
    with pytest.raises(RefusedError, match="too much gossip"):
        for _ in range(200):
            await connection.request(PROBE, messages.encode_empty(), max_reply_bytes=4096)
    assert two.peer not in one.node.gone()


async def test_an_older_gossip_hears_what_it_needs_and_is_counted(three: list[Peer]) -> None:
    one, two, _ = three
    await until(lambda: all_know(three))
    connection = await two.endpoint.dial(one.peer, (one.endpoint.address,))
    with pytest.raises(RemoteProtocolError, match="needs a newer meshswarm"):
        await connection.request(PROBE, messages.wire.pack([1]), max_reply_bytes=4096)
    assert one.node.as_json()["outdated"] == 1 and two.node.as_json()["outdated"] == 0
