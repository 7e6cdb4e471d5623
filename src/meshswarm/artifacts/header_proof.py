"""Proving a model file's header to a peer that does not have the file.

The rule this file keeps: nothing of a header is parsed before every 16 KiB block of it was checked against the model
id. A proof message is a u32 length, a msgpack part, and then the header's blocks. The msgpack part names the model's
files (which must hash to the model id), the hashes of the header's blocks, and the Merkle siblings that lead from
them to the file's root; it is checked whole before the first block, and every block as it arrives. A model split into
several files has a header, hashes and siblings for each (version 2 of the message); of one file it is version 1.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from meshswarm.artifacts.gguf.container import MAX_HEADER_BYTES
from meshswarm.artifacts.gguf.split import MAX_PARTS
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

MAX_FILES = MAX_PARTS
MAX_PROOF_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 4 + MAX_PROOF_BYTES + MAX_HEADER_BYTES + MAX_FILES * BLOCK_BYTES
_ONE_FILE, _SEVERAL_FILES = 1, 2
"""Versions of the message."""


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
class FileProof:
    """What proves one file's header, of `header_length` bytes: the hashes of its blocks, and their siblings."""

    header_length: int
    leaves: tuple[bytes, ...]
    siblings: tuple[bytes, ...]

    @classmethod
    def make(cls, file_length: int, header_length: int, kept: Mapping[Node, bytes]) -> FileProof:
        """From the nodes that `nodes_to_keep` named, collected while the file was hashed."""
        n_header = n_blocks_of(header_length)
        siblings = _siblings(n_header, n_blocks_of(file_length))
        leaves = tuple(kept[0, index] for index in range(n_header))
        return cls(header_length, leaves, tuple(kept[node] for node in siblings))

    def root(self, file_length: int) -> bytes:
        """The root that leaves and siblings lead to."""
        n_blocks = n_blocks_of(file_length)
        siblings = iter(self.siblings)
        nodes = list(self.leaves)
        for level in range(tree_depth(n_blocks)):
            if len(nodes) % 2:
                nodes.append(next(siblings) if len(nodes) << level < n_blocks else ZERO_SUBTREE[level])
            nodes = [hashlib.sha256(nodes[at] + nodes[at + 1]).digest() for at in range(0, len(nodes), 2)]
        return nodes[0]


@dataclass(frozen=True, slots=True)
class HeaderProof:
    """The part before the blocks. `files` are (length, root) in order; `proofs` are of their headers."""

    files: tuple[tuple[int, bytes], ...]
    proofs: tuple[FileProof, ...]

    @classmethod
    def make(
        cls, files: Sequence[tuple[int, bytes]], headers: Sequence[tuple[int, Mapping[Node, bytes]]]
    ) -> HeaderProof:
        """`headers`: of each file, the length of its header, and the nodes that `nodes_to_keep` named, collected while
        it was hashed."""
        proofs = (
            FileProof.make(length, header_length, kept)
            for (length, _root), (header_length, kept) in zip(files, headers, strict=True)
        )
        return cls(tuple(files), tuple(proofs))

    @property
    def model_id(self) -> bytes:
        return model_id(self.files)

    @property
    def header_length(self) -> int:
        """Bytes of the first file's header."""
        return self.proofs[0].header_length

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """Bytes of the blocks of each file's header: whole blocks, unless the file ends in the last one."""
        return tuple(
            min(len(proof.leaves) * BLOCK_BYTES, length)
            for proof, (length, _root) in zip(self.proofs, self.files, strict=True)
        )

    @property
    def blocks_length(self) -> int:
        """Bytes of all blocks that follow."""
        return sum(self.block_lengths)

    def encode(self) -> bytes:
        """The message up to the blocks."""
        files = [list(file) for file in self.files]
        proofs = [[proof.header_length, b"".join(proof.leaves), b"".join(proof.siblings)] for proof in self.proofs]
        fields = [_ONE_FILE, files, *proofs[0]] if len(files) == 1 else [_SEVERAL_FILES, files, proofs]
        body = bytes(msgpack.packb(fields))
        if len(body) > MAX_PROOF_BYTES:
            raise ArtifactError(f"the model's files have more headers than a proof of {MAX_PROOF_BYTES} bytes can show")
        return struct.pack(">I", len(body)) + body

    @classmethod
    def parse(cls, body: bytes, expected_id: bytes) -> HeaderProof:
        """The proof in a message's msgpack part, checked against the model id. Raises ArtifactError when it proves
        anything else, or nothing."""
        try:
            fields = msgpack.unpackb(body, raw=False, strict_map_key=True, max_array_len=MAX_FILES, max_map_len=0)
        except (ValueError, msgpack.UnpackException) as error:
            raise _refused(expected_id, f"is not a proof: {error}") from None
        proof = _checked(fields, expected_id)
        if proof.model_id != expected_id:
            raise _refused(expected_id, "belongs to another model")
        for one, (length, root) in zip(proof.proofs, proof.files, strict=True):
            if one.root(length) != root:
                raise _refused(expected_id, "does not lead to the file's root")
        return proof


def _hashes(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))


def _refused(expected_id: bytes, problem: str) -> ArtifactError:
    return ArtifactError(f"the header received for model {model_id_text(expected_id)} is refused: it {problem}")


def _checked(fields: Any, expected_id: bytes) -> HeaderProof:
    """Types, ranges and lengths of a proof's fields, before anything is computed from them."""
    version = fields[0] if isinstance(fields, list) and fields else None
    if type(version) is not int or (version, len(fields)) not in ((_ONE_FILE, 5), (_SEVERAL_FILES, 3)):
        raise _refused(expected_id, "is not a proof of a version known here")
    files = fields[1]
    if not isinstance(files, list) or not 1 <= len(files) <= MAX_FILES or not all(map(_is_file, files)):
        raise _refused(expected_id, "does not name the model's files")
    if (len(files) > 1) != (version == _SEVERAL_FILES):
        raise _refused(expected_id, f"is of a version that is not for a model of {len(files)} files")
    proofs = [fields[2:]] if version == _ONE_FILE else fields[2]
    if not isinstance(proofs, list) or len(proofs) != len(files):
        raise _refused(expected_id, "does not prove the headers of all files")
    checked = HeaderProof(
        tuple((length, root) for length, root in files),
        tuple(_checked_proof(proof, length, expected_id) for proof, (length, _root) in zip(proofs, files, strict=True)),
    )
    if sum(proof.header_length for proof in checked.proofs) > MAX_HEADER_BYTES:
        raise _refused(expected_id, f"is longer than {MAX_HEADER_BYTES >> 20} MiB in all parts together")
    return checked


def _checked_proof(fields: Any, file_length: int, expected_id: bytes) -> FileProof:
    if not isinstance(fields, list) or len(fields) != 3:
        raise _refused(expected_id, "does not prove the headers of all files")
    header_length, leaves, siblings = fields
    if type(header_length) is not int or not 0 < header_length <= min(file_length, MAX_HEADER_BYTES):
        raise _refused(expected_id, f"claims an impossible header length: {header_length!r:.40}")
    n_header = n_blocks_of(header_length)
    n_siblings = len(_siblings(n_header, n_blocks_of(file_length)))
    if type(leaves) is not bytes or len(leaves) != n_header * HASH_BYTES:
        raise _refused(expected_id, "has the wrong number of block hashes")
    if type(siblings) is not bytes or len(siblings) != n_siblings * HASH_BYTES:
        raise _refused(expected_id, "has the wrong number of siblings")
    return FileProof(header_length, _hashes(leaves), _hashes(siblings))


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
    """Takes a proof message in pieces of any size. `headers` are there when they are all complete and proved."""

    def __init__(self, expected_id: bytes) -> None:
        self._expected_id = expected_id
        self._input = bytearray()
        self._blocks = bytearray()  # of the file whose header comes now
        self._done: list[bytes] = []
        self._n_checked = 0
        self.received = 0  # bytes of header blocks that were checked so far
        self.proof: HeaderProof | None = None

    @property
    def headers(self) -> tuple[bytes, ...] | None:
        """The header of each file, once all are proved."""
        is_complete = self.proof is not None and len(self._done) == len(self.proof.files)
        return tuple(self._done) if is_complete else None

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
        lengths = proof.block_lengths
        if self.received + len(self._input) > sum(lengths):
            raise _refused(self._expected_id, "is followed by bytes that do not belong to it")
        start = 0
        while len(self._done) < len(lengths):
            file = len(self._done)
            length = min(BLOCK_BYTES, lengths[file] - len(self._blocks))
            if len(self._input) - start < length:
                break
            self._take_block(proof.proofs[file], self._input[start : start + length])
            start += length
        del self._input[:start]

    def _take_block(self, proof: FileProof, block: bytearray) -> None:
        if hashlib.sha256(block).digest() != proof.leaves[self._n_checked]:
            raise _refused(self._expected_id, f"has a wrong block {self._n_checked}: somebody changed its bytes")
        self._n_checked += 1
        self.received += len(block)
        self._blocks += block
        if self._n_checked == len(proof.leaves):
            self._done.append(bytes(self._blocks[: proof.header_length]))
            self._n_checked = 0
            self._blocks.clear()


def verify_message(message: bytes, expected_id: bytes) -> tuple[HeaderProof, tuple[bytes, ...]]:
    """The proof, and the bytes of each file's header, of a whole message. Raises ArtifactError when it is not exactly
    that."""
    receiver = HeaderReceiver(expected_id)
    receiver.feed(message)
    if receiver.proof is None or receiver.headers is None:
        raise _refused(expected_id, "is incomplete")
    return receiver.proof, receiver.headers
