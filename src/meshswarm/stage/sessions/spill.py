"""A file of sealed byte strings that only this process, and only until it forgets the key, can read.

The rules this file keeps: the key lives in memory and nowhere else; every record is sealed with ChaCha20-Poly1305
(RFC 8439) under a nonce that is never used again, the record's number; the file has no name as soon as the platform
allows it, so a crash leaves nothing behind that has one. Calls block on the disk: make them off the event loop.
"""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from meshswarm.errors import LocalError

_NONCE_BYTES = 12


class SpillError(LocalError):
    """Bytes cannot be spilled or had back: no room, or a damaged disk."""


class WipedError(SpillError):
    """The file was wiped, on purpose."""


@dataclass(frozen=True, slots=True)
class SpillRecord:
    """Where a byte string went. `length` is that of the sealed bytes."""

    number: int
    offset: int
    length: int


class SpillFile:
    """Sealed records in a nameless file under `folder`, made at the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._cipher: ChaCha20Poly1305 | None = ChaCha20Poly1305(ChaCha20Poly1305.generate_key())
        self._file: IO[bytes] | None = None
        self._records = 0
        self._size = 0

    def write(self, plain: bytes) -> SpillRecord:
        """Raises SpillError when the disk does not take it, WipedError after `forget_key`."""
        with self._lock:
            cipher = self._cipher
            if cipher is None:
                raise WipedError("spilled rows were wiped")
            number, offset = self._records, self._size
            self._records += 1  # first: a failed write has used its nonce up too
            sealed = cipher.encrypt(number.to_bytes(_NONCE_BYTES, "big"), plain, None)
            try:
                file = self._open()
                file.seek(offset)
                rest = memoryview(sealed)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError as error:
                raise SpillError(f"rows cannot be spilled to {self._folder}: {error.strerror or error}") from error
            self._size += len(sealed)
            return SpillRecord(number, offset, len(sealed))

    def read(self, record: SpillRecord) -> bytes:
        """The bytes that were written. Raises SpillError when they are damaged, WipedError after `forget_key`."""
        with self._lock:
            cipher, file = self._cipher, self._file
            if cipher is None or file is None:
                raise WipedError("spilled rows were wiped")
            sealed = bytearray()
            try:
                file.seek(record.offset)
                while len(sealed) < record.length and (piece := file.read(record.length - len(sealed))):
                    sealed += piece
                return cipher.decrypt(record.number.to_bytes(_NONCE_BYTES, "big"), bytes(sealed), None)
            except OSError as error:
                raise SpillError(f"spilled rows cannot be read: {error.strerror or error}") from error
            except InvalidTag:
                raise SpillError("spilled rows came back damaged") from None

    def forget_key(self) -> None:
        """From here on nobody can read the records, this process included. Never blocks on the disk."""
        self._cipher = None

    def wipe(self) -> None:
        """Forget the key and give the disk space back."""
        self.forget_key()
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self) -> IO[bytes]:
        """The file: without a name from the start on Linux, unlinked at once elsewhere, deleted on close on Windows."""
        if self._file is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder, prefix="rows-", buffering=0)  # noqa: SIM115
        return self._file
