"""Hashing what is on the disk, and notes of it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.artifacts.torrent.peers import PIECE, Shared

from meshswarm.artifacts.files import FileStamp
from meshswarm.artifacts.merkle import piece_layer
from meshswarm.artifacts.torrent.checking import good_pieces, piece_hash, pieces_with_data
from meshswarm.artifacts.torrent.content import Content, piece_length_of
from meshswarm.artifacts.torrent.resume import Note, Notes, decode_note, encode_note
from meshswarm.artifacts.torrent.watch import FileWatch
from meshswarm.errors import ArtifactError

MANY = Content(20 * PIECE + 5, bytes(32))


@pytest.mark.parametrize("length", [1, 16 * 1024, 70_000, PIECE, PIECE + 1, 3 * PIECE - 7, 5 * PIECE + 16_385])
def test_piece_hashes_are_the_layer(tmp_path: Path, length: int) -> None:
    path = tmp_path / "file"
    data = random.Random(length).randbytes(length)
    path.write_bytes(data)
    root, layer = piece_layer(path, piece_length_of(length))
    content = Content(length, root)
    spans = map(content.piece_range, range(content.n_pieces))
    hashes = [piece_hash(content, data[span.start : span.stop]) for span in spans]
    assert b"".join(hashes) == (layer or root)
    assert good_pieces(path, content, layer or None, range(content.n_pieces)) == frozenset(range(content.n_pieces))


def test_only_right_pieces_are_good(shared: Shared, tmp_path: Path) -> None:
    data = bytearray(shared.data)
    data[3 * PIECE] ^= 1
    path = tmp_path / "bent"
    path.write_bytes(data[: 11 * PIECE + 1])
    assert good_pieces(path, shared.content, shared.layer, range(13)) == frozenset(range(11)) - {3}
    assert good_pieces(path, shared.content, shared.layer, [3, 4]) == {4}
    assert good_pieces(path, shared.content, None, range(13)) == frozenset()
    assert good_pieces(path, shared.content, shared.layer, range(13), lambda: True) == frozenset()
    assert good_pieces(tmp_path / "none", shared.content, shared.layer, range(13)) == frozenset()
    with pytest.raises(ArtifactError, match="cannot be read"):
        good_pieces(tmp_path, shared.content, shared.layer, range(13))


def test_holes_are_not_hashed(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(MANY.length)
        for index in (3, 9):
            file.seek(index * PIECE)
            file.write(b"x" * PIECE)
    found = pieces_with_data(path, MANY)
    assert {3, 9} <= found <= {2, 3, 4, 8, 9, 10}
    assert pieces_with_data(tmp_path / "none", MANY) == frozenset()
    path.write_bytes(b"short")
    assert pieces_with_data(path, MANY) == {0}


@given(st.frozensets(st.integers(0, MANY.n_pieces - 1)), st.integers(0, 1 << 50))
def test_a_note_says_what_was_written(have: frozenset[int], mtime: int) -> None:
    note = Note("/a/b", FileStamp(5, mtime, 7), have)
    assert decode_note(MANY, encode_note(MANY, note)) == note


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_note_is_none_or_a_note(rubbish: bytes, at: int, byte: int) -> None:
    assert decode_note(MANY, rubbish) is None
    good = encode_note(MANY, Note("/a/b", FileStamp(5, 6, 7), frozenset({1, 20})))
    bent = bytearray(good)
    bent[at % len(bent)] = byte
    decoded = decode_note(MANY, bytes(bent))
    assert decoded is None or max(decoded.have, default=0) < MANY.n_pieces
    assert decode_note(MANY, good[:-1]) is None
    assert decode_note(Content(MANY.length, b"x" * 32), good) is None


def test_a_layer_is_kept_and_believed_only_while_it_is_the_files(shared: Shared, tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    assert notes.layer(shared.content) is None
    notes.keep_layer(shared.content, shared.layer)
    assert notes.layer(shared.content) == shared.layer
    (kept,) = (tmp_path / "notes").iterdir()
    kept.write_bytes(bytes(len(shared.layer)))
    assert notes.layer(shared.content) is None
    kept.write_bytes(shared.layer + b"more")
    assert notes.layer(shared.content) is None
    notes.forget(shared.content)
    assert not list((tmp_path / "notes").iterdir())


def test_a_stamp_counts_once_nobody_here_writes() -> None:
    stamps = [FileStamp(10, mtime, 1) for mtime in range(4)]
    watch = FileWatch(is_settled=False)
    look = {"is_busy": False, "has_some": True}
    assert not watch.is_changed(stamps[0], is_busy=True, has_some=False)
    assert not watch.is_changed(stamps[1], **look)
    assert not watch.is_changed(stamps[2], **look), "two looks that differ: late blocks of ours"
    assert not watch.is_changed(stamps[2], **look)
    assert watch.is_changed(stamps[3], **look)
    watch.unsettle()
    assert not watch.is_changed(stamps[3], is_busy=True, has_some=True)
    assert watch.is_changed(FileStamp(10, 3, 2), is_busy=True, has_some=True), "another inode, even while writing"
    assert watch.is_changed(None, **look)
    assert not FileWatch(is_settled=False).is_changed(None, is_busy=True, has_some=False)


def test_a_file_that_gets_shorter_was_touched_even_while_we_write_it() -> None:
    watch = FileWatch(is_settled=False)
    for size in (10, 10, 12):
        assert not watch.is_changed(FileStamp(size, size, 1), is_busy=True, has_some=True)
    assert watch.is_changed(FileStamp(11, 20, 1), is_busy=True, has_some=True)
    watch.start_again(None)
    assert not watch.is_changed(FileStamp(11, 20, 1), is_busy=True, has_some=True)


def test_the_first_stamp_of_a_file_that_is_only_read_counts() -> None:
    watch = FileWatch(is_settled=True)
    assert not watch.is_changed(FileStamp(10, 1, 1), is_busy=False, has_some=True)
    assert watch.is_changed(FileStamp(10, 2, 1), is_busy=False, has_some=True)
    watch.start_again(FileStamp(10, 2, 1))
    assert not watch.is_changed(FileStamp(10, 2, 1), is_busy=False, has_some=True)
    assert watch.is_changed(FileStamp(11, 2, 1), is_busy=False, has_some=True)


def test_a_link_is_no_place_for_pieces(shared: Shared, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="link"):
        Notes(tmp_path).present(shared.content, tmp_path / "link", shared.layer, frozenset())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="not a file"):
        Notes(tmp_path).present(shared.content, tmp_path / "pipe", shared.layer, frozenset())
