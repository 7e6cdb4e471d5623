"""A remote file onto this disk, and a remote file only looked at.

The rule this file keeps: two that want one file at once fetch it once, and neither sees it before it was checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.sources.answers import RemoteFile
from meshswarm.artifacts.sources.faults import SourceError
from meshswarm.artifacts.sources.http_source import HttpSource
from meshswarm.artifacts.sources.pace import Retries
from meshswarm.artifacts.sources.part_file import Expected, PartFile, Version
from meshswarm.artifacts.sources.stream_hash import Hashed, StreamHasher
from meshswarm.artifacts.sources.transfer import OnProgress, Transfer, in_thread
from meshswarm.artifacts.torrent.content import Content
from meshswarm.errors import ArtifactError

_LOCK_POLL_S = 0.2


async def download(
    source: HttpSource,
    target: Path,
    *,
    expected: Expected | None = None,
    progress: OnProgress | None = None,
    say: Callable[[str], None] | None = None,
    retries: Retries | None = None,
    resume: bool = True,
) -> Hashed | None:
    """The file of `source` as `target`, a safe name in a folder that is made if need be; None when it was there
    already.

    Goes on with what an earlier call left, however that ended. Raises SourceError when the server does not give it,
    ArtifactError when it is not the file expected or no GGUF, DiskFullError.
    """
    expected = expected or Expected()
    say = say or _quiet
    part = PartFile(target)
    try:
        await _lock(part, say)
        if part.is_complete and await in_thread(_is_expected, target, expected):
            return None
        if not resume:
            part.discard()
        sink = _PartSink(part, source, expected)
        known = await in_thread(sink.go_on, say, stop=part.stop)
        await Transfer(source, sink, expected.is_certain, progress, say, retries or Retries()).run(known)
        return await in_thread(part.finish, expected)
    finally:
        part.close()


async def hash_remote(
    source: HttpSource,
    *,
    progress: OnProgress | None = None,
    say: Callable[[str], None] | None = None,
    retries: Retries | None = None,
    expected: Expected | None = None,
) -> Hashed:
    """What the remote GGUF is, from one look at all its bytes. Keeps none of them on disk, its header in memory.

    Raises SourceError when the server does not give it, ArtifactError when it is no GGUF, or not the one expected.
    """
    sink = _HashSink(source, expected or Expected())
    await Transfer(source, sink, False, progress, say or _quiet, retries or Retries()).run()
    return await in_thread(sink.finish)


def _quiet(_sentence: str) -> None:
    """Nobody listens."""


async def _lock(part: PartFile, say: Callable[[str], None]) -> None:
    is_told = False
    while not await in_thread(part.try_lock):
        if not is_told:
            say(f"{part.target.name} is being downloaded by somebody else on this machine: waiting for that")
            is_told = True
        await asyncio.sleep(_LOCK_POLL_S)


def _is_expected(path: Path, expected: Expected) -> bool:
    length = path.stat().st_size
    if expected.length not in (None, length):
        return False
    if expected.content is None and expected.model_id is None:
        return True
    with contextlib.suppress(ArtifactError):
        replace(expected, sha256=None).check(Content(length, file_root(path)), b"", path.name)
        return True
    return False


def _check_length(file: RemoteFile, source: HttpSource, expected: Expected) -> None:
    length = expected.content.length if expected.content is not None else expected.length
    if length not in (None, file.length):
        raise SourceError(f"{source.where} has a file of {file.length} bytes, not the {length} that it should have")


class _PartSink:
    """Into a part file."""

    def __init__(self, part: PartFile, source: HttpSource, expected: Expected) -> None:
        self._part = part
        self._source = source
        self._expected = expected
        self._name = hashlib.sha256(source.url.encode()).hexdigest()  # the URL itself may hold somebody's key

    @property
    def n_bytes(self) -> int:
        return self._part.n_bytes

    @property
    def is_kept(self) -> bool:
        return self.n_bytes > 0

    def go_on(self, say: Callable[[str], None]) -> RemoteFile | None:
        """The file of which a part is here, hashed again; None when there is none that could be gone on with."""
        begun = self._part.begun()
        if begun is None or begun.url != self._name:
            return None
        file = RemoteFile(begun.length, begun.etag, begun.modified, True, self._source.url)
        if file.validator is None and not self._expected.is_certain:
            return None
        if self._source.version is not None and self._source.version != begun.etag:
            return None
        try:
            self._part.start(begun, self._expected)
        except ArtifactError:
            if self._part.begun() is not None:
                raise
            return None  # somebody spoilt it
        say(f"Going on with {self._part.target.name}: {self.n_bytes / 1e6:,.1f} MB of it are here")
        return file

    def begin(self, file: RemoteFile) -> None:
        _check_length(file, self._source, self._expected)
        self._part.discard()
        self._part.start(Version(self._name, file.length, file.etag, file.modified), self._expected)

    def write(self, chunk: bytes | bytearray) -> None:
        self._part.write(chunk)


class _HashSink:
    """Into nothing but hashes."""

    def __init__(self, source: HttpSource, expected: Expected) -> None:
        self._source = source
        self._expected = expected
        self._hasher: StreamHasher | None = None
        self._sha256 = hashlib.sha256()

    @property
    def n_bytes(self) -> int:
        return 0 if self._hasher is None else self._hasher.n_bytes

    @property
    def is_kept(self) -> bool:
        return False

    def begin(self, file: RemoteFile) -> None:
        _check_length(file, self._source, self._expected)
        self._hasher = StreamHasher(file.length, self._source.where)
        self._sha256 = hashlib.sha256()

    def write(self, chunk: bytes | bytearray) -> None:
        assert self._hasher is not None
        self._hasher.feed(memoryview(chunk))
        if self._expected.sha256 is not None:
            self._sha256.update(chunk)

    def finish(self) -> Hashed:
        assert self._hasher is not None
        hashed = self._hasher.finish()
        self._expected.check(hashed.content, self._sha256.digest(), self._source.where)
        return hashed
