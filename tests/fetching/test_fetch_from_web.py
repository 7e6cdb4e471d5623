"""Servers beside peers: what one does not have the other gives, and who lies is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.artifacts.sources.web_server import Quirk, WebFile, WebServer
from tests.fetching.conftest import Node, StartNode, eventually
from tests.fetching.test_sharing import has, size_of

from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.errors import ArtifactError
from meshswarm.fetching import fetch as fetch_module
from meshswarm.fetching.plan import FetchProgress
from meshswarm.fetching.sharing import SharingSettings
from meshswarm.fetching.web_sources import WebModel

PIECE = 256 << 10


@pytest.fixture
def web(model_bytes: bytes) -> Iterator[WebServer]:
    server = WebServer()
    server.files["/model.gguf"] = WebFile(model_bytes, etag='"1"')
    yield server
    server.close()


def at(web: WebServer, info: ModelInfo) -> tuple[WebModel, ...]:
    return (WebModel(f"{web.origin}/model.gguf", info.file_lengths, is_strangers=False),)


async def knows_hashes(node: Node, holder: Node, info: ModelInfo) -> None:
    """The header and the piece layer are here, as if they had come from a peer that has left since."""
    node.store.save_foreign_header(info.model_id, holder.store.header_proof(info.model_id))
    layer = holder.store.piece_layer(info.model_id, 0)
    assert layer
    node.store.save_piece_layer(info.model_id, 0, layer)


async def test_without_peers_just_the_wanted_pieces_come_from_the_web(
    start_node: StartNode, model_file: Path, web: WebServer
) -> None:
    silent, other = await start_node(settings=SharingSettings(seeds=False)), await start_node()
    info = await asyncio.to_thread(silent.store.import_file, model_file)
    await knows_hashes(other, silent, info)
    seen: list[FetchProgress] = []
    wanted = await other.wants(info, (range(8 * PIECE, 9 * PIECE + 1),), web=at(web, info))
    await other.sharing.fetcher.fetch(wanted, seen.append)
    (held,) = other.store.ranges(info.model_id)
    assert range(8 * PIECE, 10 * PIECE) in held
    assert seen[-1].from_web_bytes == 2 * PIECE
    assert sum(sum(request.n_sent) for request in web.seen) <= 3 * PIECE, "not the whole file"


async def test_peers_and_the_web_make_a_whole_together(start_node: StartNode, model_file: Path, web: WebServer) -> None:
    whole, part, late = await start_node(), await start_node(), await start_node()
    info = await has(whole, model_file)
    await part.sharing.library.known(info.name)
    await part.sharing.fetcher.fetch(await part.wants(info, (range(8 * PIECE),)))
    await part.until_seeding(info)
    await whole.dht.withdraw()
    await whole.leave()
    await late.sharing.library.known(info.id_text)
    seen: list[FetchProgress] = []
    await late.sharing.fetcher.fetch(await late.wants(info, web=at(web, info)), seen.append)
    assert file_root(late.store.path(info.model_id)) == file_root(model_file)
    assert seen[-1].from_web_bytes >= size_of(model_file) - 8 * PIECE, "what the peer does not have"
    await eventually(lambda: part.sharing.shelf.sent_bytes > 0, "an account of what the peer gave")


async def test_a_server_that_lies_is_dropped_and_the_peers_go_on(
    start_node: StartNode, model_file: Path, web: WebServer
) -> None:
    holder, other = await start_node(), await start_node()
    info = await has(holder, model_file)
    web.files["/model.gguf"].always = Quirk(flips=tuple(range(0, size_of(model_file), 1000)))
    await other.sharing.library.known(info.name)
    await other.sharing.fetcher.fetch(await other.wants(info, web=at(web, info)))
    assert file_root(other.store.path(info.model_id)) == file_root(model_file)


async def test_a_server_alone_that_lies_ends_the_fetch_and_says_so(
    start_node: StartNode, model_file: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "TELL_S", 0.05)
    silent, other = await start_node(settings=SharingSettings(seeds=False)), await start_node()
    info = await asyncio.to_thread(silent.store.import_file, model_file)
    await knows_hashes(other, silent, info)
    web.files["/model.gguf"].always = Quirk(flips=tuple(range(0, size_of(model_file), 1000)))
    with pytest.raises(ArtifactError, match="could not be fetched"):
        await other.sharing.fetcher.fetch(await other.wants(info, web=at(web, info)))
    assert any("model.gguf" in warning or "127.0.0.1" in warning for warning in other.warnings)
    (held,) = other.store.ranges(info.model_id)
    assert sum(map(len, held)) <= size_of(model_file) // 2, "nothing of what it sent was believed"


async def test_a_server_that_cannot_be_reached_delays_nobody(start_node: StartNode, model_file: Path) -> None:
    holder, other = await start_node(), await start_node()
    info = await has(holder, model_file)
    nowhere = WebModel("http://127.0.0.1:9/model.gguf", info.file_lengths, is_strangers=False)
    await other.sharing.library.known(info.name)
    await other.sharing.fetcher.fetch(await other.wants(info, web=(nowhere,)))
    assert file_root(other.store.path(info.model_id)) == file_root(model_file)
