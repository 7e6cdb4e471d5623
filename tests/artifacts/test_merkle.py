"""Content ids: pinned for the embedded model, and the same as libtorrent's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import libtorrent
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.artifacts.merkle import (
    BLOCK_BYTES,
    MerkleTree,
    check_piece_layer,
    file_root,
    hash_file,
    model_id,
    model_id_text,
    n_blocks_of,
    parse_model_id,
    piece_layer,
    piece_layer_nodes,
    tree_depth,
)
from meshswarm.errors import ArtifactError

SMOLLM2_ROOT = "1d1243022ea5c99e5dffe4efc8342a7779ade16a411f853db4ccddb14c0d3c87"
SMOLLM2_ID = "f3e1d504fbe47680aa2dee381991ed186a9412a8488fb4966a7e4ae3f6a680f9"
SMOLLM2_TEXT = "6pq5kbh34r3ibkrn5y4btepndbvjievijch3jftkpzfoh5vgqd4zvii"


def libtorrent_root(path: Path) -> bytes:
    storage = libtorrent.list_files(str(path)) if hasattr(libtorrent, "list_files") else libtorrent.file_storage()
    if isinstance(storage, libtorrent.file_storage):
        libtorrent.add_files(storage, str(path))
    torrent = libtorrent.create_torrent(storage, 0, libtorrent.create_torrent.v2_only)
    libtorrent.set_piece_hashes(torrent, str(path.parent))
    tree = torrent.generate()[b"info"][b"file tree"]
    return bytes(tree[path.name.encode()][b""][b"pieces root"])


def plain_root(data: bytes) -> bytes:
    """The definition, written out: all leaves, padded to a power of two, hashed pairwise."""
    nodes = [hashlib.sha256(data[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES)]
    nodes += [bytes(32)] * ((1 << tree_depth(len(nodes))) - len(nodes))
    while len(nodes) > 1:
        nodes = [hashlib.sha256(nodes[at] + nodes[at + 1]).digest() for at in range(0, len(nodes), 2)]
    return nodes[0]


def test_the_embedded_models_id_is_pinned_byte_for_byte(smollm2: Path) -> None:
    root = file_root(smollm2)
    assert root.hex() == SMOLLM2_ROOT
    raw = model_id([(smollm2.stat().st_size, root)])
    assert raw.hex() == SMOLLM2_ID
    assert model_id_text(raw) == SMOLLM2_TEXT
    assert parse_model_id(SMOLLM2_TEXT) == raw


def test_the_model_id_is_the_formula() -> None:
    files = [(5, b"a" * 32), (1 << 40, b"b" * 32)]
    spelled_out = (
        b"meshswarm/model/1" + (2).to_bytes(4, "big")
        + (5).to_bytes(8, "big") + b"a" * 32
        + (1 << 40).to_bytes(8, "big") + b"b" * 32
    )  # fmt: skip
    assert model_id(files) == hashlib.sha256(spelled_out).digest()
    assert model_id(files) != model_id(files[::-1])


def test_the_embedded_models_root_is_libtorrents(smollm2: Path) -> None:
    assert libtorrent_root(smollm2).hex() == SMOLLM2_ROOT


@pytest.mark.parametrize(
    "size", [1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 4 * BLOCK_BYTES, 100_000, 1_200_000]
)
def test_roots_of_all_shapes_are_libtorrents(tmp_path: Path, size: int) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(i * 7 & 0xFF for i in range(size)))
    assert file_root(path) == libtorrent_root(path) == plain_root(path.read_bytes())


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_every_wanted_node_is_kept_as_the_full_tree_has_it(leaves: list[bytes]) -> None:
    depth = tree_depth(len(leaves))
    levels = [leaves + [bytes(32)] * ((1 << depth) - len(leaves))]
    while len(levels[-1]) > 1:
        below = levels[-1]
        levels.append([hashlib.sha256(below[i] + below[i + 1]).digest() for i in range(0, len(below), 2)])
    wanted = {(level, i) for level in range(depth) for i in range(1 << (depth - level)) if i << level < len(leaves)}
    tree = MerkleTree(wanted)
    for leaf in leaves:
        tree.add_leaf(leaf)
    assert tree.root() == levels[-1][0]
    assert tree.kept == {(level, i): levels[level][i] for level, i in wanted}


def test_progress_ends_at_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(3_000_000))
    calls: list[tuple[int, int]] = []
    hash_file(path, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (3_000_000, 3_000_000)
    assert calls == sorted(calls) and len(calls) > 1


def test_files_without_an_id_are_refused_by_name(tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(ArtifactError, match="empty"):
        file_root(empty)
    with pytest.raises(ArtifactError, match=r"missing\.gguf cannot be read"):
        file_root(tmp_path / "missing.gguf")


def test_mistyped_ids_are_told_apart() -> None:
    with pytest.raises(ValueError, match="checksum"):
        parse_model_id(SMOLLM2_TEXT[:-1] + "a")
    with pytest.raises(ValueError, match="wrong length"):
        parse_model_id(SMOLLM2_TEXT[:-8])


def test_block_counts() -> None:
    assert [n_blocks_of(n) for n in (1, BLOCK_BYTES, BLOCK_BYTES + 1)] == [1, 1, 2]
    assert [tree_depth(n) for n in (1, 2, 3, 4, 5, 8)] == [0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("length", [1, 65536, 65537, 5 * 65536, 5 * 65536 + 3, 8 * 65536, 9 * 65536 - 20000])
def test_the_piece_layer_is_libtorrents(tmp_path: Path, length: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(hashlib.shake_128(b"%d" % length).digest(length))
    root, layer = piece_layer(path, 65536)
    storage = libtorrent.list_files(str(path))
    torrent = libtorrent.create_torrent(storage, 65536, libtorrent.create_torrent.v2_only)
    libtorrent.set_piece_hashes(torrent, str(tmp_path))
    assert layer == torrent.generate()[b"piece layers"].get(root, b"")
    assert root == file_root(path)
    check_piece_layer(length, root, 65536, layer)


def test_a_piece_layer_that_is_not_the_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(hashlib.shake_128(b"layer").digest(5 * 65536 + 3))
    root, layer = piece_layer(path, 65536)
    length = path.stat().st_size
    bent = bytearray(layer)
    for at in (0, len(layer) // 2, len(layer) - 1):
        bent[at] ^= 1
        with pytest.raises(ArtifactError, match="do not lead"):
            check_piece_layer(length, root, 65536, bytes(bent))
        bent[at] ^= 1
    for wrong in (b"", layer[:-1], layer[:-32], layer + bytes(32)):
        with pytest.raises(ArtifactError, match="bytes"):
            check_piece_layer(length, root, 65536, wrong)
    with pytest.raises(ArtifactError):
        check_piece_layer(65536, root, 65536, layer)


def test_a_piece_length_is_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two"):
        piece_layer_nodes(1 << 20, 100_000)
