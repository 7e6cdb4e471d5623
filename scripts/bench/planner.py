"""How long planning a route takes: against enumeration on a small swarm, and alone on a large one.

Run: .venv/bin/python scripts/bench/planner.py
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence

from meshswarm.config import Address
from meshswarm.dht.records import MAX_RTTS, RTT_PREFIX_BYTES, CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.cost import CostModel
from meshswarm.routing.planner import plan_routes
from meshswarm.span import Span

HEAD = PeerId(bytes(32))
RUNS = 9


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
        took = median_ms(lambda records=records, n_layers=n_layers, rtts=rtts: plan(records, n_layers, rtts))
        print(f"{count} peers x {n_layers} layers, {classes} numclass(es), 4 routes: {took:.2f} ms")


def whole(n_layers: int) -> CoverageRecord:
    """A slow peer with the whole model, so that there always is a route."""
    return CoverageRecord(
        PeerId(b"\xff" * 32), (), bytes(32), Span(0, n_layers), True, "class-0", 4096, 50_000, 50, 10_000
    )


if __name__ == "__main__":
    main()
