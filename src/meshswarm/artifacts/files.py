"""Small files of the store, written whole or not at all, and stamps that tell whether a big one was touched.

The rule this file keeps: a reader never sees half a file, whichever process writes it and whenever it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshswarm.errors import ArtifactError

TEMPORARY_SUFFIX = ".new"
_STALE_AFTER_S = 86_400.0
_MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What the file system says about a file. Equal stamps: not touched since, as far as anybody can tell cheaply."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Raises ArtifactError when the file cannot be looked at."""
        try:
            stat = path.stat()
        except OSError as error:
            raise ArtifactError(f"the file {path} cannot be used: {error.strerror or error}") from error
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> FileStamp:
        """From a JSON object. Raises KeyError or ValueError when it is not there."""
        return cls(_integer(fields, "size"), _integer(fields, "mtime_ns"), _integer(fields, "inode"))

    def fields(self) -> dict[str, int]:
        return {"size": self.size, "mtime_ns": self.mtime_ns, "inode": self.inode}


def _integer(fields: Mapping[str, Any], key: str) -> int:
    value = fields[key]
    if type(value) is not int:
        raise ValueError(f"{key} is not a number")
    return value


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under its name in one step. Raises ArtifactError when the disk refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {error.strerror or error}") from error


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(fields, indent=1).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None when there is no such file or it is damaged."""
    try:
        with path.open("rb") as file:
            fields = json.loads(file.read(_MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def sweep_temporaries(folder: Path) -> None:
    """Remove what writers that died long ago have left behind."""
    for left_over in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - left_over.stat().st_mtime > _STALE_AFTER_S:
                left_over.unlink()
