"""Peers that share files on loopback: real endpoints, tables, torrent sessions and stores, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.header_exchange import offer_headers
from meshswarm.artifacts.manifest_exchange import offer_manifests
from meshswarm.artifacts.manifests.trust import Manifests
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.ranges import Ranges
from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address
from meshswarm.dht.node import Dht
from meshswarm.fetching import hashes as hashes_module
from meshswarm.fetching import seeder as seeder_module
from meshswarm.fetching.fetch import Wanted
from meshswarm.fetching.plan import whole_files
from meshswarm.fetching.sharing import Sharing, SharingSettings, Work
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.stage.slices.store import Slices


@dataclass
class Node:
    """One peer without layers. `said`: all it told the person who sits there."""

    home: Path
    swarm: Swarm
    endpoint: Endpoint
    dht: Dht
    store: Store
    slices: Slices
    sharing: Sharing
    said: list[Mapping[str, Any]]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        return [event["message"] for event in self.said if event["event"] == "warning"]

    async def wants(self, model: ModelInfo, *files: Ranges, web: tuple[Any, ...] = ()) -> Wanted:
        """All of the model, or these ranges of its files, its header being known."""
        ranges = files or whole_files(await asyncio.to_thread(self.store.files, model.model_id))
        return Wanted(model.model_id, model.name, tuple(ranges), web)

    async def until_seeding(self, *models: ModelInfo) -> None:
        """Everything that is here is shared, and these are among it."""
        assert self.sharing.seeder is not None
        await self.sharing.seeder.look()
        assert {model.model_id for model in models} <= set(self.sharing.shelf.open_models)

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.sharing.stop()
        await self.endpoint.close()


StartNode = Callable[..., Awaitable[Node]]


@pytest.fixture
async def start_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartNode]:
    """Starts peers of one swarm, each joined to the first. `swarm`: of its own, for what only one of them knows."""
    monkeypatch.setattr(seeder_module, "LOOK_S", 0.2)
    monkeypatch.setattr(hashes_module, "LOOK_S", 0.2)
    nodes: list[Node] = []
    name, key = f"test-{secrets.token_hex(8)}", secrets.token_bytes(32)

    async def start(
        *, settings: SharingSettings | None = None, work: Work | None = None, private: bool = False
    ) -> Node:
        swarm = Swarm(name, key if private else None)
        home = tmp_path / f"node{len(nodes)}"
        home.mkdir(mode=0o700)
        identity = Identity.load_or_create(home / "peer.key")
        endpoint = await Endpoint.bind(identity, Address("127.0.0.1", 0), swarm=swarm)
        dht = Dht(endpoint, identity, swarm, question_timeout_s=1.0, server=True)
        store = Store(home)
        slices = Slices(store, home)
        said: list[Mapping[str, Any]] = []
        offer_headers(endpoint, store)
        offer_manifests(endpoint, Manifests(home))
        sharing = Sharing(
            endpoint,
            identity,
            dht,
            swarm,
            store,
            slices,
            home,
            settings=settings or SharingSettings(),
            report=said.append,
            work=work or Work(),
        )
        node = Node(home, swarm, endpoint, dht, store, slices, sharing, said)
        loop = asyncio.get_running_loop()
        node.tasks = [loop.create_task(dht.run()), loop.create_task(sharing.run())]
        if nodes:
            await dht.join([(nodes[0].endpoint.peer_id, (nodes[0].endpoint.address,))])
        nodes.append(node)
        return node

    yield start
    for node in reversed(nodes):
        with contextlib.suppress(Exception):
            await node.leave()


@pytest.fixture(scope="session")
def model_bytes(gguf_recipe: Any) -> bytes:
    """A whole model of 3.4 MB in 14 pieces."""
    return bytes(gguf_recipe(n_layers=16, n_embd=96).file())


@pytest.fixture
def model_file(tmp_path: Path, model_bytes: bytes) -> Path:
    """The model where a person has it."""
    path = tmp_path / "downloads" / "Tiny-3M.F32.gguf"
    path.parent.mkdir()
    path.write_bytes(model_bytes)
    return path


async def eventually(condition: Callable[[], Any], what: str, within_s: float = 15.0) -> None:
    """Until it is so; fails when it never is."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        assert loop.time() < deadline, f"{what}: not within {within_s} s"
        await asyncio.sleep(0.05)
