"""Which models this peer has, and which file each of them is.

The rule this file keeps: one small JSON file per model, so that two imports never overwrite each other's notes, and a
damaged note costs one model until it is imported again, never the others. Model files stay where the user has them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from meshswarm.artifacts.files import FileStamp, read_json, write_json
from meshswarm.artifacts.merkle import model_id_text, parse_model_id
from meshswarm.artifacts.names import NAME_PATTERN

_VERSION = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model's file: where it is, and how it looked when its content was last hashed."""

    model_id: bytes
    name: str
    path: Path
    stamp: FileStamp


class Registry:
    """The notes in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, record: ModelRecord) -> None:
        """Write or replace the note about a model. Raises ArtifactError when the disk refuses."""
        text = model_id_text(record.model_id)
        fields = {"version": _VERSION, "model_id": text, "name": record.name, "path": str(record.path)}
        write_json(self._folder / f"{text}.json", {**fields, **record.stamp.fields()})

    def get(self, model_id: bytes) -> ModelRecord | None:
        path = self._folder / f"{model_id_text(model_id)}.json"
        record = _read(path) if path.exists() else None
        return record if record is not None and record.model_id == model_id else None

    def all(self) -> list[ModelRecord]:
        """Every model noted, by name and id. Damaged notes are left out, with a warning in the log."""
        records = (_read(path) for path in self._folder.glob("*.json"))
        return sorted((record for record in records if record), key=lambda record: (record.name, record.model_id))


def _read(path: Path) -> ModelRecord | None:
    fields = read_json(path)
    try:
        if fields is None or fields["version"] != _VERSION:
            raise ValueError("it is no JSON object of a version known here")
        model_id, name, file = parse_model_id(fields["model_id"]), fields["name"], fields["path"]
        if not isinstance(file, str) or not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
            raise ValueError("its name or path is not text")
        return ModelRecord(model_id, name, Path(file), FileStamp.from_fields(fields))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        _log.warning("the note %s about a model is damaged (%s): import that model again", path, error)
        return None
