"""What it would take for a peer that was left out to be used: how near, how fast or how free it would have to be.

The best route through a peer is the best way to its first layer, its own part, and the best way on. What it costs is a
straight line in the peer's round trip, in its speed and in its queue, for each way in and each layer to leave at; so
where it meets the cost of the chosen route is worked out, not searched for.

The rule this file keeps: the planner's own tables and costs, so that a peer that changes as much as is said here is in
the next plan (`tests/routing/test_detours.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshswarm.routing.planner import MIXED_PERMILLE, Onward, Planning, earliest_exit, onward


@dataclass(frozen=True, slots=True)
class Detour:
    """The best route through one record, and below which values of its own the record's peer would be used; None where
    it would not be even at nothing. `tpot_s` counts a mixed route as dear as the planner does."""

    tpot_s: float
    rtt_s: float | None
    us_per_layer: float | None
    queue_s: float | None


@dataclass(frozen=True, slots=True)
class _End:
    """A way to a record or on from it: its cost in ns apart from what is the record's own, how many layers it leaves to
    the record, and how often it crosses the way between the head and the record's peer."""

    cost: int
    n_layers: int
    n_crossings: int


def detours(planning: Planning) -> dict[int, Detour]:
    """For every record of a plan, by its position. Those on the best route are in it too."""
    found: dict[int, Detour] = {}
    classes: dict[str, list[int]] = {}
    for position, record in enumerate(planning.records):
        classes.setdefault(record.numclass, []).append(position)
    runs = [(list(members), 1000) for members in classes.values()]
    if len(classes) > 1:
        runs.append((list(range(len(planning.records))), MIXED_PERMILLE))
    for members, weight in runs:
        for position, detour in _Run(planning, members, weight).detours():
            found[position] = _better(found[position], detour) if position in found else detour
    return found


def _better(one: Detour, other: Detour) -> Detour:
    """The easier of two ways to be used, for each of the values."""

    def most(a: float | None, b: float | None) -> float | None:
        known = [value for value in (a, b) if value is not None]
        return max(known, default=None)

    return Detour(
        min(one.tpot_s, other.tpot_s),
        most(one.rtt_s, other.rtt_s),
        most(one.us_per_layer, other.us_per_layer),
        most(one.queue_s, other.queue_s),
    )


class _Run:
    """Routes over some of the records, which count for `weight` thousandths of their cost."""

    def __init__(self, planning: Planning, members: list[int], weight: int) -> None:
        self._records, self._costs = planning.records, planning.costs
        self._n_layers = planning.n_layers
        self._members = members
        self._weight = weight
        self._limit_ns = planning.best_rank / weight
        self._onward: Onward = onward(members, self._records, self._costs, self._n_layers, 1)

    def detours(self) -> Iterable[tuple[int, Detour]]:
        """Works forward from the first layer: whoever starts before a record has been reached before it."""
        reached: dict[int, int] = {}  # what it costs to stand at the start of a record
        by_start: dict[int, list[int]] = {}
        for position in self._members:
            by_start.setdefault(self._records[position].span.start, []).append(position)
        for start in sorted(by_start):
            leaving = [] if start == 0 else self._leaving(start, reached)
            for position in by_start[start]:
                entries = self._entries(position, start, leaving)
                exits = list(self._exits(position))
                if not entries:
                    continue
                half = self._costs.half_rtt_ns[position]
                reached[position] = min(entry.cost + entry.n_crossings * half for entry in entries)
                if exits:
                    yield position, self._detour(position, entries, exits)

    def _leaving(self, start: int, reached: dict[int, int]) -> list[tuple[int, int]]:
        """Who can hand over at layer `start`, cheapest over the head first: what it costs to be done there, the way
        out not counted, and the record."""
        costs = self._costs
        able = []
        for position, cost in reached.items():
            record = self._records[position]
            if earliest_exit(record) <= start <= record.span.stop:
                done = cost + self._own(position) + (start - record.span.start) * costs.layer_ns[position]
                able.append((done, position))
        return sorted(able, key=lambda each: each[0] + costs.half_rtt_ns[each[1]])

    def _own(self, position: int) -> int:
        return self._costs.hop_ns[position] + self._costs.queue_ns[position]

    def _entries(self, position: int, start: int, leaving: list[tuple[int, int]]) -> list[_End]:
        if start == 0:
            return [_End(0, 0, 1)]
        costs = self._costs
        measured = costs.measured_ns[position]
        entries = [_End(done + measured[source], 0, 0) for done, source in leaving if source in measured]
        over_head = next(((done, source) for done, source in leaving if source not in measured), None)
        if over_head is not None:
            entries.append(_End(over_head[0] + costs.half_rtt_ns[over_head[1]], 0, 1))
        return entries

    def _exits(self, position: int) -> Iterable[_End]:
        record, measured = self._records[position], self._costs.measured_ns[position]
        span = record.span
        first = earliest_exit(record)
        if span.stop == self._n_layers:
            yield _End(0, len(span), 1)
        for start, options in self._onward.entering.items():
            if first <= start <= span.stop:
                best = next((cost for cost, _, path in options if path[0] not in measured), None)
                if best is not None:
                    yield _End(best, start - span.start, 1)
        for target, way_ns in measured.items():
            start = self._records[target].span.start
            if first <= start <= span.stop and self._onward.suffixes.get(target):
                yield _End(way_ns + self._onward.suffixes[target][0][0], start - span.start, 0)

    def _detour(self, position: int, entries: list[_End], exits: list[_End]) -> Detour:
        costs = self._costs
        half, layer = costs.half_rtt_ns[position], costs.layer_ns[position]
        hop, queue = costs.hop_ns[position], costs.queue_ns[position]
        least = float("inf")
        half_most = layer_most = 0.0
        for entry in entries:
            for exit_ in exits:
                crossings, n_layers = entry.n_crossings + exit_.n_crossings, exit_.n_layers
                ends = entry.cost + exit_.cost + hop
                cost = ends + queue + n_layers * layer + crossings * half
                least = min(least, cost)
                if crossings:
                    half_most = max(half_most, (self._limit_ns - cost) / crossings + half)
                layer_most = max(layer_most, (self._limit_ns - cost) / n_layers + layer)
        queue_most = self._limit_ns - least + queue
        return Detour(
            least * self._weight / 1000 / 1e9,
            2 * half_most / 1e9 if half_most > 0 else None,
            layer_most / 1e3 if layer_most > 0 else None,
            queue_most / 1e9 if queue_most > 0 else None,
        )
