"""Downloads from a real server that behaves, and from one that does not."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.artifacts.sources.web_server import Quirk, WebServer

from meshswarm.artifacts.merkle import file_root, hash_file, model_id, piece_layer
from meshswarm.artifacts.sources import part_file
from meshswarm.artifacts.sources.download import download, hash_remote
from meshswarm.artifacts.sources.faults import ChangedError, MissingError, SourceError
from meshswarm.artifacts.sources.http_source import HttpSource, Patience
from meshswarm.artifacts.sources.pace import DownloadProgress, Retries
from meshswarm.artifacts.sources.part_file import DiskFullError, Expected, PartFile
from meshswarm.artifacts.sources.stream_hash import proof_message
from meshswarm.artifacts.torrent.content import Content
from meshswarm.errors import ArtifactError

PATH = "/models/tiny.gguf"
QUICK = Patience(connect_s=5, stall_s=0.5)
"""For servers that stall. Others have the time that a busy machine takes."""


def retries(max_in_a_row: int = 4) -> Retries:
    return Retries(max_at_first=max_in_a_row, max_in_a_row=max_in_a_row, first_wait_s=0.01, longest_wait_s=0.02)


async def get(web: WebServer, target: Path, *, patience: Patience | None = None, **options: object) -> object:
    async with HttpSource(web.url(PATH), patience=patience) as source:
        return await download(source, target, **{"retries": retries(), **options})  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


def left_over(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


async def test_a_file_comes_whole_with_its_hashes_and_its_rate(web: WebServer, model: bytes, tmp_path: Path) -> None:
    web.put(PATH, model)
    told: list[DownloadProgress] = []
    target = tmp_path / "new" / "tiny.gguf"
    hashed = await get(web, target, progress=told.append)
    assert target.read_bytes() == model
    content = Content(len(model), file_root(target))
    layer = piece_layer(target, content.piece_length)[1]
    assert (hashed.content, hashed.piece_layer) == (content, layer)  # type: ignore[attr-defined]
    assert told[-1].done_bytes == told[-1].total_bytes == len(model) and told[-1].bytes_s > 0
    assert left_over(target.parent) == {"tiny.gguf", ".tiny.gguf.lock"}
    assert await get(web, target) is None and len(web.gets(PATH)) == 1, "what is here is not fetched again"


@pytest.mark.parametrize("cut", [1, 70_000, 1_500_000])
async def test_a_broken_download_goes_on_where_it_broke(web: WebServer, model: bytes, tmp_path: Path, cut: int) -> None:
    web.put(PATH, model, quirks=deque([Quirk(cut_after=cut), Quirk(status=503), Quirk(cut_after=cut)]))
    await get(web, tmp_path / "tiny.gguf")
    assert (tmp_path / "tiny.gguf").read_bytes() == model
    assert [seen.start for seen in web.gets(PATH)] == [0, cut, cut, 2 * cut]
    assert sum(sum(seen.n_sent) for seen in web.gets(PATH)) == len(model)


async def test_a_server_that_stalls_or_drips_is_asked_again(web: WebServer, model: bytes, tmp_path: Path) -> None:
    web.put(PATH, model, quirks=deque([Quirk(stall_after=900_000), Quirk(bytes_s=20_000)]))
    await get(web, tmp_path / "tiny.gguf", patience=QUICK)
    assert (tmp_path / "tiny.gguf").read_bytes() == model and len(web.gets(PATH)) >= 3


async def test_a_server_that_never_gives_anything_is_given_up(web: WebServer, model: bytes, tmp_path: Path) -> None:
    web.put(PATH, model, always=Quirk(status=503))
    with pytest.raises(SourceError, match=r"asks to come back later \(HTTP 503\); tried 3 times"):
        await get(web, tmp_path / "tiny.gguf", retries=retries(2))
    web.put(PATH, model, always=Quirk(status=429, headers=(("Retry-After", "3000"),)))
    with pytest.raises(SourceError, match="HTTP 429") as caught:
        await get(web, tmp_path / "tiny.gguf")
    assert caught.value.retry_after_s == 3000
    web.put(PATH, model, always=Quirk(cut_after=10))
    before = len(web.gets(PATH))
    with pytest.raises(SourceError, match=r"tried 5 times. What came is kept"):
        await get(web, tmp_path / "tiny.gguf")
    assert len(web.gets(PATH)) - before == 5, "ten bytes a try are no progress"


async def test_a_server_without_ranges_begins_anew_and_says_so(web: WebServer, model: bytes, tmp_path: Path) -> None:
    said: list[str] = []
    web.put(PATH, model, has_ranges=False, quirks=deque([Quirk(cut_after=2_000_000)]))
    await get(web, tmp_path / "tiny.gguf", say=said.append)
    assert (tmp_path / "tiny.gguf").read_bytes() == model
    assert said == [f"{web.url(PATH)} gives no parts of it: beginning anew"]


@pytest.mark.parametrize("mark", ["etag", "modified"])
async def test_a_file_that_changes_meanwhile_is_never_mixed(
    web: WebServer, model: bytes, tmp_path: Path, gguf_recipe: type, mark: str
) -> None:
    marks = {"etag": ('"one"', '"two"'), "modified": ("Mon, 02 Nov 2026 10:00:00 GMT", "Tue, 03 Nov 2026 10:00:00 GMT")}
    other = gguf_recipe(n_layers=16, n_embd=96).file(seed=7)
    assert len(other) == len(model)

    def change() -> None:
        web.files[PATH].data = other
        setattr(web.files[PATH], mark, marks[mark][1])

    said: list[str] = []
    quirks = deque([Quirk(cut_after=1_200_000), Quirk(status=503, before=change)])
    web.put(PATH, model, **{"etag": None, mark: marks[mark][0]}, quirks=quirks)
    await get(web, tmp_path / "tiny.gguf", say=said.append)
    assert (tmp_path / "tiny.gguf").read_bytes() == other
    assert said == [f"{web.url(PATH)} has another version of the file: beginning anew"]


async def test_without_any_mark_of_a_version_parts_are_not_joined_unless_the_whole_is_checked(
    web: WebServer, model: bytes, tmp_path: Path
) -> None:
    said: list[str] = []
    web.put(PATH, model, etag=None, quirks=deque([Quirk(cut_after=2_000_000)]))
    await get(web, tmp_path / "a.gguf", say=said.append)
    assert len(said) == 1 and "says nothing by which a change would be noticed" in said[0]
    assert [seen.start for seen in web.gets(PATH)] == [0, 0]
    web.put(PATH, model, etag=None, quirks=deque([Quirk(cut_after=2_000_000)]))
    await get(web, tmp_path / "b.gguf", expected=Expected(sha256=hashlib.sha256(model).digest()))
    assert [seen.start for seen in web.gets(PATH)][2:] == [0, 2_000_000]
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes() == model


@pytest.mark.parametrize(
    ("always", "message"),
    [
        (Quirk(headers=(("Content-Encoding", "gzip"),)), r"packs the file \(gzip\)"),
        (Quirk(is_chunked=True, extra=b"x"), "sends more bytes than it announced"),
        (Quirk(claims_range="bytes 5-9/3000000"), "was asked for the bytes from 0 and gives 5 to 9"),
        (Quirk(claims_range="bytes 0-99/100", claims_length=50), "announces 50 bytes for a part of 100"),
        (Quirk(claims_range="bytes 0-99/*"), "gives a part of the file and does not say which"),
        (Quirk(claims_range=f"bytes 0-99/{1 << 47}", claims_length=100), "that is no model"),
        (Quirk(status=500, headers=()), "is in trouble"),
        (Quirk(status=403), "does not let us have the file"),
        (Quirk(status=418), "answers with HTTP 418"),
    ],
)
async def test_answers_that_cannot_be_right_are_refused(
    web: WebServer, model: bytes, tmp_path: Path, always: Quirk, message: str
) -> None:
    web.put(PATH, model, always=always)
    with pytest.raises(SourceError, match=message):
        await get(web, tmp_path / "tiny.gguf")
    assert "tiny.gguf" not in left_over(tmp_path)


async def test_a_length_that_is_not_the_expected_one_costs_nothing(
    web: WebServer, model: bytes, tmp_path: Path
) -> None:
    web.put(PATH, model)
    with pytest.raises(SourceError, match=f"has a file of {len(model)} bytes, not the 5 that it should have"):
        await get(web, tmp_path / "tiny.gguf", expected=Expected(length=5))
    web.put(PATH, model, has_ranges=False, always=Quirk(claims_length=len(model) - 1000))
    with pytest.raises(ArtifactError, match=r"tiny\.gguf is refused"):
        await get(web, tmp_path / "tiny.gguf")
    with pytest.raises(MissingError, match="there is no file at"):
        async with HttpSource(web.url("/other.gguf")) as source:
            await download(source, tmp_path / "other.gguf")
    web.put(PATH, b"")
    with pytest.raises(ChangedError, match="shorter than it was, or empty"):
        await get(web, tmp_path / "tiny.gguf")


async def test_what_is_no_gguf_ends_at_once(web: WebServer, tmp_path: Path) -> None:
    web.put(PATH, b"<html>please log in</html>" * 1_600_000)
    with pytest.raises(ArtifactError, match="this is no GGUF file"):
        await get(web, tmp_path / "tiny.gguf")
    assert left_over(tmp_path) == set()
    assert sum(web.gets(PATH)[0].n_sent) < 20_000_000, "half of it, and most of that lies in the buffers of sockets"


@pytest.mark.parametrize("wrong", ["content", "sha256", "model_id"])
async def test_another_file_than_the_expected_never_gets_its_name(
    web: WebServer, model: bytes, tmp_path: Path, wrong: str
) -> None:
    (tmp_path / "truth").write_bytes(model)
    content = Content(len(model), file_root(tmp_path / "truth"))
    right = {
        "content": content,
        "sha256": hashlib.sha256(model).digest(),
        "model_id": model_id([(len(model), content.root)]),
    }
    web.put(PATH, model, always=Quirk(flips=(len(model) - 1,)))
    expected = Expected(**{wrong: right[wrong]})  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="is not the file it should be"):
        await get(web, tmp_path / "tiny.gguf", expected=expected)
    assert left_over(tmp_path) == {"truth"}
    web.files[PATH].always = Quirk()
    await get(web, tmp_path / "tiny.gguf", expected=Expected(**right))  # type: ignore[arg-type]
    assert (tmp_path / "tiny.gguf").read_bytes() == model
    if wrong != "sha256":
        (tmp_path / "tiny.gguf").write_bytes(model[:-1] + b"?")
        await get(web, tmp_path / "tiny.gguf", expected=expected)
        assert (tmp_path / "tiny.gguf").read_bytes() == model, "a damaged file is fetched again"


async def test_two_at_once_fetch_it_once(web: WebServer, model: bytes, tmp_path: Path) -> None:
    web.put(PATH, model, always=Quirk(bytes_s=12_000_000))
    said: list[str] = []
    results = await asyncio.gather(*(get(web, tmp_path / "tiny.gguf", say=said.append) for _ in range(3)))
    assert (tmp_path / "tiny.gguf").read_bytes() == model and len(web.gets(PATH)) == 1
    assert sum(result is not None for result in results) == 1
    assert len(said) == 2 and all("waiting for that" in sentence for sentence in said)


async def test_a_cancelled_download_is_gone_on_with(web: WebServer, model: bytes, tmp_path: Path) -> None:
    web.put(PATH, model, quirks=deque([Quirk(stall_after=2_500_000)]))
    task = asyncio.create_task(get(web, tmp_path / "tiny.gguf"))
    part = tmp_path / ".tiny.gguf.part"
    await until(lambda: part.exists() and part.stat().st_size >= 2 << 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await get(web, tmp_path / "tiny.gguf")
    assert (tmp_path / "tiny.gguf").read_bytes() == model
    assert (web.gets(PATH)[1].start or 0) >= 2 << 20


async def test_a_changed_part_or_note_costs_the_part_alone(web: WebServer, model: bytes, tmp_path: Path) -> None:
    part = PartFile(tmp_path / "tiny.gguf")

    async def interrupted() -> None:
        web.put(PATH, model, always=Quirk(cut_after=0), quirks=deque([Quirk(cut_after=2_000_000)]))
        with pytest.raises(SourceError, match="What came is kept"):
            await get(web, tmp_path / "tiny.gguf", retries=retries(1))
        web.files[PATH].always = Quirk()
        web.seen.clear()

    for spoil in (
        lambda: part._part.write_bytes(b"short"),
        lambda: part._note.write_text("{"),
        lambda: part._note.write_text(part._note.read_text().replace('"n_synced": 2', '"n_synced": -2')),
        lambda: part._note.unlink(),
        lambda: part._part.write_bytes(b"no GGUF" * 400_000),
    ):
        await interrupted()
        spoil()
        await get(web, tmp_path / "tiny.gguf")
        assert (tmp_path / "tiny.gguf").read_bytes() == model and web.gets(PATH)[0].start == 0
        (tmp_path / "tiny.gguf").unlink()


async def test_links_lead_nothing_out_of_the_folder(web: WebServer, model: bytes, tmp_path: Path) -> None:
    web.put(PATH, model)
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("tiny.gguf", ".tiny.gguf.part", ".tiny.gguf.part.json"):
        (folder / name).symlink_to(outside)
    await get(web, folder / "tiny.gguf")
    assert outside.read_bytes() == b"mine"
    assert not (folder / "tiny.gguf").is_symlink() and (folder / "tiny.gguf").read_bytes() == model
    (folder / ".other.gguf.lock").symlink_to(outside)
    with pytest.raises(ArtifactError, match=r"other\.gguf cannot be locked"):
        await get(web, folder / "other.gguf")


async def test_room_is_looked_for_first(
    web: WebServer, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.put(PATH, model)
    monkeypatch.setattr(part_file, "SPARE_BYTES", 1 << 60)
    with pytest.raises(DiskFullError, match=r"too full for tiny\.gguf: 4 MB of it are still to come; free"):
        await get(web, tmp_path / "tiny.gguf")
    monkeypatch.undo()
    await get(web, tmp_path / "tiny.gguf")
    assert (tmp_path / "tiny.gguf").read_bytes() == model


@pytest.fixture
def small_disk(tmp_path: Path) -> Callable[[], Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    yield folder  # type: ignore[misc]
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_disk_that_fills_up_meanwhile_loses_nothing(
    web: WebServer, model: bytes, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_file, "SPARE_BYTES", 1 << 20)
    filler = small_disk / "filler"
    web.put(PATH, model)

    def fill(_now: DownloadProgress) -> None:
        if not filler.exists():
            filler.write_bytes(bytes(6 << 20))

    with pytest.raises(DiskFullError, match=r"too full for tiny\.gguf: \d MB of it are still to come; free at least"):
        await get(web, small_disk / "tiny.gguf", progress=fill)
    filler.unlink()
    await get(web, small_disk / "tiny.gguf")
    assert (small_disk / "tiny.gguf").read_bytes() == model
    assert (web.gets(PATH)[-1].start or 0) >= (1 << 20) - (64 << 10)


async def test_a_remote_file_is_hashed_and_kept_nowhere(
    web: WebServer, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    web.put(PATH, model, quirks=deque([Quirk(cut_after=1_000_001), Quirk(cut_after=500_000)]))
    async with HttpSource(web.url(PATH)) as source:
        hashed = await hash_remote(source, retries=retries())
    assert left_over(tmp_path) == set()
    assert sum(sum(seen.n_sent) for seen in web.gets(PATH)) == len(model), "every byte came once"
    (tmp_path / "truth").write_bytes(model)
    root, layer = piece_layer(tmp_path / "truth", hashed.content.piece_length)
    assert hashed.content == Content(len(model), root) and hashed.piece_layer == layer
    assert hashed.head == model[: len(hashed.head)] and model.startswith(hashed.header)
    kept = hash_file(tmp_path / "truth", wanted=list(hashed.header_nodes))[1]
    assert dict(hashed.header_nodes) == kept


async def test_what_was_only_streamed_proves_its_header(web: WebServer, model: bytes) -> None:
    from meshswarm.artifacts.header_proof import verify_message

    web.put(PATH, model)
    async with HttpSource(web.url(PATH)) as source:
        hashed = await hash_remote(source)
    expected = model_id([(len(model), hashed.content.root)])
    assert verify_message(proof_message([hashed]), expected)[1] in (hashed.header, (hashed.header,))


async def test_of_a_slow_link_nothing_is_lost_either(web: WebServer, model: bytes, tmp_path: Path) -> None:
    web.put(PATH, model, quirks=deque([Quirk(bytes_s=150_000)]))
    task = asyncio.create_task(get(web, tmp_path / "tiny.gguf"))
    part = tmp_path / ".tiny.gguf.part"
    await until(lambda: part.exists() and part.stat().st_size > 0)
    here = part.stat().st_size
    assert here < 1 << 20
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await get(web, tmp_path / "tiny.gguf")
    assert (web.gets(PATH)[1].start or 0) >= here and (tmp_path / "tiny.gguf").read_bytes() == model


async def test_who_gives_up_while_a_part_is_hashed_loses_nothing(
    web: WebServer, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.put(PATH, model, always=Quirk(cut_after=0), quirks=deque([Quirk(cut_after=3_000_000)]))
    with pytest.raises(SourceError, match="What came is kept"):
        await get(web, tmp_path / "tiny.gguf", retries=retries(1))
    web.files[PATH].always = Quirk()
    monkeypatch.setattr(part_file, "_READ_BYTES", 1 << 14)
    hashing, hash_more = threading.Event(), PartFile._hash

    def slowly(part: PartFile, chunk: bytes | bytearray) -> None:
        hashing.set()
        time.sleep(0.02)
        hash_more(part, chunk)

    monkeypatch.setattr(PartFile, "_hash", slowly)
    task = asyncio.create_task(get(web, tmp_path / "tiny.gguf"))
    await asyncio.to_thread(hashing.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    monkeypatch.undo()
    await get(web, tmp_path / "tiny.gguf")
    assert web.gets(PATH)[-1].start == 3_000_000 and (tmp_path / "tiny.gguf").read_bytes() == model


async def test_nothing_counts_before_it_is_on_the_disk(
    web: WebServer, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a machine that loses its power would find: the note never speaks of more than was synced."""
    web.put(PATH, model)
    synced: list[int] = []
    noted: list[int] = []
    sync, note = os.fsync, part_file.write_json

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    def write_json(path: Path, fields: dict[str, Any]) -> None:
        assert fields["n_synced"] == synced[-1]
        noted.append(fields["n_synced"])
        note(path, fields)

    monkeypatch.setattr(part_file, "SYNC_BYTES", 1)
    monkeypatch.setattr(part_file.os, "fsync", fsync)
    monkeypatch.setattr(part_file, "write_json", write_json)
    await get(web, tmp_path / "tiny.gguf")
    assert len(noted) >= 3 and len(model) in synced, "and the file as well before it gets its name"
