"""Torrents made of a length and a root: the same as libtorrent's own, whatever the file is called."""

from __future__ import annotations

import os
import random
from pathlib import Path

import libtorrent as lt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.merkle import MAX_FILE_BYTES, file_root
from meshswarm.artifacts.torrent.content import TORRENT_NAME, Content, bencode, piece_length_of
from meshswarm.errors import ArtifactError

KIB = 1024
MANY = Content(10 * 256 * KIB + 5, bytes(32))
"""Eleven pieces, the last of five bytes."""


def libtorrents_info(path: Path, piece_length: int) -> bytes:
    torrent = lt.create_torrent(lt.list_files(str(path)), piece_length, lt.create_torrent.v2_only)
    lt.set_piece_hashes(torrent, str(path.parent))
    info: bytes = lt.bencode(torrent.generate()[b"info"])
    return info


@pytest.mark.parametrize("length", [1, 16 * KIB, 256 * KIB, 256 * KIB + 1, 3_000_001])
def test_the_info_dict_is_libtorrents_byte_for_byte(tmp_path: Path, length: int) -> None:
    path = tmp_path / TORRENT_NAME
    path.write_bytes(random.Random(length).randbytes(length))
    content = Content(length, file_root(path))
    info = libtorrents_info(path, content.piece_length)
    assert bencode(content.info_dict()) == info
    assert content.info_hash == lt.load_torrent_buffer(b"d4:info" + info + b"e").info_hashes.v2.to_bytes()


def test_a_file_is_the_same_torrent_under_any_path_name_date_and_mode(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(700_000)
    hashes = set()
    for folder, name, mode, mtime in [("a", "x.gguf", 0o644, 1), ("b c", "ünï 'q'.bin", 0o755, 2_000_000_000)]:
        path = tmp_path / folder / name
        path.parent.mkdir()
        path.write_bytes(data)
        path.chmod(mode)
        os.utime(path, (mtime, mtime))
        hashes.add(Content(len(data), file_root(path)).info_hash)
    assert len(hashes) == 1


def test_the_info_hash_is_pinned() -> None:
    """Another hash would cut this release off from every peer of the one before."""
    assert MANY.info_hash.hex() == "c2584e2c64e3ba6c5cb398071f61d3d89c9d6c8ba564b16ca965d8bc129c2935"
    assert (
        Content(40 << 30, b"r" * 32).info_hash.hex()
        == "fbe8264890840538aac4e4ce217b6ec92c3e8566dc85b29fea683fa7331870b7"
    )


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 256 * KIB), (1 << 30, 256 * KIB), ((1 << 30) + 1, 1 << 20), (16 << 30, 1 << 20), ((16 << 30) + 1, 4 << 20)],
)
def test_piece_lengths_follow_from_the_length(length: int, expected: int) -> None:
    assert piece_length_of(length) == expected


@pytest.mark.parametrize(
    ("length", "root"), [(0, bytes(32)), (-1, bytes(32)), (MAX_FILE_BYTES + 1, bytes(32)), (1, b"")]
)
def test_an_impossible_file_is_refused(length: int, root: bytes) -> None:
    with pytest.raises(ArtifactError):
        Content(length, root)


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], set()),
        ([(5, 5)], set()),
        ([(0, 1)], {0}),
        ([range(256 * KIB - 1, 256 * KIB + 1)], {0, 1}),
        ([(256 * KIB, 512 * KIB), (MANY.length - 1, MANY.length)], {1, 10}),
    ],
)
def test_pieces_of_byte_ranges(ranges: list[range | tuple[int, int]], expected: set[int]) -> None:
    assert MANY.pieces_of(ranges) == expected


@pytest.mark.parametrize("outside", [(-1, 3), (0, MANY.length + 1), (7, 3)])
def test_bytes_outside_the_file_are_refused(outside: tuple[int, int]) -> None:
    with pytest.raises(ArtifactError):
        MANY.pieces_of([outside])


@given(st.integers(0, MANY.length), st.integers(0, MANY.length))
def test_pieces_and_ranges_agree(one: int, other: int) -> None:
    start, stop = min(one, other), max(one, other)
    touched = MANY.ranges_of(MANY.pieces_of([(start, stop)]))
    if start < stop:
        assert len(touched) == 1 and touched[0].start <= start and stop <= touched[0].stop
    inside = MANY.ranges_of(MANY.pieces_within([(start, stop)]))
    assert all(start <= span.start and span.stop <= stop for span in inside)
    assert sum(map(len, touched)) - sum(map(len, inside)) <= 2 * MANY.piece_length


def test_all_pieces_are_the_whole_file() -> None:
    assert MANY.ranges_of(range(MANY.n_pieces)) == [range(MANY.length)]
    assert MANY.pieces_within([range(MANY.length)]) == frozenset(range(11))
    assert MANY.bytes_of([0, 10]) == 256 * KIB + 5
