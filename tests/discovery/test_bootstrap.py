"""A peer's way into its swarm, with real nodes of our DHT: the events, the warning, what is kept for next time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from tests.discovery.conftest import Bind

from meshswarm.config import Address
from meshswarm.dht.known_peers import KnownPeer, KnownPeers, SeenPeer
from meshswarm.dht.node import Dht
from meshswarm.discovery import bootstrap as module
from meshswarm.discovery.bootstrap import Bootstrap
from meshswarm.discovery.settings import DiscoverySettings
from meshswarm.identity import Identity
from meshswarm.net.swarm import Swarm


class Peer:
    """What `peer.py` makes of the rooms below, as far as joining goes."""

    def __init__(self, bootstrap: Bootstrap, dht: Dht, known: KnownPeers, address: Address) -> None:
        self.bootstrap = bootstrap
        self.dht = dht
        self.known = known
        self.address = address
        self.events: list[Mapping[str, Any]] = []
        self.heard = asyncio.Event()

    def report(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        self.heard.set()

    async def event(self, name: str) -> Mapping[str, Any]:
        while not (found := [event for event in self.events if event["event"] == name]):
            self.heard.clear()
            await self.heard.wait()
        return found[0]


@contextlib.asynccontextmanager
async def peer(
    bind: Bind, swarm: Swarm, folder: Path, identity: Identity, asked: tuple[KnownPeer, ...] = ()
) -> AsyncIterator[Peer]:
    endpoint = await bind(identity=identity, swarm=swarm)
    dht = Dht(endpoint, identity, swarm, rng=random.Random(5))
    known = KnownPeers(folder / f"{identity.peer_id.short}.json", identity, swarm.swarm_id)
    events: list[Mapping[str, Any]] = []
    bootstrap = Bootstrap(DiscoverySettings(), endpoint, dht, swarm, known, asked, lambda event: made.report(event))
    made = Peer(bootstrap, dht, known, endpoint.address)
    made.events = events
    tasks = [asyncio.create_task(dht.run()), asyncio.create_task(bootstrap.run())]
    try:
        async with asyncio.timeout(15):
            yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_joining_is_told_once_with_the_way_on_both_sides(bind: Bind, swarm: Swarm, tmp_path: Path) -> None:
    one, two = Identity.generate(), Identity.generate()
    async with peer(bind, swarm, tmp_path, one) as first:
        await first.bootstrap.first()
        assert first.events == [], "with nobody to look for there is nothing to tell"
        async with peer(bind, swarm, tmp_path, two, ((one.peer_id, (first.address,)),)) as second:
            await second.bootstrap.first()
            joined = await second.event("joined")
            assert (joined["peers"], joined["through"]) == (1, "asked")
            assert (await first.event("joined"))["through"] == "others"
            second.bootstrap.save()
            (seen,) = second.known.load(time.time())
            assert seen.peer == one.peer_id and first.address in seen.addresses
            assert [each["source"] for each in second.bootstrap.as_json() if each["used"]] == ["known", "asked"]
            assert len(first.events) == len(second.events) == 1
        async with peer(bind, swarm, tmp_path, two) as again:
            await again.bootstrap.first()
            assert (await again.event("joined"))["through"] == "known"


async def test_a_remembered_peer_that_a_person_names_is_one_that_could_not_be_joined(
    bind: Bind, swarm: Swarm, tmp_path: Path
) -> None:
    me, gone = Identity.generate(), Identity.generate().peer_id
    known = KnownPeers(tmp_path / f"{me.peer_id.short}.json", me, swarm.swarm_id)
    known.save([SeenPeer(gone, (Address("127.0.0.1", 9),), time.time())], time.time())
    async with peer(bind, swarm, tmp_path, me, ((gone, (Address("127.0.0.1", 9),)),)) as alone:
        await alone.bootstrap.first()
        assert (await alone.event("join-failed"))["peer"] == str(gone)
        assert [each["peer"] for each in alone.bootstrap.missed] == [str(gone)]


async def test_a_changed_cache_and_a_dead_address_are_sentences(bind: Bind, swarm: Swarm, tmp_path: Path) -> None:
    me, gone = Identity.generate(), Identity.generate().peer_id
    known = KnownPeers(tmp_path / f"{me.peer_id.short}.json", me, swarm.swarm_id)
    known.save([SeenPeer(gone, (Address("127.0.0.1", 9),), time.time())], time.time())
    known.path.write_text(known.path.read_text().replace("127.0.0.1", "127.0.0.9"))
    async with peer(bind, swarm, tmp_path, me, ((gone, (Address("127.0.0.1", 9),)),)) as alone:
        await alone.bootstrap.first()
        assert "somebody changed it" in (await alone.event("warning"))["message"]
        failed = await alone.event("join-failed")
        assert failed["peer"] == str(gone) and failed["address"] == "127.0.0.1:9" and failed["why"]
        tried = (await alone.event("alone"))["tried"]
        assert [each["source"] for each in tried] == ["asked"], "the cache had its own sentence"


async def test_who_was_met_is_written_down_while_the_peer_runs(
    bind: Bind, swarm: Swarm, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "SAVE_FIRST_S", 0.2)
    one, two = Identity.generate(), Identity.generate()
    async with (
        peer(bind, swarm, tmp_path, one) as first,
        peer(bind, swarm, tmp_path, two, ((one.peer_id, (first.address,)),)) as second,
    ):
        await second.bootstrap.first()
        await asyncio.sleep(0.4)
        assert [seen.peer for seen in second.known.load(time.time())] == [one.peer_id]
