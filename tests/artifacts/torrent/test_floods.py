"""Hosts that take the places of others: connections that ask for nothing and never end."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.artifacts.torrent.peers import LOOPBACK, Shared, StartSession
from tests.net.eventually import eventually

from meshswarm.artifacts.torrent.door import MAX_SHUT, MOST_OF_ONE_HOST, SHUT_FOR_S, Door
from meshswarm.artifacts.torrent.session import TorrentSession

FLOOD_HOST = "127.0.0.66"


@asynccontextmanager
async def flood(session: TorrentSession, shared: Shared, n_connections: int) -> AsyncIterator[None]:
    """From one host, well-behaved up to the handshake; what is cut off comes again."""
    greeting = b"\x13BitTorrent protocol" + bytes(7) + b"\x10" + shared.content.info_hash[:20]
    n_tries = 0

    async def one() -> None:
        nonlocal n_tries
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(LOOPBACK, session.port, local_addr=(FLOOD_HOST, 0))
                writer.write(greeting + random.randbytes(20))
                n_tries += 1
                while await reader.read(1024):
                    pass
                writer.close()
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(one()) for _ in range(n_connections)]
    try:
        await eventually(lambda: n_tries >= n_connections, 20)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("is_seeder_flooded", [False, True])
async def test_idle_connections_keep_nobody_from_the_pieces(
    shared: Shared, start_session: StartSession, tmp_path: Path, is_seeder_flooded: bool
) -> None:
    """As many as there are places: from one host, they are shut out; and who dials in leaves room to dial out."""
    seeder, leecher = await start_session(peer_limit=40), await start_session(peer_limit=40)
    await seeder.seed(shared.content, shared.path, shared.layer)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    async with flood(seeder if is_seeder_flooded else leecher, shared, 130):
        torrent.connect(LOOPBACK, seeder.port)
        await torrent.fetch(range(13), patience_s=10.0)
    assert torrent.path.read_bytes() == shared.data


async def test_who_dials_in_leaves_room_to_dial_out(
    shared: Shared, start_session: StartSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is shut out here, as if each connection came from another host."""
    monkeypatch.setattr("meshswarm.artifacts.torrent.door.MOST_OF_ONE_HOST", 10_000)
    seeder, leecher = await start_session(), await start_session(peer_limit=20)
    await seeder.seed(shared.content, shared.path, shared.layer)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    async with flood(leecher, shared, 80):
        await eventually(lambda: torrent.progress().n_peers >= 40, 20)
        torrent.connect(LOOPBACK, seeder.port)
        await torrent.fetch(range(13), patience_s=10.0)


def test_one_host_is_shut_out_for_a_while() -> None:
    door = Door()
    for port in range(MOST_OF_ONE_HOST):
        assert not door.came(("192.0.2.1", port), 1, 0.0)
    assert not door.came(("192.0.2.2", 1), 1, 0.0) and door.shut() == set()
    assert door.came(("192.0.2.1", 60_000), 1, 1.0)
    assert not door.came(("192.0.2.1", 60_001), 1, 1.0), "is shut out already"
    assert door.shut() == {("192.0.2.1", "192.0.2.1")}
    assert not door.reopen(SHUT_FOR_S) and door.reopen(1.0 + SHUT_FOR_S) and door.shut() == set()


def test_who_left_does_not_count_and_many_files_take_many_connections() -> None:
    door = Door()
    for port in range(10 * MOST_OF_ONE_HOST):
        assert not door.came(("192.0.2.1", port), 1, 0.0)
        door.left(("192.0.2.1", port))
    door.left(("192.0.2.9", 1))
    for port in range(4 * MOST_OF_ONE_HOST):
        assert not door.came(("192.0.2.1", port), MOST_OF_ONE_HOST, 0.0)
    door.forget()
    assert not door.came(("192.0.2.1", 1), 1, 0.0)


def test_an_ipv6_network_is_one_host() -> None:
    door = Door()
    came = [door.came((f"2001:db8::{port:x}", port), 1, 0.0) for port in range(1, MOST_OF_ONE_HOST + 2)]
    assert came == [False] * MOST_OF_ONE_HOST + [True]
    assert door.shut() == {("2001:db8::", "2001:db8::ffff:ffff:ffff:ffff")}
    assert not door.came(("::ffff:192.0.2.1", 1), 1, 0.0)
    for host in range(2 * MAX_SHUT):
        for port in range(MOST_OF_ONE_HOST + 1):
            door.came((f"10.{host >> 8}.{host & 255}.1", port), 1, float(host))
            door.left(("nobody", port))
    assert len(door.shut()) == MAX_SHUT
