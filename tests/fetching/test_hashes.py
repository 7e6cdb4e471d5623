"""A publisher that only read a model once: it proves header and hashes to others, and says that it has no pieces."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.artifacts.sources.conftest import cdn, hub  # noqa: F401
from tests.artifacts.sources.web_server import HubServer

from meshswarm.artifacts.header_exchange import fetch_header, offer_headers
from meshswarm.artifacts.manifests.trust import Manifests
from meshswarm.artifacts.merkle import parse_model_id
from meshswarm.artifacts.store.store import Store
from meshswarm.commands.publish import Wish, publish
from meshswarm.config import Address, Home
from meshswarm.dht.node import Dht
from meshswarm.errors import RefusedError
from meshswarm.fetching.exchange import Offer, ask_piece_layer, ask_pieces
from meshswarm.fetching.hashes import Hashes
from meshswarm.fetching.shelf import Shelf
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm


@dataclass
class Pair:
    """A publisher that holds nothing, and somebody who wants the model."""

    publisher: Endpoint
    hashes: Hashes
    home: Home
    store: Store
    asker: Endpoint
    asker_dht: Dht


async def no_session() -> Any:
    raise AssertionError("who has no pieces needs no torrents")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    swarm, home = Swarm(f"test-{secrets.token_hex(8)}"), Home(tmp_path / "publisher").create()
    identity, other = Identity.load_or_create(home.key), Identity.generate()
    publisher = await Endpoint.bind(identity, Address("127.0.0.1", 0), swarm=swarm)
    asker = await Endpoint.bind(other, Address("127.0.0.1", 0), swarm=swarm)
    dht, asker_dht, store = Dht(publisher, identity, swarm), Dht(asker, other, swarm), Store(home.root)
    await asker_dht.join([(publisher.peer_id, (publisher.address,))])
    hashes = Hashes(publisher, identity, dht, store, Manifests(home.root), Shelf(store, no_session))
    offer_headers(publisher, store)
    Offer(publisher, hashes)
    yield Pair(publisher, hashes, home, store, asker, asker_dht)
    for endpoint in (publisher, asker):
        await endpoint.close()


async def test_what_was_published_without_being_kept_can_be_checked_by_others(
    pair: Pair,
    hub: HubServer,  # noqa: F811
    gguf_recipe: Any,
    tmp_path: Path,
) -> None:
    data = gguf_recipe(n_layers=8, n_embd=96).file(seed=2)
    hub.put_repo("owner/repo", {"big.gguf": data})
    wish = Wish(is_calibrated=False)
    told = await asyncio.to_thread(publish, pair.home, "hf:owner/repo/big.gguf", wish, None, lambda _: None)
    model_id = parse_model_id(told["model_id"])
    await pair.hashes.look()
    (record,) = await pair.asker_dht.holders(model_id, fresh=True)
    assert (record.peer, record.torrent_port, record.layers, record.is_whole) == (
        pair.publisher.peer_id,
        0,
        None,
        False,
    )
    assert [card.model_id for card, _ in await pair.asker_dht.models(fresh=True)] == [model_id], "found by its name"

    wanted = Store(tmp_path / "wanted")
    await fetch_header(pair.asker, wanted, model_id, [(record.peer, record.addresses)])
    contents = wanted.contents(model_id)
    connection = await pair.asker.dial(record.peer, record.addresses)
    said = await ask_pieces(connection, model_id, contents, 0)
    assert said.torrent_port == 0 and said.files == (frozenset(),)
    layer = await ask_piece_layer(connection, model_id, 0, contents[0])
    wanted.save_piece_layer(model_id, 0, layer)
    assert contents[0].n_pieces > 1 and wanted.piece_layer(model_id, 0) == layer


async def test_of_others_models_and_of_what_is_not_proved_nothing_is_told(
    pair: Pair, gguf_recipe: Any, tmp_path: Path
) -> None:
    elsewhere = Home(tmp_path / "elsewhere")
    path = gguf_recipe(n_layers=4).write(tmp_path / "tiny.gguf")
    told = publish(elsewhere, str(path), Wish(is_calibrated=False), None, lambda _: None)
    model_id = parse_model_id(told["model_id"])
    theirs = Manifests(elsewhere.root).by_id(model_id)
    assert theirs is not None
    Manifests(pair.home.root).accept(theirs)
    await pair.hashes.look()
    assert pair.hashes.contents(model_id) is None and await pair.asker_dht.holders(model_id, fresh=True) == []
    connection = await pair.asker.dial(pair.publisher.peer_id, [pair.publisher.address])
    with pytest.raises(RefusedError, match="shares no files of that model"):
        await ask_pieces(connection, model_id, Store(elsewhere.root).contents(model_id), 0)
