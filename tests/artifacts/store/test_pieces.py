"""What was fetched of files: counted only when it was verified, hashed again when the file was touched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshswarm.artifacts.merkle import piece_layer
from meshswarm.artifacts.store.pieces import Pieces, check_file, disk_bytes, good_ranges
from meshswarm.artifacts.torrent.content import Content, piece_length_of
from meshswarm.errors import ArtifactError

PIECE = 256 << 10
LENGTH = 5 * PIECE + 1000


def content_of(path: Path) -> tuple[Content, bytes]:
    length = path.stat().st_size
    root, layer = piece_layer(path, piece_length_of(length))
    return Content(length, root), layer


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.bin"
    path.write_bytes(bytes(i * i % 251 for i in range(LENGTH)))
    return path


@pytest.fixture
def pieces(tmp_path: Path) -> Pieces:
    return Pieces(tmp_path / "home")


def put(pieces: Pieces, content: Content, whole: Path, *ranges: range) -> Path:
    path = pieces.path(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = whole.read_bytes()
    with path.open("wb") as file:
        file.truncate(content.length)
        for each in ranges:
            file.seek(each.start)
            file.write(data[each.start : each.stop])
    return path


def test_ranges_are_there_for_anybody_as_they_were_noted(pieces: Pieces, whole: Path, tmp_path: Path) -> None:
    content, layer = content_of(whole)
    assert pieces.ranges(content) == () and pieces.layer(content) is None
    put(pieces, content, whole, range(PIECE))
    pieces.note(content, [range(100, PIECE), range(100), range(5, 10)])
    pieces.save_layer(content, layer)
    again = Pieces(tmp_path / "home")
    assert again.ranges(content) == (range(PIECE),)
    assert again.layer(content) == layer
    assert again.drop(content) > 0 and again.drop(content) == 0
    assert pieces.ranges(content) == ()
    again.drop_layer(content)
    assert pieces.layer(content) is None
    with pytest.raises(ArtifactError, match="cannot be used"):
        pieces.note(content, [range(5)])


def test_only_a_files_own_layer_is_kept(pieces: Pieces, whole: Path) -> None:
    content, layer = content_of(whole)
    for wrong in (layer[:-1], layer[:-32], layer + layer[:32], bytes(len(layer)), layer[32:] + layer[:32]):
        with pytest.raises(ArtifactError, match="a piece layer"):
            pieces.save_layer(content, wrong)
    pieces.save_layer(content, layer)
    (kept,) = (pieces.folder.parent / "layers").iterdir()
    for damage in (layer[:-32], bytes(len(layer)), b""):
        kept.write_bytes(damage)
        assert pieces.layer(content) is None
        pieces.save_layer(content, layer)
        assert pieces.layer(content) == layer


def test_every_damaged_piece_of_a_touched_file_is_dropped_and_no_other(pieces: Pieces, whole: Path) -> None:
    content, layer = content_of(whole)
    pieces.save_layer(content, layer)
    path = put(pieces, content, whole, range(2 * PIECE), range(3 * PIECE, LENGTH))
    held = (range(2 * PIECE), range(3 * PIECE, LENGTH))
    pieces.note(content, held)
    os.utime(path, ns=(1, 1))
    assert pieces.ranges(content) == held
    for at in (PIECE, LENGTH - 1):
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
    check = check_file(path, content, layer, held)
    assert (check.bad_pieces, check.good) == ((1, 5), (range(PIECE), range(3 * PIECE, 5 * PIECE)))
    os.utime(path, ns=(2, 2))
    assert pieces.ranges(content) == check.good
    os.truncate(path, 4 * PIECE)
    assert pieces.ranges(content) == (range(PIECE), range(3 * PIECE, 4 * PIECE))


def test_a_file_that_was_replaced_is_hashed_again(pieces: Pieces, whole: Path) -> None:
    content, layer = content_of(whole)
    pieces.save_layer(content, layer)
    path = put(pieces, content, whole, range(LENGTH))
    pieces.note(content, [range(LENGTH)])
    other = path.with_name("other")
    other.write_bytes(bytes(LENGTH))
    stamp = path.stat()
    os.utime(other, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    other.replace(path)
    assert pieces.ranges(content) == ()


def test_without_a_piece_layer_only_a_whole_file_can_be_right(pieces: Pieces, whole: Path) -> None:
    content, layer = content_of(whole)
    path = put(pieces, content, whole, range(PIECE))
    pieces.note(content, [range(PIECE)])
    os.utime(path, ns=(1, 1))
    assert pieces.ranges(content) == ()
    assert good_ranges(whole, content, None, [range(LENGTH)]) == (range(LENGTH),)
    assert good_ranges(whole, content, None, [range(PIECE)]) == ()
    assert good_ranges(whole, content, layer, [range(LENGTH)]) == (range(LENGTH),)
    assert good_ranges(whole, content, layer, [range(10, 2 * PIECE + 10)]) == (range(PIECE, 2 * PIECE),)
    small = path.with_name("small")
    small.write_bytes(b"x" * 40_000)
    one_piece, no_layer = content_of(small)
    assert no_layer == b"" == pieces.layer(one_piece)
    assert good_ranges(small, one_piece, b"", [range(40_000)]) == (range(40_000),)
    small.write_bytes(b"x" * 39_999 + b"y")
    assert check_file(small, one_piece, b"", (range(40_000),)).bad_pieces == (0,)
    assert check_file(path.with_name("gone"), one_piece, b"", (range(40_000),)).bad == (range(40_000),)


@pytest.mark.parametrize(
    "damage",
    [
        {"ranges": [[5, 3]]},
        {"ranges": [[-1, 3]]},
        {"ranges": [[0, LENGTH + 1]]},
        {"ranges": [[0, 1, 2]]},
        {"ranges": [["0", 3]]},
        {"ranges": "all"},
        {"ranges": None},
        {"length": 7},
        {"size": "x"},
        None,
    ],
)
def test_a_damaged_note_means_that_nothing_is_here(pieces: Pieces, whole: Path, damage: dict[str, object]) -> None:
    content, _ = content_of(whole)
    path = put(pieces, content, whole, range(PIECE))
    pieces.note(content, [range(PIECE)])
    note = path.with_name("ranges.json")
    note.write_text("[" if damage is None else json.dumps(json.loads(note.read_text()) | damage))
    assert pieces.ranges(content) == ()


def test_what_files_take_on_disk_leaves_out_their_holes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with (tmp_path / "sub" / "sparse").open("wb") as file:
        file.truncate(100 << 20)
        file.write(b"x" * 8192)
        file.flush()
        os.fsync(file.fileno())
    (tmp_path / "link").symlink_to("/proc/kcore")
    assert 8192 <= disk_bytes(tmp_path) < 1 << 20
    assert disk_bytes(tmp_path / "gone") == 0
