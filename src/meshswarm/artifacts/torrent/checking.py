"""Which pieces of a file are what its root says: hashed by ourselves, when nobody's word for them will do.

The rule this file keeps: a piece counts as good only when its bytes were just read and lead to the piece layer.
Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from meshswarm.artifacts.merkle import BLOCK_BYTES, HASH_BYTES, ZERO_SUBTREE, n_blocks_of, tree_depth
from meshswarm.artifacts.torrent.content import Content
from meshswarm.errors import ArtifactError


def piece_hash(content: Content, data: bytes | memoryview) -> bytes:
    """The hash of a piece's bytes as it stands in the piece layer; of the only piece of a file, the root."""
    leaves = [hashlib.sha256(data[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES)]
    depth = tree_depth(content.piece_length // BLOCK_BYTES)
    if content.n_pieces == 1:
        depth = tree_depth(n_blocks_of(content.length))
    for level in range(depth):
        if len(leaves) % 2:
            leaves.append(ZERO_SUBTREE[level])
        leaves = [hashlib.sha256(leaves[at] + leaves[at + 1]).digest() for at in range(0, len(leaves), 2)]
    return leaves[0]


def expected_hash(content: Content, layer: bytes | None, index: int) -> bytes | None:
    """What `piece_hash` must give; None where only other peers know: the layer is not here."""
    if content.n_pieces == 1:
        return content.root
    return None if layer is None else layer[index * HASH_BYTES : (index + 1) * HASH_BYTES]


def good_pieces(
    path: Path,
    content: Content,
    layer: bytes | None,
    candidates: Iterable[int],
    is_cancelled: Callable[[], bool] = lambda: False,
) -> frozenset[int]:
    """Those of `candidates` whose bytes in `path` are right; none without a layer. About 1 GB/s.

    Raises ArtifactError when the file cannot be read; one that ends early only has fewer good pieces.
    """
    good = set()
    try:
        with path.open("rb", buffering=0) as file:
            for index in sorted(candidates):
                if is_cancelled():
                    break
                span = content.piece_range(index)
                data = _read(file.fileno(), span)
                if len(data) == len(span) and piece_hash(content, data) == expected_hash(content, layer, index):
                    good.add(index)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    return frozenset(good)


def _read(descriptor: int, span: range) -> memoryview:
    parts = bytearray()
    while len(parts) < len(span):
        got = os.pread(descriptor, len(span) - len(parts), span.start + len(parts))
        if not got:
            break
        parts += got
    return memoryview(parts)


def pieces_with_data(path: Path, content: Content) -> frozenset[int]:
    """Pieces of which anything was ever written, as far as the file system tells holes from data."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return frozenset()
    try:
        end = min(os.fstat(descriptor).st_size, content.length)
        return content.pieces_of(_extents(descriptor, end))
    finally:
        os.close(descriptor)


def _extents(descriptor: int, end: int) -> Iterator[range]:
    at = 0
    while at < end:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
            stop = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data behind `at`; any other: the file system cannot tell
                yield range(at, end)
            return
        if start < end:
            yield range(start, min(stop, end))
        at = stop


def write_out(path: Path) -> None:
    """Have the disk keep what was written to `path`: then it outlives the machine's power, not only this process."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
