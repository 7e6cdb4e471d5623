"""Signed records: what a peer says about itself, in at most 1 KB, for at most half an hour.

The rule this file keeps: the exact bytes that were signed travel and are stored; they are never encoded again. A record
names its author, its swarm, a number that only rises, and its end. Of two records with the same author, kind and
subject the higher number wins, so nobody can overwrite somebody else, and nobody can bring back what was replaced.
A record with an empty body is a tombstone: its author has withdrawn what it said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from meshswarm.dht import wire
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.span import MAX_LAYERS

RECORD_VERSION = 1
MAX_RECORD_BYTES = 1024
LIFETIME_S = 1800.0
CLOCK_SKEW_S = 300.0  # how far ahead of ours an honest author's clock may be
SUBJECT_BYTES = 32
SCOPE_BYTES = 16
_SIGNATURE_BYTES = 64
_PURPOSE = "record"

RecordKey = tuple[str, bytes, bytes]  # kind, author's key, subject


class RecordKind(StrEnum):
    """`COVERAGE`: the layers a peer serves. `CARD`: a model a peer holds, by its card. `HOLDER`: files of a model that
    others may fetch from a peer, whether it serves the model or not."""

    COVERAGE = "coverage"
    CARD = "card"
    HOLDER = "holder"


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """One record as it travels. `wire` is the whole of it; every other field was read from there.

    `subject` is a model id. `start` and `stop` are the layers a coverage record is about; 0 and 0 in the others.
    """

    kind: RecordKind
    author: PeerId
    scope: bytes
    subject: bytes
    start: int
    stop: int
    seq: int
    expires_ms: int
    body: bytes
    wire: bytes = field(repr=False)

    @classmethod
    def sign(
        cls,
        identity: Identity,
        kind: RecordKind,
        *,
        scope: bytes,
        subject: bytes,
        layers: tuple[int, int] = (0, 0),
        seq: int,
        expires_ms: int,
        body: bytes,
    ) -> SignedRecord:
        """A new record of this peer. Raises WireError when it would be larger than `MAX_RECORD_BYTES`."""
        fields = [RECORD_VERSION, kind.value, identity.peer_id.key, scope, subject, *layers, seq, expires_ms, body]
        payload = wire.pack(fields)
        return cls.decode(wire.pack([payload, identity.sign(_PURPOSE, payload)]))

    @classmethod
    def decode(cls, data: bytes) -> SignedRecord:
        """Reads and checks every field but the signature (`verify`). Raises WireError."""
        return _decode(data)

    @classmethod
    def _read(cls, data: bytes) -> SignedRecord:
        payload, _ = _open(data)
        fields = wire.array(wire.unpack_array(payload, MAX_RECORD_BYTES, "a record"), "a record", at_least=10)
        wire.integer(fields[0], "record version", low=RECORD_VERSION, high=RECORD_VERSION)
        kind = _kind(fields[1])
        start = wire.integer(fields[5], "first layer", high=MAX_LAYERS)
        stop = wire.integer(fields[6], "layer end", high=MAX_LAYERS)
        if (start < stop) != (kind is RecordKind.COVERAGE):
            raise WireError(f"a {kind} record about layers {start}:{stop}")
        return cls(
            kind=kind,
            author=wire.peer_id(fields[2], "author"),
            scope=wire.binary(fields[3], "scope", size=SCOPE_BYTES),
            subject=wire.binary(fields[4], "subject", size=SUBJECT_BYTES),
            start=start,
            stop=stop,
            seq=wire.integer(fields[7], "number"),
            expires_ms=wire.integer(fields[8], "end"),
            body=wire.binary(fields[9], "body", at_most=MAX_RECORD_BYTES),
            wire=data,
        )

    def verify(self) -> bool:
        """True when the author signed exactly these bytes."""
        return _is_signed(self.author, self.wire)

    @property
    def key(self) -> RecordKey:
        """What only one record can stand for at a time."""
        return (self.kind.value, self.author.key, self.subject)

    @property
    def is_tombstone(self) -> bool:
        return not self.body

    def is_expired(self, now: float) -> bool:
        return self.expires_ms <= now * 1000

    def is_too_long(self, now: float) -> bool:
        """True when it claims to live longer than any record may: its author's clock is wrong, or it lies."""
        return self.expires_ms > (now + LIFETIME_S + CLOCK_SKEW_S) * 1000


class RecordSet:
    """The newest record of every (kind, author, subject) among those added; of `limit`, when there is one.

    A set that is full takes another record of a source in place of the last one of the source that brought the most.
    Whoever answers with a flood of invented authors thus crowds out nothing but his own.
    """

    def __init__(self, records: Iterable[SignedRecord] = (), *, limit: int | None = None) -> None:
        self._newest: dict[RecordKey, SignedRecord] = {}
        self._limit = limit
        self._source_of: dict[RecordKey, object] = {}
        self._brought: dict[object, dict[RecordKey, None]] = {}  # by source, in the order they came
        self.update(records)

    def update(self, records: Iterable[SignedRecord], source: object = None) -> None:
        """Adds what `source` brought."""
        for record in records:
            known = self._newest.get(record.key)
            if known is None:
                if self._limit is None or self._has_room(source):
                    self._newest[record.key] = record
                    self._attribute(record.key, source)
                continue
            if replaces(record, known):
                self._newest[record.key] = record
            if self._n_brought(source) < self._n_brought(self._source_of.get(record.key)):
                self._attribute(record.key, source)

    def _has_room(self, source: object) -> bool:
        """True when one more of `source` may come in, in the place of another if need be."""
        assert self._limit is not None
        if len(self._newest) < self._limit:
            return True
        most = max(self._brought, key=self._n_brought)
        if self._n_brought(source) + 1 >= self._n_brought(most):
            return False
        last, _ = self._brought[most].popitem()
        del self._newest[last], self._source_of[last]
        return True

    def _attribute(self, key: RecordKey, source: object) -> None:
        """Whatever two sources brought counts for the one that brought less."""
        if self._limit is not None:
            self._brought.get(self._source_of.get(key), {}).pop(key, None)
            self._source_of[key] = source
            self._brought.setdefault(source, {})[key] = None

    def _n_brought(self, source: object) -> int:
        return len(self._brought.get(source, ()))

    def __iter__(self) -> Iterator[SignedRecord]:
        return iter(list(self._newest.values()))

    def __len__(self) -> int:
        return len(self._newest)

    def live(self, now: float) -> list[SignedRecord]:
        """Those that still say something: not withdrawn, not expired, in a fixed order."""
        found = [r for r in self._newest.values() if not r.is_tombstone and not r.is_expired(now)]
        return sorted(found, key=lambda record: record.key)


def replaces(new: SignedRecord, old: SignedRecord) -> bool:
    """True when `new` takes the place of `old`. Equal numbers are the author's mistake; all pick the same one."""
    return (new.seq, new.wire) > (old.seq, old.wire)


@lru_cache(maxsize=4096)
def _decode(data: bytes) -> SignedRecord:
    """The same record comes in answer after answer, from every peer that keeps it."""
    return SignedRecord._read(data)


@lru_cache(maxsize=8192)
def _is_signed(author: PeerId, data: bytes) -> bool:
    payload, signature = _open(data)
    return author.verify(_PURPOSE, payload, signature)


def _open(data: bytes) -> tuple[bytes, bytes]:
    outer = wire.array(wire.unpack_array(data, MAX_RECORD_BYTES, "a record"), "a record", at_least=2, at_most=2)
    payload = wire.binary(outer[0], "payload", at_most=MAX_RECORD_BYTES)
    return payload, wire.binary(outer[1], "signature", size=_SIGNATURE_BYTES)


def _kind(value: object) -> RecordKind:
    try:
        return RecordKind(wire.text(value, "record kind", at_most=32))
    except ValueError:
        raise WireError(f"a record of an unknown kind: {str(value)[:32]!r}") from None
