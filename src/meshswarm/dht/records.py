"""Coverage records: the layers one peer serves of one model, how fast, and where to reach it.

The rule this file keeps: a `CoverageRecord` that exists is within every limit, whoever made it, so that the planner and
the listings need no checks of their own. What it claims about speed is a claim; the head's own measurements outrank it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshswarm.config import Address
from meshswarm.dht import wire
from meshswarm.dht.signed import SUBJECT_BYTES, RecordKind, SignedRecord
from meshswarm.dht.wire import MAX_ADDRESSES, MAX_INT, WireError
from meshswarm.identity import PeerId
from meshswarm.span import Span

MAX_RTTS = 16
RTT_PREFIX_BYTES = 8  # of a peer's key: enough to recognise a peer already known from elsewhere
MAX_NUMCLASS = 96
MAX_ROLES = 8
WHOLE_ONLY = "whole-only"
"""The role of a peer whose span is used from its first to its last layer or not at all."""
_MAX_US = 10**9
_MAX_RTT_US = 60 * 10**6
_MAX_CONTEXT = 2**31 - 1
_MAX_KV_TOKENS = 2**40
_MAX_BYTES = 2**50
_ABSENT: tuple[object, ...] = (0, 0, 0, 0, [])
"""What the fields after the first nine are where a record ends before them."""
_ROLE = re.compile(r"[a-z][a-z-]{0,15}")
_NUMCLASS = re.compile(r"[\x20-\x7e]{0,96}")


@dataclass(frozen=True)
class CoverageRecord:
    """What a peer serves of one model. Raises ValueError for a value out of its limits.

    `loaded` False: held on disk, not in memory. `us_per_layer`: measured µs one decode row takes in one layer;
    `us_per_layer_4`, `us_per_layer_16`: 4 and 16 rows of different sessions together, 0 when not measured.
    `prefill_us_per_row_layer`: per row of a long prompt. `free_kv_tokens`: positions it can still reserve.
    `rtts`: measured round trips to other peers in µs, by the first 8 bytes of their keys. `paged_bytes`: weights that
    memory has no room for, 0 for none, and `read_bytes_per_s` how fast they come back from the disk, 0 when not
    measured. `next_span`: the layers it is loading, to serve them instead. `seq` and `expires_ms` (Unix time) are set
    when the record is published.
    """

    peer: PeerId
    addresses: tuple[Address, ...]
    model_id: bytes
    span: Span
    loaded: bool
    numclass: str
    n_ctx: int
    us_per_layer: int
    prefill_us_per_row_layer: int
    free_kv_tokens: int
    roles: tuple[str, ...] = ()
    rtts: tuple[tuple[bytes, int], ...] = ()
    us_per_layer_4: int = 0
    us_per_layer_16: int = 0
    read_bytes_per_s: int = 0
    paged_bytes: int = 0
    next_span: Span | None = None
    seq: int = 0
    expires_ms: int = 0

    def __post_init__(self) -> None:
        _require(len(self.model_id) == SUBJECT_BYTES, "a model id is 32 bytes")
        _require(len(self.addresses) <= MAX_ADDRESSES, f"at most {MAX_ADDRESSES} addresses")
        _require(all(a.is_dialable for a in self.addresses), "addresses are IP addresses with a port")
        _require(_NUMCLASS.fullmatch(self.numclass) is not None, f"numclass is at most {MAX_NUMCLASS} ASCII characters")
        _require(1 <= self.n_ctx <= _MAX_CONTEXT, "n_ctx is from 1 to 2^31 - 1")
        _require(1 <= self.us_per_layer <= _MAX_US, "us_per_layer is from 1 to 10^9")
        _require(0 <= self.prefill_us_per_row_layer <= _MAX_US, "prefill_us_per_row_layer is from 0 to 10^9")
        together = max(self.us_per_layer_4, self.us_per_layer_16)
        _require(min(self.us_per_layer_4, self.us_per_layer_16) >= 0 and together <= _MAX_US, "µs are from 0 to 10^9")
        _require(0 <= self.free_kv_tokens <= _MAX_KV_TOKENS, "free_kv_tokens is from 0 to 2^40")
        _require(0 <= self.read_bytes_per_s <= _MAX_BYTES, "read_bytes_per_s is from 0 to 2^50")
        _require(0 <= self.paged_bytes <= _MAX_BYTES, "paged_bytes is from 0 to 2^50")
        _require(len(self.roles) <= MAX_ROLES, f"at most {MAX_ROLES} roles")
        _require(all(_ROLE.fullmatch(role) for role in self.roles), "a role is 1 to 16 of a-z and -")
        _require(len(self.rtts) <= MAX_RTTS, f"at most {MAX_RTTS} round trips")
        _require(all(len(p) == RTT_PREFIX_BYTES and 0 <= us <= _MAX_RTT_US for p, us in self.rtts), "a bad round trip")
        _require(0 <= self.seq <= MAX_INT and 0 <= self.expires_ms <= MAX_INT, "seq and expires_ms are below 2^53")

    def body(self) -> bytes:
        """What the signed record carries beyond its envelope."""
        return wire.pack(
            [
                wire.pack_addresses(self.addresses),
                self.loaded,
                self.numclass,
                self.n_ctx,
                self.us_per_layer,
                self.prefill_us_per_row_layer,
                self.free_kv_tokens,
                list(self.roles),
                [[prefix, us] for prefix, us in self.rtts],
                self.us_per_layer_4,
                self.us_per_layer_16,
                self.read_bytes_per_s,
                self.paged_bytes,
                [] if self.next_span is None else [self.next_span.start, self.next_span.stop],
            ]
        )

    @classmethod
    def from_record(cls, record: SignedRecord) -> CoverageRecord:
        """What `record` says. Raises WireError when it is not a coverage record within the limits."""
        if record.kind is not RecordKind.COVERAGE or record.is_tombstone:
            raise WireError("not a coverage record")
        what = "coverage record"
        fields = wire.array(wire.unpack_array(record.body, len(record.body), what), what, at_least=9)
        roles = wire.array(fields[7], "roles", at_most=MAX_ROLES)
        rtts = wire.array(fields[8], "round trips", at_most=MAX_RTTS)
        later = [*fields[9:], *_ABSENT[len(fields) - 9 :]]  # appended after the first version, whose records end before
        try:
            return cls(
                peer=record.author,
                addresses=wire.addresses(fields[0], "addresses"),
                model_id=record.subject,
                span=Span(record.start, record.stop),
                loaded=wire.boolean(fields[1], "loaded"),
                numclass=wire.text(fields[2], "numclass", at_most=MAX_NUMCLASS),
                n_ctx=wire.integer(fields[3], "n_ctx"),
                us_per_layer=wire.integer(fields[4], "us_per_layer"),
                prefill_us_per_row_layer=wire.integer(fields[5], "prefill_us_per_row_layer"),
                free_kv_tokens=wire.integer(fields[6], "free_kv_tokens"),
                roles=tuple(wire.text(role, "role", at_most=16) for role in roles),
                rtts=tuple(_rtt(item) for item in rtts),
                us_per_layer_4=wire.integer(later[0], "us_per_layer_4"),
                us_per_layer_16=wire.integer(later[1], "us_per_layer_16"),
                read_bytes_per_s=wire.integer(later[2], "read_bytes_per_s"),
                paged_bytes=wire.integer(later[3], "paged_bytes"),
                next_span=_next_span(later[4]),
                seq=record.seq,
                expires_ms=record.expires_ms,
            )
        except ValueError as error:
            raise WireError(f"a {what} of {record.author.short} out of its limits: {error}") from None


def _rtt(item: object) -> tuple[bytes, int]:
    pair = wire.array(item, "round trip", at_least=2, at_most=2)
    return wire.binary(pair[0], "round trip", size=RTT_PREFIX_BYTES), wire.integer(pair[1], "round trip")


def _next_span(item: object) -> Span | None:
    if item == []:
        return None
    ends = wire.array(item, "next span", at_least=2, at_most=2)
    return Span(wire.integer(ends[0], "next span"), wire.integer(ends[1], "next span"))


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
