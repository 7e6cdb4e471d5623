"""Giving back to the disk what a file takes in places that nobody needs any more.

The rule this file keeps: every other byte of the file stays where it is, and its length too; what is given back reads
as zeros. Where the file system makes no holes, the bytes that stay are copied to a file that has them.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from meshswarm.artifacts.files import TEMPORARY_SUFFIX
from meshswarm.artifacts.ranges import Ranges, merged, missing
from meshswarm.errors import ArtifactError

_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE (fallocate(2))."""
_BUFFER_BYTES = 1 << 20


def make_holes(path: Path, ranges: Iterable[range]) -> None:
    """The bytes `ranges` of a file take nothing on disk any more, as far as whole blocks go. Blocking. Raises
    ArtifactError."""
    holes = merged(ranges)
    try:
        with path.open("r+b", buffering=0) as file:
            if all(_punch(file, hole) for hole in holes):
                return
            _copy_without(file, path, holes)
    except OSError as error:
        raise ArtifactError(f"parts of {path} cannot be removed: {error.strerror or error}") from error


def _punch(file: IO[bytes], hole: range) -> bool:
    """False where this system, or the file's, cannot."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", None) or libc.fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return int(fallocate(file.fileno(), _KEEP_SIZE_AND_PUNCH, hole.start, len(hole))) == 0


def _copy_without(file: IO[bytes], path: Path, holes: Ranges) -> None:
    """Replace the file by one without these bytes."""
    length = os.fstat(file.fileno()).st_size
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as out:
            for kept in missing(holes, (range(length),)):
                file.seek(kept.start)
                out.seek(kept.start)
                left = len(kept)
                while left:
                    left -= out.write(file.read(min(left, _BUFFER_BYTES)))
            out.truncate(length)
            os.fsync(out.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
