"""Model cards: what any holder of a model publishes, so that models can be listed and named.

The rule this file keeps: the exact bytes that were signed travel and are stored, never encoded again; and a card's
claims are hints. Who wants the model checks its header against the id before believing a number in here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgpack

from meshswarm.artifacts.gguf.container import MAX_HEADER_BYTES
from meshswarm.artifacts.gguf.hyperparameters import MAX_CONTEXT, MAX_EMBEDDING, MAX_VOCABULARY
from meshswarm.artifacts.merkle import HASH_BYTES, MAX_FILE_BYTES
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.names import NAME_PATTERN
from meshswarm.errors import RemoteProtocolError
from meshswarm.identity import Identity, PeerId
from meshswarm.span import MAX_LAYERS

MAX_CARD_BYTES = 640
MAX_CARD_FILES = 32
_PURPOSE = "model-card"
_VERSION = 1
_SIGNATURE_BYTES = 64
_N_FIELDS = 11


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model in one line. Raises ValueError for a value out of its limits. Lengths are in bytes; of a model in more
    than `MAX_CARD_FILES` files, `file_lengths` are the first one's and that of all others together."""

    model_id: bytes
    name: str
    architecture: str
    encoding: str
    n_layers: int
    file_lengths: tuple[int, ...]
    header_length: int
    n_ctx: int
    n_embd: int
    n_vocab: int

    def __post_init__(self) -> None:
        _require(len(self.model_id) == HASH_BYTES, "a model id is 32 bytes")
        _require(NAME_PATTERN.fullmatch(self.name) is not None, "a model's name is 1 to 96 of a-z, 0-9, '.', '_', '-'")
        _require(re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,31}", self.architecture) is not None, "a strange architecture")
        _require(re.fullmatch(r"[a-z0-9_]{1,16}", self.encoding) is not None, "a strange encoding")
        _require(1 <= self.n_layers <= MAX_LAYERS, f"a model has 1 to {MAX_LAYERS} layers")
        _require(1 <= len(self.file_lengths) <= MAX_CARD_FILES, f"a model has 1 to {MAX_CARD_FILES} files")
        _require(all(0 < length <= MAX_FILE_BYTES for length in self.file_lengths), "an impossible file length")
        _require(0 < self.header_length <= min(MAX_HEADER_BYTES, self.file_lengths[0]), "an impossible header length")
        _require(1 <= self.n_ctx <= MAX_CONTEXT, f"a context is 1 to {MAX_CONTEXT} tokens")
        _require(1 <= self.n_embd <= MAX_EMBEDDING, f"a width is 1 to {MAX_EMBEDDING}")
        _require(1 <= self.n_vocab <= MAX_VOCABULARY, f"a vocabulary is 1 to {MAX_VOCABULARY} tokens")

    @classmethod
    def of(cls, info: ModelInfo) -> ModelCard:
        return cls(
            info.model_id,
            info.name,
            info.architecture,
            info.encoding,
            info.n_layers,
            _told_lengths(info.file_lengths),
            info.header_length,
            info.n_ctx_train,
            info.n_embd,
            info.n_vocab,
        )

    def sign(self, identity: Identity) -> SignedCard:
        """This card with a peer's word that it holds the model."""
        fields = [
            _VERSION,
            self.model_id,
            self.name,
            self.architecture,
            self.encoding,
            self.n_layers,
            list(self.file_lengths),
            self.header_length,
            self.n_ctx,
            self.n_embd,
            self.n_vocab,
        ]
        payload = bytes(msgpack.packb(fields))
        signature = identity.sign(_PURPOSE, payload)
        return SignedCard(self, identity.peer_id, _pack_signed(payload, identity.peer_id, signature))


@dataclass(frozen=True, slots=True)
class SignedCard:
    """A card whose signature was checked. `wire` is the whole of it as it travels."""

    card: ModelCard
    author: PeerId
    wire: bytes = field(repr=False)

    @classmethod
    def parse(cls, data: bytes) -> SignedCard:
        """The card in `data`, verified. Raises RemoteProtocolError for anything else than a well-signed card."""
        outer = _unpack(data, 3)
        payload, key, signature = outer
        if not (type(payload) is bytes and type(key) is bytes and type(signature) is bytes):
            raise RemoteProtocolError("a model card is malformed: its envelope has fields of wrong types")
        if len(key) != HASH_BYTES or len(signature) != _SIGNATURE_BYTES:
            raise RemoteProtocolError("a model card is malformed: its key or signature has a wrong length")
        author = PeerId(key)
        if not author.verify(_PURPOSE, payload, signature):
            raise RemoteProtocolError("a model card's signature is wrong", peer=str(author))
        return cls(_parse_payload(payload, author), author, data)


def _pack_signed(payload: bytes, author: PeerId, signature: bytes) -> bytes:
    wire = bytes(msgpack.packb([payload, author.key, signature]))
    if len(wire) > MAX_CARD_BYTES:
        raise ValueError(f"a model card of {len(wire)} bytes is larger than the {MAX_CARD_BYTES} allowed")
    return wire


def _unpack(data: bytes, n_fields: int) -> list[Any]:
    if len(data) > MAX_CARD_BYTES:
        raise RemoteProtocolError(f"a model card is larger than the {MAX_CARD_BYTES} bytes allowed")
    try:
        fields = msgpack.unpackb(data, raw=False, max_array_len=MAX_CARD_FILES, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"a model card is malformed: {error}") from None
    if not isinstance(fields, list) or len(fields) != n_fields:
        raise RemoteProtocolError(f"a model card is malformed: it does not have {n_fields} fields")
    return fields


def _parse_payload(payload: bytes, author: PeerId) -> ModelCard:
    version, model_id, name, architecture, encoding, n_layers, lengths, *rest = _unpack(payload, _N_FIELDS)
    if type(version) is not int or version != _VERSION:
        raise RemoteProtocolError("a model card has a version not known here", peer=str(author))
    numbers_are_right = isinstance(lengths, list) and all(type(number) is int for number in [n_layers, *lengths, *rest])
    texts_are_right = type(model_id) is bytes and all(type(text) is str for text in (name, architecture, encoding))
    if not (numbers_are_right and texts_are_right):
        raise RemoteProtocolError("a model card has fields of wrong types", peer=str(author))
    try:
        return ModelCard(model_id, name, architecture, encoding, n_layers, tuple(lengths), *rest)
    except ValueError as error:
        raise RemoteProtocolError(f"a model card is out of its limits: {error}", peer=str(author)) from None


def _told_lengths(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return lengths if len(lengths) <= MAX_CARD_FILES else (lengths[0], sum(lengths[1:]))


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
