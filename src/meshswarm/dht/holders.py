"""Holder records: a peer has files of a model, whole or in part, and others may fetch them from it.

The rule this file keeps: holding is no serving. A holder record says nothing of layers that are computed, so plans and
coverage never read one; and it is a claim: what a holder sends is checked against the model's hashes, whoever it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshswarm.config import Address
from meshswarm.dht import wire
from meshswarm.dht.signed import SUBJECT_BYTES, RecordKind, SignedRecord
from meshswarm.dht.wire import MAX_ADDRESSES, MAX_INT, WireError
from meshswarm.errors import RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.span import Span

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class HolderRecord:
    """What a peer holds of one model's files. Raises ValueError for a value out of its limits.

    `torrent_port`: TCP, at the hosts of `addresses`; 0 where it sends no pieces over BitTorrent. `layers`: those whose
    tensors it holds, all of them; None where that is not one stretch of layers: it has some parts, and says which when
    it is asked. `is_whole`: every byte of every file. `seq` and `expires_ms` (Unix time) are set when the record is
    published.
    """

    peer: PeerId
    addresses: tuple[Address, ...]
    model_id: bytes
    torrent_port: int
    layers: Span | None = None
    is_whole: bool = False
    seq: int = 0
    expires_ms: int = 0

    def __post_init__(self) -> None:
        _require(len(self.model_id) == SUBJECT_BYTES, "a model id is 32 bytes")
        _require(len(self.addresses) <= MAX_ADDRESSES, f"at most {MAX_ADDRESSES} addresses")
        _require(all(a.is_dialable for a in self.addresses), "addresses are IP addresses with a port")
        _require(0 <= self.torrent_port <= _MAX_PORT, f"a port is from 0 to {_MAX_PORT}")
        _require(0 <= self.seq <= MAX_INT and 0 <= self.expires_ms <= MAX_INT, "seq and expires_ms are below 2^53")

    def holds(self, layers: Span) -> bool:
        """True when it says that it has all of `layers`."""
        if self.is_whole:
            return True
        return self.layers is not None and self.layers.start <= layers.start and layers.stop <= self.layers.stop

    def body(self) -> bytes:
        """What the signed record carries beyond its envelope."""
        layers = [] if self.layers is None else [self.layers.start, self.layers.stop]
        return wire.pack([wire.pack_addresses(self.addresses), self.torrent_port, layers, self.is_whole])

    @classmethod
    def from_record(cls, record: SignedRecord) -> HolderRecord:
        """What `record` says. Raises WireError when it is not a holder record within the limits."""
        if record.kind is not RecordKind.HOLDER or record.is_tombstone:
            raise WireError("not a holder record")
        what = "holder record"
        fields = wire.array(wire.unpack_array(record.body, len(record.body), what), what, at_least=4)
        try:
            return cls(
                peer=record.author,
                addresses=wire.addresses(fields[0], "addresses"),
                model_id=record.subject,
                torrent_port=wire.integer(fields[1], "torrent port", high=_MAX_PORT),
                layers=_layers(fields[2]),
                is_whole=wire.boolean(fields[3], "is whole"),
                seq=record.seq,
                expires_ms=record.expires_ms,
            )
        except ValueError as error:
            raise WireError(f"a {what} of {record.author.short} out of its limits: {error}") from None


def read_holders(records: Iterable[SignedRecord], model_id: bytes) -> list[HolderRecord]:
    """The holders of one model among `records`; what does not keep the limits is left out."""
    read = []
    for record in records:
        if record.kind is RecordKind.HOLDER and record.subject == model_id:
            try:
                read.append(HolderRecord.from_record(record))
            except RemoteProtocolError:
                continue
    return read


def _layers(item: object) -> Span | None:
    if item == []:
        return None
    ends = wire.array(item, "layers held", at_least=2, at_most=2)
    return Span(wire.integer(ends[0], "first layer held"), wire.integer(ends[1], "end of the layers held"))


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
