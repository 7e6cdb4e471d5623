"""Manifests: what a model's publisher says of it, signed once and served by anybody.

The rule this file keeps: the exact bytes that were signed travel and are stored, never encoded again; and a manifest is
believed only together with what the model id proves. Its files hash to the id or it is no manifest; what a header says
is read again from the proved one (`check_header`). The rest is its publisher's word.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from meshswarm.artifacts.gguf.container import MAX_HEADER_BYTES, GgufHeader
from meshswarm.artifacts.gguf.hyperparameters import MAX_CONTEXT, MAX_EMBEDDING, MAX_VOCABULARY
from meshswarm.artifacts.manifests.facts import (
    Calibration,
    ProvedCuts,
    ProvedWire,
    check_licence,
    check_source,
    clean_licence,
)
from meshswarm.artifacts.manifests.layer_ranges import LayerRanges
from meshswarm.artifacts.merkle import HASH_BYTES, MAX_FILE_BYTES, model_id, model_id_text
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.names import NAME_PATTERN
from meshswarm.errors import ArtifactError, RemoteProtocolError
from meshswarm.identity import Identity, PeerId

MAX_MANIFEST_BYTES = 256 * 1024
MAX_FILES = 512
MAX_SOURCES = 16
MAX_PROOFS = 16
MAX_CALIBRATIONS = 64
DECODE_WEIGHT = 4
"""A decoded token is so much more work than one of a prompt, as the ledger counts."""
MAX_NUMBER = (1 << 63) - 1
TEMPLATE_KEY = "tokenizer.chat_template"
LICENCE_KEY = "general.license"
_PURPOSE = "manifest"
_VERSION = 1
_N_FIELDS = 19
_SIGNATURE_BYTES = 64


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One of a model's files: bytes in all and of its header, and its BitTorrent v2 root."""

    length: int
    root: bytes
    header_length: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A model as its publisher describes it. Raises ValueError for a value out of its limits, or one against another.

    `number` rises with each edition. `template_hash`: SHA-256 of the chat template's text, empty where there is none.
    `licence` empty: not said.
    """

    number: int
    name: str
    model_id: bytes
    architecture: str
    encoding: str
    n_ctx: int
    n_embd: int
    n_vocab: int
    files: tuple[ManifestFile, ...]
    layers: LayerRanges
    licence: str = ""
    template_hash: bytes = b""
    wire: tuple[ProvedWire, ...] = ()
    cuts: tuple[ProvedCuts, ...] = ()
    sources: tuple[str, ...] = ()
    calibrations: tuple[Calibration, ...] = ()
    decode_weight: int = DECODE_WEIGHT

    def __post_init__(self) -> None:
        _require(0 <= self.number <= MAX_NUMBER, "a number that cannot be")
        _require(NAME_PATTERN.fullmatch(self.name), "a model's name is 1 to 96 of a-z, 0-9, '.', '_', '-'")
        _require(re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,31}", self.architecture), "a strange architecture")
        _require(re.fullmatch(r"[a-z0-9_]{1,16}", self.encoding), "a strange encoding")
        _require(1 <= self.n_ctx <= MAX_CONTEXT, f"a context is 1 to {MAX_CONTEXT} tokens")
        _require(1 <= self.n_embd <= MAX_EMBEDDING, f"a width is 1 to {MAX_EMBEDDING}")
        _require(1 <= self.n_vocab <= MAX_VOCABULARY, f"a vocabulary is 1 to {MAX_VOCABULARY} tokens")
        self._check_files()
        check_licence(self.licence)
        _require(len(self.template_hash) in (0, HASH_BYTES), "a template's hash is 32 bytes")
        _require(len(self.wire) <= MAX_PROOFS and len(self.cuts) <= MAX_PROOFS, f"more than {MAX_PROOFS} proofs")
        _require(all(cut.starts[-1] < self.n_layers for cut in self.cuts), "a cut behind the last layer")
        _require(
            len(set(self.sources)) == len(self.sources) <= MAX_SOURCES, f"not up to {MAX_SOURCES} different sources"
        )
        for source in self.sources:
            check_source(source)
        _require(len(self.calibrations) <= MAX_CALIBRATIONS, f"more than {MAX_CALIBRATIONS} calibrations")
        _require(all(row.depth <= self.n_layers for row in self.calibrations), "a calibration deeper than the model")
        _require(1 <= self.decode_weight <= 1000, "a decoded token weighs 1 to 1000 of a prompt's")

    def _check_files(self) -> None:
        _require(1 <= len(self.files) <= MAX_FILES, f"a model has 1 to {MAX_FILES} files")
        _require(len(self.files) == len(self.layers.files), "layers are said of other files than the model has")
        for file, runs in zip(self.files, self.layers.files, strict=True):
            _require(0 < file.length <= MAX_FILE_BYTES and len(file.root) == HASH_BYTES, "an impossible file")
            _require(0 < file.header_length <= min(MAX_HEADER_BYTES, file.length), "an impossible header length")
            if runs:
                _require(file.header_length <= runs[0].start, "a layer that begins within the header")
                _require(runs[-1].stop <= file.length, "a layer that ends behind its file")
        _require(
            model_id([(file.length, file.root) for file in self.files]) == self.model_id,
            "its files are not the model it names",
        )

    @property
    def n_layers(self) -> int:
        return self.layers.n_layers

    @property
    def n_bytes(self) -> int:
        """Of all files."""
        return sum(file.length for file in self.files)

    @property
    def contents(self) -> tuple[tuple[int, bytes], ...]:
        """(length, root) of each file, in order."""
        return tuple((file.length, file.root) for file in self.files)

    @classmethod
    def of(
        cls,
        info: ModelInfo,
        header: GgufHeader,
        files: Sequence[tuple[int, bytes]],
        *,
        number: int,
        name: str | None = None,
        licence: str | None = None,
        **said: Any,
    ) -> Manifest:
        """Of a model whose header was proved. `files`: (length, root) in order; `name` and `licence` None: those of the
        file; `said`: `wire`, `cuts`, `sources`, `calibrations`. Raises ValueError, ArtifactError."""
        return cls(
            number=number,
            name=name or info.name,
            model_id=info.model_id,
            architecture=info.architecture,
            encoding=info.encoding,
            n_ctx=info.n_ctx_train,
            n_embd=info.n_embd,
            n_vocab=info.n_vocab,
            files=_files(header, files),
            layers=LayerRanges.of(header),
            licence=clean_licence(_text(header, LICENCE_KEY)) if licence is None else licence,
            template_hash=template_hash(header),
            **said,
        )

    def check_header(self, header: GgufHeader) -> None:
        """Compare with the header that the model id proves. Raises ArtifactError that names what is told wrongly."""
        told = {
            "header lengths": (tuple(file.header_length for file in self.files), _header_lengths(header)),
            "places of the layers": (self.layers, LayerRanges.of(header)),
            "architecture": (self.architecture, header.text("general.architecture")),
            "chat template": (self.template_hash, template_hash(header)),
        }
        for what, (said, proved) in told.items():
            if said != proved:
                raise ArtifactError(
                    f"the manifest of {self.name} ({model_id_text(self.model_id)}) is refused: it does not tell the "
                    f"{what} that the model's own header does"
                )

    def sign(self, identity: Identity) -> SignedManifest:
        """This manifest as `identity`'s word. Raises ArtifactError when it is too large to be one."""
        payload = bytes(msgpack.packb(self._fields()))
        wire = bytes(msgpack.packb([payload, identity.peer_id.key, identity.sign(_PURPOSE, payload)]))
        if len(wire) > MAX_MANIFEST_BYTES:
            raise ArtifactError(f"a manifest of {len(wire)} bytes is larger than the {MAX_MANIFEST_BYTES} allowed")
        return SignedManifest(self, identity.peer_id, wire)

    def _fields(self) -> list[Any]:
        return [
            _VERSION,
            self.number,
            self.name,
            self.model_id,
            self.architecture,
            self.encoding,
            self.n_layers,
            self.n_ctx,
            self.n_embd,
            self.n_vocab,
            [[file.length, file.root, file.header_length] for file in self.files],
            self.layers.fields(),
            self.licence,
            self.template_hash,
            [proof.fields() for proof in self.wire],
            [proof.fields() for proof in self.cuts],
            list(self.sources),
            [row.fields() for row in self.calibrations],
            self.decode_weight,
        ]


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest whose signature was checked. `wire` is the whole of it as it travels."""

    manifest: Manifest
    publisher: PeerId
    wire: bytes = field(repr=False)

    @classmethod
    def parse(cls, data: bytes) -> SignedManifest:
        """The manifest in `data`, verified. Raises RemoteProtocolError for anything else than a well-signed one."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise RemoteProtocolError(f"a manifest is larger than the {MAX_MANIFEST_BYTES} bytes allowed")
        outer = _unpack(data)
        if len(outer) != 3 or not all(type(part) is bytes for part in outer):
            raise RemoteProtocolError("a manifest is malformed: its envelope is not payload, key and signature")
        payload, key, signature = outer
        if len(key) != HASH_BYTES or len(signature) != _SIGNATURE_BYTES:
            raise RemoteProtocolError("a manifest is malformed: its key or signature has a wrong length")
        publisher = PeerId(key)
        if not publisher.verify(_PURPOSE, payload, signature):
            raise RemoteProtocolError("a manifest's signature is wrong: it is forged or damaged", peer=str(publisher))
        try:
            return cls(_parse(_unpack(payload)), publisher, data)
        except ValueError as error:
            raise RemoteProtocolError(f"a manifest is refused: {error}", peer=str(publisher)) from None


def template_hash(header: GgufHeader) -> bytes:
    """SHA-256 of the model's chat template; empty where it has none."""
    template = _text(header, TEMPLATE_KEY)
    return b"" if template is None else hashlib.sha256(template.encode()).digest()


def _text(header: GgufHeader, key: str) -> str | None:
    """The header's text, None where it is missing or something else."""
    try:
        return header.text(key)
    except ArtifactError:
        return None


def _header_lengths(header: GgufHeader) -> tuple[int, ...]:
    return tuple(file.data_offset for file in header.files)


def _files(header: GgufHeader, files: Sequence[tuple[int, bytes]]) -> tuple[ManifestFile, ...]:
    return tuple(
        ManifestFile(length, root, header_length)
        for (length, root), header_length in zip(files, _header_lengths(header), strict=True)
    )


def _unpack(data: bytes) -> list[Any]:
    try:
        fields = msgpack.unpackb(data, raw=False, max_array_len=MAX_FILES, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"a manifest is malformed: {error}") from None
    if not isinstance(fields, list):
        raise RemoteProtocolError("a manifest is malformed: it is not a list of fields")
    return fields


def _parse(fields: list[Any]) -> Manifest:
    """Raises ValueError for a payload that is no manifest."""
    if not fields or type(fields[0]) is not int:
        raise ValueError("it has no version")
    if fields[0] != _VERSION:
        raise ValueError(f"it is of version {fields[0]}, and {_VERSION} is known here: a newer meshswarm may read it")
    kinds = (int, int, str, bytes, str, str, int, int, int, int, list, list, str, bytes, list, list, list, list, int)
    if len(fields) != _N_FIELDS or not all(type(value) is kind for value, kind in zip(fields, kinds, strict=True)):
        raise ValueError("its fields are not those of a manifest")
    _, number, name, own_id, architecture, encoding, n_layers, n_ctx, n_embd, n_vocab, files, layers, *rest = fields
    licence, template, wire, cuts, sources, calibrations, decode_weight = rest
    if not all(type(source) is str for source in sources):
        raise ValueError("a source is not text")
    return Manifest(
        number=number,
        name=name,
        model_id=own_id,
        architecture=architecture,
        encoding=encoding,
        n_ctx=n_ctx,
        n_embd=n_embd,
        n_vocab=n_vocab,
        files=tuple(map(_parse_file, files)),
        layers=LayerRanges.parse(n_layers, layers),
        licence=licence,
        template_hash=template,
        wire=tuple(map(ProvedWire.parse, wire)),
        cuts=tuple(map(ProvedCuts.parse, cuts)),
        sources=tuple(sources),
        calibrations=tuple(map(Calibration.parse, calibrations)),
        decode_weight=decode_weight,
    )


def _parse_file(fields: Any) -> ManifestFile:
    if not isinstance(fields, list) or [type(value) for value in fields] != [int, bytes, int]:
        raise ValueError("a file is not told by length, root and header length")
    return ManifestFile(*fields)


def _require(condition: object, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
