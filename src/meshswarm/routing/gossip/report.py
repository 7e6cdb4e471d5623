"""Load reports: what a peer says of itself at this moment, in at most 512 bytes, signed by it.

The rule this file keeps: a `LoadReport` that exists is within its limits, whoever made it. Its number orders it, never
its time: `at_ms` is its author's clock, shown to people and used for nothing. What it claims hurts or helps nobody but
its author.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from meshswarm.dht import wire
from meshswarm.dht.signed import SUBJECT_BYTES
from meshswarm.dht.wire import MAX_INT, WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.routing.gossip.sealed import seal, unseal
from meshswarm.span import MAX_LAYERS, Span

MAX_REPORT_BYTES = 512
MAX_DEMANDS = 6
MAX_QUEUE_S = 3600.0
MAX_REQUESTS_PER_S = 1e6
PURPOSE = "load"
_MAX_COUNT = 2**31 - 1
_MAX_KV_TOKENS = 2**40


class Role(IntEnum):
    """What a peer is there for. The numbers travel."""

    STANDBY = 0
    SERVER = 1
    SEEDER = 2
    RELAY = 3
    VERIFIER = 4
    CLIENT = 5


ROLE_NAMES: Mapping[str, Role] = {role.name.lower(): role for role in Role}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One peer's state. Raises ValueError for a value out of its limits.

    `model_id` and `span`: what it serves, None when nothing; `n_layers`: of that model. `queue_s`: how long a step
    waits there before its turn. `free_kv_tokens`: positions it can still reserve. `us_per_layer`: of one decode row,
    measured lately, 0 when not measured. `demand`: requests a second this peer's own clients made, by model.
    """

    peer: PeerId
    seq: int = 0
    at_ms: int = 0
    model_id: bytes | None = None
    span: Span | None = None
    queue_s: float = 0.0
    sessions: int = 0
    free_kv_tokens: int = 0
    draining: bool = False
    us_per_layer: int = 0
    demand: tuple[tuple[bytes, float], ...] = ()
    role: str = "client"
    n_layers: int = 0

    def __post_init__(self) -> None:
        _require(0 <= self.seq <= MAX_INT and 0 <= self.at_ms <= MAX_INT, "seq and at_ms are below 2^53")
        _require((self.model_id is None) == (self.span is None), "a span belongs to a model")
        _require(self.model_id is None or len(self.model_id) == SUBJECT_BYTES, "a model id is 32 bytes")
        _require(0 <= self.n_layers <= MAX_LAYERS, f"n_layers is from 0 to {MAX_LAYERS}")
        _require(self.span is None or self.span.stop <= self.n_layers, "the span lies within the model")
        _require(math.isfinite(self.queue_s) and 0 <= self.queue_s <= MAX_QUEUE_S, "queue_s is from 0 to an hour")
        _require(0 <= self.sessions <= _MAX_COUNT, "sessions is from 0 to 2^31 - 1")
        _require(0 <= self.free_kv_tokens <= _MAX_KV_TOKENS, "free_kv_tokens is from 0 to 2^40")
        _require(0 <= self.us_per_layer <= 10**9, "us_per_layer is from 0 to 10^9")
        _require(len(self.demand) <= MAX_DEMANDS, f"demand names at most {MAX_DEMANDS} models")
        for model_id, per_s in self.demand:
            _require(len(model_id) == SUBJECT_BYTES, "a model id is 32 bytes")
            _require(math.isfinite(per_s) and 0 <= per_s <= MAX_REQUESTS_PER_S, "requests a second are from 0 to 10^6")
        _require(self.role in ROLE_NAMES, f"a role is one of {', '.join(ROLE_NAMES)}")


@dataclass(frozen=True, slots=True)
class SignedReport:
    """A report as it travels. `wire` is the whole of it."""

    report: LoadReport
    scope: bytes
    wire: bytes = field(repr=False)

    @classmethod
    def sign(cls, identity: Identity, scope: bytes, report: LoadReport) -> SignedReport:
        """Raises ValueError when `report` is about somebody else, or larger than `MAX_REPORT_BYTES`."""
        if report.peer != identity.peer_id:
            raise ValueError("a peer reports its own load only")
        data = seal(identity, PURPOSE, scope, report.seq, _fields(report))
        if len(data) > MAX_REPORT_BYTES:
            raise ValueError(f"a load report of {len(data)} bytes; at most {MAX_REPORT_BYTES} are allowed")
        return cls(report, scope, data)

    @classmethod
    def decode(cls, data: bytes) -> SignedReport:
        """Reads and checks all but the signature. Raises WireError."""
        sealed = unseal(data, max_bytes=MAX_REPORT_BYTES, at_least=11, what="a load report")
        return cls(_report(sealed.author, sealed.number, sealed.fields), sealed.scope, data)

    def verify(self) -> bool:
        sealed = unseal(self.wire, max_bytes=MAX_REPORT_BYTES, at_least=11, what="a load report")
        return sealed.is_signed(PURPOSE)


def is_news(report: LoadReport, before: LoadReport) -> bool:
    """Whether `report` says something that others should hear of soon, and not only when they ask next."""
    if report.draining != before.draining or report.role != before.role:
        return True
    if (report.model_id, report.span) != (before.model_id, before.span):
        return True
    if (report.free_kv_tokens == 0) != (before.free_kv_tokens == 0):
        return True
    low, high = sorted((report.queue_s, before.queue_s))
    return high >= 0.1 and high >= 2 * low


def _fields(report: LoadReport) -> list[object]:
    return [
        report.at_ms,
        report.model_id or b"",
        report.n_layers,
        [] if report.span is None else [report.span.start, report.span.stop],
        round(report.queue_s * 1000),
        report.sessions,
        report.free_kv_tokens,
        report.draining,
        report.us_per_layer,
        int(ROLE_NAMES[report.role]),
        [[model_id, round(per_s * 1000)] for model_id, per_s in report.demand],
    ]


def _report(peer: PeerId, seq: int, fields: tuple[object, ...]) -> LoadReport:
    model_id = wire.binary(fields[1], "model id", at_most=SUBJECT_BYTES)
    ends = wire.array(fields[3], "span", at_most=2)
    try:
        return LoadReport(
            peer=peer,
            seq=seq,
            at_ms=wire.integer(fields[0], "time"),
            model_id=model_id or None,
            n_layers=wire.integer(fields[2], "layers", high=MAX_LAYERS),
            span=Span(*(wire.integer(end, "span", high=MAX_LAYERS) for end in ends)) if len(ends) == 2 else None,
            queue_s=wire.integer(fields[4], "queue", high=int(MAX_QUEUE_S * 1000)) / 1000,
            sessions=wire.integer(fields[5], "sessions"),
            free_kv_tokens=wire.integer(fields[6], "free KV"),
            draining=wire.boolean(fields[7], "draining"),
            us_per_layer=wire.integer(fields[8], "us_per_layer"),
            role=Role(wire.integer(fields[9], "role", high=max(Role))).name.lower(),
            demand=tuple(_demand(item) for item in wire.array(fields[10], "demand", at_most=MAX_DEMANDS)),
        )
    except ValueError as error:
        raise WireError(f"a load report of {peer.short} out of its limits: {error}") from None


def _demand(item: object) -> tuple[bytes, float]:
    pair = wire.array(item, "demand", at_least=2, at_most=2)
    model_id = wire.binary(pair[0], "demand", size=SUBJECT_BYTES)
    return model_id, wire.integer(pair[1], "demand", high=int(MAX_REQUESTS_PER_S * 1000)) / 1000


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
