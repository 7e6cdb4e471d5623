"""Proving a model file's header to a peer that does not have the file.

The rule this file keeps: nothing of a header is parsed before every 16 KiB block of it was checked against the model
id. A proof message is a u32 length, a msgpack part, and then the header's blocks. The msgpack part names the model's
files (which must hash to the model id), the hashes of the header's blocks, and the Merkle siblings that lead from
them to the first file's root; it is checked whole before the first block, and every block as it arrives.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from meshswarm.artifacts.container import MAX_HEADER_BYTES
from meshswarm.artifacts.merkle import (
    BLOCK_BYTES,
    HASH_BYTES,
    MAX_FILE_BYTES,
    ZERO_SUBTREE,
    Node,
    model_id,
    model_id_text,
    n_blocks_of,
    tree_depth,
)
from meshswarm.errors import ArtifactError

MAX_FILES = 1024
MAX_PROOF_BYTES = 256 * 1024
MAX_MESSAGE_BYTES = 4 + MAX_PROOF_BYTES + MAX_HEADER_BYTES + BLOCK_BYTES
_VERSION = 1


def nodes_to_keep(header_length: int, file_length: int) -> frozenset[Node]:
    """The tree nodes a proof is made of: the header's leaves, and the siblings at the right end of their part."""
    n_header = n_blocks_of(header_length)
    return frozenset((0, index) for index in range(n_header)) | frozenset(_siblings(n_header, n_blocks_of(file_length)))


def _siblings(n_header: int, n_blocks: int) -> list[Node]:
    """The nodes right of the header's part of the tree that its root needs, from the leaves up, without padding."""
    siblings = []
    for level in range(tree_depth(n_blocks)):
        index = -(-n_header >> level)
        if index % 2 and index << level < n_blocks:
            siblings.append((level, index))
    return siblings


@dataclass(frozen=True, slots=True)
class HeaderProof:
    """The part before the blocks. `files` are (length, root) in order; the header is the first file's."""

    files: tuple[tuple[int, bytes], ...]
    header_length: int
    leaves: tuple[bytes, ...]
    siblings: tuple[bytes, ...]

    @classmethod
    def make(cls, files: Sequence[tuple[int, bytes]], header_length: int, kept: Mapping[Node, bytes]) -> HeaderProof:
        """From the nodes that `nodes_to_keep` named, collected while the first file was hashed."""
        n_header = n_blocks_of(header_length)
        siblings = _siblings(n_header, n_blocks_of(files[0][0]))
        return cls(
            tuple(files),
            header_length,
            tuple(kept[0, index] for index in range(n_header)),
            tuple(kept[node] for node in siblings),
        )

    @property
    def model_id(self) -> bytes:
        return model_id(self.files)

    @property
    def blocks_length(self) -> int:
        """Bytes of all header blocks: whole blocks, unless the file ends in the last one."""
        return min(len(self.leaves) * BLOCK_BYTES, self.files[0][0])

    def encode(self) -> bytes:
        """The message up to the blocks."""
        files = [list(file) for file in self.files]
        body = msgpack.packb([_VERSION, files, self.header_length, b"".join(self.leaves), b"".join(self.siblings)])
        return struct.pack(">I", len(body)) + bytes(body)

    @classmethod
    def parse(cls, body: bytes, expected_id: bytes) -> HeaderProof:
        """The proof in a message's msgpack part, checked against the model id. Raises ArtifactError when it proves
        anything else, or nothing."""
        try:
            fields = msgpack.unpackb(body, raw=False, strict_map_key=True, max_array_len=MAX_FILES, max_map_len=0)
        except (ValueError, msgpack.UnpackException) as error:
            raise _refused(expected_id, f"is not a proof: {error}") from None
        files, header_length, leaves, siblings = _checked_fields(fields, expected_id)
        proof = cls(files, header_length, _hashes(leaves), _hashes(siblings))
        if proof.model_id != expected_id:
            raise _refused(expected_id, "belongs to another model")
        if proof._root() != files[0][1]:
            raise _refused(expected_id, "does not lead to the file's root")
        return proof

    def _root(self) -> bytes:
        """The root that leaves and siblings lead to."""
        n_blocks = n_blocks_of(self.files[0][0])
        siblings = iter(self.siblings)
        nodes = list(self.leaves)
        for level in range(tree_depth(n_blocks)):
            if len(nodes) % 2:
                nodes.append(next(siblings) if len(nodes) << level < n_blocks else ZERO_SUBTREE[level])
            nodes = [hashlib.sha256(nodes[at] + nodes[at + 1]).digest() for at in range(0, len(nodes), 2)]
        return nodes[0]


def _hashes(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))


def _refused(expected_id: bytes, problem: str) -> ArtifactError:
    return ArtifactError(f"the header received for model {model_id_text(expected_id)} is refused: it {problem}")


def _checked_fields(fields: Any, expected_id: bytes) -> tuple[tuple[tuple[int, bytes], ...], int, bytes, bytes]:
    """Types, ranges and lengths of a proof's fields, before anything is computed from them."""
    if not isinstance(fields, list) or len(fields) != 5 or fields[0] != _VERSION or isinstance(fields[0], bool):
        raise _refused(expected_id, "is not a proof of a version known here")
    _, files, header_length, leaves, siblings = fields
    if not isinstance(files, list) or not 1 <= len(files) <= MAX_FILES or not all(map(_is_file, files)):
        raise _refused(expected_id, "does not name the model's files")
    length = files[0][0]
    if type(header_length) is not int or not 0 < header_length <= min(length, MAX_HEADER_BYTES):
        raise _refused(expected_id, f"claims an impossible header length: {header_length!r:.40}")
    n_header = n_blocks_of(header_length)
    n_siblings = len(_siblings(n_header, n_blocks_of(length)))
    if type(leaves) is not bytes or len(leaves) != n_header * HASH_BYTES:
        raise _refused(expected_id, "has the wrong number of block hashes")
    if type(siblings) is not bytes or len(siblings) != n_siblings * HASH_BYTES:
        raise _refused(expected_id, "has the wrong number of siblings")
    return tuple((file[0], file[1]) for file in files), header_length, leaves, siblings


def _is_file(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and type(value[0]) is int
        and 0 < value[0] <= MAX_FILE_BYTES
        and type(value[1]) is bytes
        and len(value[1]) == HASH_BYTES
    )


class HeaderReceiver:
    """Takes a proof message in pieces of any size. `header` is there when it is complete and proved."""

    def __init__(self, expected_id: bytes) -> None:
        self._expected_id = expected_id
        self._input = bytearray()
        self._blocks = bytearray()
        self._n_checked = 0
        self.proof: HeaderProof | None = None
        self.header: bytes | None = None

    @property
    def received(self) -> int:
        """Bytes of header blocks that were checked so far."""
        return len(self._blocks)

    def feed(self, piece: bytes | memoryview) -> None:
        """Take the next bytes of the message. Raises ArtifactError at the first that cannot be right."""
        self._input += piece
        if self.proof is None:
            self._take_proof()
        if self.proof is not None:
            self._take_blocks(self.proof)

    def _take_proof(self) -> None:
        if len(self._input) < 4:
            return
        (length,) = struct.unpack_from(">I", self._input)
        if length > MAX_PROOF_BYTES:
            raise _refused(self._expected_id, f"claims a proof of {length} bytes, more than {MAX_PROOF_BYTES}")
        if len(self._input) < 4 + length:
            return
        self.proof = HeaderProof.parse(bytes(self._input[4 : 4 + length]), self._expected_id)
        del self._input[: 4 + length]

    def _take_blocks(self, proof: HeaderProof) -> None:
        if len(self._blocks) + len(self._input) > proof.blocks_length:
            raise _refused(self._expected_id, "is followed by bytes that do not belong to it")
        start = 0
        while self.header is None:
            length = min(BLOCK_BYTES, proof.blocks_length - len(self._blocks))
            if len(self._input) - start < length:
                break
            block = self._input[start : start + length]
            if hashlib.sha256(block).digest() != proof.leaves[self._n_checked]:
                raise _refused(self._expected_id, f"has a wrong block {self._n_checked}: somebody changed its bytes")
            self._n_checked += 1
            self._blocks += block
            start += length
            if self._n_checked == len(proof.leaves):
                self.header = bytes(self._blocks[: proof.header_length])
        del self._input[:start]


def verify_message(message: bytes, expected_id: bytes) -> tuple[HeaderProof, bytes]:
    """The proof and the header's bytes of a whole message. Raises ArtifactError when it is not exactly that."""
    receiver = HeaderReceiver(expected_id)
    receiver.feed(message)
    if receiver.proof is None or receiver.header is None:
        raise _refused(expected_id, "is incomplete")
    return receiver.proof, receiver.header
