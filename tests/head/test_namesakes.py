"""An attacker gives a model's name to models of his own: real peers on loopback, each host counting as a network."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from meshswarm.artifacts.header_exchange import offer_headers
from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.dht.signed import RecordKind, SignedRecord
from meshswarm.errors import RequestError, UnknownModelError
from meshswarm.head.models import MAX_FOREIGN, ModelDirectory
from meshswarm.head.names import RememberedNames
from meshswarm.identity import Identity, PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span

NAME = "small-one"
FAKE = b"f" * 32


def serves(peer: PeerId, address: Address, card: ModelCard) -> CoverageRecord:
    return CoverageRecord(peer, (address,), card.model_id, Span(0, card.n_layers), True, "cpu", 512, 1, 1, 9)


class Member:
    """A peer with a disk; `serve` says what a serving peer says."""

    def __init__(self, swarm: Swarm, identity: Identity, endpoint: Endpoint, home: Path) -> None:
        self.identity, self.endpoint = identity, endpoint
        self.dht = Dht(endpoint, identity, swarm, question_timeout_s=1.0)
        self.store = Store(home)
        self.pinned: dict[str, bytes] = {}
        self.swarm, self.home = swarm, home
        self.directory = self.new_directory()

    def new_directory(self) -> ModelDirectory:
        """As after a start."""
        names = RememberedNames(self.home / "names.json", self.swarm.swarm_id)
        return ModelDirectory(
            self.endpoint, self.store, self.dht, self.home / "vocabularies", names, lambda name: self.pinned.get(name)
        )

    def take(self, file: Path) -> ModelCard:
        """Puts a model file on the disk, and offers its header."""
        offer_headers(self.endpoint, self.store)
        return ModelCard.of(self.store.import_file(file))

    async def serve(self, card: ModelCard) -> None:
        await self.dht.publish_card(card.sign(self.identity))
        await self.dht.publish_coverage(serves(self.endpoint.peer_id, self.endpoint.address, card))


class World:
    def __init__(self, tmp_path: Path, gguf_recipe: Callable[..., object]) -> None:
        self.swarm = Swarm(f"names-{secrets.token_hex(8)}")
        self.folder = tmp_path
        self.recipe = gguf_recipe
        self.members: list[Member] = []

    async def add(self, host: int) -> Member:
        """A peer at 127.0.0.`host`, that knows those before it."""
        identity = Identity.generate()
        endpoint = await Endpoint.bind(identity, Address(f"127.0.0.{host}", 0), swarm=self.swarm)
        home = self.folder / f"home-{len(self.members)}"
        home.mkdir()
        member = Member(self.swarm, identity, endpoint, home)
        self.members.append(member)
        await member.dht.join([(each.endpoint.peer_id, (each.endpoint.address,)) for each in self.members[:-1]])
        return member

    def file(self, seed: int) -> Path:
        path = self.folder / str(seed) / f"{NAME}.gguf"
        if not path.exists():
            path.parent.mkdir()
            recipe = self.recipe(n_layers=4)
            recipe.entries["general.version"] = (8, str(seed))  # type: ignore[attr-defined]
            recipe.write(path, seed=seed)  # type: ignore[attr-defined]
        return path

    def invent(self, witness: Member, card: ModelCard, count: int) -> None:
        """`count` peers that do not exist say that they serve the model; `witness` keeps what they said."""
        topics, now = witness.dht._topics, time.time()
        for number in range(count):
            who = Identity.generate()
            record = serves(who.peer_id, Address("127.0.0.1", 9), card)
            for kind, body, layers in (
                (RecordKind.CARD, card.sign(who).wire, (0, 0)),
                (RecordKind.COVERAGE, record.body(), (0, card.n_layers)),
            ):
                signed = SignedRecord.sign(
                    who,
                    kind,
                    scope=topics.scope,
                    subject=card.model_id,
                    layers=layers,
                    seq=number + 1,
                    expires_ms=int((now + 900) * 1000),
                    body=body,
                )
                witness.dht._core.store.put(signed, topics.of_record(signed), now)


@pytest.fixture
async def world(tmp_path: Path, gguf_recipe: Callable[..., object]) -> AsyncIterator[World]:
    world = World(tmp_path, gguf_recipe)
    yield world
    for member in world.members:
        await member.endpoint.close()


async def test_forty_cards_of_peers_that_do_not_exist_take_nobodys_name_away(world: World) -> None:
    honest, head = await world.add(1), await world.add(1)
    card = honest.take(world.file(1))
    await honest.serve(card)
    fake = replace(card, model_id=FAKE)
    world.invent(head, fake, 40)
    cards = await head.directory.cards()
    assert cards[FAKE][1] == 40 and cards[card.model_id][1] == 1, "the attacker has the most holders by far"
    assert await head.directory.resolve(NAME) == card
    assert await head.directory.resolve(model_id_text(FAKE)) == fake
    assert await head.directory.resolve(None) == card, "nor is it what is meant when nothing is said"


async def test_many_fakes_of_one_name_are_outweighed_by_one_real_peer(world: World) -> None:
    """One reachable attacker claims to serve thirty models by the name: his network counts once for all of them."""
    honest, evil, head = await world.add(1), await world.add(2), await world.add(1)
    card = honest.take(world.file(1))
    await honest.serve(card)
    for number in range(12):
        await evil.serve(replace(card, model_id=bytes([number]) * 32))
    assert await head.directory.resolve(NAME) == card


async def test_a_reachable_attacker_without_the_model_loses_the_name_to_whoever_has_it(world: World) -> None:
    honest, evil, head = await world.add(1), await world.add(2), await world.add(3)
    card = honest.take(world.file(1))
    await honest.serve(card)
    await evil.serve(replace(card, model_id=FAKE))
    assert await head.directory.resolve(NAME) == card


async def test_a_name_is_not_hung_on_another_model_that_others_serve(world: World) -> None:
    """The attacker says that a model served by honest peers goes by the name. Only he says so: it has his weight."""
    other, honest, evil, head = [await world.add(host) for host in (1, 2, 4, 5)]
    more = [await world.add(3)]
    elsewhere = replace(other.take(world.file(2)), name="something-else")
    for member in (other, *more):
        await member.serve(elsewhere)
    card = honest.take(world.file(1))
    await honest.serve(card)
    await more[0].serve(card)
    await evil.serve(replace(elsewhere, name=NAME))
    assert await head.directory.resolve(NAME) == card


async def test_of_two_real_models_the_one_in_more_networks_is_meant_and_equals_are_told_by_their_ids(
    world: World,
) -> None:
    honest, evil, head = await world.add(1), await world.add(2), await world.add(3)
    card, theirs = honest.take(world.file(1)), evil.take(world.file(2))
    await honest.serve(card)
    await evil.serve(theirs)
    with pytest.raises(RequestError, match="more than one model") as caught:
        await head.directory.resolve(NAME)
    assert all(model_id_text(each.model_id) in str(caught.value) for each in (card, theirs))
    assert (await head.directory.resolve(None)).model_id in (card.model_id, theirs.model_id)
    second = await world.add(4)
    second.take(world.file(1))
    await second.serve(card)
    head.directory = head.new_directory()
    await head.dht.cards(fresh=True)
    await head.dht.coverage(card.model_id, card.n_layers, fresh=True)
    assert await head.directory.resolve(NAME) == card


async def test_a_name_that_was_answered_goes_on_meaning_the_same_whoever_comes_and_over_restarts(world: World) -> None:
    honest, head = await world.add(1), await world.add(2)
    card = honest.take(world.file(1))
    await honest.serve(card)
    assert await head.directory.resolve(NAME) == card
    await head.directory.voice(card, await head.dht.coverage(card.model_id, card.n_layers))
    await head.directory.answered(NAME, card.model_id)
    for host in (3, 4, 5):
        evil = await world.add(host)
        theirs = evil.take(world.file(2))
        await evil.serve(theirs)
    for directory in (head.directory, head.new_directory()):
        await head.dht.cards(fresh=True)
        assert (await directory.resolve(NAME)).model_id == card.model_id
    fresh = await world.add(6)
    assert (await fresh.directory.resolve(NAME)).model_id == theirs.model_id, "who never used it goes by the networks"

    await honest.dht.withdraw()
    await head.dht.cards(fresh=True)
    await head.dht.coverage(card.model_id, card.n_layers, fresh=True)
    with pytest.raises(UnknownModelError, match="has meant here the model") as caught:
        await head.directory.resolve(NAME)
    assert model_id_text(theirs.model_id) in str(caught.value)


async def test_what_its_publisher_pinned_is_meant_unless_another_lies_on_this_disk(world: World) -> None:
    honest, evil, head = await world.add(1), await world.add(2), await world.add(3)
    card, theirs = honest.take(world.file(1)), evil.take(world.file(2))
    await honest.serve(card)
    for member in (evil, await world.add(4)):
        await member.serve(theirs)
    assert (await head.directory.resolve(NAME)).model_id == theirs.model_id
    head.pinned[NAME] = card.model_id
    assert await head.directory.resolve(NAME) == card
    head.pinned[NAME] = b"n" * 32
    with pytest.raises(UnknownModelError, match="by its publisher's word"):
        await head.directory.resolve(NAME)
    own = head.take(world.file(3))
    assert (await head.directory.resolve(NAME)).model_id == own.model_id


async def test_of_an_honest_model_strangers_may_say_another_name_and_it_keeps_its_own(world: World) -> None:
    """More cards call the model something else than call it what it is: it goes on being found by its name."""
    honest, head = await world.add(1), await world.add(2)
    card = honest.take(world.file(1))
    await honest.serve(card)
    world.invent(head, replace(card, name="garbage", n_layers=3), 20)
    assert await head.directory.resolve(NAME) == card
    shown, _ = (await head.directory.cards())[card.model_id]
    assert shown == card, "nor is it listed by what strangers call it"


async def test_of_hundreds_of_models_of_strangers_a_listing_looks_at_a_few_and_real_ones_come_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, head = await world.add(1), await world.add(2)
    card = honest.take(world.file(1))
    await honest.serve(card)
    for number in range(60):
        for witness in (head, honest):
            world.invent(witness, replace(card, model_id=bytes([number]) * 32, name=f"m-{number}"), 1)
    looked_at: list[ModelCard] = []

    async def coverage(card: ModelCard) -> list[CoverageRecord]:
        looked_at.append(card)
        return []

    assert len(await head.directory.cards()) > MAX_FOREIGN + 20
    listed = await head.directory.listings(coverage)
    assert len(listed) == len(looked_at) == MAX_FOREIGN
    assert card in looked_at
    own = head.take(world.file(2))
    listed = await head.directory.listings(coverage)
    assert len(listed) == MAX_FOREIGN + 1
    assert model_id_text(own.model_id) in {each.model_id for each in listed}
