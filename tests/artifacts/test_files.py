"""Small files: whole or not at all, and damage is seen."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from meshswarm.artifacts.files import FileStamp, read_json, sweep_temporaries, write_json, write_whole
from meshswarm.errors import ArtifactError


def test_a_file_is_written_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "note.bin"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "note.json"
    folder.mkdir()
    (folder / "inside").touch()
    with pytest.raises(ArtifactError, match=r"note\.json cannot be written"):
        write_whole(folder, b"x")
    assert sorted(tmp_path.iterdir()) == [folder]
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_whole(folder / "inside" / "x", b"x")


def test_json_round_trip(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1, "b": "ü\udcff"})
    assert read_json(tmp_path / "a.json") == {"a": 1, "b": "ü\udcff"}


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000, b'{"a": 1' + b" " * (1 << 20)])
def test_damaged_json_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.json").write_bytes(data)
    assert read_json(tmp_path / "a.json") is None


def test_no_json_is_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "a.json") is None
    assert read_json(tmp_path) is None


def test_stamps_tell_touched_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"abc")
    stamp = FileStamp.of(path)
    assert FileStamp.of(path) == stamp == FileStamp.from_fields(stamp.fields())
    os.utime(path, ns=(1, 1))
    assert FileStamp.of(path) != stamp
    with pytest.raises(ArtifactError, match=r"nowhere\.gguf cannot be used"):
        FileStamp.of(tmp_path / "nowhere.gguf")
    for fields in ({}, {"size": 1, "mtime_ns": "1", "inode": 1}, {"size": True, "mtime_ns": 1, "inode": 1}):
        with pytest.raises((KeyError, ValueError)):
            FileStamp.from_fields(fields)


def test_only_old_left_overs_are_swept(tmp_path: Path) -> None:
    old, young, other = tmp_path / ".a.x.new", tmp_path / ".b.x.new", tmp_path / "c.gguf"
    for path in (old, young, other):
        path.touch()
    long_ago = time.time() - 10 * 86_400
    os.utime(old, (long_ago, long_ago))
    os.utime(other, (long_ago, long_ago))
    sweep_temporaries(tmp_path)
    assert sorted(tmp_path.iterdir()) == [young, other]
