"""Pieces from real servers, good and bad, checked by their hashes as a torrent checks them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from pathlib import Path

import pytest
from tests.artifacts.sources.web_server import Quirk, WebServer

from meshswarm.artifacts.merkle import piece_layer
from meshswarm.artifacts.sources.http_source import HttpSource, Patience
from meshswarm.artifacts.sources.web_pieces import WebOutcome, WebPieces
from meshswarm.artifacts.sources.web_plan import WebLimits
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.session import TorrentSession

PATH = "/models/tiny.gguf"
LIMITS = WebLimits(max_bytes=1 << 20, first_wait_s=0.01)
PIECE = 256 << 10


class Torrent:
    """The part of a torrent that takes pieces: checks each against the file's own."""

    def __init__(self, model: bytes, wanted: list[int]) -> None:
        self.content = Content(len(model), bytes(32))
        self.hashes = [hashlib.sha256(model[at : at + PIECE]).digest() for at in range(0, len(model), PIECE)]
        self.missing = list(wanted)
        self.have: dict[int, bytes] = {}
        self.n_refused = 0

    def wanted(self) -> list[int]:
        return list(self.missing)

    async def add_piece(self, index: int, data: bytes) -> bool:
        await asyncio.sleep(0)
        if hashlib.sha256(data).digest() != self.hashes[index]:
            self.n_refused += 1
            return False
        self.have[index] = data
        if index in self.missing:
            self.missing.remove(index)
        return True


async def bring(web: WebServer, torrent: Torrent, stall_s: float = 10.0, **options: object) -> WebOutcome:
    patience = Patience(connect_s=5, stall_s=stall_s)
    async with HttpSource(web.url(PATH), patience=patience) as source, asyncio.timeout(30):
        pieces = WebPieces(
            source,
            torrent.content,
            wanted=torrent.wanted,
            add_piece=torrent.add_piece,
            **{"limits": LIMITS, **options},  # type: ignore[arg-type]
        )
        return await pieces.run()


def sent(web: WebServer) -> int:
    return sum(sum(seen.n_sent) for seen in web.gets(PATH))


async def test_exactly_the_wanted_pieces_come(web: WebServer, model: bytes) -> None:
    web.put(PATH, model)
    torrent = Torrent(model, [13, 0, 1, 2, 3, 4, 5, 9])
    outcome = await bring(web, torrent)
    assert outcome == WebOutcome(None, 8, 7 * PIECE + len(model) - 13 * PIECE, 0)
    assert sorted(torrent.have) == [0, 1, 2, 3, 4, 5, 9, 13]
    assert all(data == model[index * PIECE : (index + 1) * PIECE] for index, data in torrent.have.items())
    assert sent(web) == outcome.n_bytes + 1, "and one byte to see what is there"
    assert sorted(seen.start or 0 for seen in web.gets(PATH)[1:]) == [0, 4 * PIECE, 9 * PIECE, 13 * PIECE]


async def test_what_peers_bring_meanwhile_is_not_fetched(web: WebServer, model: bytes) -> None:
    web.put(PATH, model)
    torrent = Torrent(model, list(range(14)))

    take = torrent.add_piece

    async def add_piece(index: int, data: bytes) -> bool:
        torrent.missing = [index for index in torrent.missing if index < 2]
        return await take(index, data)

    torrent.add_piece = add_piece  # type: ignore[method-assign]
    outcome = await bring(web, torrent)
    assert outcome.dropped is None and torrent.missing == []
    assert {0, 1} <= torrent.have.keys() <= {0, 1, 4, 8, 12}, "of each request no more than the piece that was coming"


async def test_a_request_that_peers_made_needless_is_ended(web: WebServer, model: bytes) -> None:
    web.put(PATH, model, quirks=deque([Quirk()]), always=Quirk(stall_after=100))
    torrent = Torrent(model, [5])

    async def peers() -> None:
        await asyncio.sleep(0.1)
        torrent.missing.clear()

    async with asyncio.TaskGroup() as group:
        group.create_task(peers())
        outcome = await bring(web, torrent)
    assert outcome == WebOutcome(None, 0, 0, 100)


async def test_a_liar_is_dropped_and_costs_little(web: WebServer, model: bytes) -> None:
    web.put(PATH, model, always=Quirk(flips=tuple(range(7, len(model), PIECE))))
    torrent = Torrent(model, list(range(14)))
    outcome = await bring(web, torrent, limits=WebLimits(max_in_flight=1, max_bytes=2 * PIECE))
    assert outcome.dropped is not None and "gave wrong bytes for 3 pieces" in outcome.dropped
    assert torrent.n_refused == 3 and torrent.have == {} and outcome.n_wasted_bytes >= 3 * PIECE


async def test_one_wrong_piece_spoils_no_other(web: WebServer, model: bytes) -> None:
    web.put(PATH, model, always=Quirk(flips=(3 * PIECE + 1,)))
    torrent = Torrent(model, list(range(14)))
    outcome = await bring(web, torrent)
    assert torrent.missing == [3] and outcome.n_pieces == 13
    assert outcome.dropped is not None and "wrong bytes for all that is still wanted" in outcome.dropped


async def test_a_server_that_stalls_then_gives_is_used_and_one_that_only_stalls_is_dropped(
    web: WebServer, model: bytes
) -> None:
    web.put(PATH, model, quirks=deque([Quirk(), Quirk(stall_after=300_000), Quirk(status=503), Quirk(cut_after=5)]))
    torrent = Torrent(model, list(range(14)))
    assert (await bring(web, torrent, stall_s=0.5)).dropped is None and torrent.missing == []
    web.put(PATH, model, quirks=deque([Quirk()]), always=Quirk(stall_after=1000))
    torrent = Torrent(model, list(range(14)))
    outcome = await bring(web, torrent, stall_s=0.3)
    assert outcome.dropped is not None and "sends next to nothing any more" in outcome.dropped


async def test_a_dripping_server_has_a_deadline(web: WebServer, model: bytes) -> None:
    web.put(PATH, model, quirks=deque([Quirk()]), always=Quirk(bytes_s=400_000))
    torrent = Torrent(model, [0, 1])
    limits = WebLimits(grace_s=0.2, min_bytes_s=1 << 30, max_failures=1, first_wait_s=0.01)
    outcome = await bring(web, torrent, limits=limits)
    assert outcome.dropped is not None and "it is too slow" in outcome.dropped


async def test_a_slow_taker_is_not_the_servers_fault(web: WebServer, model: bytes) -> None:
    web.put(PATH, model)
    torrent = Torrent(model, [0, 1, 2, 3])

    async def limit(_n_bytes: int) -> None:
        await asyncio.sleep(0.1)

    limits = WebLimits(grace_s=1.0, min_bytes_s=1 << 30, max_failures=0)
    outcome = await bring(web, torrent, limit=limit, limits=limits)
    assert outcome.dropped is None and torrent.missing == []


async def test_without_ranges_only_the_whole_file_is_taken(web: WebServer, model: bytes) -> None:
    web.put(PATH, model, has_ranges=False)
    torrent = Torrent(model, [5, 6])
    outcome = await bring(web, torrent)
    assert outcome.dropped == f"{web.url(PATH)}: it does not give parts of a file, only all of it"
    torrent = Torrent(model, list(range(14)))
    assert (await bring(web, torrent)).dropped is None and torrent.missing == []


@pytest.mark.parametrize(
    ("quirk", "message"),
    [
        (Quirk(status=403), "does not let us have the file"),
        (Quirk(status=404), "there is no file at"),
        (Quirk(status=503), "asks to come back later"),
        (Quirk(location=PATH), "was reached over 5 redirects and sends on"),
        (Quirk(location="https://127.0.0.1:1/x"), "cannot be reached"),
        (Quirk(headers=(("Content-Encoding", "br"),)), "packs the file"),
    ],
)
async def test_a_server_that_gives_nothing_is_dropped_with_the_reason(
    web: WebServer, model: bytes, quirk: Quirk, message: str
) -> None:
    web.put(PATH, model, always=quirk)
    outcome = await bring(web, Torrent(model, [0]))
    assert outcome.dropped is not None and message in outcome.dropped


async def test_another_or_a_changed_file_is_not_used(web: WebServer, model: bytes) -> None:
    web.put(PATH, model[:-1])
    outcome = await bring(web, Torrent(model, [0]))
    assert outcome.dropped is not None and f"has a file of {len(model) - 1} bytes" in outcome.dropped
    web.put(PATH, model, quirks=deque([Quirk(), Quirk(headers=(("ETag", '"other"'),))]))
    outcome = await bring(web, Torrent(model, [0]))
    assert outcome.dropped is not None and "has changed" in outcome.dropped


async def test_what_the_taker_raises_ends_it_all(web: WebServer, model: bytes) -> None:
    web.put(PATH, model)
    torrent = Torrent(model, list(range(14)))

    async def full(_index: int, _data: bytes) -> bool:
        raise OSError(28, "No space left on device")

    torrent.add_piece = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space left"):
        await bring(web, torrent)


async def test_a_real_torrent_takes_what_a_liar_and_an_honest_server_bring(
    web: WebServer, cdn: WebServer, model: bytes, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(model)
    root, layer = piece_layer(whole, PIECE)
    content = Content(len(model), root)
    web.put(PATH, model, always=Quirk(flips=tuple(range(9, len(model), 2 * PIECE))))
    cdn.put(PATH, model)
    session = await TorrentSession.start("127.0.0.1", folder=tmp_path / "torrents")
    try:
        torrent = await session.open(content, tmp_path / "part.gguf", layer)
        wanted = [0, 1, 2, 3, 10, 13]
        fetched = asyncio.create_task(torrent.fetch(wanted, patience_s=30))
        await asyncio.sleep(0)
        outcomes = []
        for server in (web, cdn):
            async with HttpSource(server.url(PATH)) as source:
                feeder = WebPieces(
                    source,
                    content,
                    wanted=lambda: sorted(torrent.missing()),
                    add_piece=torrent.add_piece,
                    limits=WebLimits(max_in_flight=1, max_bytes=PIECE),
                )
                outcomes.append(await feeder.run())
        await fetched
        assert outcomes[0].dropped is not None and "wrong bytes for 3 pieces" in outcomes[0].dropped
        assert outcomes[1].dropped is None and outcomes[0].n_pieces + outcomes[1].n_pieces == len(wanted)
        assert torrent.have() == frozenset(wanted)
    finally:
        await session.close()
    data = (tmp_path / "part.gguf").read_bytes()
    for index in wanted:
        piece = content.piece_range(index)
        assert data[piece.start : piece.stop] == model[piece.start : piece.stop]
