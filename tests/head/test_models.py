"""Which models a head knows: its own checked headers against what the swarm's cards claim."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.header_exchange import fetch_header, offer_headers
from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import RequestError, UnknownModelError
from meshswarm.head.models import LOOKED_UP, ModelDirectory
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.routing.gossip.told import Told
from meshswarm.span import Span

NAME = "smollm2-135m-instruct"


@dataclass
class Member:
    """A peer with a store and a directory of its own."""

    identity: Identity
    endpoint: Endpoint
    dht: Dht
    store: Store
    directory: ModelDirectory

    @classmethod
    async def start(cls, swarm: Swarm, home: Path) -> Member:
        identity = Identity.generate()
        endpoint = await Endpoint.bind(identity, Address("127.0.0.1", 0), swarm=swarm)
        dht = Dht(endpoint, identity, swarm)
        store = Store(home)
        return cls(identity, endpoint, dht, store, ModelDirectory(endpoint, store, dht, home / "vocabularies"))

    def serves(self, model_id: bytes, n_ctx: int = 4096) -> CoverageRecord:
        return CoverageRecord(
            self.endpoint.peer_id, tuple(self.endpoint.addresses), model_id, Span(0, 30), True, "cpu", n_ctx, 1, 1, 9
        )


@dataclass
class Pair:
    """A holder of the model, which says so to the swarm, and a head without it."""

    holder: Member
    head: Member
    card: ModelCard


@pytest.fixture
async def pair(tmp_path: Path, smollm2: Path) -> AsyncIterator[Pair]:
    swarm = Swarm(f"test-{secrets.token_hex(8)}")
    holder, head = [await Member.start(swarm, tmp_path / name) for name in ("holder", "head")]
    card = ModelCard.of(holder.store.import_file(smollm2))
    offer_headers(holder.endpoint, holder.store)
    await head.dht.join([(holder.endpoint.peer_id, (holder.endpoint.address,))])
    yield Pair(holder, head, card)
    for member in (holder, head):
        await member.endpoint.close()


async def test_a_header_on_this_disk_outranks_what_strangers_say_of_the_model(pair: Pair) -> None:
    lie = replace(pair.card, name="something-else", n_layers=7, n_vocab=10)
    await pair.head.dht.publish_card(lie.sign(pair.head.identity))
    assert await pair.holder.directory.resolve(NAME) == pair.card
    (card, holders) = (await pair.holder.directory.cards())[pair.card.model_id]
    assert (card, holders) == (pair.card, 1)


async def test_a_header_that_was_fetched_outranks_the_card_that_led_to_it(pair: Pair) -> None:
    lie = replace(pair.card, n_layers=31, n_vocab=10, n_ctx=64)
    await pair.holder.dht.publish_card(lie.sign(pair.holder.identity))
    claimed = await pair.head.directory.resolve(NAME)
    assert claimed == lie
    voice = await pair.head.directory.voice(claimed, [pair.holder.serves(pair.card.model_id)])
    assert voice.card == pair.card
    assert voice.template is not None
    assert await pair.head.directory.resolve(NAME) == pair.card


async def test_a_listing_tells_the_context_of_that_model_and_not_of_another(pair: Pair) -> None:
    other = replace(pair.card, model_id=bytes(32), name="other")
    await pair.holder.dht.publish_card(other.sign(pair.holder.identity))
    contexts = {other.model_id: 100, pair.card.model_id: 4096}

    async def coverage(card: ModelCard) -> list[CoverageRecord]:
        return [pair.holder.serves(card.model_id, contexts[card.model_id])]

    listed = {listing.id: listing for listing in await pair.holder.directory.listings(coverage)}
    assert (listed["other"].n_ctx, listed[NAME].n_ctx) == (100, 4096)
    assert all(listing.ready for listing in listed.values())


async def test_layers_that_are_still_being_loaded_do_not_make_a_model_ready(pair: Pair) -> None:
    record = pair.holder.serves(pair.card.model_id)

    async def coverage(card: ModelCard) -> list[CoverageRecord]:
        return [replace(record, span=Span(0, 20)), replace(record, span=Span(15, 30), loaded=False)]

    (listing,) = await pair.holder.directory.listings(coverage)
    assert listing.covered == (Span(0, 20),) and not listing.ready


async def test_of_many_models_the_first_are_looked_up_and_the_rest_only_where_others_tell_no_whole(pair: Pair) -> None:
    for number in range(12):
        other = replace(pair.card, model_id=number.to_bytes(32), name=f"other-{number:02}")
        await pair.holder.dht.publish_card(other.sign(pair.holder.identity))
    looked_up: list[str] = []

    async def coverage(card: ModelCard) -> list[CoverageRecord]:
        looked_up.append(card.name)
        return []

    def told(card: ModelCard) -> Told | None:
        holders = 30 * (1,) if card.name != "other-11" else 29 * (1,) + (0,)
        return None if card.name == "other-10" else Told(card.model_id, holders, 1, 1.0, 0.0, 2)

    listed = await pair.head.directory.listings(coverage, told=told)
    assert looked_up == [*(f"other-{number:02}" for number in range(LOOKED_UP)), "other-10", "other-11"]
    assert [listing.id for listing in listed if listing.ready] == ["other-08", "other-09"]
    assert {listing.covered for listing in listed if listing.ready} == {(Span(0, 30),)}


async def test_of_models_that_share_a_name_the_one_on_this_disk_is_meant(pair: Pair) -> None:
    """Nobody may take a name away from the models here by giving it to another."""
    namesake = replace(pair.card, model_id=bytes(32))
    await pair.head.dht.publish_card(namesake.sign(pair.head.identity))
    assert len(await pair.holder.directory.cards()) == 2
    assert await pair.holder.directory.resolve(NAME) == pair.card
    assert await pair.holder.directory.resolve(model_id_text(bytes(32))) == namesake


async def test_a_name_that_two_models_elsewhere_share_is_answered_with_both_ids(pair: Pair) -> None:
    await pair.holder.dht.publish_card(pair.card.sign(pair.holder.identity))
    namesake = replace(pair.card, model_id=bytes(32))
    await pair.head.dht.publish_card(namesake.sign(pair.head.identity))
    with pytest.raises(RequestError, match="more than one model") as caught:
        await pair.head.directory.resolve(NAME)
    assert all(model_id_text(card.model_id) in str(caught.value) for card in (pair.card, namesake))


async def test_an_unknown_name_is_answered_with_the_names_there_are(pair: Pair) -> None:
    with pytest.raises(UnknownModelError, match=f"'gpt-5'; the models are: {NAME}"):
        await pair.holder.directory.resolve("gpt-5")
    with pytest.raises(UnknownModelError, match="no model is known here yet"):
        await pair.head.directory.resolve(None)


async def test_a_slow_disk_holds_up_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may lie on a network drive: while that takes its time, the loop goes on."""
    store, loop = pair.holder.store, asyncio.get_running_loop()
    loop_went_on = threading.Event()

    def slow(read: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_read(*asked: Any) -> Any:
            loop.call_soon_threadsafe(loop_went_on.set)
            assert loop_went_on.wait(10), "the loop waited for the disk"
            loop_went_on.clear()
            return read(*asked)

        return wait_and_read

    for name in ("models", "has_header"):
        monkeypatch.setattr(store, name, slow(getattr(store, name)))
    namesake = replace(pair.card, model_id=bytes(32))
    await pair.holder.dht.publish_card(namesake.sign(pair.holder.identity))
    assert await pair.holder.directory.resolve(NAME) == pair.card
    assert (await pair.holder.directory.voice(pair.card, [])).card == pair.card
    await fetch_header(pair.head.endpoint, pair.head.store, pair.card.model_id, [
        (pair.holder.endpoint.peer_id, (pair.holder.endpoint.address,))
    ])  # fmt: skip


async def test_a_models_voice_says_whether_it_has_an_exact_profile(pair: Pair) -> None:
    records = [pair.holder.serves(pair.card.model_id)]
    assert (await pair.head.directory.voice(pair.card, records)).exact_obstacle is None


async def test_what_is_known_without_asking_stays_known_and_costs_the_swarm_nothing(pair: Pair) -> None:
    """As /health looks: what was asked for once is seen, what others tell of a model counts, and nobody is asked."""
    asked: list[object] = []
    questions, dht = pair.head.dht._questions, pair.head.dht
    look_up = questions.look_up

    async def noted(targets: Any, **more: Any) -> Any:
        asked.append(targets)
        return await look_up(targets, **more)

    questions.look_up = noted  # type: ignore[method-assign]
    await pair.holder.dht.publish_card(pair.card.sign(pair.holder.identity))
    await pair.holder.dht.publish_coverage(pair.holder.serves(pair.card.model_id))
    dht._core.store._under.clear()

    async def coverage(card: ModelCard) -> list[CoverageRecord]:
        return await dht.coverage(card.model_id, card.n_layers, ask=False)

    def whole(card: ModelCard) -> Told:
        return Told(card.model_id, (2,) * card.n_layers, 2, 1.0, 0.0, 3)

    assert await pair.head.directory.listings(coverage, ask=False) == [] and not asked
    await pair.head.directory.refresh([], whole)
    assert len(asked) == 1, "the cards alone: others tell the rest"
    (listing,) = await pair.head.directory.listings(coverage, ask=False)
    assert not listing.ready
    (listing,) = await pair.head.directory.listings(coverage, ask=False, told=whole)
    assert listing.ready and len(asked) == 1
    await pair.head.directory.refresh([], lambda card: None)
    n_asked = len(asked)
    assert n_asked > 1
    for _ in range(3):
        (listing,) = await pair.head.directory.listings(coverage, ask=False)
        assert listing.ready
    assert len(asked) == n_asked
