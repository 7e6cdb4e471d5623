"""Peers on loopback that give each other models, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest
from tests.fetching.conftest import Node, StartNode, eventually

from meshswarm.artifacts.files import FileStamp
from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.errors import ArtifactError, UnknownModelError
from meshswarm.fetching import fetch as fetch_module
from meshswarm.fetching.plan import FetchProgress
from meshswarm.fetching.sharing import SharingSettings

PIECE = 256 << 10


def size_of(path: Path) -> int:
    return path.stat().st_size


def flip_a_bit(path: Path) -> None:
    """In place, far from the header."""
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


async def has(node: Node, path: Path) -> ModelInfo:
    """The model in `path` is imported and shared."""
    info = await asyncio.to_thread(node.store.import_file, path)
    await node.until_seeding(info)
    return info


async def test_a_name_is_enough_to_get_a_model_from_a_peer(start_node: StartNode, model_file: Path) -> None:
    holder, other = await start_node(), await start_node()
    info = await has(holder, model_file)
    known = await other.sharing.library.known(info.name)
    assert known == info
    assert not list((other.home / "pieces").rglob("*.gguf")), "to know a model takes its header alone"
    await other.sharing.library.have_whole(known)
    path = other.store.path(info.model_id)
    assert file_root(path) == file_root(model_file)
    (told,) = [event for event in other.said if event["event"] == "fetched"]
    assert told["bytes"] <= size_of(model_file)
    records = {record.peer: record for record in await other.dht.holders(info.model_id, fresh=True)}
    assert records[other.endpoint.peer_id].is_whole, "who has it gives it on"
    assert records[holder.endpoint.peer_id].is_whole


async def test_parts_make_a_whole(start_node: StartNode, model_file: Path) -> None:
    """Two peers have a half each, and the third gets all of it from them once the first has left."""
    holder = await start_node()
    halves = [await start_node(), await start_node()]
    late = await start_node()
    info = await has(holder, model_file)
    length, middle = size_of(model_file), 6 * PIECE
    for node, half in zip(halves, (range(middle), range(middle, length)), strict=True):
        await node.sharing.library.known(info.id_text)
        await node.sharing.fetcher.fetch(await node.wants(info, (half,)))
        await node.until_seeding(info)
        assert node.store.paths(info.model_id) is None
    await holder.dht.withdraw()
    await holder.leave()
    known = await late.sharing.library.known(info.id_text)
    await late.sharing.library.have_whole(known)
    assert file_root(late.store.path(info.model_id)) == file_root(model_file)


async def test_two_who_want_the_same_model_share_one_fetch(start_node: StartNode, model_file: Path) -> None:
    holder, other = await start_node(), await start_node()
    info = await has(holder, model_file)
    await other.sharing.library.known(info.name)
    seen: tuple[list[FetchProgress], list[FetchProgress]] = ([], [])
    wanted = await other.wants(info)
    await asyncio.gather(*(other.sharing.fetcher.fetch(wanted, each.append) for each in seen))
    assert seen[0] and seen[0] == seen[1], "both see how far it is"
    torrent = other.sharing.shelf.torrents(info.model_id)[0]
    assert torrent.received_bytes <= size_of(model_file) + PIECE


async def test_what_nobody_holds_is_said_at_once(start_node: StartNode, model_file: Path) -> None:
    silent, other = await start_node(settings=SharingSettings(seeds=False)), await start_node()
    info = await asyncio.to_thread(silent.store.import_file, model_file)
    with pytest.raises(UnknownModelError, match=r"stored: none.*known: none"):
        await other.sharing.library.known(info.name)
    other.store.save_foreign_header(info.model_id, silent.store.header_proof(info.model_id))
    with pytest.raises(ArtifactError, match="nobody who holds it is known"):
        await other.sharing.fetcher.fetch(await other.wants(info))


async def test_a_part_that_nobody_has_is_waited_for_in_vain_only_briefly(
    start_node: StartNode, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "PATIENCE_S", 1.0)
    whole, part, late = await start_node(), await start_node(), await start_node()
    info = await has(whole, model_file)
    await part.sharing.library.known(info.name)
    await part.sharing.fetcher.fetch(await part.wants(info, (range(8 * PIECE),)))
    await part.until_seeding(info)
    await whole.dht.withdraw()
    await whole.leave()
    await late.sharing.library.known(info.id_text)
    with pytest.raises(ArtifactError, match=r"could not be fetched; what came is kept"):
        await late.sharing.fetcher.fetch(await late.wants(info))
    (held,) = late.store.ranges(info.model_id)
    assert sum(map(len, held)) >= 8 * PIECE, "what there was came"


async def test_who_was_expelled_is_neither_asked_nor_answered(start_node: StartNode, model_file: Path) -> None:
    owner, former = await start_node(private=True), await start_node(private=True)
    info = await has(former, model_file)
    await owner.sharing.library.known(info.name)
    owner.swarm.renew([secrets.token_bytes(32)], expelled={former.endpoint.peer_id})
    with pytest.raises(ArtifactError):
        await owner.sharing.fetcher.fetch(await owner.wants(info))
    assert not former.sharing.shelf.sent_bytes


async def test_pieces_go_under_the_newest_key_of_a_private_swarm(start_node: StartNode, model_file: Path) -> None:
    holder, member = await start_node(private=True), await start_node(private=True)
    info = await has(holder, model_file)
    await member.sharing.library.known(info.name)
    await member.sharing.fetcher.fetch(await member.wants(info, (range(4 * PIECE),)))
    key = secrets.token_bytes(32)
    for node in (holder, member):
        node.swarm.renew([key])
    for node in (holder, member):
        await eventually(lambda node=node: node.sharing.shelf.generation == 1, "a session under the new key")
        await node.until_seeding(info)
    await member.sharing.fetcher.fetch(await member.wants(info))
    assert file_root(member.store.path(info.model_id)) == file_root(model_file)


async def test_a_model_that_is_imported_while_the_peer_runs_is_shared(start_node: StartNode, model_file: Path) -> None:
    holder, other = await start_node(), await start_node()
    info = await asyncio.to_thread(holder.store.import_file, model_file)

    async def is_held() -> bool:
        return bool(await other.dht.holders(info.model_id, fresh=True))

    await eventually(is_held, "a record of the new model")
    assert holder.sharing.is_seeding


async def test_a_file_that_changes_under_a_seeding_peer_is_withdrawn(start_node: StartNode, model_file: Path) -> None:
    holder, other = await start_node(), await start_node()
    info = await has(holder, model_file)
    await asyncio.to_thread(flip_a_bit, model_file)

    async def is_held() -> bool:
        return bool(await other.dht.holders(info.model_id, fresh=True))

    async def is_withdrawn() -> bool:
        return not await is_held()

    await eventually(is_withdrawn, "the end of the record")
    await eventually(lambda: not holder.sharing.shelf.open_models, "the end of its torrent")
    await asyncio.to_thread(flip_a_bit, model_file)  # as it was, though touched
    await eventually(is_held, "the record of the restored file")


async def test_who_does_not_seed_tells_nobody_anything(start_node: StartNode, model_file: Path) -> None:
    holder = await start_node()
    silent = await start_node(settings=SharingSettings(seeds=False))
    info = await has(holder, model_file)
    await silent.sharing.library.known(info.name)
    await silent.sharing.fetcher.fetch(await silent.wants(info))
    assert not silent.sharing.shelf.open_models and not silent.sharing.is_seeding
    holders = {record.peer for record in await silent.dht.holders(info.model_id, fresh=True)}
    assert holders == {holder.endpoint.peer_id}


async def test_a_quota_is_kept_and_said(start_node: StartNode, model_file: Path) -> None:
    holder = await start_node()
    small = await start_node(settings=SharingSettings(disk_bytes=2 * PIECE))
    info = await has(holder, model_file)
    await small.sharing.library.known(info.name)
    with pytest.raises(ArtifactError, match="--disk"):
        await small.sharing.fetcher.fetch(await small.wants(info))
    await small.sharing.fetcher.fetch(await small.wants(info, (range(8 * PIECE, 9 * PIECE),)))


async def test_what_is_not_used_makes_room_within_the_quota(
    start_node: StartNode, model_file: Path, tmp_path: Path, gguf_recipe: Any
) -> None:
    holder = await start_node()
    small = await start_node(settings=SharingSettings(disk_bytes=5_000_000))
    first = await has(holder, model_file)
    another = gguf_recipe(n_layers=16, n_embd=96).write(tmp_path / "downloads" / "Other-3M.F32.gguf", seed=2)
    second = await has(holder, another)
    for info in (first, second):
        known = await small.sharing.library.known(info.id_text)
        await small.sharing.library.have_whole(known)
    assert small.store.get(second.model_id) is not None
    assert any("to stay within --disk" in warning for warning in small.warnings)

    async def is_only_the_second_held() -> bool:
        held = [await holder.dht.holders(info.model_id, fresh=True) for info in (first, second)]
        return [any(record.peer == small.endpoint.peer_id for record in records) for records in held] == [False, True]

    await eventually(is_only_the_second_held, "the end of the record of what was removed")


async def test_a_slice_alone_is_kept_where_that_was_asked_for(start_node: StartNode, model_file: Path) -> None:
    holder, other = await start_node(), await start_node()
    info = await has(holder, model_file)
    await other.sharing.library.known(info.name)
    await other.sharing.fetcher.fetch(await other.wants(info, (range(4 * PIECE),)))
    assert await other.sharing.library.only_slices(info) > 0
    assert not list((other.home / "pieces").rglob("*.gguf"))
    assert not other.sharing.is_seeding
    await holder.dht.withdraw()
    await holder.leave()
    known = await other.sharing.library.known(info.name)
    assert known.model_id == info.model_id, "it is known by name without anybody else"


async def test_a_file_in_place_is_seeded_without_a_copy_or_a_change(start_node: StartNode, model_file: Path) -> None:
    holder, other = await start_node(), await start_node()
    before = FileStamp.of(model_file)
    info = await has(holder, model_file)
    await other.sharing.library.known(info.name)
    await other.sharing.fetcher.fetch(await other.wants(info))
    assert FileStamp.of(model_file) == before
    assert not list(holder.home.rglob("*.gguf"))
    enough = size_of(model_file) - 2 * PIECE
    await eventually(lambda: holder.sharing.shelf.sent_bytes >= enough, "an account of what was sent")
