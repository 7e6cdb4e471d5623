"""Holders that lie about what they have: no wrong byte is kept, and the honest ones are enough."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.fetching.conftest import StartNode, eventually
from tests.fetching.test_sharing import has

from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.torrent.content import Content
from meshswarm.config import Address
from meshswarm.dht.holders import HolderRecord
from meshswarm.errors import ArtifactError
from meshswarm.fetching import fetch as fetch_module
from meshswarm.fetching import scout as scout_module
from meshswarm.fetching.exchange import (
    LAYER_REQUEST,
    MAX_LAYER_ANSWER_BYTES,
    MAX_PIECES_BYTES,
    PIECES_REQUEST,
    Pieces,
    pack_pieces,
)
from meshswarm.fetching.scout import MAX_HOLDERS, MAX_LINKS, believable, with_newcomers
from meshswarm.fetching.sharing import SharingSettings
from meshswarm.identity import Identity, PeerId


async def test_wrong_hashes_of_a_liar_are_passed_over(start_node: StartNode, model_file: Path) -> None:
    holder, liar, other = (
        await start_node(),
        await start_node(settings=SharingSettings(seeds=False)),
        await start_node(),
    )
    info = await has(holder, model_file)
    contents = holder.store.contents(info.model_id)

    async def say_all(peer: PeerId, question: bytes) -> bytes:
        return pack_pieces(Pieces(0, (None,)), contents)

    async def lie(peer: PeerId, question: bytes) -> bytes:
        return secrets.token_bytes(contents[0].layer_bytes)

    liar.endpoint.handle_request(PIECES_REQUEST, say_all, max_request_bytes=128, max_reply_bytes=MAX_PIECES_BYTES)
    liar.endpoint.handle_request(LAYER_REQUEST, lie, max_request_bytes=128, max_reply_bytes=MAX_LAYER_ANSWER_BYTES)
    await liar.dht.say_holding(
        HolderRecord(liar.endpoint.peer_id, (liar.endpoint.address,), info.model_id, 0, is_whole=True)
    )
    await other.sharing.library.known(info.name)
    await other.sharing.fetcher.fetch(await other.wants(info))
    assert file_root(other.store.path(info.model_id)) == file_root(model_file)


@pytest.mark.parametrize("answer", [b"", b"\x94\x01\x00\x90\x90", bytes(1000), "too many others"])
async def test_malformed_answers_of_the_only_holder_end_in_a_sentence(
    start_node: StartNode, model_file: Path, answer: bytes | str
) -> None:
    silent, liar, other = (
        await start_node(settings=SharingSettings(seeds=False)),
        await start_node(settings=SharingSettings(seeds=False)),
        await start_node(),
    )
    info = await asyncio.to_thread(silent.store.import_file, model_file)
    if isinstance(answer, str):
        crowd = tuple(Address("192.0.2.1", port) for port in range(1, 100))
        answer = pack_pieces(Pieces(1, (None,), crowd), silent.store.contents(info.model_id))
    said = answer

    async def lie(peer: PeerId, question: bytes) -> bytes:
        return said

    liar.endpoint.handle_request(PIECES_REQUEST, lie, max_request_bytes=128, max_reply_bytes=MAX_PIECES_BYTES)
    where = (liar.endpoint.address,)
    await liar.dht.say_holding(HolderRecord(liar.endpoint.peer_id, where, info.model_id, 4810, is_whole=True))
    other.store.save_foreign_header(info.model_id, silent.store.header_proof(info.model_id))
    with pytest.raises(ArtifactError, match="pieces"):
        await other.sharing.fetcher.fetch(await other.wants(info))


async def test_a_holder_that_tcp_does_not_reach_is_named(
    start_node: StartNode, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers over QUIC and says it has everything, but its torrent port is closed, as behind a translator."""
    monkeypatch.setattr(fetch_module, "PATIENCE_S", 0.5)
    silent, hidden, other = (
        await start_node(settings=SharingSettings(seeds=False)),
        await start_node(settings=SharingSettings(seeds=False)),
        await start_node(),
    )
    info = await asyncio.to_thread(silent.store.import_file, model_file)
    contents = silent.store.contents(info.model_id)

    async def say_all(peer: PeerId, question: bytes) -> bytes:
        return pack_pieces(Pieces(9, (None,)), contents)

    hidden.endpoint.handle_request(PIECES_REQUEST, say_all, max_request_bytes=128, max_reply_bytes=MAX_PIECES_BYTES)
    where = (hidden.endpoint.address,)
    await hidden.dht.say_holding(HolderRecord(hidden.endpoint.peer_id, where, info.model_id, 9, is_whole=True))
    other.store.save_foreign_header(info.model_id, silent.store.header_proof(info.model_id))
    layer = silent.store.piece_layer(info.model_id, 0)
    assert layer
    other.store.save_piece_layer(info.model_id, 0, layer)
    with pytest.raises(ArtifactError, match=r"1 of those who hold it cannot be reached over TCP"):
        await other.sharing.fetcher.fetch(await other.wants(info))


async def test_a_file_that_changed_under_one_holder_spoils_nothing(
    start_node: StartNode, model_file: Path, tmp_path: Path
) -> None:
    """Its session may not have noticed yet; each piece is hashed before it is sent, and again when it comes."""
    honest, poisoner, other = await start_node(), await start_node(), await start_node()
    info = await has(honest, model_file)
    copy = tmp_path / "poisoned.gguf"
    await asyncio.to_thread(shutil.copyfile, model_file, copy)
    await asyncio.to_thread(poisoner.store.import_file, copy)
    await poisoner.until_seeding(info)
    await asyncio.to_thread(poison, copy)
    await other.sharing.library.known(info.name)
    await other.sharing.fetcher.fetch(await other.wants(info))
    assert file_root(other.store.path(info.model_id)) == file_root(model_file)


def test_a_stranger_on_the_internet_aims_nobody_at_a_local_network() -> None:
    inside = [Address(host, 4811) for host in ("127.0.0.1", "10.0.0.9", "192.168.1.1", "169.254.1.1", "fe80::1", "::1")]
    outside = [Address("198.51.100.7", 4811), Address("2001:db8::7", 4811)]
    assert believable(Address("203.0.113.5", 4810), [*inside, *outside]) == outside
    lan = [Address("10.0.0.9", 4811), Address("192.168.1.1", 4811)]
    assert believable(Address("192.168.1.2", 4810), [*inside, *outside]) == [*lan, *outside]
    assert believable(Address("127.0.0.1", 4810), [*inside, *outside]) == [*inside, *outside]


def test_however_many_holders_answer_every_one_has_its_turn() -> None:
    """A crowd that says it has everything would otherwise be all that is ever asked."""
    crowd = [holder(number) for number in range(60)]
    asked: set[PeerId] = set()
    for _ in range(4):
        answered_first = sorted(crowd, key=lambda record: (record.peer not in asked, record.peer))
        now = with_newcomers(answered_first, asked)
        assert len(now) == len({record.peer for record in now}) == MAX_HOLDERS
        asked |= {record.peer for record in now}
    assert asked == {record.peer for record in crowd}
    assert with_newcomers(crowd[:5], set()) == crowd[:5]
    assert with_newcomers(crowd[:5], {crowd[0].peer, crowd[4].peer}) == [crowd[0], crowd[4], *crowd[1:4]]


def holder(number: int) -> HolderRecord:
    return HolderRecord(PeerId(number.to_bytes(32)), (), b"m" * 32, 4811, is_whole=True)


def poison(path: Path) -> None:
    """Change every piece on the disk, behind the back of whoever seeds it."""
    data = bytearray(path.read_bytes())
    for at in range(300_000, len(data), 100_000):
        data[at] ^= 0xFF
    with path.open("r+b") as file:
        file.write(data)


async def test_a_crowd_of_made_up_holders_keeps_nobody_from_the_honest_one(
    start_node: StartNode, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scout_module, "MAX_HOLDERS", 4)
    holder, other = await start_node(), await start_node()
    info = await has(holder, model_file)
    await other.sharing.library.known(info.name)
    nobody = Address("127.0.0.1", 9)
    crowd = [HolderRecord(Identity.generate().peer_id, (nobody,), info.model_id, 9, is_whole=True) for _ in range(12)]
    found = other.dht.holders

    async def holders(model_id: bytes, *, fresh: bool = False) -> list[HolderRecord]:
        return sorted([*crowd, *await found(model_id, fresh=fresh)], key=lambda record: record.peer)

    monkeypatch.setattr(other.dht, "holders", holders)
    monkeypatch.setattr(scout_module, "DIAL_TIMEOUT_S", 0.3)
    await other.sharing.fetcher.fetch(await other.wants(info))
    assert file_root(other.store.path(info.model_id)) == file_root(model_file)


class Dialled:
    """In place of a torrent: whom it was told of."""

    def __init__(self) -> None:
        self.hosts: list[str] = []

    def connect(self, host: str, port: int) -> None:
        self.hosts.append(host)


@pytest.mark.parametrize(("n_files", "n_holders"), [(1, 100), (10, 50), (48, 50), (500, 5)])
async def test_many_files_of_many_holders_take_no_more_connections_than_there_are(
    start_node: StartNode, n_files: int, n_holders: int
) -> None:
    node = await start_node(settings=SharingSettings(seeds=False))
    scout = node.sharing.fetcher.scout(b"m" * 32, [Content(1000, bytes([1]) * 32)] * n_files)
    for number in range(n_holders):
        peer = holder(number).peer
        scout._where[peer] = Address(f"192.0.2.{number}", 4811)
        scout.pieces[peer] = Pieces(4811, tuple(None if number % 2 else frozenset() for _ in range(n_files)))
    torrents = [Dialled() for _ in range(n_files)]
    for _ in range(3):
        scout.join(torrents)  # type: ignore[arg-type]
    n_links = sum(len(each.hosts) for each in torrents)
    assert n_links <= max(MAX_LINKS, n_files) and all(each.hosts for each in torrents)
    first = [each.hosts[0] for each in torrents]
    assert all(int(host.rpartition(".")[2]) % 2 for host in first), "those that have something of the file come first"
    if n_files > 1:
        assert len(set(first)) > 1, "not all files hang on one holder"
    scout.join_again()
    scout.join(torrents)  # type: ignore[arg-type]
    assert torrents[0].hosts[n_links // n_files :][:1] != first[:1], "another has its turn"


async def test_a_change_of_keys_amid_a_look_at_what_is_gone_ends_no_sharing(
    start_node: StartNode, tmp_path: Path, gguf_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node()
    paths = [gguf_recipe(n_layers=n).write(tmp_path / f"m{n}.gguf") for n in (1, 2, 3)]
    await node.until_seeding(*[await asyncio.to_thread(node.store.import_file, path) for path in paths])
    seeder, stop_holding = node.sharing.seeder, node.dht.stop_holding
    assert seeder is not None

    async def changed_meanwhile(model_id: bytes) -> None:
        await stop_holding(model_id)
        seeder.begin_again()

    monkeypatch.setattr(node.dht, "stop_holding", changed_meanwhile)
    for path in paths:
        path.unlink()
    await eventually(lambda: not seeder.is_seeding, "what is gone is shared no more")
    await seeder.look()
    assert not any(task.done() for task in node.tasks)
