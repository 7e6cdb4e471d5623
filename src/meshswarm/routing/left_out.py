"""Why a peer is not on a planned route, and what would change that, as sentences for its owner.

The rule this file keeps: a reason for every peer that serves layers of the model, and what is said to change it would
(`routing/detours.py`); where nothing of its own would, that is said too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.candidates import Objection, objection
from meshswarm.routing.detours import Detour, detours
from meshswarm.routing.planner import Planning, RouteHop, Situation


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A peer that serves `record` and is on no route: `reason`, and what would change it, in `changes`."""

    record: CoverageRecord
    reason: str
    changes: tuple[str, ...]


def explain(
    n_layers: int,
    records: Sequence[CoverageRecord],
    situation: Situation,
    away: Mapping[PeerId, str],
    planning: Planning | None,
    used: Collection[PeerId],
) -> tuple[LeftOut, ...]:
    """Everybody of `records` but those `used`; `planning` is what the last stream was planned by, None when there is no
    route. In the order of layers."""
    around = {} if planning is None else detours(planning)
    planned = {} if planning is None else {(each.peer, each.span): at for at, each in enumerate(planning.records)}
    found = []
    for record in sorted(records, key=lambda each: (each.span.start, each.span.stop, each.peer)):
        if record.peer in used:
            continue
        against = objection(
            record,
            n_layers=n_layers,
            avoid=situation.avoid,
            n_ctx=situation.n_ctx,
            kv_tokens=situation.kv_tokens,
        )
        if against is not None:
            found.append(_objected(record, against, situation, away))
        elif planning is None:
            found.append(LeftOut(record, "other layers have no holder", ("would be used once all layers are served",)))
        else:
            at = planned[record.peer, record.span]
            found.append(_outdone(at, planning, around.get(at), situation))
    return tuple(found)


def _objected(record: CoverageRecord, against: Objection, situation: Situation, away: Mapping[PeerId, str]) -> LeftOut:
    match against:
        case Objection.AVOIDED:
            reason, change = (
                f"it {away.get(record.peer, 'refused')}",
                "would be considered as soon as it takes sessions",
            )
        case Objection.BEYOND_THE_MODEL:
            reason, change = f"it says it serves {record.span}, and the model ends before", "serve layers of this model"
        case Objection.ON_DISK:
            reason = f"its layers {record.span} are not in memory"
            change = "would be considered once they are loaded"
        case Objection.CONTEXT:
            reason = f"context {record.n_ctx:,} < {situation.n_ctx:,}"
            change = f"restart it with --ctx {situation.n_ctx}"
        case Objection.ROOM:
            reason = "all its sessions are taken"
            change = "would be considered when one of them ends; more of them with --sessions"
    return LeftOut(record, reason, (change,))


def _outdone(at: int, planning: Planning, detour: Detour | None, situation: Situation) -> LeftOut:
    """The record at position `at` of the plan could be used, and others are better."""
    record, costs = planning.records[at], planning.costs
    if detour is None:
        change = "would be considered if peers with room served all layers around them"
        return LeftOut(record, f"no route can go through its layers {record.span}", (change,))
    more_ms = detour.tpot_s * 1e3 - planning.best_rank / 1e9
    reason = f"serves {record.span} but {_rival(at, planning)}; a route through it takes {more_ms:.2f} ms more a token"
    rtt_s, us, queue_s = 2 * costs.half_rtt_ns[at] / 1e9, costs.layer_ns[at] / 1e3, costs.queue_ns[at] / 1e9
    changes = []
    if detour.rtt_s is not None and record.peer != situation.head and detour.rtt_s <= rtt_s:
        changes.append(f"would be used if its round trip fell below {_ms(detour.rtt_s)} (now {_ms(rtt_s)})")
    if detour.us_per_layer is not None and detour.us_per_layer <= us:
        changes.append(f"would be used if it took less than {detour.us_per_layer:,.0f} µs a layer (now {us:,.0f})")
    if detour.queue_s is not None and detour.queue_s <= queue_s:
        changes.append(f"would be used if its queue fell below {_ms(detour.queue_s)} (now {_ms(queue_s)})")
    return LeftOut(record, reason, tuple(changes) or ("neither its speed nor its distance alone would change that",))


def _rival(at: int, planning: Planning) -> str:
    """What the peer that has most of its layers on the route does better."""
    record, costs, route = planning.records[at], planning.costs, planning.routes[0]

    def shared(hop: RouteHop) -> int:
        return min(hop.stop, record.span.stop) - max(hop.span.start, record.span.start)

    hop, rival = max(zip(route.hops, planning.paths[0], strict=True), key=lambda each: shared(each[0]))
    name = hop.peer.short
    if costs.layer_ns[rival] < costs.layer_ns[at]:
        return f"a faster peer does ({name})"
    if costs.half_rtt_ns[rival] < costs.half_rtt_ns[at]:
        return f"a nearer peer does ({name})"
    if costs.queue_ns[rival] < costs.queue_ns[at]:
        return f"a peer that is less busy does ({name})"
    if hop.numclass != record.numclass:
        return f"it computes with another numclass than {name} does"
    if hop.stop - hop.span.start > len(record.span):
        return f"a peer that computes more layers in one go does ({name})"
    return f"{name} does as well"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
