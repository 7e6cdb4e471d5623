"""Which spans a request goes through: the cheapest routes that cover the model, exactly.

A hop enters at the start of a peer's span and may leave after any layer of it, so spans that overlap or end at odd
layers join wherever the next one starts. Starts only rise along a route: that makes it a shortest path in a graph
without cycles, and the k best suffixes of every span give the k best routes (no heuristic, no repetition).

The rule this file keeps: the same candidates give the same routes, in whatever order they come. The order of routes is
cost, then number of hops, then the peers' keys. A route through several numclasses must beat the best of one numclass
by `MIXED_PERMILLE`, because its answers repeat only on exactly that mix.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from meshswarm.config import Address
from meshswarm.dht.records import WHOLE_ONLY, CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.candidates import require_cover, usable
from meshswarm.routing.cost import CostModel, RttOf
from meshswarm.span import Span

MIXED_PERMILLE = 1100
"""A mixed route counts as a tenth dearer than it is."""

_Suffix = tuple[int, int, tuple[int, ...]]  # cost in ns, hops, positions of the records


@dataclass(frozen=True, slots=True)
class RouteHop:
    """One span of a route: layers `span.start` up to `stop` of the slice `span` that `peer` serves."""

    peer: PeerId
    addresses: tuple[Address, ...]
    span: Span
    stop: int
    numclass: str


@dataclass(frozen=True, slots=True)
class Route:
    """Hops that cover the model in order, and what a decoded token is predicted to take.

    `predicted_tpot_s` is the sum of the other three: computing, travelling (distance and cost of each hop), waiting.
    """

    hops: tuple[RouteHop, ...]
    predicted_tpot_s: float
    compute_s: float
    network_s: float
    queue_s: float


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known when routes are planned, and what they are for.

    `rtt_s(head, peer)`: the round trip the head measured, or None; pairs without the head come from the records.
    `avoid`: peers that refused, did not answer, have gone or are leaving. `n_ctx`: the session's context, which every
    hop must offer. `kv_tokens`: positions the session reserves at every hop. `queue_s`: expected wait at each peer, 0
    when absent. `sessions`: how many others the head has at each peer, whose steps share turns with this one's.
    `measured_us`: what a lone row turned out to take in a layer of a peer, whatever its record claims.
    """

    head: PeerId
    rtt_s: RttOf
    avoid: frozenset[PeerId] = frozenset()
    n_ctx: int = 1
    kv_tokens: int = 0
    queue_s: Mapping[PeerId, float] = field(default_factory=dict)
    sessions: Mapping[PeerId, int] = field(default_factory=dict)
    measured_us: Mapping[PeerId, float] = field(default_factory=dict)


def plan_routes(
    n_layers: int,
    candidates: Iterable[CoverageRecord],
    *,
    head: PeerId,
    rtt_s: RttOf,
    avoid: frozenset[PeerId] = frozenset(),
    limit: int = 4,
    n_ctx: int = 1,
    kv_tokens: int = 0,
    queue_s: Mapping[PeerId, float] = MappingProxyType({}),
    sessions: Mapping[PeerId, int] = MappingProxyType({}),
    measured_us: Mapping[PeerId, float] = MappingProxyType({}),
) -> list[Route]:
    """`Planning.of` without what only an explanation needs: the `limit` best routes through layers `[0, n_layers)`."""
    situation = Situation(head, rtt_s, avoid, n_ctx, kv_tokens, queue_s, sessions, measured_us)
    return Planning.of(n_layers, candidates, situation, limit).routes


@dataclass(frozen=True, slots=True)
class Planning:
    """Routes, best first, each with another sequence of peers, and what they were chosen from: `records` that nothing
    speaks against, in the order of peers and spans, with their costs. `paths`: the routes as positions in `records`."""

    n_layers: int
    records: list[CoverageRecord]
    costs: CostModel
    paths: list[tuple[int, ...]]
    routes: list[Route]

    @classmethod
    def of(cls, n_layers: int, candidates: Iterable[CoverageRecord], situation: Situation, limit: int = 4) -> Planning:
        """The `limit` best routes through layers `[0, n_layers)`. Raises MissingLayersError, a NoRouteError, naming
        the layers."""
        offered = list(candidates)
        now = situation
        kept = usable(offered, n_layers=n_layers, avoid=now.avoid, n_ctx=now.n_ctx, kv_tokens=now.kv_tokens)
        require_cover(offered, kept, n_layers=n_layers, avoid=now.avoid, n_ctx=now.n_ctx, kv_tokens=now.kv_tokens)
        records = sorted(kept, key=lambda record: (record.peer, record.span))
        costs = CostModel(
            records,
            head=now.head,
            rtt_s=now.rtt_s,
            queue_s=now.queue_s,
            sessions=now.sessions,
            measured_us=now.measured_us,
        )
        paths = _best(records, costs, n_layers, limit)
        return cls(n_layers, records, costs, paths, [_route(path, records, costs, n_layers) for path in paths])

    @property
    def best_rank(self) -> int:
        """What the best route counts as, mixed or not, in thousandths of ns."""
        (path, route) = self.paths[0], self.routes[0]
        return round(route.predicted_tpot_s * 1e9) * weight_of(path, self.records)


def repriced(n_layers: int, hops: Sequence[CoverageRecord], situation: Situation) -> Route:
    """The route over these records, in this order, as it is priced now."""
    costs = CostModel(
        hops,
        head=situation.head,
        rtt_s=situation.rtt_s,
        queue_s=situation.queue_s,
        sessions=situation.sessions,
        measured_us=situation.measured_us,
    )
    return _route(tuple(range(len(hops))), hops, costs, n_layers)


def weight_of(path: Iterable[int], records: Sequence[CoverageRecord]) -> int:
    """Thousandths that a route over these records counts for."""
    return MIXED_PERMILLE if _is_mixed(path, records) else 1000


def _best(records: Sequence[CoverageRecord], costs: CostModel, n_layers: int, limit: int) -> list[tuple[int, ...]]:
    """The best paths over all records, with mixed ones handicapped.

    The best by that order are among the cheapest overall and the cheapest of each numclass: a mixed route outside the
    first list has `limit` cheaper ones before it, which the handicap cannot put behind it.
    """
    classes: dict[str, list[int]] = {}
    for position, record in enumerate(records):
        classes.setdefault(record.numclass, []).append(position)
    found = set(_cheapest(range(len(records)), records, costs, n_layers, limit))
    if any(_is_mixed(path, records) for _, _, path in found):
        for members in classes.values():
            found.update(_cheapest(members, records, costs, n_layers, limit))

    def rank(suffix: _Suffix) -> _Suffix:
        cost, hops, path = suffix
        return (cost * weight_of(path, records), hops, path)

    best: dict[tuple[PeerId, ...], tuple[int, ...]] = {}
    for _, _, path in sorted(found, key=rank):
        best.setdefault(tuple(records[position].peer for position in path), path)
    return list(best.values())[:limit]


def _is_mixed(path: Iterable[int], records: Sequence[CoverageRecord]) -> bool:
    return len({records[position].numclass for position in path}) > 1


@dataclass(frozen=True, slots=True)
class Onward:
    """What one can do from a layer on, cheapest first: cost in ns, hops, positions of the records.

    `entering[start]`: from layer `start` on, the way in over the head included; the highest start first.
    `suffixes[position]`: from the start of a record's span on, without the way there.
    """

    entering: dict[int, list[_Suffix]]
    suffixes: dict[int, list[_Suffix]]


def onward(
    members: Iterable[int], records: Sequence[CoverageRecord], costs: CostModel, n_layers: int, limit: int
) -> Onward:
    """The `limit` cheapest ways over `members` from every start, worked out from the last layer back."""
    by_start: dict[int, list[int]] = {}
    for position in members:
        by_start.setdefault(records[position].span.start, []).append(position)
    entering: dict[int, list[_Suffix]] = {}
    suffixes: dict[int, list[_Suffix]] = {}
    for start in sorted(by_start, reverse=True):
        for position in by_start[start]:
            suffixes[position] = _suffixes(position, records, costs, n_layers, limit, entering, suffixes)
        options = sorted(
            (cost + costs.half_rtt_ns[position], hops, path)
            for position in by_start[start]
            for cost, hops, path in suffixes[position]
        )
        if options:
            entering[start] = options
    return Onward(entering, suffixes)


def _cheapest(
    members: Iterable[int], records: Sequence[CoverageRecord], costs: CostModel, n_layers: int, limit: int
) -> list[_Suffix]:
    """The `limit` cheapest paths over `members`, each with another sequence of peers."""
    return _distinct(onward(members, records, costs, n_layers, limit).entering.get(0, ()), records, limit)


def _suffixes(
    position: int,
    records: Sequence[CoverageRecord],
    costs: CostModel,
    n_layers: int,
    limit: int,
    entering: dict[int, list[_Suffix]],
    suffixes: Mapping[int, list[_Suffix]],
) -> list[_Suffix]:
    """The `limit` cheapest ways from the start of one record's span to the end of the model.

    `entering` holds the starts behind this one, the highest first.
    """
    span = records[position].span
    layer_ns = costs.layer_ns[position]
    out_ns = costs.half_rtt_ns[position]
    measured = costs.measured_ns[position]
    first_exit = earliest_exit(records[position])
    ids = costs.peer_ids
    # Where one can go on: what is to be done there, cheapest first, what it costs to get there, and whether over the
    # head. Of each only the best is in the heap; whoever is taken makes room for the next from the same place.
    places: list[tuple[list[_Suffix], int, bool]] = []
    heap: list[tuple[int, int, tuple[int, ...], int, int]] = []  # cost, hops, path, place, rank there
    if span.stop == n_layers:
        heap.append(((n_layers - span.start) * layer_ns + out_ns, 0, (), -1, 0))
    for start, options in reversed(entering.items()):  # the lowest start first
        if start > span.stop:
            break
        if start >= first_exit:
            base = (start - span.start) * layer_ns + out_ns
            cost, hops, path = options[0]
            heap.append((cost + base, hops, path, len(places), 0))
            places.append((options, base, True))
    for target, way_ns in measured.items():
        start = records[target].span.start
        if first_exit <= start <= span.stop and suffixes.get(target):
            base = (start - span.start) * layer_ns + way_ns
            cost, hops, path = suffixes[target][0]
            heap.append((cost + base, hops, path, len(places), 0))
            places.append((suffixes[target], base, False))
    heapq.heapify(heap)
    own_ns = costs.hop_ns[position] + costs.queue_ns[position]
    chosen: list[_Suffix] = []
    seen: set[tuple[int, ...]] = set()
    while heap and len(chosen) < limit:
        cost, hops, path, place, rank = heap[0]
        if place < 0:
            is_over_head = False
            heapq.heappop(heap)
        else:
            options, base, is_over_head = places[place]
            if rank + 1 < len(options):
                cost_after, hops_after, path_after = options[rank + 1]
                heapq.heapreplace(heap, (cost_after + base, hops_after, path_after, place, rank + 1))
            else:
                heapq.heappop(heap)
        if is_over_head and path[0] in measured:
            continue  # its true way is in the heap on its own
        peers = tuple([ids[p] for p in path])
        if peers not in seen:
            seen.add(peers)
            chosen.append((cost + own_ns, hops + 1, (position, *path)))
    return chosen


def earliest_exit(record: CoverageRecord) -> int:
    """The first layer after which a route may leave the record's span."""
    return record.span.stop if WHOLE_ONLY in record.roles else record.span.start + 1


def _distinct(suffixes: Iterable[_Suffix], records: Sequence[CoverageRecord], limit: int) -> list[_Suffix]:
    best: dict[tuple[PeerId, ...], _Suffix] = {}
    for suffix in suffixes:
        best.setdefault(tuple(records[position].peer for position in suffix[2]), suffix)
        if len(best) == limit:
            break
    return list(best.values())


def _route(path: tuple[int, ...], records: Sequence[CoverageRecord], costs: CostModel, n_layers: int) -> Route:
    stops = [records[position].span.start for position in path[1:]] + [n_layers]
    hops = tuple(_hop(records[position], stop) for position, stop in zip(path, stops, strict=True))
    compute = sum(costs.layer_ns[p] * (hop.stop - hop.span.start) for p, hop in zip(path, hops, strict=True))
    ways = sum(costs.way_ns(source, target) for source, target in itertools.pairwise(path))
    network = costs.half_rtt_ns[path[0]] + ways + costs.half_rtt_ns[path[-1]] + sum(costs.hop_ns[p] for p in path)
    queue = sum(costs.queue_ns[p] for p in path)
    return Route(hops, (compute + network + queue) / 1e9, compute / 1e9, network / 1e9, queue / 1e9)


def _hop(record: CoverageRecord, stop: int) -> RouteHop:
    return RouteHop(record.peer, record.addresses, record.span, stop, record.numclass)
