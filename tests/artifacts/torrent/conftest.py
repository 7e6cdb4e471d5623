"""Real torrent sessions on loopback, files to share, and peers that lie."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.artifacts.torrent.peers import LOOPBACK, PIECE, Liar, MakeFile, MakeLiar, Shared, StartSession

from meshswarm.artifacts.merkle import piece_layer
from meshswarm.artifacts.torrent import session as sessions
from meshswarm.artifacts.torrent.certificates import TlsIdentity
from meshswarm.artifacts.torrent.content import Content, piece_length_of
from meshswarm.artifacts.torrent.session import TorrentSession


@pytest.fixture
def make_file(tmp_path: Path) -> MakeFile:
    """Random bytes under a name; the same seed gives the same bytes."""

    def make(length: int = 12 * PIECE + 777, name: str = "whole/any name.gguf", seed: int = 1) -> Shared:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(seed).randbytes(length))
        root, layer = piece_layer(path, piece_length_of(length))
        return Shared(path, Content(length, root), layer)

    return make


@pytest.fixture
def shared(make_file: MakeFile) -> Shared:
    """Thirteen pieces, the last of 777 bytes."""
    return make_file()


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions look at their files ten times as often, so that tests need not wait."""
    monkeypatch.setattr(sessions, "LOOK_EVERY_S", 0.1)


@pytest.fixture
async def start_session(tmp_path: Path) -> AsyncIterator[StartSession]:
    """Starts sessions that end with the test, each with a folder of its own unless one is given."""
    sessions: list[TorrentSession] = []

    async def start(host: str = LOOPBACK, **options: Any) -> TorrentSession:
        options.setdefault("folder", tmp_path / f"torrents-{len(sessions)}")
        sessions.append(await TorrentSession.start(host, **options))
        return sessions[-1]

    yield start
    for session in sessions:
        await session.close()


@pytest.fixture
def make_liar(tmp_path: Path) -> Iterator[MakeLiar]:
    """`wrong`: the offsets of the bytes it changes."""
    liars: list[Liar] = []

    def make(shared: Shared, wrong: list[int], host: str = LOOPBACK, tls: TlsIdentity | None = None) -> Liar:
        liars.append(Liar(shared, tmp_path / f"liar-{len(liars)}", wrong, host, tls))
        return liars[-1]

    yield make
    while liars:
        liar = liars.pop()
        del liar.handle, liar.session
