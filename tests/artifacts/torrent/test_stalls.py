"""Peers that stop sending, and nobody to ask."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from tests.artifacts.torrent.peers import LOOPBACK, PIECE, MakeFile, Shared, StartSession
from tests.net.eventually import eventually

from meshswarm.errors import ArtifactError


async def test_nobody_to_ask_is_said(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    torrent = await (await start_session()).open(shared.content, tmp_path / "model.gguf", shared.layer)
    with pytest.raises(ArtifactError, match="no peer that has it is known"):
        await torrent.fetch([0, 1], patience_s=0.5)


async def test_what_was_tried_is_said(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    """One address refuses, one takes the connection and says nothing."""
    torrent = await (await start_session()).open(shared.content, tmp_path / "model.gguf", shared.layer)
    with socket.socket() as mute, socket.socket() as closed:
        mute.bind((LOOPBACK, 0))
        mute.listen()
        closed.bind((LOOPBACK, 0))
        ports = [sock.getsockname()[1] for sock in (mute, closed)]
        for port in ports:
            torrent.connect(LOOPBACK, port)
        with pytest.raises(ArtifactError) as caught:
            await torrent.fetch([0], patience_s=1.0)
    words = str(caught.value)
    assert all(f"{LOOPBACK}:{port}" in words for port in ports)
    assert "refused" in words and "model.gguf" in words
    assert torrent.missing() == frozenset()


async def test_a_peer_that_stops_sending_is_passed_over(
    make_file: MakeFile, start_session: StartSession, tmp_path: Path
) -> None:
    big = make_file(40 * PIECE, "big.gguf")
    stuck, good, leecher = [await start_session() for _ in range(3)]
    await stuck.seed(big.content, big.path, big.layer)
    await good.seed(big.content, big.path, big.layer)
    torrent = await leecher.open(big.content, tmp_path / "model.gguf", big.layer)
    stuck.limit(0, 4 * 16384)
    torrent.connect(LOOPBACK, stuck.port)
    fetching = asyncio.create_task(torrent.fetch(range(40), patience_s=30.0))
    await eventually(lambda: torrent.received_bytes, 10)
    stuck.limit(0, 1)
    torrent.connect(LOOPBACK, good.port)
    await fetching
    assert torrent.path.read_bytes() == big.data


async def test_a_peer_that_trickles_holds_nobody_up_for_ever(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    slow, leecher = await start_session(), await start_session()
    await slow.seed(shared.content, shared.path, shared.layer)
    slow.limit(0, 200)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, slow.port)
    with pytest.raises(ArtifactError, match="connected, sends nothing"):
        await torrent.fetch(range(13), patience_s=1.0)


async def test_who_comes_late_is_in_time(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    seeder, leecher = await start_session(), await start_session()
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    fetching = asyncio.create_task(torrent.fetch(range(13), patience_s=20.0))
    await asyncio.sleep(0.5)
    await seeder.seed(shared.content, shared.path, shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    await fetching
    assert torrent.path.read_bytes() == shared.data


async def test_a_seeder_that_comes_back_is_dialled_again(
    make_file: MakeFile, start_session: StartSession, tmp_path: Path
) -> None:
    big = make_file(40 * PIECE, "big.gguf")
    seeder, leecher = await start_session(), await start_session()
    await seeder.seed(big.content, big.path, big.layer)
    seeder.limit(0, 8 * PIECE)
    torrent = await leecher.open(big.content, tmp_path / "model.gguf", big.layer)
    torrent.connect(LOOPBACK, seeder.port)
    fetching = asyncio.create_task(torrent.fetch(range(40), patience_s=30.0))
    await eventually(lambda: torrent.received_bytes, 10)
    await seeder.close()
    again = await start_session(port=seeder.port)
    await again.seed(big.content, big.path, big.layer)
    await fetching
    assert torrent.path.read_bytes() == big.data
