"""Hashing a model file as it streams past: its root, its piece layer, and what proves its header.

The rule this file keeps: what is no GGUF is noticed in its first bytes, before a link is kept busy for hours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshswarm.artifacts.gguf.container import MAX_HEADER_BYTES, HeaderCutShortError, parse_container
from meshswarm.artifacts.header_proof import HeaderProof, nodes_to_keep
from meshswarm.artifacts.merkle import BLOCK_BYTES, MerkleTree, Node, n_blocks_of, piece_layer_nodes
from meshswarm.artifacts.torrent.content import Content, piece_length_of
from meshswarm.errors import ArtifactError

_FIRST_TRY_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Hashed:
    """A file whose bytes were all seen. `head`: its first bytes, the header in whole 16 KiB blocks, of which
    `header_length` are the header. `header_nodes`: the tree's nodes that prove them."""

    content: Content
    piece_layer: bytes
    header_length: int
    head: bytes
    header_nodes: Mapping[Node, bytes]

    @property
    def header(self) -> bytes:
        return self.head[: self.header_length]


def proof_message(files: Sequence[Hashed]) -> bytes:
    """The message that proves the headers of the model in these files, in order, to anybody who has its id."""
    contents = [(file.content.length, file.content.root) for file in files]
    proof = HeaderProof.make(contents, [(file.header_length, file.header_nodes) for file in files])
    return proof.encode() + b"".join(file.head for file in files)


class StreamHasher:
    """Takes a GGUF of `length` bytes from its start, in pieces of any size. `source` names it in messages."""

    def __init__(self, length: int, source: str) -> None:
        self._length = length
        self._source = source
        self._start = bytearray()  # what came while the header is incomplete
        self._next_try = _FIRST_TRY_BYTES
        self._rest = b""  # less than a block
        self._tree: MerkleTree | None = None
        self._header_nodes: frozenset[Node] = frozenset()
        self._header_length = 0
        self._head = b""
        self.n_bytes = 0

    def feed(self, piece: bytes | memoryview) -> None:
        """Raises ArtifactError when this is no GGUF, or longer than was said."""
        self.n_bytes += len(piece)
        if self.n_bytes > self._length:
            raise ArtifactError(f"{self._source} is longer than the {self._length} bytes it should have")
        if self._tree is not None:
            self._hash(self._tree, piece)
            return
        self._start += piece
        if len(self._start) >= self._next_try or self.n_bytes == self._length:
            self._try_header()

    def _try_header(self) -> None:
        start = bytes(self._start)
        try:
            header = parse_container(start, self._length, self._source, min_tensors=0)
            header_length = header.data_offset
        except HeaderCutShortError:
            if len(start) >= min(self._length, MAX_HEADER_BYTES):
                raise
            self._next_try = 2 * len(start)
            return
        self._header_length = header_length
        n_head = min(n_blocks_of(header_length) * BLOCK_BYTES, self._length)
        if len(start) < n_head:
            self._next_try = n_head
            return
        self._header_nodes = nodes_to_keep(header_length, self._length)
        layer = piece_layer_nodes(self._length, piece_length_of(self._length))
        self._head = start[:n_head]
        self._tree = MerkleTree(self._header_nodes | frozenset(layer))
        self._start.clear()
        self._hash(self._tree, start)

    def _hash(self, tree: MerkleTree, piece: bytes | memoryview) -> None:
        if self._rest:
            missing = BLOCK_BYTES - len(self._rest)
            self._rest += piece[:missing]
            piece = memoryview(piece)[missing:]
            if len(self._rest) < BLOCK_BYTES:
                return
            tree.add_leaf(hashlib.sha256(self._rest).digest())
        view = memoryview(piece)
        whole = len(view) - len(view) % BLOCK_BYTES
        for at in range(0, whole, BLOCK_BYTES):
            tree.add_leaf(hashlib.sha256(view[at : at + BLOCK_BYTES]).digest())
        self._rest = bytes(view[whole:])

    def finish(self) -> Hashed:
        """Once all bytes are in. Raises ArtifactError when some are missing."""
        if self.n_bytes != self._length or self._tree is None:
            raise ArtifactError(f"{self._source} ended after {self.n_bytes} of {self._length} bytes")
        if self._rest:
            self._tree.add_leaf(hashlib.sha256(self._rest).digest())
            self._rest = b""
        root, kept = self._tree.root(), self._tree.kept
        layer = piece_layer_nodes(self._length, piece_length_of(self._length))
        return Hashed(
            Content(self._length, root),
            b"".join(kept[node] for node in layer),
            self._header_length,
            self._head,
            {node: kept[node] for node in self._header_nodes},
        )
