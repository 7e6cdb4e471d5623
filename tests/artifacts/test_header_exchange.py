"""Headers over real sockets: from a holder that has it, past those that lie, refuse, stall or are gone."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshswarm.artifacts import header_exchange
from meshswarm.artifacts.header_exchange import HEADER_REQUEST, MAX_ASKED, fetch_header, offer_headers
from meshswarm.artifacts.header_proof import MAX_MESSAGE_BYTES
from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, PeerUnreachableError, RefusedError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

Answerer = Callable[[PeerId, bytes], Awaitable[bytes]]


@dataclass
class Scene:
    """A head that wants a header, an honest holder, and another that does as a test says."""

    head: Endpoint
    wanted: Store
    honest: Endpoint
    other: Endpoint
    model_id: bytes

    def let_other(self, answer: Answerer) -> None:
        self.other.handle_request(HEADER_REQUEST, answer, max_request_bytes=64, max_reply_bytes=MAX_MESSAGE_BYTES)

    async def fetch(self, *holders: Endpoint) -> None:
        asked = [(holder.peer_id, (holder.address,)) for holder in holders]
        await fetch_header(self.head, self.wanted, self.model_id, asked)


@pytest.fixture
async def scene(tmp_path: Path, smollm2: Path) -> AsyncIterator[Scene]:
    swarm = Swarm(f"test-{secrets.token_hex(8)}")
    head, honest, other = [
        await Endpoint.bind(Identity.generate(), Address("127.0.0.1", 0), swarm=swarm) for _ in range(3)
    ]
    held = Store(tmp_path / "held")
    info = held.import_file(smollm2)
    offer_headers(honest, held)
    yield Scene(head, Store(tmp_path / "wanted"), honest, other, info.model_id)
    for endpoint in (head, honest, other):
        await endpoint.close()


async def test_a_header_that_was_fetched_describes_the_model(scene: Scene) -> None:
    await scene.fetch(scene.honest)
    described = scene.wanted.describe(scene.model_id, "a-name")
    assert (described.n_layers, described.n_embd, described.name) == (30, 576, "a-name")


async def test_holders_that_lie_refuse_or_are_gone_are_passed_over(scene: Scene) -> None:
    async def lie(peer: PeerId, request: bytes) -> bytes:
        return secrets.token_bytes(1000)

    scene.let_other(lie)
    gone = await Endpoint.bind(Identity.generate(), Address("127.0.0.1", 0), swarm=Swarm("another"))
    await gone.close()
    await scene.fetch(gone, scene.other, scene.honest)
    assert scene.wanted.has_header(scene.model_id)


async def test_a_holder_that_keeps_us_waiting_does_not_hold_up_the_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header_exchange, "PATIENCE_S", 0.05)
    abandoned = asyncio.Event()

    async def stall(peer: PeerId, request: bytes) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            abandoned.set()
        return b""

    scene.let_other(stall)
    async with asyncio.timeout(20):
        await scene.fetch(scene.other, scene.honest)
        await abandoned.wait()


async def test_a_crowd_that_keeps_us_waiting_is_never_asked_all_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each of them sends meanwhile is in memory."""
    monkeypatch.setattr(header_exchange, "PATIENCE_S", 0.1)
    n_asked = n_now = most = 0

    async def stall(peer: PeerId, request: bytes) -> bytes:
        nonlocal n_asked, n_now, most
        n_asked, n_now = n_asked + 1, n_now + 1
        most = max(most, n_now)
        try:
            await asyncio.Event().wait()
        finally:
            n_now -= 1
        return b""

    scene.let_other(stall)
    async with asyncio.timeout(20):
        await scene.fetch(*[scene.other] * 14, scene.honest)
    assert n_asked > MAX_ASKED >= most > 1


async def test_a_caller_that_gives_up_leaves_no_question_open(scene: Scene) -> None:
    asked, abandoned = asyncio.Event(), asyncio.Event()

    async def stall(peer: PeerId, request: bytes) -> bytes:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            abandoned.set()
        return b""

    scene.let_other(stall)
    fetching = asyncio.create_task(scene.fetch(scene.other))
    async with asyncio.timeout(20):
        await asked.wait()
        fetching.cancel()
        await abandoned.wait()


async def test_the_last_holder_s_reason_is_told_when_none_has_it(scene: Scene) -> None:
    async def refuse(peer: PeerId, request: bytes) -> bytes:
        raise RefusedError("not today")

    scene.let_other(refuse)
    with pytest.raises(RefusedError, match="not today"):
        await scene.fetch(scene.other)
    with pytest.raises(PeerUnreachableError, match="no peer is known"):
        await scene.fetch()


async def test_only_a_model_id_is_a_question(scene: Scene) -> None:
    connection = await scene.head.dial(scene.honest.peer_id, [scene.honest.address])
    with pytest.raises(MeshswarmError, match="not a model id"):
        await connection.request(HEADER_REQUEST, b"?")
    with pytest.raises(RefusedError, match="does not hold"):
        await connection.request(HEADER_REQUEST, bytes(32))
