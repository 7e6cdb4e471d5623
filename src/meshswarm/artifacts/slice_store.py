"""Slices on disk: cut when first asked for, hashed when cut, tried in a child process before their first load.

The rule this file keeps: a slice is handed out only when it is the file that was cut: its stamp is unchanged, or its
content still has the root that was noted. Anything else is cut again.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from meshswarm.artifacts.files import FileStamp, read_json, sweep_temporaries, write_json
from meshswarm.artifacts.gguf import GgufHeader, read_header
from meshswarm.artifacts.merkle import HASH_BYTES, file_root, model_id_text
from meshswarm.artifacts.probe import engine_build, probe
from meshswarm.span import Span
from meshswarm.stage.slicing import SLICE_FORMAT, write_slice


@dataclass(frozen=True, slots=True)
class SliceFile:
    """A file the engine may load for a span: a slice, or the model's own file when the span is the whole model.

    `root` is its BitTorrent v2 root, the same on every peer that serves this span of this model.
    """

    path: Path
    root: bytes
    n_bytes: int


class SliceStore:
    """Slices of all models in `folder`, and in `probed_folder` the notes of which files llama.cpp has loaded well."""

    def __init__(self, folder: Path, probed_folder: Path) -> None:
        self._folder = folder
        self._probed_folder = probed_folder
        self._locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._locks_guard = threading.Lock()

    def get(self, model_id: bytes, span: Span, source: Path, header: GgufHeader, *, pad_layers: int) -> SliceFile:
        """The slice of `source`, a checked file of the model, cut if need be. Blocking; raises ArtifactError."""
        folder = self._folder / model_id_text(model_id)
        padding = f"+{pad_layers}" if pad_layers else ""
        path = folder / f"{span.start}-{span.stop}{padding}.gguf"
        with self._lock(path):
            slice_file = _noted(path)
            if slice_file is None:
                sweep_temporaries(folder)
                write_slice(source, header, span, path, pad_layers=pad_layers)
                read_header(path)
                slice_file = SliceFile(path, file_root(path), path.stat().st_size)
                _note(slice_file)
            self.probe_once(path, slice_file.root)
        return slice_file

    def probe_once(self, path: Path, root: bytes) -> None:
        """Load the file in a child process unless this llama.cpp has already loaded this very content well."""
        note = self._probed_folder / f"{root.hex()}.json"
        build = engine_build()
        known = read_json(note)
        if known is None or known.get("build") != build:
            probe(path)
            write_json(note, {"build": build})

    def _lock(self, path: Path) -> threading.Lock:
        with self._locks_guard:
            return self._locks[path]


def _note_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _note(slice_file: SliceFile) -> None:
    stamp = FileStamp.of(slice_file.path)
    fields = {"format": SLICE_FORMAT, "root": slice_file.root.hex(), **stamp.fields()}
    write_json(_note_path(slice_file.path), fields)


def _noted(path: Path) -> SliceFile | None:
    """The slice that was cut to `path`, if the file is still that one."""
    fields = read_json(_note_path(path))
    if fields is None or fields.get("format") != SLICE_FORMAT or not path.is_file():
        return None
    try:
        stamp, root = FileStamp.from_fields(fields), bytes.fromhex(fields["root"])
    except (KeyError, ValueError, TypeError):
        return None
    if len(root) != HASH_BYTES:
        return None
    slice_file = SliceFile(path, root, stamp.size)
    if FileStamp.of(path) != stamp:
        if file_root(path) != root:
            return None
        _note(slice_file)
    return slice_file
