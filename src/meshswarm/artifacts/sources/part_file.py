"""A file that is being downloaded: `.NAME.part`, a note beside it, and a lock.

The rule this file keeps: a file stands under its real name complete and checked, or not at all. Whatever dies and
whenever: what counts as being here is what was synced to the disk before it was noted, and it is hashed again when the
download goes on.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from meshswarm.artifacts.files import read_json, write_json
from meshswarm.artifacts.merkle import model_id
from meshswarm.artifacts.sources.stream_hash import Hashed, StreamHasher
from meshswarm.artifacts.torrent.content import Content
from meshswarm.config import lock_file
from meshswarm.errors import ArtifactError

SYNC_BYTES = 32 << 20
SYNC_S = 2.0
"""Synced and noted after so much or so long, whichever comes first: no more of it is fetched again after a crash."""
SPARE_BYTES = 64 << 20
"""What a download leaves free on the disk."""
_READ_BYTES = 1 << 20
_NOTE_ROOM_BYTES = 64 << 10
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFullError(ArtifactError):
    """The disk has no room; what came so far stays, and the same command goes on from there."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a file must be, as far as anybody said: its length in bytes, its content, the SHA-256 of all its bytes, the
    id of the model that it is all of."""

    length: int | None = None
    content: Content | None = None
    sha256: bytes | None = None
    model_id: bytes | None = None

    @property
    def is_certain(self) -> bool:
        """True where a wrong byte would be noticed."""
        return self.content is not None or self.sha256 is not None or self.model_id is not None

    def check(self, content: Content, sha256: bytes, name: str) -> None:
        """Raises ArtifactError for any other file. `sha256` is looked at only where one is expected."""
        if self.content not in (None, content) or self.model_id not in (
            None,
            model_id([(content.length, content.root)]),
        ):
            raise ArtifactError(f"{name} is not the file it should be: its content id differs")
        if self.sha256 not in (None, sha256):
            raise ArtifactError(f"{name} is not the file it should be: its SHA-256 differs")


@dataclass(frozen=True, slots=True)
class Version:
    """Which version of which file a part belongs to: where it comes from, its length, and the server's mark for it."""

    url: str
    length: int
    etag: str | None
    modified: str | None


class PartFile:
    """The download of `target`. Blocking; one thread at a time."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._part = target.with_name(f".{target.name}.part")
        self._note = target.with_name(f".{target.name}.part.json")
        self._lock_path = target.with_name(f".{target.name}.lock")
        self._lock: IO[str] | None = None
        self._file: IO[bytes] | None = None
        self._version: Version | None = None
        self._hasher: StreamHasher | None = None
        self._sha256: hashlib._Hash | None = None
        self._n_synced = 0
        self._synced_at = 0.0
        self._is_stopped = threading.Event()

    @property
    def is_complete(self) -> bool:
        """True when the file itself is there: a plain file, not a link to one."""
        return _is_plain_file(self.target)

    @property
    def n_bytes(self) -> int:
        """How much of the file is here."""
        return 0 if self._hasher is None else self._hasher.n_bytes

    def try_lock(self) -> bool:
        """False while another process or task downloads the same file. Raises ArtifactError when the folder cannot be
        used."""
        with self._disk("locked"):
            try:
                self.target.parent.mkdir(parents=True, exist_ok=True)
                lock = os.fdopen(_open_plain(self._lock_path, os.O_WRONLY | os.O_CREAT), "w")
            except FileNotFoundError:  # who had the lock has just removed its empty folder
                return False
        try:
            lock_file(lock)
            is_ours = os.path.samestat(os.fstat(lock.fileno()), self._lock_path.stat())  # not one just removed
        except OSError:
            is_ours = False
        if not is_ours:
            lock.close()
            return False
        self._lock = lock
        return True

    @property
    def n_noted(self) -> int:
        """How much of the file counts as being here, by the note."""
        n_synced = (read_json(self._note) or {}).get("n_synced", 0)
        return n_synced if type(n_synced) is int else 0

    def remove(self) -> int:
        """Remove the file, or what came of it, while it is locked. Bytes freed. Raises ArtifactError."""
        n_bytes = 0
        for path in (self.target, self._part):
            with self._disk("removed"), contextlib.suppress(FileNotFoundError):
                n_bytes += path.lstat().st_size
                path.unlink()
        self.discard()
        return n_bytes

    def begun(self) -> Version | None:
        """The version that a part here belongs to; None when there is no part to go on with."""
        fields = read_json(self._note) or {}
        try:
            version = Version(fields["url"], fields["length"], fields["etag"], fields["modified"])
            n_synced = fields["n_synced"]
        except KeyError:
            return None
        marks = (version.etag, version.modified)
        if type(version.url) is not str or not all(mark is None or type(mark) is str for mark in marks):
            return None
        if type(version.length) is not int or type(n_synced) is not int or not 0 < n_synced <= version.length:
            return None
        return version if _is_plain_file(self._part) and self._part.stat().st_size >= n_synced else None

    def start(self, version: Version, expected: Expected) -> None:
        """Go on with the part if it is of `version`, else from nothing. Hashes what is here, until `stop`.

        Raises ArtifactError when what is here, or the disk, is unfit; DiskFullError when there is no room for the rest.
        """
        self._close_file()
        goes_on = self.begun() == version
        n_here = (read_json(self._note) or {}).get("n_synced", 0) if goes_on else 0
        self._version = version
        self._hasher = StreamHasher(version.length, self.target.name)
        self._sha256 = hashlib.sha256() if expected.sha256 is not None else None
        self._n_synced = n_here
        with self._disk("written"), contextlib.ExitStack() as until_hashed:
            file = os.fdopen(_open_plain(self._part, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
            until_hashed.callback(file.close)
            file.truncate(n_here)
            while n_here > self.n_bytes and (chunk := file.read(min(_READ_BYTES, n_here - self.n_bytes))):
                self._hash_or_discard(chunk)
                if self._is_stopped.is_set():
                    raise ArtifactError(f"{self.target.name} was given up while what is here was hashed")
            until_hashed.pop_all()
            self._file = file
        self._synced_at = time.monotonic()
        self._check_room(version.length - self.n_bytes)

    def stop(self) -> None:
        """From another thread: let `start` end soon."""
        self._is_stopped.set()

    def write(self, chunk: bytes | bytearray) -> None:
        """The next bytes. Raises ArtifactError when they cannot be the file's, and forgets them all; DiskFullError."""
        assert self._file is not None
        with self._disk("written"):
            view = memoryview(chunk)
            while view:
                view = view[self._file.write(view) or 0 :]
        self._hash_or_discard(chunk)  # only what was written counts
        is_due = self.n_bytes - self._n_synced >= SYNC_BYTES or time.monotonic() - self._synced_at >= SYNC_S
        if is_due:
            self.sync()

    def sync(self) -> None:
        """Make what was written count, also after the machine loses its power."""
        if self._file is None or self._version is None or self.n_bytes == self._n_synced:
            return
        with self._disk("written"):
            os.fsync(self._file.fileno())
        self._write_note(self._version, self.n_bytes)

    def _write_note(self, version: Version, n_bytes: int) -> None:
        write_json(self._note, {**asdict(version), "n_synced": n_bytes})
        self._n_synced, self._synced_at = n_bytes, time.monotonic()

    def finish(self, expected: Expected) -> Hashed:
        """Check the file and give it its real name. Raises ArtifactError when it is not what was expected; then it is
        gone, as going on with it would give the same again."""
        assert self._file is not None and self._hasher is not None
        try:
            hashed = self._hasher.finish()
            expected.check(hashed.content, self._sha256.digest() if self._sha256 else b"", self.target.name)
        except ArtifactError:
            self.discard()
            raise
        with self._disk("given its name"):
            os.fsync(self._file.fileno())
            self._close_file()
            self._part.replace(self.target)
            self._note.unlink(missing_ok=True)
            _sync_folder(self.target.parent)
        return hashed

    def discard(self) -> None:
        """Forget what came."""
        self._close_file()
        for path in (self._note, self._part):
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Leave what came so far for another time, and let others have a go."""
        with contextlib.suppress(ArtifactError, OSError):
            try:
                self.sync()
            except ArtifactError:
                self._give_back()
        self._close_file()
        lock, self._lock = self._lock, None
        if lock is not None:
            if not self.is_complete and self.begun() is None:
                self._leave_nothing()
            lock.close()

    def _leave_nothing(self) -> None:
        """What is of no use for another time: a folder where nothing came."""
        self.discard()
        with contextlib.suppress(OSError):  # not every system removes a file that is open, and others may be here
            self._lock_path.unlink()
            self.target.parent.rmdir()

    def _give_back(self) -> None:
        """On a full disk: the end of the part for the note about the rest."""
        n_kept = self.n_bytes - _NOTE_ROOM_BYTES
        if self._file is not None and self._version is not None and n_kept > self._n_synced:
            self._file.truncate(n_kept)
            os.fsync(self._file.fileno())
            self._write_note(self._version, n_kept)

    def _hash(self, chunk: bytes | bytearray) -> None:
        assert self._hasher is not None
        self._hasher.feed(memoryview(chunk))
        if self._sha256 is not None:
            self._sha256.update(chunk)

    def _hash_or_discard(self, chunk: bytes | bytearray) -> None:
        """What cannot be a model's would be refused again and again if it stayed."""
        try:
            self._hash(chunk)
        except ArtifactError:
            self.discard()
            raise

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _check_room(self, missing: int) -> None:
        with self._disk("written"):
            free = shutil.disk_usage(self.target.parent).free
        if free < missing + SPARE_BYTES:
            raise self._full(missing, missing + SPARE_BYTES - free)

    def _full(self, missing: int, short: int) -> DiskFullError:
        return DiskFullError(
            f"the disk of {self.target.parent} is too full for {self.target.name}: {missing / 1e6:,.0f} MB of it are "
            f"still to come; free at least {max(short, 10**6) / 1e6:,.0f} MB and run the same command again"
        )

    @contextlib.contextmanager
    def _disk(self, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL and self._version is not None:
                missing = self._version.length - self._n_synced
                raise self._full(missing, missing + SPARE_BYTES - _free(self.target.parent)) from error
            raise ArtifactError(f"{self.target} cannot be {done}: {error.strerror or error}") from error


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _is_plain_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _open_plain(path: Path, flags: int) -> int:
    """Open a file that is no link: one that somebody put there would lead the bytes elsewhere."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)


def _sync_folder(folder: Path) -> None:
    """So that the name is there after the machine loses its power. Not every system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
