"""Downloads that all peers of a user share: nothing is left of failed ones, and a person can remove the others."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import pytest
from tests.artifacts.sources.web_server import Quirk, WebServer

from meshswarm.artifacts import sources
from meshswarm.artifacts.sources import download
from meshswarm.artifacts.sources.faults import MissingError, SourceError
from meshswarm.artifacts.sources.http_source import HttpSource
from meshswarm.artifacts.sources.pace import Retries
from meshswarm.artifacts.sources.part_file import PartFile
from meshswarm.artifacts.sources.remote import targets_of
from meshswarm.artifacts.sources.shared import remove_downloads, unfinished_downloads
from meshswarm.errors import ArtifactError, ConfigError


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "Retries", lambda: Retries(max_at_first=0, max_in_a_row=0, first_wait_s=0.01))


def look_at(url: str) -> None:
    """Hash a remote file, of which nothing is kept."""

    async def look() -> None:
        async with HttpSource(url) as source:
            await download.hash_remote(source)

    asyncio.run(look())


def test_a_wrong_url_leaves_no_folder(web: WebServer, tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        sources.fetch(web.url("/nosuch.gguf"), folder=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.name != "web"] == []


def test_what_is_unfinished_is_named_and_only_that_is_said_to_be_kept(
    web: WebServer, model: bytes, tmp_path: Path
) -> None:
    ref = web.url("/tiny.gguf")
    web.put("/tiny.gguf", model, quirks=deque([Quirk(status=503), Quirk(cut_after=700_000)]))
    with pytest.raises(SourceError, match="Try again later"):
        sources.fetch(ref, folder=tmp_path)
    assert unfinished_downloads(tmp_path) == []
    with pytest.raises(SourceError, match="What came is kept"):
        sources.fetch(ref, folder=tmp_path)
    web.put("/seen.gguf", model, quirks=deque([Quirk(cut_after=700_000)]))
    with pytest.raises(SourceError, match="Try again later"):
        look_at(web.url("/seen.gguf"))
    (left,) = unfinished_downloads(tmp_path)
    assert (left.target,) == targets_of(ref, tmp_path)
    assert (left.n_bytes, left.length) == (700_000, len(model))
    lock = PartFile(left.target)
    assert lock.try_lock()
    with pytest.raises(ArtifactError, match=r"tiny\.gguf is just being downloaded"):
        remove_downloads([left.target], tmp_path)
    lock.close()
    assert remove_downloads([left.target], tmp_path) == 700_000
    assert unfinished_downloads(tmp_path) == [] and not left.target.parent.exists()


def test_nothing_but_downloads_is_removed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "downloads", tmp_path / "mine.gguf"
    folder.mkdir()
    outside.write_bytes(b"mine")
    (folder / "link").symlink_to(tmp_path)
    for path in (outside, folder / ".." / "mine.gguf", folder / "link" / "mine.gguf", folder / ".."):
        with pytest.raises(ConfigError, match="is no download of this program"):
            remove_downloads([path], folder)
    assert outside.read_bytes() == b"mine"
