"""Which peers may carry a session at all, and a sentence for the person whose request nobody can carry.

The rule this file keeps: a layer that nobody serves and a layer whose every holder was left out are told apart, and
every reason for leaving a peer out is counted in the sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import NoRouteError
from meshswarm.identity import PeerId
from meshswarm.span import Span, missing_layers

RETRY_UNHELD_S = 10.0  # until a peer with the layers may have come
RETRY_BUSY_S = 2.0  # until a holder may have room again


class MissingLayersError(NoRouteError):
    """Layers `missing` cannot be computed now. `held`: somebody serves all of them, but not for this session."""

    def __init__(self, message: str, *, missing: tuple[Span, ...], held: bool) -> None:
        super().__init__(message, retry_after_s=RETRY_BUSY_S if held else RETRY_UNHELD_S)
        self.missing = missing
        self.held = held


class Objection(Enum):
    """What speaks against a peer, whatever it costs."""

    AVOIDED = auto()
    BEYOND_THE_MODEL = auto()
    ON_DISK = auto()
    CONTEXT = auto()
    ROOM = auto()


def usable(
    offered: Iterable[CoverageRecord], *, n_layers: int, avoid: frozenset[PeerId], n_ctx: int, kv_tokens: int
) -> list[CoverageRecord]:
    """Those of `offered` that nothing speaks against."""
    return [
        record
        for record in offered
        if objection(record, n_layers=n_layers, avoid=avoid, n_ctx=n_ctx, kv_tokens=kv_tokens) is None
    ]


def objection(
    record: CoverageRecord, *, n_layers: int, avoid: frozenset[PeerId], n_ctx: int, kv_tokens: int
) -> Objection | None:
    """The first thing that speaks against a peer."""
    if record.span.stop > n_layers:
        return Objection.BEYOND_THE_MODEL
    if record.peer in avoid:
        return Objection.AVOIDED
    if not record.loaded:
        return Objection.ON_DISK
    if record.n_ctx < n_ctx:
        return Objection.CONTEXT
    return Objection.ROOM if record.free_kv_tokens < kv_tokens else None


def require_cover(
    offered: Sequence[CoverageRecord],
    kept: Sequence[CoverageRecord],
    *,
    n_layers: int,
    avoid: frozenset[PeerId],
    n_ctx: int,
    kv_tokens: int,
) -> None:
    """Raises MissingLayersError unless the `kept` records cover the model.

    Spans that cover every layer always chain into a route: one that ends early or late is left where the next starts.
    """
    missing = missing_layers((record.span for record in kept), n_layers)
    if not missing:
        return
    inside = [record for record in offered if record.span.stop <= n_layers]
    unheld = missing_layers((record.span for record in inside), n_layers)
    if unheld:
        raise MissingLayersError(
            f"no peer of this swarm serves layers {_text(unheld)} of this model yet",
            missing=unheld,
            held=False,
        )
    holders = [record for record in inside if any(_overlap(record.span, gap) for gap in missing)]
    ends = {
        Objection.AVOIDED: "refused it or did not answer",
        Objection.ON_DISK: "only holding them on disk",
        Objection.CONTEXT: f"with a context below the {n_ctx} it needs",
        Objection.ROOM: (
            "whose sessions are all taken"
            if kv_tokens <= 1
            else f"without room for the {kv_tokens} positions it reserves"
        ),
    }
    reasons = Counter(
        objection(record, n_layers=n_layers, avoid=avoid, n_ctx=n_ctx, kv_tokens=kv_tokens) for record in holders
    )
    counted = ", ".join(f"{reasons[reason]} {end}" for reason, end in ends.items() if reasons[reason])
    raise MissingLayersError(
        f"layers {_text(missing)} of this model are served, but by no peer that can take this session: {counted}",
        missing=missing,
        held=True,
    )


def _overlap(span: Span, other: Span) -> bool:
    return span.start < other.stop and other.start < span.stop


def _text(spans: Iterable[Span]) -> str:
    return ", ".join(str(span) for span in spans)
