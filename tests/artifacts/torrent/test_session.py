"""Sharing files between real sessions on loopback."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import psutil
import pytest
from tests.artifacts.torrent.peers import LOOPBACK, PIECE, MakeFile, Shared, StartSession
from tests.net.eventually import eventually

from meshswarm.artifacts.torrent.content import Content
from meshswarm.errors import ArtifactError, ConfigError


def state_of(path: Path) -> list[tuple[str, int, int]]:
    return sorted((str(p), p.stat().st_mtime_ns, p.stat().st_ino) for p in path.parent.rglob("*"))


async def test_a_file_is_seeded_where_it_lies_and_fetched_whole(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    seeder, leecher = await start_session(), await start_session()
    before = state_of(shared.path)
    await seeder.seed(shared.content, shared.path, shared.layer)
    target = tmp_path / "pieces" / "deep" / "model.gguf"
    torrent = await leecher.open(shared.content, target, shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    seen: list[int] = []
    await torrent.fetch(range(13), progress=lambda progress: seen.append(progress.have_bytes))
    assert target.read_bytes() == shared.data
    assert torrent.have() == frozenset(range(13))
    assert seen[-1] == shared.content.length and seen == sorted(seen)
    await seeder.close()
    assert state_of(shared.path) == before, "seeding wrote beside the file"


async def test_only_the_wanted_pieces_are_fetched_and_they_are_on_the_disk(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    seeder, leecher = await start_session(), await start_session()
    served = await seeder.seed(shared.content, shared.path, shared.layer)
    target = tmp_path / "model.gguf"
    torrent = await leecher.open(shared.content, target, shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    for ranges in ([(0, 10)], [(3 * PIECE, 4 * PIECE + 1), (shared.content.length - 1, shared.content.length)]):
        wanted = shared.content.pieces_of(ranges)
        await torrent.fetch(wanted)
        on_disk = target.read_bytes()
        for span in shared.content.ranges_of(wanted):
            assert on_disk[span.start : span.stop] == shared.data[span.start : span.stop]
    assert torrent.have() == frozenset({0, 3, 4, 12})
    assert target.stat().st_blocks * 512 < 6 * PIECE, "more than the pieces takes room on the disk"
    await asyncio.sleep(0.6)
    assert served.sent_bytes <= shared.content.bytes_of({0, 3, 4, 12}) + PIECE


async def test_a_peer_with_some_pieces_serves_them(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    first, second, third = [await start_session() for _ in range(3)]
    await first.seed(shared.content, shared.path, shared.layer)
    half = await second.open(shared.content, tmp_path / "b" / "model.gguf", shared.layer)
    half.connect(LOOPBACK, first.port)
    await half.fetch(range(5))
    await first.close()
    last = await third.open(shared.content, tmp_path / "c" / "model.gguf", shared.layer)
    last.connect(LOOPBACK, second.port)
    await last.fetch(range(5))
    assert (tmp_path / "c" / "model.gguf").read_bytes()[: 5 * PIECE] == shared.data[: 5 * PIECE]


async def test_pieces_are_proved_by_peers_where_the_layer_is_unknown(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    seeder, leecher = await start_session(), await start_session()
    await seeder.seed(shared.content, shared.path, shared.layer)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", None)
    torrent.connect(LOOPBACK, seeder.port)
    await torrent.fetch(range(13))
    assert (tmp_path / "model.gguf").read_bytes() == shared.data


async def test_two_fetches_of_one_content_share_a_torrent(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    seeder, leecher = await start_session(), await start_session()
    served = await seeder.seed(shared.content, shared.path, shared.layer)
    one, other = await asyncio.gather(
        leecher.open(shared.content, tmp_path / "one.gguf", shared.layer),
        leecher.open(shared.content, tmp_path / "other.gguf", shared.layer),
    )
    assert one is other
    one.connect(LOOPBACK, seeder.port)
    await asyncio.gather(one.fetch(range(9)), other.fetch(range(4, 13)), other.fetch([2], priority=7))
    assert one.path.read_bytes() == shared.data
    await asyncio.sleep(0.6)
    assert served.sent_bytes <= shared.content.length + 4 * 16384


async def test_a_root_with_another_length_is_another_content(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    """Whoever claims a length that is not the root's gets nothing, and is in nobody's way."""
    seeder, leecher = await start_session(), await start_session()
    await seeder.seed(shared.content, shared.path, shared.layer)
    claimed = Content(shared.content.length + 1, shared.content.root)
    wrong = await leecher.open(claimed, tmp_path / "wrong.gguf", shared.layer)
    right = await leecher.open(shared.content, tmp_path / "right.gguf", shared.layer)
    assert wrong is not right and leecher.get(claimed) is wrong
    for torrent in (wrong, right):
        torrent.connect(LOOPBACK, seeder.port)
    await right.fetch(range(13))
    assert right.path.read_bytes() == shared.data
    with pytest.raises(ArtifactError):
        await wrong.fetch([12], patience_s=0.5)


async def test_opened_at_once_after_it_was_removed(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    session = await start_session()
    await session.open(shared.content, tmp_path / "model.gguf", shared.layer)
    removing = asyncio.create_task(session.remove(shared.content))
    await asyncio.sleep(0)
    torrent = await session.open(shared.content, tmp_path / "model.gguf", shared.layer)
    await removing
    assert session.get(shared.content) is torrent and torrent.failure is None


async def test_a_file_of_one_piece_and_a_file_of_one_byte(
    make_file: MakeFile, start_session: StartSession, tmp_path: Path
) -> None:
    seeder, leecher = await start_session(), await start_session()
    for length in (1, PIECE):
        small = make_file(length, f"small-{length}.gguf")
        await seeder.seed(small.content, small.path, b"")
        torrent = await leecher.open(small.content, tmp_path / "got" / f"{length}", None)
        torrent.connect(LOOPBACK, seeder.port)
        await torrent.fetch([0])
        assert torrent.path.read_bytes() == small.data


async def test_pieces_from_elsewhere_are_taken_when_they_are_right(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    session = await start_session()
    torrent = await session.open(shared.content, tmp_path / "model.gguf", shared.layer)
    data = shared.data
    wrong = bytearray(data[PIECE : 2 * PIECE])
    wrong[77] ^= 1
    assert not await torrent.add_piece(1, bytes(wrong))
    assert not await torrent.add_piece(1, data[PIECE : 2 * PIECE - 1])
    assert not await torrent.add_piece(13, b"")
    assert not await torrent.add_piece(-1, data[:PIECE])
    fetching = asyncio.create_task(torrent.fetch(range(13)))
    for index in range(13):
        span = shared.content.piece_range(index)
        assert await torrent.add_piece(index, data[span.start : span.stop])
    await fetching
    assert torrent.path.read_bytes() == data
    assert await torrent.add_piece(1, data[PIECE : 2 * PIECE])


async def test_a_layer_that_is_not_the_files_is_refused(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    session = await start_session()
    wrong = bytes(len(shared.layer))
    with pytest.raises(ArtifactError, match="piece layer"):
        await session.seed(shared.content, shared.path, wrong)
    with pytest.raises(ArtifactError, match="piece layer"):
        await session.open(shared.content, tmp_path / "model.gguf", wrong)
    assert not session.torrents() and not (tmp_path / "model.gguf").exists()


async def test_what_is_no_place_for_pieces_is_refused_and_untouched(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    session = await start_session()
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * (shared.content.length + 1))
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "folder").mkdir()
    for name in ("precious", "link", "folder"):
        with pytest.raises(ArtifactError, match=name):
            await session.open(shared.content, tmp_path / name, shared.layer)
    assert precious.read_bytes() == b"x" * (shared.content.length + 1)
    with pytest.raises(ArtifactError, match="changed"):
        await session.seed(Content(5, shared.content.root), shared.path, b"")


async def test_a_torrent_that_was_removed_ends_its_fetches_and_can_be_opened_again(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    session = await start_session()
    torrent = await session.open(shared.content, tmp_path / "model.gguf", shared.layer)
    fetching = asyncio.create_task(torrent.fetch([0]))
    await asyncio.sleep(0.1)
    await session.remove(shared.content)
    with pytest.raises(ArtifactError, match="no longer shared"):
        await fetching
    with pytest.raises(ArtifactError):
        await torrent.add_piece(0, b"")
    again = await session.open(shared.content, tmp_path / "model.gguf", shared.layer)
    assert again is not torrent and await again.add_piece(0, shared.data[:PIECE])


async def test_a_cancelled_fetch_keeps_what_has_come(
    shared: Shared, start_session: StartSession, tmp_path: Path
) -> None:
    session = await start_session()
    torrent = await session.open(shared.content, tmp_path / "model.gguf", shared.layer)
    fetching = asyncio.create_task(torrent.fetch([0, 1]))
    assert await torrent.add_piece(0, shared.data[:PIECE])
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert torrent.missing() == frozenset()
    await torrent.fetch([0], patience_s=1.0)
    with pytest.raises(ArtifactError, match="0 to 12"):
        await torrent.fetch([13])


async def test_a_port_in_use_is_said_and_a_free_one_is_read_back(start_session: StartSession, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            await start_session(port=port)
    session = await start_session(port=port)
    assert session.port == port
    assert (await start_session()).port not in (0, port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_one_port_at_every_address_of_this_machine(
    shared: Shared, start_session: StartSession, tmp_path: Path, host: str
) -> None:
    """libtorrent by itself takes another free port at each."""
    if host == "::" and not has_ipv6():
        pytest.skip("this machine has no IPv6 on loopback")
    seeder, leecher = await start_session(host), await start_session()
    listening = {
        each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN
    }
    assert listening == {seeder.port, leecher.port}
    await seeder.seed(shared.content, shared.path, shared.layer)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect(LOOPBACK, seeder.port)
    await torrent.fetch([0])


@pytest.mark.parametrize("options", [{"host": "no address"}, {"port": 65_536}, {"port": -1}, {"secret": b"short"}])
async def test_settings_that_cannot_work_are_refused(start_session: StartSession, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        await start_session(**options)


async def test_peers_are_dialled_by_address_only(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    torrent = await (await start_session()).open(shared.content, tmp_path / "model.gguf", shared.layer)
    for host, port in (("localhost", 5), ("", 5), (LOOPBACK, 0), (LOOPBACK, 65_536), ("1.2.3", 5)):
        with pytest.raises(ConfigError):
            torrent.connect(host, port)


async def test_over_ipv6(shared: Shared, start_session: StartSession, tmp_path: Path) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6 on loopback")
    seeder, leecher = await start_session("::1"), await start_session("::1")
    await seeder.seed(shared.content, shared.path, shared.layer)
    torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
    torrent.connect("0:0:0:0:0:0:0:1", seeder.port)
    await torrent.fetch(range(13))
    assert torrent.path.read_bytes() == shared.data


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_a_rate_limit_holds_at_once(make_file: MakeFile, start_session: StartSession, tmp_path: Path) -> None:
    """More than the limit and what was under way when it was set never comes, however fast the machine is."""
    big = make_file(16 * PIECE, "big.gguf")
    seeder, leecher = await start_session(), await start_session()
    await seeder.seed(big.content, big.path, big.layer)
    torrent = await leecher.open(big.content, tmp_path / "model.gguf", big.layer)
    leecher.limit(PIECE, 0)
    torrent.connect(LOOPBACK, seeder.port)
    began = time.monotonic()
    fetching = asyncio.create_task(torrent.fetch(range(16)))
    await eventually(lambda: torrent.received_bytes)
    await asyncio.sleep(0.6)
    assert torrent.received_bytes <= (time.monotonic() - began + 1) * PIECE
    assert torrent.missing()
    leecher.limit(0, 0)
    await fetching
    assert torrent.path.read_bytes() == big.data
    with pytest.raises(ConfigError):
        leecher.limit(-1, 0)


async def test_more_alerts_than_the_queue_holds(
    make_file: MakeFile, start_session: StartSession, tmp_path: Path
) -> None:
    """Lost alerts are made up for: 150 pieces arrive while the loop sleeps and the queue holds 10."""
    many = make_file(150 * PIECE, "many.gguf")
    seeder, leecher = await start_session(), await start_session()
    leecher._engine.apply({"alert_queue_size": 10})
    await seeder.seed(many.content, many.path, many.layer)
    torrent = await leecher.open(many.content, tmp_path / "model.gguf", many.layer)
    torrent.connect(LOOPBACK, seeder.port)
    fetching = asyncio.create_task(torrent.fetch(range(150)))
    while not fetching.done():
        await asyncio.sleep(0.05)
        await asyncio.to_thread(os.sched_yield)
        block_the_loop()
    await fetching
    assert torrent.path.read_bytes() == many.data


def block_the_loop() -> None:
    """As a busy program would: nobody reads alerts meanwhile."""
    time.sleep(0.3)


async def test_an_unknown_content_is_not_here(shared: Shared, start_session: StartSession) -> None:
    session = await start_session()
    assert session.get(shared.content) is None
    await session.remove(shared.content)
    await session.close()
    await session.close()
    with pytest.raises(ArtifactError, match="closed"):
        await session.seed(shared.content, shared.path, shared.layer)


def test_on_uvloop(shared: Shared, tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")
    from meshswarm.artifacts.torrent.session import TorrentSession

    async def share() -> bytes:
        seeder = await TorrentSession.start(LOOPBACK, folder=tmp_path / "a")
        leecher = await TorrentSession.start(LOOPBACK, folder=tmp_path / "b")
        await seeder.seed(shared.content, shared.path, shared.layer)
        torrent = await leecher.open(shared.content, tmp_path / "model.gguf", shared.layer)
        torrent.connect(LOOPBACK, seeder.port)
        await torrent.fetch(range(13))
        await seeder.close()
        await leecher.close()
        return torrent.path.read_bytes()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(share()) == shared.data
