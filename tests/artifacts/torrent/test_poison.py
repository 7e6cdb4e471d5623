"""Peers that send wrong bytes: found out by asking alone, refused, and never in the way of what is right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.artifacts.torrent.peers import LOOPBACK, PIECE, MakeFile, MakeLiar, Shared, StartSession
from tests.net.eventually import eventually

from meshswarm.artifacts.torrent import alone
from meshswarm.errors import ArtifactError


async def test_rare_wrong_bytes_among_honest_peers(
    make_file: MakeFile, start_session: StartSession, make_liar: MakeLiar, tmp_path: Path
) -> None:
    """The case in which libtorrent bans the honest: one byte in every ninth piece."""
    shared = make_file(90 * PIECE + 5, "big.gguf")
    honest, other, leecher = [await start_session() for _ in range(3)]
    for session in (honest, other):
        await session.seed(shared.content, shared.path, shared.layer)
    liar = make_liar(shared, [index * PIECE + 1000 for index in range(0, 90, 9)])
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    for port in (liar.port, honest.port, other.port):
        torrent.connect(LOOPBACK, port)
    await torrent.fetch(range(91))
    assert torrent.path.read_bytes() == shared.data
    assert torrent.blamed <= {(LOOPBACK, liar.port)}


async def test_a_liar_is_blamed_and_not_dialled_again(
    shared: Shared, start_session: StartSession, make_liar: MakeLiar, tmp_path: Path
) -> None:
    said: list[str] = []
    honest, leecher = await start_session(), await start_session(say=said.append)
    await honest.seed(shared.content, shared.path, shared.layer)
    liar = make_liar(shared, [index * PIECE + 9 for index in range(13)])
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, liar.port)
    fetching = asyncio.create_task(torrent.fetch(range(13)))
    await eventually(lambda: torrent.blamed, 20)
    assert torrent.blamed == {(LOOPBACK, liar.port)}
    assert any(str(liar.port) in words for words in said)
    torrent.connect(LOOPBACK, honest.port)
    await fetching
    assert torrent.path.read_bytes() == shared.data
    sent = liar.sent_bytes
    torrent.connect(LOOPBACK, liar.port)
    await asyncio.sleep(0.3)
    assert liar.sent_bytes == sent
    assert torrent.blamed == {(LOOPBACK, liar.port)}


async def test_a_liar_alone_ends_in_an_error_that_names_it(
    shared: Shared, start_session: StartSession, make_liar: MakeLiar, tmp_path: Path
) -> None:
    leecher = await start_session()
    liar = make_liar(shared, [index * PIECE for index in range(13)])
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, liar.port)
    with pytest.raises(ArtifactError, match=rf"{LOOPBACK}:{liar.port}: sent wrong bytes"):
        await torrent.fetch(range(13), patience_s=1.5)
    assert torrent.have() == frozenset()


async def test_many_liars_and_one_honest_peer(
    shared: Shared, start_session: StartSession, make_liar: MakeLiar, tmp_path: Path
) -> None:
    honest, leecher = await start_session(), await start_session()
    await honest.seed(shared.content, shared.path, shared.layer)
    liars = [make_liar(shared, [index * PIECE + n for index in range(13)]) for n in range(4)]
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    for port in [*(liar.port for liar in liars), honest.port]:
        torrent.connect(LOOPBACK, port)
    await torrent.fetch(range(13))
    assert torrent.path.read_bytes() == shared.data
    assert torrent.blamed <= {(LOOPBACK, liar.port) for liar in liars}


async def test_a_liars_address_is_refused_where_no_honest_peer_shares_it(
    shared: Shared, start_session: StartSession, make_liar: MakeLiar, tmp_path: Path
) -> None:
    """What it was asked for is not all it can do: it dials too."""
    honest, leecher = await start_session(), await start_session()
    await honest.seed(shared.content, shared.path, shared.layer)
    liar = make_liar(shared, [index * PIECE for index in range(13)], "127.0.0.7")
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect("127.0.0.7", liar.port)
    torrent.connect(LOOPBACK, honest.port)
    fetching = asyncio.create_task(torrent.fetch(range(13)))
    await fetching
    if torrent.blamed:
        liar.handle.connect_peer((LOOPBACK, leecher.port))
        await asyncio.sleep(0.5)
        assert all(peer.ip[0] != "127.0.0.7" for peer in torrent_peers(torrent))
    assert torrent.path.read_bytes() == shared.data


def torrent_peers(torrent: object) -> list[object]:
    return list(torrent._state.attachment._handle.get_peer_info())  # type: ignore[attr-defined]


async def test_a_liar_that_dials_in_and_many_that_say_nothing_stop_no_fetch(
    shared: Shared,
    start_session: StartSession,
    make_liar: MakeLiar,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody was told of the liar, so it is never asked alone; the silent ones are asked before the honest peer."""
    monkeypatch.setattr(alone, "ANSWER_S", 2.0)
    leecher, honest = await start_session(), await start_session("127.0.0.9")
    await honest.seed(shared.content, shared.path, shared.layer)
    liar = make_liar(shared, [index * PIECE for index in range(13)])
    silent = [await asyncio.start_server(say_nothing, LOOPBACK, 0) for _ in range(3)]
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    for server in silent:
        torrent.connect(*server.sockets[0].getsockname())
    fetching = asyncio.create_task(torrent.fetch(range(13), patience_s=5.0))
    liar.handle.connect_peer((LOOPBACK, leecher.port))
    await eventually(lambda: liar.sent_bytes > PIECE, 20)
    torrent.connect("127.0.0.9", honest.port)
    await fetching
    assert torrent.path.read_bytes() == shared.data
    for server in silent:
        server.close()


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_right_bytes_from_elsewhere_clear_a_doubt(
    shared: Shared, start_session: StartSession, make_liar: MakeLiar, tmp_path: Path
) -> None:
    """A web source is as good a way out as an honest peer, whatever blocks the liar put in between."""
    leecher = await start_session()
    liar = make_liar(shared, [index * PIECE for index in range(13)])
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, liar.port)
    fetching = asyncio.create_task(torrent.fetch(range(13)))
    await eventually(lambda: liar.sent_bytes > PIECE, 20)
    for index in range(13):
        span = shared.content.piece_range(index)
        assert await torrent.add_piece(index, shared.data[span.start : span.stop])
    await fetching
    assert torrent.path.read_bytes() == shared.data
