"""How long planning a route takes, against two plain ways to do the same.

    .venv/bin/python scripts/bench/planner.py

On a small swarm the baseline is the enumeration of every route; at full size it is Dijkstra's algorithm over (peer,
layer) states, without anything clever, for one route only. All find the same cost, which is checked. The rule: 1,000
candidates in less than 50 ms for four routes. What a preview adds (`detours`: for every peer left out, what it would
take) is timed apart, because requests do not wait for it.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence

from meshswarm.config import Address
from meshswarm.dht.records import MAX_RTTS, RTT_PREFIX_BYTES, CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.cost import CostModel
from meshswarm.routing.detours import detours
from meshswarm.routing.planner import Planning, Situation, plan_routes
from meshswarm.span import Span

HEAD = PeerId(bytes(32))
RUNS = 9
MOST_MS = 50.0


def swarm(count: int, n_layers: int, rng: random.Random, classes: int) -> list[CoverageRecord]:
    """`count` peers with random spans of about a quarter of the model and 16 measured round trips each."""
    peers = [PeerId(rng.randbytes(32)) for _ in range(count)]
    records = []
    for number, peer in enumerate(peers):
        start = rng.randrange(n_layers)
        others = rng.sample(peers, min(MAX_RTTS, count))
        records.append(
            CoverageRecord(
                peer=peer,
                addresses=(Address("127.0.0.1", 4000),),
                model_id=bytes(32),
                span=Span(start, min(n_layers, start + rng.randint(1, n_layers // 2))),
                loaded=True,
                numclass=f"class-{number % classes}",
                n_ctx=4096,
                us_per_layer=rng.randint(100, 5000),
                prefill_us_per_row_layer=50,
                free_kv_tokens=10_000,
                rtts=tuple((other.key[:RTT_PREFIX_BYTES], rng.randint(500, 90_000)) for other in others),
            )
        )
    return records


def plan(records: Sequence[CoverageRecord], n_layers: int, rtts: dict[PeerId, float]) -> float:
    return plan_routes(n_layers, records, head=HEAD, rtt_s=lambda _head, peer: rtts.get(peer))[0].predicted_tpot_s


def enumerate_all(records: Sequence[CoverageRecord], n_layers: int, rtts: dict[PeerId, float]) -> float:
    """The naive baseline: the cost of every route there is."""
    costs = CostModel(records, head=HEAD, rtt_s=lambda _head, peer: rtts.get(peer), queue_s={})
    best = float("inf")

    def walk(path: list[int], start: int, spent: int) -> None:
        nonlocal best
        for position, record in enumerate(records):
            if record.span.start != start:
                continue
            way = costs.way_ns(path[-1], position) if path else costs.half_rtt_ns[position]
            entered = spent + way + costs.hop_ns[position]
            if record.span.stop == n_layers:
                whole = entered + (n_layers - start) * costs.layer_ns[position] + costs.half_rtt_ns[position]
                best = min(best, whole / 1e9)
            for stop in range(start + 1, min(record.span.stop, n_layers - 1) + 1):
                walk([*path, position], stop, entered + (stop - start) * costs.layer_ns[position])

    walk([], 0, 0)
    return best


def dijkstra(records: Sequence[CoverageRecord], n_layers: int, rtts: dict[PeerId, float]) -> float:
    """The baseline at full size: states are (layer that is due, record that computes it)."""
    costs = CostModel(records, head=HEAD, rtt_s=lambda _head, peer: rtts.get(peer), queue_s={})
    starting: dict[int, list[int]] = {}
    for position, record in enumerate(records):
        starting.setdefault(record.span.start, []).append(position)
    queue = [(costs.half_rtt_ns[at] + costs.hop_ns[at], 0, at) for at in starting.get(0, ())]
    heapq.heapify(queue)
    done: set[tuple[int, int]] = set()
    while queue:
        spent, layer, at = heapq.heappop(queue)
        if layer == n_layers:
            return spent / 1e9
        if (layer, at) in done:
            continue
        done.add((layer, at))
        span, after = records[at].span, layer + 1
        computed = spent + costs.layer_ns[at]
        if after == n_layers:
            heapq.heappush(queue, (computed + costs.half_rtt_ns[at], after, at))
        elif after < span.stop:
            heapq.heappush(queue, (computed, after, at))
        for other in starting.get(after, ()) if after < n_layers else ():
            heapq.heappush(queue, (computed + costs.way_ns(at, other) + costs.hop_ns[other], after, other))
    return float("inf")


def median_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def main() -> None:
    rng = random.Random(1)
    small = next(
        records
        for records in (swarm(24, 10, rng, 1) for _ in itertools.count())
        if any(r.span.start == 0 for r in records) and enumerate_all(records, 10, {}) < float("inf")
    )
    rtts = {record.peer: rng.uniform(0.001, 0.1) for record in small}
    assert abs(plan(small, 10, rtts) - enumerate_all(small, 10, rtts)) < 1e-12
    planned, naive = median_ms(lambda: plan(small, 10, rtts)), median_ms(lambda: enumerate_all(small, 10, rtts))
    print(f"24 peers x 10 layers: planner {planned:.2f} ms, enumeration {naive:.2f} ms, ratio {planned / naive:.4f}")
    for count, n_layers, classes in ((3, 30, 1), (100, 80, 1), (1000, 80, 1), (1000, 80, 3)):
        records = swarm(count - 1, n_layers, rng, classes)
        records.append(whole(n_layers))
        rtts = {record.peer: rng.uniform(0.001, 0.1) for record in records}
        at_full_size(records, n_layers, rtts, classes)


def at_full_size(records: list[CoverageRecord], n_layers: int, rtts: dict[PeerId, float], classes: int) -> None:
    if classes == 1:  # a mix of numclasses counts as dearer than it is, which Dijkstra's costs do not know
        assert abs(plan(records, n_layers, rtts) - dijkstra(records, n_layers, rtts)) < 1e-9
    ours, plain = median_ms(lambda: plan(records, n_layers, rtts)), median_ms(lambda: dijkstra(records, n_layers, rtts))
    planning = Planning.of(n_layers, records, Situation(HEAD, lambda _head, peer: rtts.get(peer)))
    preview = median_ms(lambda: detours(planning))
    verdict = f"   rule (< {MOST_MS:g} ms) {'kept' if ours < MOST_MS else 'BROKEN'}" if len(records) == 1000 else ""
    print(
        f"{len(records)} peers x {n_layers} layers, {classes} numclass(es): four routes {ours:.2f} ms, Dijkstra for "
        f"one {plain:.2f} ms, ratio {ours / plain:.3f}; what it would take for the others {preview:.2f} ms{verdict}"
    )


def whole(n_layers: int) -> CoverageRecord:
    """A slow peer with the whole model, so that there always is a route."""
    return CoverageRecord(
        PeerId(b"\xff" * 32), (), bytes(32), Span(0, n_layers), True, "class-0", 4096, 50_000, 50, 10_000
    )


if __name__ == "__main__":
    main()
