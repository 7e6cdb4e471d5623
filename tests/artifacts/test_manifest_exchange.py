"""Manifests over real sockets: from any holder, past those that lie or are gone, and a name to one publisher only."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from meshswarm.artifacts import manifest_exchange
from meshswarm.artifacts.manifest_exchange import (
    MANIFEST_REQUEST,
    fetch_manifest_named,
    fetch_manifest_of,
    offer_manifests,
)
from meshswarm.artifacts.manifests.manifest import MAX_MANIFEST_BYTES, Manifest
from meshswarm.artifacts.manifests.trust import ManifestChangedError, Manifests
from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, RefusedError, RemoteProtocolError, UnknownModelError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

OWNER, OTHER = Identity.from_seed(b"1" * 32), Identity.from_seed(b"2" * 32)
Answerer = Callable[[PeerId, bytes], Awaitable[bytes]]


@dataclass
class Scene:
    """Somebody who asks, an honest holder, and another that does as a test says."""

    asker: Endpoint
    own: Manifests
    store: Store
    honest: Endpoint
    held: Manifests
    other: Endpoint
    manifest: Manifest

    def let_other(self, answer: Answerer) -> None:
        self.other.handle_request(
            MANIFEST_REQUEST, answer, max_request_bytes=200, max_reply_bytes=2 * MAX_MANIFEST_BYTES
        )

    def let_other_bring(self, wire: bytes) -> None:
        async def bring(_peer: PeerId, _question: bytes) -> bytes:
            return wire

        self.let_other(bring)

    def holders(self, *endpoints: Endpoint) -> list[tuple[PeerId, tuple[Address, ...]]]:
        return [(each.peer_id, (each.address,)) for each in endpoints]

    async def named(self, *endpoints: Endpoint, name: str = "tiny") -> Manifest:
        signed = await fetch_manifest_named(self.asker, self.own, self.store, name, self.holders(*endpoints))
        assert self.own.by_name(name) == signed
        return signed.manifest

    async def of_id(self, *endpoints: Endpoint) -> Manifest:
        model_id = self.manifest.model_id
        return (await fetch_manifest_of(self.asker, self.own, self.store, model_id, self.holders(*endpoints))).manifest


@pytest.fixture
async def scene(tmp_path: Path, gguf_recipe: type) -> AsyncIterator[Scene]:
    swarm = Swarm(f"test-{secrets.token_hex(8)}")
    asker, honest, other = [
        await Endpoint.bind(Identity.generate(), Address("127.0.0.1", 0), swarm=swarm) for _ in range(3)
    ]
    path = gguf_recipe(n_layers=3).write(tmp_path / "tiny.gguf", seed=1)
    holder = Store(tmp_path / "holder")
    info = holder.import_file(path)
    files = [(path.stat().st_size, file_root(path))]
    manifest = Manifest.of(info, holder.header(info.model_id), files, number=1, name="tiny")
    held = Manifests(tmp_path / "holder")
    offer_manifests(honest, held)
    held.accept(manifest.sign(OWNER))
    yield Scene(asker, Manifests(tmp_path / "own"), Store(tmp_path / "own"), honest, held, other, manifest)
    for endpoint in (asker, honest, other):
        await endpoint.close()


async def test_any_holder_brings_the_publisher_s_word(scene: Scene) -> None:
    assert await scene.named(scene.honest) == scene.manifest
    signed = scene.own.by_name("tiny")
    assert signed is not None and signed.publisher == OWNER.peer_id != scene.honest.peer_id
    assert await scene.of_id(scene.honest) == scene.manifest


async def test_asking_by_id_gives_no_name_a_meaning(scene: Scene) -> None:
    assert await scene.of_id(scene.honest) == scene.manifest
    assert scene.own.pins() == []


async def test_liars_and_the_dead_are_passed_over(scene: Scene) -> None:
    gone = await Endpoint.bind(Identity.generate(), Address("127.0.0.1", 0), swarm=Swarm("another"))
    await gone.close()
    lies = [
        secrets.token_bytes(3000),
        bytes(MAX_MANIFEST_BYTES + 1),
        scene.manifest.sign(OWNER).wire[:-1] + b"\0",
        replace(scene.manifest, name="another").sign(OTHER).wire,
    ]
    for lie in lies:
        scene.let_other_bring(lie)
        assert await scene.named(gone, scene.other, scene.honest) == scene.manifest
        assert await scene.of_id(gone, scene.other, scene.honest) == scene.manifest


async def test_one_that_keeps_us_waiting_costs_a_bounded_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_exchange, "ANSWER_TIMEOUT_S", 0.5)

    async def stall(_peer: PeerId, _question: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    scene.let_other(stall)
    async with asyncio.timeout(20):
        assert await scene.named(scene.other, scene.honest) == scene.manifest


async def test_of_several_publishers_of_a_new_name_none_is_chosen(scene: Scene) -> None:
    scene.let_other_bring(replace(scene.manifest, number=9).sign(OTHER).wire)
    with pytest.raises(ManifestChangedError, match="several publishers claim the name tiny") as refusal:
        await scene.named(scene.other, scene.honest)
    assert str(OWNER.peer_id) in str(refusal.value) and str(OTHER.peer_id) in str(refusal.value)
    assert scene.own.pins() == []
    scene.own.trust("tiny", OWNER.peer_id)
    assert await scene.named(scene.other, scene.honest) == scene.manifest


async def test_a_changed_publisher_is_told_where_nobody_has_the_known_one(scene: Scene) -> None:
    await scene.named(scene.honest)
    scene.let_other_bring(replace(scene.manifest, number=9).sign(OTHER).wire)
    assert await scene.named(scene.other, scene.honest) == scene.manifest
    with pytest.raises(ManifestChangedError, match="claimed by another publisher"):
        await scene.named(scene.other)


async def test_the_newest_edition_of_all_answers_is_taken(scene: Scene) -> None:
    newer = replace(scene.manifest, number=2, licence="mit")
    scene.let_other_bring(newer.sign(OWNER).wire)
    assert await scene.named(scene.honest, scene.other) == newer
    assert await scene.named(scene.honest) == newer, "an older one takes nothing back"


async def test_what_the_proved_header_contradicts_is_not_taken(scene: Scene, tmp_path: Path) -> None:
    scene.store.import_file(tmp_path / "tiny.gguf")
    liar = replace(scene.manifest, number=9, template_hash=bytes(32)).sign(OWNER)
    scene.let_other_bring(liar.wire)
    assert await scene.named(scene.other, scene.honest) == scene.manifest
    assert await scene.of_id(scene.other, scene.honest) == scene.manifest
    assert scene.own.by_id(scene.manifest.model_id) == scene.manifest.sign(OWNER)


async def test_when_nobody_has_it_that_is_said(scene: Scene) -> None:
    with pytest.raises(UnknownModelError, match="nobody who was asked has a manifest named unheard"):
        await scene.named(scene.honest, name="unheard")
    with pytest.raises(MeshswarmError, match="nobody who was asked"):
        await scene.of_id()


@pytest.mark.parametrize("question", [b"", b"\0short", b"\2" + bytes(32), b"\1../../x", b"\1\xff\xfe", b"\1"])
async def test_what_is_no_question_is_refused(scene: Scene, question: bytes) -> None:
    connection = await scene.asker.dial(scene.honest.peer_id, [scene.honest.address])
    with pytest.raises(MeshswarmError, match="neither a name nor an id"):
        await connection.request(MANIFEST_REQUEST, question)


async def test_questions_are_bounded_and_unknown_names_refused(scene: Scene) -> None:
    connection = await scene.asker.dial(scene.honest.peer_id, [scene.honest.address])
    with pytest.raises(RefusedError, match="no such manifest"):
        await connection.request(MANIFEST_REQUEST, b"\0" + bytes(32))
    with pytest.raises((RemoteProtocolError, RefusedError, MeshswarmError)):
        await connection.request(MANIFEST_REQUEST, b"\1" + b"a" * 500)
