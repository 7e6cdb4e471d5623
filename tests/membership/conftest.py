"""Members of private swarms on loopback: each with a folder, an endpoint and a keeper that runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meshswarm.config import Address, Home
from meshswarm.identity import Identity
from meshswarm.membership import keeper as keeper_module
from meshswarm.membership.folder import SwarmFolder
from meshswarm.membership.invite import Invite
from meshswarm.membership.keeper import Keeper
from meshswarm.membership.swarms import Swarms
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

NOW = 1_800_000_000.0


@dataclass
class Clock:
    now: float = NOW

    def __call__(self) -> float:
        return self.now


@dataclass
class Member:
    """One member's part of a peer. `said`: what it told its person."""

    identity: Identity
    folder: SwarmFolder
    swarm: Swarm
    endpoint: Endpoint
    keeper: Keeper
    task: asyncio.Task[None]
    said: list[Mapping[str, Any]] = field(default_factory=list)

    async def dial(self, other: Member) -> None:
        await self.endpoint.dial(other.endpoint.peer_id, [other.endpoint.address])

    def knows(self, other: Member) -> bool:
        return self.endpoint.connection(other.endpoint.peer_id) is not None

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.endpoint.close()


@dataclass
class Town:
    """`found` makes a swarm and its owner's member, `invite` another member; all share one clock."""

    root: Path
    clock: Clock = field(default_factory=Clock)
    members: list[Member] = field(default_factory=list)
    owner: Member | None = None

    async def found(self, name: str = "office") -> Member:
        swarms = Swarms(Home(self.root / "owner").create())
        swarms.create(name, os.urandom(32))
        self.owner = await self.start(swarms, name)
        return self.owner

    def invitation(self) -> Invite:
        assert self.owner is not None
        standing = self.owner.folder.load()
        return Invite(standing.name, standing.keys[0], standing.lineage, standing.owner, standing.number)

    async def invite(self, name: str, invite: Invite | None = None, identity: Identity | None = None) -> Member:
        swarms = Swarms(Home(self.root / name).create())
        folder = swarms.join(invite or self.invitation())
        return await self.start(swarms, folder.name, identity)

    async def start(self, swarms: Swarms, name: str, identity: Identity | None = None) -> Member:
        opened = swarms.open(name, now_ms=int(self.clock() * 1000))
        assert opened.folder is not None and opened.standing is not None
        identity = identity or Identity.generate()
        endpoint = await Endpoint.bind(identity, Address("127.0.0.1", 0), swarm=opened.swarm)
        said: list[Mapping[str, Any]] = []
        keeper = Keeper(endpoint, opened.folder, opened.swarm, opened.standing, said.append, clock=self.clock)
        task = asyncio.create_task(keeper.run())
        member = Member(identity, opened.folder, opened.swarm, endpoint, keeper, task, said)
        self.members.append(member)
        return member

    def now_ms(self) -> int:
        return int(self.clock() * 1000)


MakeTown = Callable[[], Awaitable[Town]]


@pytest.fixture
async def town(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Town]:
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.02)
    monkeypatch.setattr(keeper_module, "BEHIND_PERIOD_S", 0.05)
    made = Town(tmp_path)
    yield made
    await asyncio.gather(*(member.stop() for member in made.members))
