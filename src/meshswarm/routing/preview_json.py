"""A preview as JSON: what `meshswarm plan --json` prints and `/meshswarm/plan` answers (docs/api.md).

The rule this file keeps: times are in ms, sizes in bytes, and what nobody knows is null.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshswarm.routing.alone import Alone
from meshswarm.routing.left_out import LeftOut
from meshswarm.routing.planner import Route
from meshswarm.routing.preview import PlannedHop, PlannedRoute, Preview, Way
from meshswarm.stage.sizes.memory import SpanMemory


def as_json(preview: Preview) -> dict[str, Any]:
    """Everything but the model's name."""
    question = preview.question
    return {
        "context": question.n_ctx,
        "prompt": question.n_prompt,
        "streams": question.n_streams,
        "streams_placed": sum(route.n_streams for route in preview.routes),
        "refusal": preview.refusal,
        "tokens_per_s": round(preview.tokens_per_s, 2) if preview.routes else None,
        "disjoint": preview.is_disjoint,
        "routes": [_route(route) for route in preview.routes],
        "alternatives": [_alternative(route) for route in preview.alternatives],
        "alone": None if preview.alone is None else _alone(preview.alone),
        "left_out": [_left_out(each) for each in preview.left_out],
    }


def _route(planned: PlannedRoute) -> dict[str, Any]:
    route = planned.route
    return {
        "streams": planned.n_streams,
        "tpot_ms": _ms(planned.tpot_s),
        "ttft_ms": _ms(planned.ttft_s),
        "ttft_is_claim": planned.ttft_is_claim,
        "tokens_per_s": round(planned.tokens_per_s, 2),
        "compute_ms": _ms(route.compute_s),
        "network_ms": _ms(route.network_s),
        "queue_ms": _ms(route.queue_s),
        "hops": [_hop(hop) for hop in planned.hops],
        "way_back": _way(planned.way_back),
    }


def _hop(hop: PlannedHop) -> dict[str, Any]:
    record = hop.record
    return {
        "peer": str(record.peer),
        "layers": f"{record.span.start}:{hop.stop}",
        "serves": str(record.span),
        "numclass": record.numclass,
        "us_per_layer": round(hop.us_per_layer, 1),
        "speed_basis": hop.speed_basis,
        "speed_is_claim": hop.is_claim,
        "pages": bool(record.paged_bytes),
        "queue_ms": _ms(hop.queue_s),
        "way_in": _way(hop.way_in),
        "memory": None if hop.memory is None else _memory(hop.memory),
    }


def _memory(memory: SpanMemory) -> dict[str, int]:
    return {**asdict(memory), "total": memory.total}


def _way(way: Way) -> dict[str, Any]:
    return {"ms": _ms(way.seconds), "basis": way.basis.value}


def _alternative(route: Route) -> dict[str, Any]:
    return {
        "tpot_ms": _ms(route.predicted_tpot_s),
        "hops": [{"peer": str(hop.peer), "layers": f"{hop.span.start}:{hop.stop}"} for hop in route.hops],
    }


def _alone(alone: Alone) -> dict[str, Any]:
    return {
        "peer": None if alone.peer is None else str(alone.peer),
        "tpot_ms": _ms(alone.tpot_s),
        "best_split_tpot_ms": _ms(alone.best_split_s),
        "is_better": alone.is_better,
        "sentence": alone.sentence,
    }


def _left_out(each: LeftOut) -> dict[str, Any]:
    return {
        "peer": str(each.record.peer),
        "layers": str(each.record.span),
        "reason": each.reason,
        "changes": list(each.changes),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
