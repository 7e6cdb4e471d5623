"""The notes about models: one damaged note costs one model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.files import FileStamp
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.store.registry import ModelFile, ModelRecord, Registry

FILE = ModelFile(Path("/models/tiny \udcff.gguf"), FileStamp(5, 6, 7))
RECORD = ModelRecord(b"m" * 32, "tiny", (FILE,))
NOTE = f"{model_id_text(RECORD.model_id)}.json"


def test_what_was_put_is_there_for_anybody(tmp_path: Path) -> None:
    other = ModelRecord(b"o" * 32, "another", (ModelFile(Path("/models/b.gguf"), FileStamp(1, 2, 3)), FILE))
    registry = Registry(tmp_path)
    assert registry.all() == []
    registry.put(RECORD)
    registry.put(other)
    assert Registry(tmp_path).all() == [other, RECORD]
    assert Registry(tmp_path).get(RECORD.model_id) == RECORD
    assert Registry(tmp_path).get(b"x" * 32) is None


@pytest.mark.parametrize(
    "damage",
    [
        None,
        {"version": 9},
        {"model_id": "abc"},
        {"model_id": 5},
        {"name": "../Evil"},
        {"name": None},
        {"files": []},
        {"files": 5},
        {"files": [{}]},
        {"files": [{"path": 5, "size": 5, "mtime_ns": 6, "inode": 7}]},
        {"files": [{"path": "/a", "size": "5", "mtime_ns": 6, "inode": 7}]},
        {"files": [{"path": "/a", "size": 5, "mtime_ns": 6, "inode": None}]},
    ],
    ids=str,
)
def test_a_damaged_note_is_left_out_with_a_warning(
    tmp_path: Path, damage: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(tmp_path)
    other = ModelRecord(b"o" * 32, "another", (ModelFile(Path("/models/b.gguf"), FileStamp(1, 2, 3)), FILE))
    registry.put(RECORD)
    registry.put(other)
    note = tmp_path / NOTE
    note.write_text("{broken" if damage is None else json.dumps(json.loads(note.read_text()) | damage))
    with caplog.at_level(logging.WARNING):
        assert registry.all() == [other]
        assert registry.get(RECORD.model_id) is None
    assert NOTE in caplog.text and "import that model again" in caplog.text
    registry.put(RECORD)
    assert registry.all() == [other, RECORD]


def test_a_note_under_anothers_name_is_not_believed(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.put(RECORD)
    (tmp_path / NOTE).rename(tmp_path / f"{model_id_text(b'x' * 32)}.json")
    assert registry.get(b"x" * 32) is None


def test_a_note_of_one_file_from_before_is_read(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.put(RECORD)
    note = tmp_path / NOTE
    fields = json.loads(note.read_text())
    (file,) = fields.pop("files")
    note.write_text(json.dumps(fields | file | {"version": 1}))
    assert registry.all() == [RECORD]
    registry.remove(RECORD.model_id)
    registry.remove(RECORD.model_id)
    assert registry.all() == []
