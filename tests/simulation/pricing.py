"""Peers that lie about their speed, and heads that learn better: the product's planner and what it keeps of sessions.

The rule this file keeps: a head is told nothing but what peers claim, and sees nothing but how long its own sessions'
steps took as a whole, with what other work adds to that.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshswarm.config import Address
from meshswarm.dht.records import MAX_RTTS, RTT_PREFIX_BYTES, CoverageRecord
from meshswarm.identity import Identity, PeerId
from meshswarm.routing.measured import MeasuredSpeeds, Share
from meshswarm.routing.planner import Route, plan_routes
from meshswarm.span import Span

N_LAYERS = 80
MODEL = bytes(32)
DISTANCE_S = 0.08
SESSION_EVERY_S = 20.0
HARM = 1.25
CLAIM, TRUTH = 0.2, 8.0  # what a liar says and takes, as parts of what it would honestly be


@dataclass(frozen=True, slots=True)
class Priced:
    """Of the sessions of all heads, in the first fifth and in the last: the share with a liar on the route
    (`with_liar`), and the share that took more than a quarter longer than the route the head would choose if there were
    no liars (`harmed`). `uses`: sessions that a head had with a liar it used at all, the median, and the 90th
    percentile. `to_rest`: how many sessions a head had, in the middle, before five in a row were unharmed."""

    n_peers: int
    n_liars: int
    n_sessions: int
    with_liar_first: float
    with_liar_last: float
    harmed_first: float
    harmed_last: float
    slowdown_first: float
    slowdown_last: float
    uses_median: float
    uses_p90: float
    to_rest: float


class _World:
    """What is true."""

    def __init__(self, n_peers: int, liars: float, rng: random.Random) -> None:
        self.rng = rng
        self.places: dict[PeerId, tuple[float, float]] = {}
        self.true_us: dict[PeerId, float] = {}
        self.liars: set[PeerId] = set()
        self.records: list[CoverageRecord] = []
        lying = set(rng.sample(range(n_peers), round(liars * n_peers)))
        for number in range(n_peers):
            peer = Identity.from_seed(rng.randbytes(32)).peer_id
            self.places[peer] = (rng.random(), rng.random())
            length = rng.randint(8, 24)
            start = rng.randint(0, N_LAYERS - length) if number % 4 else rng.choice((0, N_LAYERS - length))
            us = rng.lognormvariate(math.log(400), 0.4)
            lies = number in lying
            self.true_us[peer] = us * (TRUTH if lies else 1.0)
            if lies:
                self.liars.add(peer)
            self.records.append(self._record(peer, Span(start, start + length), us * (CLAIM if lies else 1.0)))
        self.records = [replace(record, rtts=self._rtts(record.peer)) for record in self.records]

    def _record(self, peer: PeerId, span: Span, us: float) -> CoverageRecord:
        return CoverageRecord(
            peer, (Address("10.0.0.1", 1),), MODEL, span, True, "cpu", 4096, max(1, round(us)), 100, 65536
        )

    def _rtts(self, peer: PeerId) -> tuple[tuple[bytes, int], ...]:
        """To 16 others that hold layers: as they are, or, between liars, as near as neighbours in a rack."""
        others = [other for other in self.true_us if other != peer]
        if peer in self.liars:
            return tuple((other.key[:RTT_PREFIX_BYTES], 100) for other in sorted(self.liars - {peer})[:MAX_RTTS])
        some = self.rng.sample(others, min(MAX_RTTS, len(others)))
        return tuple((other.key[:RTT_PREFIX_BYTES], round(2e6 * self.way_s(peer, other))) for other in some)

    def way_s(self, one: PeerId, other: PeerId) -> float:
        return 0.005 + DISTANCE_S * math.dist(self.places[one], self.places[other])

    def compute_s(self, route: Route) -> float:
        layers = ((hop.peer, hop.stop - hop.span.start) for hop in route.hops)
        return sum(self.true_us[peer] * count for peer, count in layers) / 1e6

    def network_s(self, head: PeerId, route: Route) -> float:
        stops = [head, *(hop.peer for hop in route.hops), head]
        return sum(self.way_s(one, other) for one, other in itertools.pairwise(stops))


def price_out(n_peers: int, seed: int, *, liars: float = 0.2, n_heads: int = 10, n_sessions: int = 60) -> Priced:
    """`n_heads` heads, each with `n_sessions` sessions one after the other, among holders of one model of 80 layers of
    which `liars` claim to be five times as fast as they could be, are eight times as slow, and say that the way between
    them is nothing."""
    rng = random.Random(seed)
    world = _World(n_peers, liars, rng)
    honest = [record for record in world.records if record.peer not in world.liars]
    claims = {record.peer: float(record.us_per_layer) for record in world.records}
    met: list[list[bool]] = []
    slowdowns: list[list[float]] = []
    uses: Counter[tuple[PeerId, PeerId]] = Counter()
    for _ in range(n_heads):
        head = Identity.from_seed(rng.randbytes(32)).peer_id
        world.places[head] = (rng.random(), rng.random())
        speeds = MeasuredSpeeds(head)
        best = _plan(world, head, honest, {})
        best_s = world.compute_s(best) + world.network_s(head, best)
        met.append([])
        slowdowns.append([])
        for number in range(n_sessions):
            now = number * SESSION_EVERY_S
            measured = {peer: speed.us_per_layer for peer, speed in speeds.of(MODEL, claims, now).items()}
            route = _plan(world, head, world.records, measured)
            took_s = world.compute_s(route) + world.network_s(head, route)
            used = {hop.peer for hop in route.hops} & world.liars
            uses.update((head, peer) for peer in sorted(used))
            met[-1].append(bool(used))
            slowdowns[-1].append(took_s / best_s)
            seen_s = took_s * rng.uniform(1.0, 1.1)  # others' work
            shares = [Share(hop.peer, claims[hop.peer], hop.stop - hop.span.start) for hop in route.hops]
            speeds.note(MODEL, shares, max(0.0, seen_s - route.network_s), now)
    fifth = max(1, n_sessions // 5)
    harmed = [[each > HARM for each in row] for row in slowdowns]
    return Priced(
        n_peers=n_peers,
        n_liars=len(world.liars),
        n_sessions=n_heads * n_sessions,
        with_liar_first=_share(met, slice(fifth)),
        with_liar_last=_share(met, slice(-fifth, None)),
        harmed_first=_share(harmed, slice(fifth)),
        harmed_last=_share(harmed, slice(-fifth, None)),
        slowdown_first=_share(slowdowns, slice(fifth)),
        slowdown_last=_share(slowdowns, slice(-fifth, None)),
        uses_median=statistics.median(uses.values()) if uses else 0.0,
        uses_p90=sorted(uses.values())[int(0.9 * len(uses))] if uses else 0.0,
        to_rest=statistics.median(_first_calm(row) for row in harmed),
    )


def _share(rows: Sequence[Sequence[float]], part: slice) -> float:
    return statistics.mean(each for row in rows for each in row[part])


def _first_calm(harmed: Sequence[bool]) -> int:
    """Sessions before the first of five in a row that were unharmed."""
    calm = (at for at in range(len(harmed) - 4) if not any(harmed[at : at + 5]))
    return next(calm, len(harmed))


def _plan(world: _World, head: PeerId, records: list[CoverageRecord], measured_us: dict[PeerId, float]) -> Route:
    def rtt_s(_head: PeerId, peer: PeerId) -> float:
        return 2 * world.way_s(head, peer)

    return plan_routes(N_LAYERS, records, head=head, rtt_s=rtt_s, limit=1, measured_us=measured_us)[0]
