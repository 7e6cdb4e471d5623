"""Slices on disk: cut when first asked for, hashed when cut, tried in a child process before their first load.

The rule this file keeps: a slice is handed out only when it is the file that was cut: its stamp is unchanged, or its
content still has the root that was noted. Anything else is cut again. Several processes and threads may use one folder
at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from meshswarm.artifacts.files import FileStamp, read_json, sweep_temporaries, write_json
from meshswarm.artifacts.gguf.check import read_header
from meshswarm.artifacts.gguf.probe import engine_build, probe
from meshswarm.artifacts.merkle import HASH_BYTES, file_root, model_id_text, parse_model_id
from meshswarm.artifacts.ranges import Ranges
from meshswarm.artifacts.store.disk import remove_slice
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError, MeshswarmError
from meshswarm.span import Span
from meshswarm.stage.engine.llama import numclass
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS, LlamaOptions
from meshswarm.stage.families.cuts import check_cut
from meshswarm.stage.families.proofs import Proofs
from meshswarm.stage.slices.slicing import SLICE_FORMAT, slice_file_bytes, slice_ranges, write_hashed_slice

UNUSED_S = 14 * 86_400.0
"""A slice that was not asked for in so long is not kept where it could be cut again."""
_SETTLED_S = 3600.0


@dataclass(frozen=True, slots=True)
class SliceFile:
    """A file the engine may load for a span: a slice, or the model's own file when the span is the whole model.

    `root` is its BitTorrent v2 root, the same on every peer that serves this span of this model.
    """

    path: Path
    root: bytes
    n_bytes: int


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """What loading a span takes from the disk. `path`: the slice, None for a whole model, whose own files are loaded;
    `needs`: the bytes of each of the model's files to be here first, none where the slice was cut before; `cut_bytes`:
    the length of the slice that is still to be cut."""

    path: Path | None
    needs: tuple[Ranges, ...]
    cut_bytes: int


class Slices:
    """Slices of the models in `store`, in `home / "slices"`; which files llama.cpp has loaded well, in `probed`."""

    def __init__(self, store: Store, home: Path) -> None:
        self._store = store
        self._folder = home / "slices"
        self._probed_folder = home / "probed"
        self._proofs_folder = home / "proofs"
        self._locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._locks_guard = threading.Lock()
        self._given: Counter[tuple[bytes, Span]] = Counter()  # spans whose files may be loaded, and how often
        self._given_whole: Counter[bytes] = Counter()  # the same of models whose own files are

    def proofs(self, model_id: bytes, options: LlamaOptions = DEFAULT_OPTIONS) -> Proofs:
        """What is proved about a model's parts here, when they are computed with these options."""
        return Proofs.here(self._proofs_folder, model_id, numclass(options))

    def file(self, model_id: bytes, span: Span, options: LlamaOptions = DEFAULT_OPTIONS) -> SliceFile:
        """The file to load for `span`, cut if need be and loaded once in a child process. Blocking.

        It counts as loaded until it is let go. Raises IllegalCutError for a span that cannot be cut, ArtifactError when
        model or slice is refused.
        """
        header = self._store.header(model_id)
        proofs = self.proofs(model_id, options)
        family = check_cut(header, span, proofs)
        if family is not None:
            cut = self._cut(model_id, span, proofs)
            with self._locks_guard:
                self._given[model_id, span] += 1
            return cut
        source = self._store.path(model_id)
        files = self._store.files(model_id)
        root = files[0][1] if len(files) == 1 else model_id
        self._probe_once(source, root)
        with self._locks_guard:
            self._given_whole[model_id] += 1
        return SliceFile(source, root, header.file_length)

    def needs(self, model_id: bytes, span: Span, options: LlamaOptions = DEFAULT_OPTIONS) -> tuple[Ranges, ...]:
        """The bytes of each of the model's files that `file` would read for `span`, by the header alone: all of them
        where the span is the whole model. Raises IllegalCutError."""
        header = self._store.header(model_id)
        proofs = self.proofs(model_id, options)
        if check_cut(header, span, proofs) is None:
            return tuple((range(part.file_length),) for part in header.files)
        return slice_ranges(header, span, proofs=proofs)

    def plan(self, model_id: bytes, span: Span, options: LlamaOptions = DEFAULT_OPTIONS) -> SlicePlan:
        """What `file` would need that is not here, by the header alone. Blocking where the slice was touched. Raises
        IllegalCutError."""
        header = self._store.header(model_id)
        proofs = self.proofs(model_id, options)
        if check_cut(header, span, proofs) is None:
            return SlicePlan(None, self.needs(model_id, span, options), 0)
        path = self._path(model_id, span)
        if _noted(path) is not None:
            return SlicePlan(path, ((),) * len(header.files), 0)
        return SlicePlan(path, self.needs(model_id, span, options), slice_file_bytes(header, span, proofs=proofs))

    def let_go(self, model_id: bytes, span: Span) -> None:
        """What `file` gave for these layers is not loaded any more."""
        with self._locks_guard:
            if self._given[model_id, span] > 0:
                self._given[model_id, span] -= 1
            else:
                self._given_whole[model_id] -= 1
            self._given, self._given_whole = +self._given, +self._given_whole

    def loaded(self) -> frozenset[Path]:
        """Slices that may be loaded."""
        with self._locks_guard:
            return frozenset(self._path(*each) for each in self._given)

    def loaded_models(self, *, whole: bool = False) -> frozenset[bytes]:
        """Models of which anything may be loaded, or those whose own files may be."""
        with self._locks_guard:
            parts = () if whole else (model_id for model_id, _ in self._given)
            return frozenset((*parts, *self._given_whole))

    def _cut(self, model_id: bytes, span: Span, proofs: Proofs) -> SliceFile:
        """The slice that was cut before, or one cut now from as much of the model as is here."""
        path = self._path(model_id, span)
        with self._lock(path):
            slice_file = _noted(path)
            if slice_file is None:
                header = self._store.header(model_id)
                source = self._store.readable(model_id, slice_ranges(header, span, proofs=proofs))
                self._sweep(keep=path)
                root = write_hashed_slice(source, header, span, path, proofs=proofs)
                read_header(path)
                slice_file = SliceFile(path, root, path.stat().st_size)
                _note(slice_file)
            self._probe_once(path, slice_file.root)
            os.utime(_note_path(path))
        return slice_file

    def _sweep(self, keep: Path) -> None:
        """Remove slices that nobody will load again: of an older format, without a note, or, where the model is here to
        cut them anew, unused for `UNUSED_S`. Not those that this process gave out."""
        with self._locks_guard:
            kept = {keep, *(self._path(*each) for each in self._given)}
        for path in set(self._folder.glob("*/*.gguf")) - kept:
            with contextlib.suppress(ArtifactError, OSError):
                is_useless = not _is_current(path) and _is_settled(path)
                if is_useless or (_is_unused(path) and self._can_be_cut_again(path)):
                    remove_slice(path)
        for folder in self._folder.glob("*"):
            sweep_temporaries(folder)

    def _can_be_cut_again(self, path: Path) -> bool:
        try:
            model_id = parse_model_id(path.parent.name)
            span = Span.parse(path.stem.replace("-", ":"))
            wanted = slice_ranges(self._store.header(model_id), span)
            self._store.readable(model_id, wanted)
        except (ValueError, MeshswarmError):
            return False
        return True

    def _probe_once(self, path: Path, root: bytes) -> None:
        """Load the file in a child process unless this llama.cpp has already loaded this very content well."""
        note = self._probed_folder / f"{root.hex()}.json"
        build = engine_build()
        known = read_json(note)
        if known is None or known.get("build") != build:
            probe(path)
            write_json(note, {"build": build})

    def _path(self, model_id: bytes, span: Span) -> Path:
        return self._folder / model_id_text(model_id) / f"{span.start}-{span.stop}.gguf"

    def _lock(self, path: Path) -> threading.Lock:
        with self._locks_guard:
            return self._locks[path]


def _is_current(path: Path) -> bool:
    fields = read_json(_note_path(path))
    return fields is not None and fields.get("format") == SLICE_FORMAT


def _is_settled(path: Path) -> bool:
    """False for a slice that somebody may just have cut, and not noted yet."""
    return time.time() - path.stat().st_mtime > _SETTLED_S


def _is_unused(path: Path) -> bool:
    return time.time() - _note_path(path).stat().st_mtime > UNUSED_S


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
