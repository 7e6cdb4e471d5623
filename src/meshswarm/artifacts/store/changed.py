"""What is left of models whose files were imported in place and then changed or moved by their owner.

The rule this file keeps: those files are only read. Bytes count as the model's when their pieces' hashes say so, now.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from meshswarm.artifacts.ranges import Ranges
from meshswarm.artifacts.store.pieces import good_ranges
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError


def parts_left(store: Store, model_id: bytes) -> tuple[tuple[Path, Ranges], ...]:
    """Each file of the model as it was imported, and which of its bytes are still right; empty where the model is here
    whole, or was never imported. Blocking: it hashes them all."""
    paths = store.noted_paths(model_id)
    if paths is None or store.paths(model_id) is not None:
        return ()
    return tuple((path, _left(store, model_id, index, path)) for index, path in enumerate(paths))


def _left(store: Store, model_id: bytes, index: int, path: Path) -> Ranges:
    content = store.contents(model_id)[index]
    with contextlib.suppress(ArtifactError):
        if path.is_file():
            return good_ranges(path, content, store.piece_layer(model_id, index), [range(content.length)])
    return ()


def read_piece(path: Path, place: range) -> bytes:
    """The bytes of the file there, fewer where it ends. Raises ArtifactError."""
    try:
        with path.open("rb") as file:
            file.seek(place.start)
            return file.read(len(place))
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
