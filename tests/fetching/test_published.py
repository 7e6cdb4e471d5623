"""Manifests of a swarm: found with whoever holds the model or is near, pinned by name, and never against a pin."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.manifest_exchange import offer_manifests
from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.manifests.manifest import Manifest
from meshswarm.artifacts.manifests.trust import ManifestChangedError, Manifests
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address
from meshswarm.dht.holders import HolderRecord
from meshswarm.dht.node import Dht
from meshswarm.fetching.published import Published
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

OWNER, OTHER = Identity.from_seed(b"1" * 32), Identity.from_seed(b"2" * 32)


@dataclass
class Member:
    endpoint: Endpoint
    dht: Dht
    store: Store
    manifests: Manifests
    published: Published

    @classmethod
    async def start(cls, swarm: Swarm, home: Path) -> Member:
        identity = Identity.generate()
        endpoint = await Endpoint.bind(identity, Address("127.0.0.1", 0), swarm=swarm)
        dht, store, manifests = Dht(endpoint, identity, swarm), Store(home), Manifests(home)
        offer_manifests(endpoint, manifests)
        return cls(endpoint, dht, store, manifests, Published(endpoint, dht, store, manifests))

    async def says_it_holds(self, model_id: bytes) -> None:
        where = tuple(self.endpoint.addresses)
        await self.dht.say_holding(HolderRecord(self.endpoint.peer_id, where, model_id, 0, is_whole=True))


@dataclass
class Scene:
    """Somebody who asks; a holder of a model with its manifest; one who is only near. None knows more than that."""

    asker: Member
    holder: Member
    near: Member
    card: ModelCard
    manifest: Manifest


@pytest.fixture
async def scene(tmp_path: Path, gguf_recipe: Any) -> AsyncIterator[Scene]:
    swarm = Swarm(f"test-{secrets.token_hex(8)}")
    asker, holder, near = [await Member.start(swarm, tmp_path / name) for name in ("asker", "holder", "near")]
    info = holder.store.import_file(gguf_recipe(n_layers=3).write(tmp_path / "tiny.gguf", seed=1))
    header, files = holder.store.header(info.model_id), holder.store.files(info.model_id)
    manifest = Manifest.of(info, header, files, number=1, name="tiny", sources=("pypi:x", "hf:a/b/tiny.gguf"))
    for member in (asker, holder):
        await member.dht.join([(near.endpoint.peer_id, (near.endpoint.address,))])
    await holder.says_it_holds(info.model_id)
    yield Scene(asker, holder, near, ModelCard.of(info), manifest)
    for member in (asker, holder, near):
        await member.endpoint.close()


async def test_a_name_is_asked_of_those_who_hold_a_model_of_that_name(scene: Scene) -> None:
    scene.holder.manifests.accept(scene.manifest.sign(OWNER))
    found = await scene.asker.published.named("Tiny.gguf", [scene.card])
    assert found is not None and (found.manifest, found.publisher) == (scene.manifest, OWNER.peer_id)
    assert scene.asker.manifests.pinned("tiny") == scene.manifest.model_id
    await scene.holder.endpoint.close()
    assert await scene.asker.published.named("tiny") == found, "what is pinned is not asked again"


async def test_a_name_that_nobody_serves_is_asked_of_those_near(scene: Scene) -> None:
    """As of a publisher who only read the model once, and holds nothing of it."""
    scene.near.manifests.accept(scene.manifest.sign(OWNER))
    found = await scene.asker.published.named("tiny")
    assert found is not None and found.manifest == scene.manifest


async def test_a_name_that_nobody_published_stays_what_the_cards_say(scene: Scene) -> None:
    assert await scene.asker.published.named("tiny", [scene.card]) is None
    assert await scene.asker.published.named("../..", [scene.card]) is None
    assert scene.asker.manifests.pins() == []


async def test_a_claim_against_others_or_against_a_pin_is_an_error(scene: Scene) -> None:
    scene.holder.manifests.accept(scene.manifest.sign(OWNER))
    scene.near.manifests.accept(replace(scene.manifest, number=9).sign(OTHER))
    await scene.near.says_it_holds(scene.manifest.model_id)
    with pytest.raises(ManifestChangedError, match="several publishers"):
        await scene.asker.published.named("tiny", [scene.card])
    scene.asker.manifests.trust("tiny", OWNER.peer_id)
    found = await scene.asker.published.named("tiny", [scene.card])
    assert found is not None and found.publisher == OWNER.peer_id
    scene.asker.manifests.trust("tiny", Identity.generate().peer_id)
    with pytest.raises(ManifestChangedError, match="claimed by another publisher"):
        await scene.asker.published.named("tiny", [scene.card])


async def test_where_cards_and_publishers_or_cards_among_them_differ_nobody_is_trusted_for_being_first(
    scene: Scene,
) -> None:
    other = replace(scene.card, model_id=b"o" * 32)
    scene.holder.manifests.accept(scene.manifest.sign(OTHER))
    assert await scene.asker.published.named("tiny", [scene.card, other]) is None
    await scene.holder.says_it_holds(other.model_id)
    with pytest.raises(ManifestChangedError, match=f"here it is served as {model_id_text(other.model_id)}"):
        await scene.asker.published.named("tiny", [other])
    assert scene.asker.manifests.pins() == []
    scene.asker.manifests.trust("tiny", OTHER.peer_id)
    found = await scene.asker.published.named("tiny", [other, scene.card])
    assert found is not None and found.manifest == scene.manifest, "a person said whom to believe"


async def test_a_model_s_sources_are_those_of_its_manifest_that_give_parts_of_files(scene: Scene) -> None:
    scene.holder.manifests.keep(scene.manifest.sign(OWNER))
    own_id = scene.manifest.model_id
    assert await scene.asker.published.sources(own_id) == ("hf:a/b/tiny.gguf",), "no wheel has ranges"
    assert await scene.asker.published.sources(bytes(32)) == ()
    assert await scene.asker.published.of(own_id) == scene.manifest.sign(OWNER)
    assert scene.asker.manifests.pins() == []


async def test_what_a_source_gives_is_believed_of_this_peer_and_of_those_it_trusts(scene: Scene) -> None:
    own_id, published = scene.manifest.model_id, scene.asker.published
    at_commit = replace(scene.manifest, sources=("hf:a/b/tiny.gguf@0123",))
    scene.asker.manifests.keep(at_commit.sign(OTHER))
    assert await published.model_of_source("hf:a/b/tiny.gguf") is None, "a stranger's word"
    scene.asker.manifests.accept(at_commit.sign(OWNER))
    for ref in ("hf:a/b/tiny.gguf", "hf:a/b/tiny.gguf@0123"):
        assert await published.model_of_source(ref) == own_id
    assert await published.model_of_source("hf:a/b/other.gguf") is None
    scene.asker.manifests.note_source("hf:a/b/tiny.gguf", b"s" * 32)
    assert await published.model_of_source("hf:a/b/tiny.gguf") == b"s" * 32, "what was seen here goes before"


async def test_what_the_proved_header_contradicts_counts_for_nothing(scene: Scene, tmp_path: Path) -> None:
    scene.asker.store.import_file(tmp_path / "tiny.gguf")
    liar = replace(scene.manifest, template_hash=bytes(32))
    scene.holder.manifests.keep(liar.sign(OTHER))
    assert await scene.asker.published.of(liar.model_id) is None
