"""Content ids: BitTorrent v2 file roots, and the model id made of them.

The rule this file keeps: an id depends on the bytes alone, never on a name or a piece size. A file's root is the root
of a SHA-256 Merkle tree over its 16 KiB blocks (BEP 52: the last block is hashed as long as it is, missing leaves up
to the next power of two are 32 zero bytes), so a torrent of the unmodified file proves the same root.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from meshswarm.artifacts.files import FileStamp
from meshswarm.errors import ArtifactError
from meshswarm.identity import decode_id, encode_id

BLOCK_BYTES = 16 * 1024
HASH_BYTES = 32
MAX_FILE_BYTES = 1 << 46
_MODEL_DOMAIN = "meshswarm/model/1"
_READ_BYTES = 64 * BLOCK_BYTES

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) now and then."""

Node = tuple[int, int]
"""A place in the tree: (level, index), level 0 being the leaves."""


def _zero_subtrees() -> tuple[bytes, ...]:
    """Hash of a subtree of padding only, by level."""
    hashes = [bytes(HASH_BYTES)]
    for _ in range(MAX_FILE_BYTES.bit_length()):
        hashes.append(hashlib.sha256(hashes[-1] * 2).digest())
    return tuple(hashes)


ZERO_SUBTREE = _zero_subtrees()


def tree_depth(n_blocks: int) -> int:
    """Levels above the leaves: the smallest d with 2**d >= n_blocks."""
    return (n_blocks - 1).bit_length()


def n_blocks_of(n_bytes: int) -> int:
    return -(-n_bytes // BLOCK_BYTES)


class MerkleTree:
    """Builds a file root leaf by leaf in O(log n) memory, keeping the hashes of `wanted` nodes on the way."""

    def __init__(self, wanted: Collection[Node] = ()) -> None:
        self._pending: list[bytes | None] = []  # by level: a left node waiting for its right sibling
        self._n_leaves = 0
        self._wanted = frozenset(wanted)
        self.kept: dict[Node, bytes] = {}

    def add_leaf(self, digest: bytes) -> None:
        index = self._n_leaves
        self._n_leaves += 1
        level = 0
        while True:
            if (level, index) in self._wanted:
                self.kept[level, index] = digest
            if level == len(self._pending):
                self._pending.append(None)
            left = self._pending[level]
            if left is None:
                self._pending[level] = digest
                return
            self._pending[level] = None
            digest = hashlib.sha256(left + digest).digest()
            level, index = level + 1, index >> 1

    def root(self) -> bytes:
        """The root, once every leaf is in. Raises ArtifactError when there is none: an empty file has no root."""
        if not self._n_leaves:
            raise ArtifactError("an empty file has no content id")
        depth = tree_depth(self._n_leaves)
        tail: bytes | None = None  # the unfinished node at the right end of the level reached
        for level in range(depth):
            left = self._pending[level]
            if left is not None:
                tail = hashlib.sha256(left + (tail or ZERO_SUBTREE[level])).digest()
            elif tail is not None:
                tail = hashlib.sha256(tail + ZERO_SUBTREE[level]).digest()
            parent = (level + 1, (self._n_leaves - 1) >> (level + 1))
            if tail is not None and parent in self._wanted:
                self.kept[parent] = tail
        root = tail or self._pending[depth]
        assert root is not None
        return root


def hash_file(
    path: Path, *, wanted: Collection[Node] = (), progress: Progress | None = None
) -> tuple[bytes, dict[Node, bytes]]:
    """Root of the file in `path`, and the hashes of its `wanted` nodes. Lets go of the GIL while it hashes.

    Raises ArtifactError when the file is empty, cannot be read, or changes its length meanwhile.
    """
    tree = MerkleTree(wanted)
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    sha256 = hashlib.sha256
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            total = path.stat().st_size
            while got := _read_full(file.readinto, view):
                for start in range(0, got, BLOCK_BYTES):
                    tree.add_leaf(sha256(view[start : min(start + BLOCK_BYTES, got)]).digest())
                done += got
                if progress is not None:
                    progress(done, total)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    if done != total:
        raise ArtifactError(f"{path} changed while it was being hashed: {done} bytes read, {total} expected")
    return tree.root(), tree.kept


def _read_full(readinto: Callable[[memoryview], int | None], view: memoryview) -> int:
    """Fill `view` as far as the file goes: a short read in the middle would shift every later block."""
    filled = 0
    while filled < len(view) and (got := readinto(view[filled:])):
        filled += got
    return filled


def file_root(path: Path, progress: Progress | None = None) -> bytes:
    """The BitTorrent v2 `pieces root` of a file: 32 bytes."""
    return hash_file(path, progress=progress)[0]


def piece_layer_nodes(length: int, piece_length: int) -> list[Node]:
    """The nodes of a file of `length` bytes that make up its piece layer (BEP 52), left to right.

    Empty for a file no longer than one piece: its root says all. Raises ValueError for a piece length that is not a
    power of two of at least 16 KiB.
    """
    level = _piece_level(piece_length)
    if length <= piece_length:
        return []
    return [(level, index) for index in range(-(-length // piece_length))]


def piece_layer(path: Path, piece_length: int, progress: Progress | None = None) -> tuple[bytes, bytes]:
    """(root, piece layer) of the file in `path`: 32 bytes, and 32 for each piece. Blocking, see `hash_file`."""
    nodes = piece_layer_nodes(FileStamp.of(path).size, piece_length)
    root, kept = hash_file(path, wanted=nodes, progress=progress)
    return root, b"".join(kept[node] for node in nodes)


def check_piece_layer(length: int, root: bytes, piece_length: int, layer: bytes) -> None:
    """Raises ArtifactError unless `layer` is the piece layer of the file with this length and root."""
    n_pieces = len(piece_layer_nodes(length, piece_length))
    if len(layer) != n_pieces * HASH_BYTES:
        raise ArtifactError(f"a piece layer has {len(layer)} bytes, not {n_pieces * HASH_BYTES} as its file needs")
    if not n_pieces:
        return
    level = _piece_level(piece_length)
    nodes = [layer[start : start + HASH_BYTES] for start in range(0, len(layer), HASH_BYTES)]
    while len(nodes) > 1:
        if len(nodes) % 2:
            nodes.append(ZERO_SUBTREE[level])
        nodes = [hashlib.sha256(nodes[i] + nodes[i + 1]).digest() for i in range(0, len(nodes), 2)]
        level += 1
    if nodes[0] != root:
        raise ArtifactError("a piece layer does not belong to its file: its hashes do not lead to the file's root")


def _piece_level(piece_length: int) -> int:
    level = tree_depth(max(1, piece_length // BLOCK_BYTES))
    if piece_length != BLOCK_BYTES << level:
        raise ValueError(f"a piece length is a power of two of at least {BLOCK_BYTES} bytes, not {piece_length}")
    return level


def model_id(files: Sequence[tuple[int, bytes]]) -> bytes:
    """Id of a model made of files in order, each (length in bytes, 32-byte root)."""
    digest = hashlib.sha256(_MODEL_DOMAIN.encode() + struct.pack(">I", len(files)))
    for length, root in files:
        digest.update(struct.pack(">Q", length) + root)
    return digest.digest()


def model_id_text(raw: bytes) -> str:
    """The text form of a model id, with its checksum."""
    return encode_id(raw, _MODEL_DOMAIN)


def parse_model_id(text: str) -> bytes:
    """Raises ValueError with a sentence for a person."""
    return decode_id(text, _MODEL_DOMAIN, "model id")
