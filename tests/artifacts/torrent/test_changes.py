"""Files that others touch while they are shared: nothing wrong is served, and a person is told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.artifacts.torrent.peers import LOOPBACK, PIECE, Shared, StartSession
from tests.net.eventually import eventually

from meshswarm.artifacts.files import FileStamp
from meshswarm.errors import ArtifactError


def bend(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


CHANGES = [lambda path: bend(path, 5 * PIECE), cut, lengthen, replace, Path.unlink]


@pytest.mark.parametrize("change", CHANGES, ids=["one byte", "cut", "longer", "replaced", "deleted"])
async def test_a_changed_file_is_no_longer_seeded_and_that_is_said(
    shared: Shared, start_session: StartSession, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """After the whole file was served once, so that libtorrent itself hashes nothing any more."""
    said: list[str] = []
    seeder, first = await start_session(say=said.append), await start_session()
    served = await seeder.seed(shared.content, shared.path, shared.layer)
    whole = await first.open(shared.content, tmp_path / "first", shared.layer)
    whole.connect(LOOPBACK, seeder.port)
    await whole.fetch(range(13))
    await first.close()
    change(shared.path)
    await eventually(lambda: said, 10)
    assert str(shared.path) in said[0] and served.failure is not None
    second = await start_session()
    torrent = await second.open(shared.content, tmp_path / "second", shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    with pytest.raises(ArtifactError):
        await torrent.fetch(range(13), patience_s=0.6)
    assert torrent.received_bytes == 0
    with pytest.raises(ArtifactError, match=r"any name\.gguf"):
        await served.fetch([0])


async def test_a_change_just_before_it_is_served_is_caught_by_the_hash(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    """No look at the file's date comes in between: the piece is hashed before it is served first."""
    seeder, leecher = await start_session(), await start_session()
    served = await seeder.seed(shared.content, shared.path, shared.layer)
    served._state.watch.is_changed = lambda *_args, **_options: False  # type: ignore[method-assign]
    for index in range(13):
        bend(shared.path, index * PIECE)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    with pytest.raises(ArtifactError):
        await torrent.fetch(range(13), patience_s=0.8)
    assert torrent.have() == frozenset() and torrent.received_bytes == 0
    assert served.failure is not None


async def test_a_seeded_file_is_never_written_to(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    """Not even to mend it, while another peer has what is wrong in it."""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(shared.data)
    bend(copy, 3 * PIECE)
    honest, seeder, leecher = [await start_session() for _ in range(3)]
    right = await honest.seed(shared.content, shared.path, shared.layer)
    served = await seeder.seed(shared.content, copy, shared.layer)
    served._state.suspect = lambda: None  # type: ignore[method-assign] # libtorrent is left alone with what it found
    stamp = FileStamp.of(copy)
    served.connect(LOOPBACK, honest.port)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    with pytest.raises(ArtifactError):
        await torrent.fetch(range(13), patience_s=0.8)
    assert FileStamp.of(copy) == stamp and copy.read_bytes() != shared.data
    assert right.sent_bytes == 0


async def test_a_file_touched_but_not_changed_is_seeded_on(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    said: list[str] = []
    seeder, leecher = await start_session(say=said.append), await start_session()
    served = await seeder.seed(shared.content, shared.path, shared.layer)
    os.utime(shared.path, (1, 1))
    await eventually(lambda: served._upkeep.n_looks, 10)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    await torrent.fetch(range(13))
    assert not said and torrent.path.read_bytes() == shared.data
    assert served._upkeep.n_looks == 1


async def test_a_file_that_changed_since_it_was_hashed_is_not_seeded(
    shared: Shared, start_session: StartSession
) -> None:
    stamp = FileStamp.of(shared.path)
    os.utime(shared.path, (1, 1))
    session = await start_session()
    with pytest.raises(ArtifactError, match="changed"):
        await session.seed(shared.content, shared.path, shared.layer, stamp=stamp)


async def test_a_partly_fetched_file_that_is_bent_loses_that_piece_only(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    said: list[str] = []
    seeder, leecher = await start_session(), await start_session(say=said.append)
    await seeder.seed(shared.content, shared.path, shared.layer)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    await torrent.fetch(range(6))
    await eventually(lambda: torrent._state.watch._stamp is not None, 10)
    bend(torrent.path, 2 * PIECE + 5)
    await eventually(lambda: said, 10)
    await eventually(lambda: torrent.have() == frozenset({0, 1, 3, 4, 5}), 10)
    await torrent.fetch(range(13))
    assert torrent.path.read_bytes() == shared.data


async def test_a_file_deleted_under_a_fetch_is_fetched_anew(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    leecher = await start_session()
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    fetching = asyncio.create_task(torrent.fetch(range(13)))
    for index in (0, 1):
        assert await torrent.add_piece(index, shared.data[index * PIECE : (index + 1) * PIECE])
    await torrent.fetch([0, 1])
    await eventually(lambda: torrent._state.watch._inode is not None, 10)
    torrent.path.unlink()
    await eventually(lambda: torrent.have() == frozenset(), 10)
    for index in range(13):
        span = shared.content.piece_range(index)
        assert await torrent.add_piece(index, shared.data[span.start : span.stop])
    await fetching
    assert torrent.path.read_bytes() == shared.data


async def test_recheck_finds_what_is_wrong(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    session = await start_session()
    torrent = await session.open(shared.content, tmp_path / "model.gguf", shared.layer)
    for index in range(4):
        assert await torrent.add_piece(index, shared.data[index * PIECE : (index + 1) * PIECE])
    await torrent.fetch(range(4))
    bend(torrent.path, 3 * PIECE)
    await torrent.recheck()
    assert torrent.have() == frozenset(range(3))
    seeded = await (await start_session()).seed(shared.content, shared.path, shared.layer)
    await seeded.recheck()
    cut(shared.path)
    with pytest.raises(ArtifactError, match="import it again"):
        await seeded.recheck()


async def test_a_file_that_is_cut_while_it_is_fetched_is_right_in_the_end(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    """What comes later makes it as long again: nobody would see the gap then."""
    seeder, leecher = await start_session(), await start_session()
    await seeder.seed(shared.content, shared.path, shared.layer)
    seeder.limit(0, PIECE * 4)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    fetching = asyncio.create_task(torrent.fetch(range(13)))

    def has_some() -> bool:
        torrent.flush()
        return len(torrent.have()) >= 3

    await eventually(has_some, 20)
    os.truncate(torrent.path, 5)
    await fetching
    assert torrent.path.read_bytes() == shared.data
