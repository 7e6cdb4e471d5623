"""Copying bytes between files the cheapest way the file system knows.

The rule this file keeps: every way gives the same bytes, and a way that does not work here gives way to the next one.
Whole blocks that lie alike in both files are shared where the file system can (Btrfs, XFS: nothing is read or written),
else the kernel copies, else this process does.
"""

from __future__ import annotations

import os
import struct
from typing import IO

_BUFFER_BYTES = 1 << 20
BLOCK_BYTES = 4096
"""File systems that share blocks share none smaller."""
_FICLONERANGE = 0x4020940D
"""Linux's ioctl, `struct file_clone_range` (ioctl_ficlonerange(2))."""
_SHARE_FROM_BYTES = 1 << 20


def copy_range(source: IO[bytes], start: int, target: IO[bytes], position: int, n_bytes: int) -> None:
    """Copy `n_bytes` of `source` from `start` on to `position` of `target`. Raises OSError."""
    head = -start % BLOCK_BYTES
    if (start - position) % BLOCK_BYTES == 0 and n_bytes >= head + _SHARE_FROM_BYTES:
        middle = (n_bytes - head) // BLOCK_BYTES * BLOCK_BYTES
        if _share(source, start + head, target, position + head, middle):
            _copy(source, start, target, position, head)
            done = head + middle
            start, position, n_bytes = start + done, position + done, n_bytes - done
    _copy(source, start, target, position, n_bytes)


def _share(source: IO[bytes], start: int, target: IO[bytes], position: int, n_bytes: int) -> bool:
    """Let both files have the same blocks. False where that cannot be."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.ioctl(target.fileno(), _FICLONERANGE, struct.pack("qQQQ", source.fileno(), start, n_bytes, position))
    except OSError:
        return False
    return True


def _copy(source: IO[bytes], start: int, target: IO[bytes], position: int, n_bytes: int) -> None:
    source.seek(start)
    target.seek(position)
    left = n_bytes
    while left:
        copied = _copy_in_kernel(source, target, left) or _copy_through_buffer(source, target, left)
        if not copied:
            raise OSError(f"the model file ends {left} bytes too early")
        left -= copied


def _copy_in_kernel(source: IO[bytes], target: IO[bytes], n_bytes: int) -> int:
    """Bytes copied by the kernel from one position to the other, both moved on; 0 where it cannot."""
    copy_file_range = getattr(os, "copy_file_range", None)  # Linux only
    if copy_file_range is None:
        return 0
    try:
        return int(copy_file_range(source.fileno(), target.fileno(), n_bytes))
    except OSError:  # not between these file systems: the copy by hand says so if it is anything else
        return 0


def _copy_through_buffer(source: IO[bytes], target: IO[bytes], n_bytes: int) -> int:
    piece = source.read(min(n_bytes, _BUFFER_BYTES))
    written = target.write(piece)
    if written < len(piece):
        source.seek(written - len(piece), os.SEEK_CUR)
    return written
