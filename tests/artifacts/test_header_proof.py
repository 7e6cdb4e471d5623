"""Header proofs: what is proved arrives whole, and no changed bit passes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.artifacts.header_proof import (
    MAX_PROOF_BYTES,
    FileProof,
    HeaderProof,
    HeaderReceiver,
    nodes_to_keep,
    verify_message,
)
from meshswarm.artifacts.merkle import BLOCK_BYTES, MAX_FILE_BYTES, hash_file, model_id
from meshswarm.errors import ArtifactError


def prove(*parts: tuple[Path, int]) -> tuple[HeaderProof, bytes]:
    """Proof and message for files with headers of these lengths."""
    files, headers = [], []
    for path, header_length in parts:
        length = path.stat().st_size
        root, kept = hash_file(path, wanted=nodes_to_keep(header_length, length))
        files.append((length, root))
        headers.append((header_length, kept))
    proof = HeaderProof.make(files, headers)
    blocks = [path.read_bytes()[:length] for (path, _), length in zip(parts, proof.block_lengths, strict=True)]
    return proof, b"".join([proof.encode(), *blocks])


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> tuple[HeaderProof, bytes]:
    """A file of 11 blocks and a bit, whose header ends inside the third."""
    path = tmp_path_factory.mktemp("proof") / "data.bin"
    path.write_bytes(bytes(i * i % 251 for i in range(11 * BLOCK_BYTES + 100)))
    return prove((path, 2 * BLOCK_BYTES + 5))


def test_the_embedded_models_header_arrives_in_small_pieces(smollm2: Path) -> None:
    header = read_header(smollm2)
    proof, message = prove((smollm2, header.data_offset))
    assert len(message) - proof.blocks_length < 4096, "the proof itself is small"
    receiver = HeaderReceiver(proof.model_id)
    for at in range(0, len(message), 1300):
        assert receiver.headers is None
        receiver.feed(message[at : at + 1300])
    assert receiver.headers == (header.raw,)
    assert receiver.received == proof.blocks_length


@given(st.integers(1, 12 * BLOCK_BYTES), st.integers(1, 12 * BLOCK_BYTES))
@settings(max_examples=60, deadline=None)
def test_every_shape_of_file_and_header(tmp_path_factory: pytest.TempPathFactory, a: int, b: int) -> None:
    header_length, length = sorted((a, b))
    path = tmp_path_factory.mktemp("shape") / "data.bin"
    path.write_bytes(bytes(i % 253 for i in range(length)))
    proof, message = prove((path, header_length))
    assert verify_message(message, proof.model_id) == (proof, (path.read_bytes()[:header_length],))


@pytest.fixture(scope="module")
def proved_parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[HeaderProof, bytes]:
    """Three files: of three blocks and a bit with a header of two, of one block, and of five that are all header."""
    parts = []
    for number, (length, header_length) in enumerate([(50_000, 20_000), (16_384, 30), (70_000, 70_000)]):
        path = tmp_path_factory.mktemp("parts") / f"{number}.bin"
        path.write_bytes(bytes((i * i + number) % 251 for i in range(length)))
        parts.append((path, header_length))
    return prove(*parts)


@pytest.mark.parametrize("step", [7, 1300, 1 << 20])
def test_the_headers_of_all_files_arrive(proved_parts: tuple[HeaderProof, bytes], step: int) -> None:
    proof, message = proved_parts
    receiver = HeaderReceiver(proof.model_id)
    for at in range(0, len(message), step):
        receiver.feed(message[at : at + step])
    assert receiver.proof == proof
    assert receiver.headers is not None
    assert [len(header) for header in receiver.headers] == [20_000, 30, 70_000]
    assert receiver.headers[1] == bytes((i * i + 1) % 251 for i in range(30))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_flipped_bit_passes_in_a_proof_of_several_files(
    proved_parts: tuple[HeaderProof, bytes], data: st.DataObject
) -> None:
    proof, message = proved_parts
    start = data.draw(st.sampled_from([0, len(message) - proof.blocks_length]), label="in the proof or in the blocks")
    bit = data.draw(st.integers(start * 8, len(message) * 8 - 1))
    changed = bytearray(message)
    changed[bit // 8] ^= 1 << bit % 8
    try:
        parsed, headers = verify_message(bytes(changed), proof.model_id)
    except ArtifactError:
        return
    wrong = [at for at in range(3) if parsed.proofs[at].header_length != proof.proofs[at].header_length]
    assert len(wrong) == 1, "only one file's claimed length, inside its last block, is unproved"
    assert parsed.files == proof.files and len(headers) == 3


@pytest.mark.parametrize(
    "bend",
    [
        lambda fields: fields[2].pop(),
        lambda fields: fields[2].append(fields[2][0]),
        lambda fields: fields[2][1].pop(),
        lambda fields: fields[2].__setitem__(1, None),
        lambda fields: fields[2].__setitem__(1, fields[2][0]),
        lambda fields: fields[2].reverse(),
        lambda fields: fields[1].reverse(),
        lambda fields: fields.append(1),
        lambda fields: fields.__setitem__(0, 1),
        lambda fields: fields.__setitem__(0, 3),
        lambda fields: fields.__setitem__(2, 5),
        lambda fields: fields.__setitem__(1, fields[1][:1]),
    ],
)
def test_a_bent_proof_of_several_files_is_refused(proved_parts: tuple[HeaderProof, bytes], bend: Any) -> None:
    proof, message = proved_parts
    fields = msgpack.unpackb(message[4 : len(message) - proof.blocks_length])
    bend(fields)
    with pytest.raises(ArtifactError, match="is refused"):
        HeaderProof.parse(bytes(msgpack.packb(fields)), proof.model_id)


def test_a_proof_of_version_1_that_names_several_files_is_refused(proved_parts: tuple[HeaderProof, bytes]) -> None:
    """As peers wrote it before models could be split: it proves the first header alone."""
    proof = proved_parts[0]
    first = proof.proofs[0]
    fields = [1, [list(file) for file in proof.files], first.header_length, b"".join(first.leaves)]
    with pytest.raises(ArtifactError, match="of a version that is not for a model of 3 files"):
        HeaderProof.parse(bytes(msgpack.packb([*fields, b"".join(first.siblings)])), proof.model_id)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_flipped_bit_is_refused(proved: tuple[HeaderProof, bytes], data: st.DataObject) -> None:
    proof, message = proved
    start = data.draw(st.sampled_from([0, len(message) - proof.blocks_length]), label="in the proof or in the blocks")
    bit = data.draw(st.integers(start * 8, len(message) * 8 - 1))
    changed = bytearray(message)
    changed[bit // 8] ^= 1 << bit % 8
    try:
        parsed, (header,) = verify_message(bytes(changed), proof.model_id)
    except ArtifactError:
        return
    assert parsed.header_length != proof.header_length, "only the claimed length, inside its last block, is unproved"
    assert header == message[-proof.blocks_length :][: parsed.header_length]


@given(st.integers(0, 4), st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_noise_is_refused(length_bytes: int, noise: bytes) -> None:
    with pytest.raises(ArtifactError):
        verify_message(bytes(length_bytes) + noise, b"i" * 32)


def test_a_cut_or_longer_message_is_refused(proved: tuple[HeaderProof, bytes]) -> None:
    proof, message = proved
    for length in (0, 3, 4, 20, len(message) - proof.blocks_length, len(message) - 1):
        with pytest.raises(ArtifactError, match="it is incomplete"):
            verify_message(message[:length], proof.model_id)
    with pytest.raises(ArtifactError, match="followed by bytes that do not belong"):
        verify_message(message + b"x", proof.model_id)


def test_a_wrong_block_is_refused_as_it_arrives(proved: tuple[HeaderProof, bytes]) -> None:
    proof, message = proved
    start = len(message) - proof.blocks_length
    receiver = HeaderReceiver(proof.model_id)
    receiver.feed(message[:start])
    receiver.feed(message[start : start + BLOCK_BYTES])
    assert receiver.received == BLOCK_BYTES
    with pytest.raises(ArtifactError, match="wrong block 1"):
        receiver.feed(bytes(BLOCK_BYTES))
    assert receiver.received == BLOCK_BYTES


def test_the_proof_of_another_model_is_refused(proved: tuple[HeaderProof, bytes]) -> None:
    with pytest.raises(ArtifactError, match="belongs to another model"):
        verify_message(proved[1], b"i" * 32)


def body(proof: HeaderProof, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "version": 1,
        "files": [list(file) for file in proof.files],
        "header_length": proof.header_length,
        "leaves": b"".join(proof.proofs[0].leaves),
        "siblings": b"".join(proof.proofs[0].siblings),
    }
    return bytes(msgpack.packb(list((fields | changes).values())))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"version": True},
        {"files": []},
        {"files": [[1, b"r" * 31]]},
        {"files": [[0, b"r" * 32]]},
        {"files": [[-1, b"r" * 32]]},
        {"files": [[MAX_FILE_BYTES + 1, b"r" * 32]]},
        {"files": [[True, b"r" * 32]]},
        {"files": [[1.5, b"r" * 32]]},
        {"files": [[1, "r" * 32]]},
        {"files": {"a": 1}},
        {"files": None},
        {"header_length": 0},
        {"header_length": -1},
        {"header_length": (64 << 20) + 1},
        {"header_length": 12 * BLOCK_BYTES},
        {"header_length": 2 * BLOCK_BYTES},
        {"header_length": "5"},
        {"leaves": b""},
        {"leaves": b"l" * 32},
        {"leaves": "l" * 96},
        {"siblings": b""},
        {"siblings": b"s" * 31},
        {"siblings": None},
        {"more": 1},
    ],
    ids=str,
)
def test_fields_that_cannot_be_are_refused(proved: tuple[HeaderProof, bytes], changes: dict[str, Any]) -> None:
    proof = proved[0]
    assert HeaderProof.parse(body(proof), proof.model_id) == proof
    changed = body(proof, **changes)
    with pytest.raises(ArtifactError, match="is refused"):
        HeaderProof.parse(changed, proof.model_id)


def test_wrong_hashes_under_the_right_id_do_not_lead_to_the_root(proved: tuple[HeaderProof, bytes]) -> None:
    proof = proved[0]
    leaves = bytearray(b"".join(proof.proofs[0].leaves))
    leaves[40] ^= 1
    with pytest.raises(ArtifactError, match="does not lead to the file's root"):
        HeaderProof.parse(body(proof, leaves=bytes(leaves)), proof.model_id)


def test_a_tree_as_deep_as_the_largest_file_is_no_problem() -> None:
    files = ((MAX_FILE_BYTES, b"r" * 32),)
    siblings = len(nodes_to_keep(1, MAX_FILE_BYTES)) - 1
    proof = HeaderProof(files, (FileProof(1, (b"l" * 32,), (b"s" * 32,) * siblings),))
    with pytest.raises(ArtifactError, match="does not lead to the file's root"):
        HeaderProof.parse(body(proof), model_id(files))


def test_a_huge_proof_is_refused_by_its_length_alone() -> None:
    with pytest.raises(ArtifactError, match="claims a proof of 4294967295 bytes"):
        HeaderReceiver(b"i" * 32).feed(struct.pack(">I", (1 << 32) - 1))
    with pytest.raises(ArtifactError, match="claims a proof"):
        HeaderReceiver(b"i" * 32).feed(struct.pack(">I", MAX_PROOF_BYTES + 1))


def test_deep_or_wide_msgpack_is_refused(proved: tuple[HeaderProof, bytes]) -> None:
    for data in (b"\x91" * 2000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\x00\x00\x00\x01\x01\x01"):
        with pytest.raises(ArtifactError, match="is not a proof"):
            HeaderProof.parse(data, proved[0].model_id)
