"""A peer killed in the middle: what was said to be on the disk is there, nothing wrong is believed, and it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from tests.artifacts.torrent.peers import LOOPBACK, PIECE, MakeFile, Shared, StartSession

from meshswarm.artifacts.torrent.session import TorrentSession
from meshswarm.errors import ArtifactError

CHILD = """
import asyncio, json, os, sys
from pathlib import Path
from meshswarm.artifacts.torrent import session as sessions
from meshswarm.artifacts.torrent.content import Content

async def main(folder, path, length, root, layer, port):
    sessions.LOOK_EVERY_S, sessions.SAVE_EVERY_S = 0.02, 0.04
    session = await sessions.TorrentSession.start("127.0.0.1", folder=Path(folder))
    print("started", flush=True)
    torrent = await session.open(Content(length, bytes.fromhex(root)), Path(path), Path(layer).read_bytes())
    torrent.connect("127.0.0.1", port)
    print("opened", flush=True)
    for start in range(0, 12, 3):
        await torrent.fetch(range(start, start + 3))
        print("have", *sorted(torrent.have()), flush=True)
    print("closing", flush=True)
    await session.close()
    print("closed", flush=True)

for arguments in map(json.loads, sys.stdin):
    child = os.fork()
    if child == 0:
        print("process", os.getpid(), flush=True)
        asyncio.run(main(*arguments))
        os._exit(0)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""
"""Runs the same fetch again and again, each time in a process of its own."""

PHASES = [
    ("started", 0.0),
    ("opened", 0.0),
    ("opened", 0.1),
    ("have", 0.0),
    ("have 0 1 2 3", 0.05),
    ("closing", 0.0),
    ("closing", 0.01),
    ("closed", 0.0),
]


async def run_until(line: str, then_s: float, parent: asyncio.subprocess.Process, *arguments: object) -> frozenset[int]:
    """Has it fetch until it says `line`, and kills it `then_s` later. The pieces it said it has."""
    assert parent.stdin is not None and parent.stdout is not None
    parent.stdin.write(json.dumps(arguments).encode() + b"\n")
    process = int((await parent.stdout.readline()).split()[1])
    have: frozenset[int] = frozenset()
    async for raw in parent.stdout:
        said = raw.decode()
        if said.startswith("have"):
            have = frozenset(map(int, said.split()[1:]))
        if said.startswith(line):
            break
    await asyncio.sleep(then_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    async for raw in parent.stdout:
        said = raw.decode()
        if said.startswith("have"):
            have = frozenset(map(int, said.split()[1:]))
        if said == "ended\n":
            break
    return have


async def test_a_kill_in_any_phase(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    seeder = await start_session()
    await seeder.seed(shared.content, shared.path, shared.layer)
    layer = tmp_path / "layer"
    layer.write_bytes(shared.layer)
    content = shared.content
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, **pipes)
    for n, (line, then_s) in enumerate(PHASES):
        folder, target = tmp_path / f"notes-{n}", tmp_path / f"pieces-{n}" / "model.gguf"
        arguments = (str(folder), str(target), content.length, content.root.hex(), str(layer), seeder.port)
        said = await run_until(line, then_s, parent, *arguments)
        session = await start_session(folder=folder)
        torrent = await session.open(content, target, shared.layer)
        where = f"killed {then_s} s after {line!r}"
        assert said <= torrent.have(), where
        if torrent.have():
            on_disk = target.read_bytes()
            for span in content.ranges_of(torrent.have()):
                assert on_disk[span.start : span.stop] == shared.data[span.start : span.stop], where
        torrent.connect(LOOPBACK, seeder.port)
        await torrent.fetch(range(13))
        assert target.read_bytes() == shared.data, where
        await session.close()
    assert parent.stdin is not None
    parent.stdin.close()
    assert await parent.wait() == 0


async def fetched(shared: Shared, folder: Path, path: Path, pieces: range) -> None:
    session = await TorrentSession.start(LOOPBACK, folder=folder)
    torrent = await session.open(shared.content, path, shared.layer)
    for index in pieces:
        span = shared.content.piece_range(index)
        assert await torrent.add_piece(index, shared.data[span.start : span.stop])
    await session.close()


async def test_what_was_noted_is_believed_while_the_file_is_as_it_was(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    """Also where nothing could be hashed again: the layer comes from the note's folder."""
    folder, path = tmp_path / "notes", tmp_path / "model.gguf"
    await fetched(shared, folder, path, range(5))
    session = await start_session(folder=folder)
    torrent = await session.open(shared.content, path, None)
    assert torrent.have() == frozenset(range(5))


def bend(path: Path) -> None:
    """Another byte in piece 2, written later."""
    data = bytearray(path.read_bytes())
    data[2 * PIECE + 1] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def cut(path: Path) -> None:
    os.truncate(path, 2 * PIECE + 5)


def replace(path: Path) -> None:
    """Size and date as before, in another file."""
    stat = path.stat()
    other = path.with_name("other")
    data = bytearray(path.read_bytes())
    data[2 * PIECE :] = bytes(len(data) - 2 * PIECE)
    other.write_bytes(data)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize(("change", "left"), [(bend, {0, 1, 3}), (cut, {0, 1}), (replace, {0, 1})])
async def test_what_was_noted_of_a_changed_file_is_not_believed(
    shared: Shared, start_session: StartSession, tmp_path: Path, change: object, left: set[int]
) -> None:
    folder, path = tmp_path / "notes", tmp_path / "model.gguf"
    await fetched(shared, folder, path, range(4))
    change(path)  # type: ignore[operator]
    session = await start_session(folder=folder)
    torrent = await session.open(shared.content, path, shared.layer, have=[range(shared.content.length)])
    assert torrent.have() == left


async def test_a_deleted_file_is_not_believed_to_be_there(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    folder, path = tmp_path / "notes", tmp_path / "model.gguf"
    await fetched(shared, folder, path, range(4))
    path.unlink()
    session = await start_session(folder=folder)
    torrent = await session.open(shared.content, path, shared.layer, have=[(0, PIECE)])
    assert torrent.have() == frozenset()


async def test_notes_of_rubbish_are_no_notes(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    folder, path = tmp_path / "notes", tmp_path / "model.gguf"
    await fetched(shared, folder, path, range(4))
    for note in folder.iterdir():
        note.write_bytes(random.Random(3).randbytes(note.stat().st_size))
    session = await start_session(folder=folder)
    torrent = await session.open(shared.content, path, shared.layer)
    assert torrent.have() == frozenset(range(4))


async def test_ranges_known_elsewhere_are_hashed_and_taken(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    """A whole copy without a note: also where nothing on the disk is a hole."""
    path = tmp_path / "model.gguf"
    path.write_bytes(shared.data)
    bend(path)
    session = await start_session()
    torrent = await session.open(shared.content, path, shared.layer, have=[(0, 4 * PIECE)])
    assert torrent.have() == frozenset(range(13)) - {2}
    with pytest.raises(ArtifactError, match="not within"):
        await session.open(shared.content, path, shared.layer, have=[(0, shared.content.length + 1)])


async def test_a_session_closed_in_the_middle_goes_on_later(
    make_file: MakeFile, start_session: StartSession, tmp_path: Path
) -> None:
    big = make_file(60 * PIECE, "big.gguf")
    seeder = await start_session()
    await seeder.seed(big.content, big.path, big.layer)
    leecher = await start_session(folder=tmp_path / "notes")
    torrent = await leecher.open(big.content, tmp_path / "model.gguf", big.layer)
    leecher.limit(16 * PIECE, 0)
    torrent.connect(LOOPBACK, seeder.port)
    fetching = asyncio.create_task(torrent.fetch(range(60)))
    await asyncio.sleep(1.5)
    await leecher.close()
    with pytest.raises(ArtifactError, match="closed"):
        await fetching
    again = await start_session(folder=tmp_path / "notes")
    resumed = await again.open(big.content, tmp_path / "model.gguf", None)
    assert resumed.have() == torrent.have() and resumed.have()
    resumed.connect(LOOPBACK, seeder.port)
    await resumed.fetch(range(60))
    assert resumed.path.read_bytes() == big.data
    assert resumed.received_bytes <= big.content.bytes_of(frozenset(range(60)) - torrent.have()) + PIECE


async def test_two_processes_do_not_fetch_one_file_at_once(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    one, other = await start_session(folder=tmp_path / "notes"), await start_session(folder=tmp_path / "notes")
    await one.open(shared.content, tmp_path / "model.gguf", shared.layer)
    with pytest.raises(ArtifactError, match="another process"):
        await other.open(shared.content, tmp_path / "model.gguf", shared.layer)
    await one.remove(shared.content)
    await other.open(shared.content, tmp_path / "model.gguf", shared.layer)
