"""One file as a torrent: which info dict it has, and which pieces its bytes lie in.

The rule this file keeps: everything follows from the length and the root (BEP 52 `pieces root`) alone. A torrent knows
neither a file's name nor its date, nor who made it, so every peer that has the bytes shares them under one info-hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from meshswarm.artifacts.merkle import HASH_BYTES, MAX_FILE_BYTES
from meshswarm.errors import ArtifactError

TORRENT_NAME = "model.gguf"
"""What every file is called in its torrent. On disk it may be called anything."""
_PIECE_LENGTHS = ((1 << 30, 256 << 10), (16 << 30, 1 << 20), (MAX_FILE_BYTES, 4 << 20))
"""(Files up to this many bytes, have pieces of this many): little is fetched in vain of small ones, and the layers of
large ones stay small. Part of the info-hash: changed, no peer finds another's torrents."""

ByteRange = range | tuple[int, int]
"""Bytes from the first number up to, not including, the second."""


def piece_length_of(length: int) -> int:
    """Bytes of each piece, but the last, of a file with `length` bytes."""
    return next(piece for at_most, piece in _PIECE_LENGTHS if length <= at_most)


@dataclass(frozen=True)
class Content:
    """A file known by its `length` in bytes and its BitTorrent v2 `root`. Raises ArtifactError for impossible ones."""

    length: int
    root: bytes

    def __post_init__(self) -> None:
        if not 0 < self.length <= MAX_FILE_BYTES:
            raise ArtifactError(f"no model file has {self.length} bytes")
        if len(self.root) != HASH_BYTES:
            raise ArtifactError(f"a file's root has {HASH_BYTES} bytes, not {len(self.root)}")

    @property
    def piece_length(self) -> int:
        return piece_length_of(self.length)

    @property
    def n_pieces(self) -> int:
        return -(-self.length // self.piece_length)

    @property
    def layer_bytes(self) -> int:
        """Size of the piece layer: 0 for a file no longer than one piece."""
        return self.n_pieces * HASH_BYTES if self.n_pieces > 1 else 0

    def info_dict(self) -> dict[str, object]:
        """The info dict of BEP 52, to be bencoded."""
        return {
            "file tree": {TORRENT_NAME: {"": {"length": self.length, "pieces root": self.root}}},
            "meta version": 2,
            "name": TORRENT_NAME,
            "piece length": self.piece_length,
        }

    @cached_property
    def info_hash(self) -> bytes:
        """SHA-256 of the bencoded info dict: 32 bytes."""
        return hashlib.sha256(bencode(self.info_dict())).digest()

    def piece_range(self, index: int) -> range:
        """The bytes of a piece."""
        start = index * self.piece_length
        return range(start, min(start + self.piece_length, self.length))

    def pieces_of(self, ranges: Iterable[ByteRange]) -> frozenset[int]:
        """Every piece that has a byte of `ranges`. Raises ArtifactError for bytes outside the file."""
        pieces: set[int] = set()
        for start, stop in map(_ends, ranges):
            self._check_within(start, stop)
            if start < stop:
                pieces.update(range(start // self.piece_length, (stop - 1) // self.piece_length + 1))
        return frozenset(pieces)

    def pieces_within(self, ranges: Iterable[ByteRange]) -> frozenset[int]:
        """Every piece all of whose bytes are in one of `ranges`, which neither overlap nor touch."""
        pieces: set[int] = set()
        for start, stop in map(_ends, ranges):
            self._check_within(start, stop)
            last = self.n_pieces if stop == self.length else stop // self.piece_length
            pieces.update(range(-(-start // self.piece_length), last))
        return frozenset(pieces)

    def ranges_of(self, pieces: Iterable[int]) -> list[range]:
        """The bytes of `pieces`, in order, neighbours joined."""
        ranges: list[range] = []
        for index in sorted(set(pieces)):
            piece = self.piece_range(index)
            if ranges and ranges[-1].stop == piece.start:
                ranges[-1] = range(ranges[-1].start, piece.stop)
            else:
                ranges.append(piece)
        return ranges

    def bytes_of(self, pieces: Iterable[int]) -> int:
        return sum(len(self.piece_range(index)) for index in pieces)

    def _check_within(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.length:
            raise ArtifactError(f"bytes {start} to {stop} are not within a file of {self.length}")


def _ends(span: ByteRange) -> tuple[int, int]:
    return (span.start, span.stop) if isinstance(span, range) else span


def bencode(value: object) -> bytes:
    """Bencoding (BEP 3) of numbers, bytes, text, lists, and dicts with text or bytes as keys."""
    match value:
        case int():
            return b"i%de" % value
        case bytes():
            return b"%d:%s" % (len(value), value)
        case str():
            return bencode(value.encode())
        case list():
            return b"l" + b"".join(map(bencode, value)) + b"e"
        case dict():
            items = sorted((key.encode() if isinstance(key, str) else key, item) for key, item in value.items())
            return b"d" + b"".join(bencode(key) + bencode(item) for key, item in items) + b"e"
    raise TypeError(f"{type(value).__name__} cannot be bencoded")
