"""Which models this peer has, and which files each of them is.

The rule this file keeps: one small JSON file per model, so that two imports never overwrite each other's notes, and a
damaged note costs one model until it is imported again, never the others. Model files stay where the user has them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshswarm.artifacts.files import FileStamp, read_json, write_json
from meshswarm.artifacts.merkle import model_id_text, parse_model_id
from meshswarm.artifacts.names import NAME_PATTERN

_VERSION = 2
_ONE_FILE_VERSION = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model: where it is, and how it looked when its content was last hashed."""

    path: Path
    stamp: FileStamp


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model and its files, in order."""

    model_id: bytes
    name: str
    files: tuple[ModelFile, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self.files)

    @property
    def is_untouched(self) -> bool:
        """True when every file is there and nobody touched it since."""
        return all(file.path.is_file() and FileStamp.of(file.path) == file.stamp for file in self.files)


class Registry:
    """The notes in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, record: ModelRecord) -> None:
        """Write or replace the note about a model. Raises ArtifactError when the disk refuses."""
        files = [{"path": str(file.path), **file.stamp.fields()} for file in record.files]
        fields = {"version": _VERSION, "model_id": model_id_text(record.model_id), "name": record.name}
        write_json(self._path(record.model_id), {**fields, "files": files})

    def get(self, model_id: bytes) -> ModelRecord | None:
        path = self._path(model_id)
        record = _read(path) if path.exists() else None
        return record if record is not None and record.model_id == model_id else None

    def remove(self, model_id: bytes) -> None:
        """Forget a model. Its files are not touched."""
        self._path(model_id).unlink(missing_ok=True)

    def all(self) -> list[ModelRecord]:
        """Every model noted, by name and id. Damaged notes are left out, with a warning in the log."""
        records = (_read(path) for path in self._folder.glob("*.json"))
        return sorted((record for record in records if record), key=lambda record: (record.name, record.model_id))

    def _path(self, model_id: bytes) -> Path:
        return self._folder / f"{model_id_text(model_id)}.json"


def _read(path: Path) -> ModelRecord | None:
    fields = read_json(path)
    try:
        if fields is None or fields["version"] not in (_ONE_FILE_VERSION, _VERSION):
            raise ValueError("it is no JSON object of a version known here")
        model_id, name = parse_model_id(fields["model_id"]), fields["name"]
        if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
            raise ValueError("its name is not a model's")
        listed = [fields] if fields["version"] == _ONE_FILE_VERSION else fields["files"]
        if not isinstance(listed, list) or not listed:
            raise ValueError("it lists no files")
        return ModelRecord(model_id, name, tuple(map(_file, listed)))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        _log.warning("the note %s about a model is damaged (%s): import that model again", path, error)
        return None


def _file(fields: Mapping[str, Any]) -> ModelFile:
    if not isinstance(fields["path"], str):
        raise ValueError("a path is not text")
    return ModelFile(Path(fields["path"]), FileStamp.from_fields(fields))
