"""No room: a clean error, what came is kept, and the fetch goes on once there is room."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.artifacts.torrent.peers import LOOPBACK, MakeFile, Shared, StartSession

from meshswarm.errors import ArtifactError


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, half a MiB of it taken."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system needs root")
    (place / "other").write_bytes(bytes(512 * 1024))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


async def test_a_full_disk(shared: Shared, start_session: StartSession, small_disk: Path) -> None:
    seeder, leecher = await start_session(), await start_session()
    await seeder.seed(shared.content, shared.path, shared.layer)
    target = small_disk / "model.gguf"
    torrent = await leecher.open(shared.content, target, shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    with pytest.raises(ArtifactError, match="disk is full"):
        await torrent.fetch(range(13))
    with pytest.raises(ArtifactError, match="disk is full"):
        await torrent.fetch(range(13))
    data = target.read_bytes()
    for span in shared.content.ranges_of(torrent.have()):
        assert data[span.start : span.stop] == shared.data[span.start : span.stop]
    (small_disk / "other").unlink()
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    kept = torrent.have()
    await torrent.fetch(range(13))
    assert target.read_bytes() == shared.data and kept <= torrent.have()
    await leecher.close()


async def test_a_disk_too_full_for_a_piece_from_elsewhere(
    make_file: MakeFile, start_session: StartSession, small_disk: Path
) -> None:
    big = make_file()
    leecher = await start_session()
    torrent = await leecher.open(big.content, small_disk / "model.gguf", big.layer)
    with pytest.raises(ArtifactError, match="disk is full"):
        for index in range(13):
            span = big.content.piece_range(index)
            await torrent.add_piece(index, big.data[span.start : span.stop])
            await torrent.fetch([index])
    await leecher.close()


LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.session import TorrentSession
from meshswarm.errors import ArtifactError

async def main(folder, path, length, root, layer, port):
    session = await TorrentSession.start("127.0.0.1", folder=Path(folder))
    torrent = await session.open(Content(int(length), bytes.fromhex(root)), Path(path), Path(layer).read_bytes())
    torrent.connect("127.0.0.1", int(port))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    try:
        await torrent.fetch(range(13))
    except ArtifactError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    await torrent.fetch(range(13))
    await session.close()
    print("done")

asyncio.run(main(*sys.argv[1:]))
"""


async def test_files_that_may_not_grow(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    """A limit of the process, as a quota would be."""
    seeder = await start_session()
    await seeder.seed(shared.content, shared.path, shared.layer)
    layer, target = tmp_path / "layer", tmp_path / "model.gguf"
    layer.write_bytes(shared.layer)
    content = shared.content
    arguments = (tmp_path / "n", target, content.length, content.root.hex(), layer, seeder.port)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LIMITED, *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(40):
        out, _ = await child.communicate()
    assert "full" in out.decode() and out.decode().endswith("done\n")
    assert target.read_bytes() == shared.data
