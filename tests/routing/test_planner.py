"""The planner against enumeration of every route, and what a person expects of it."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.routing.peers import HEAD, near, peer, record

from meshswarm.dht.records import WHOLE_ONLY, CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.candidates import MissingLayersError
from meshswarm.routing.cost import DEFAULT_RTT_S, HOP_S, LOCAL_HOP_S, turn_us
from meshswarm.routing.planner import MIXED_PERMILLE, Route, plan_routes
from meshswarm.span import Span


def shape(route: Route) -> list[tuple[int, str, int]]:
    return [(int.from_bytes(hop.peer.key[:8]), str(hop.span), hop.stop) for hop in route.hops]


def test_exact_spans_are_chained() -> None:
    routes = plan_routes(30, [record(3, "20:30"), record(1, "0:10"), record(2, "10:20")], head=HEAD, rtt_s=near)
    assert [shape(route) for route in routes] == [[(1, "0:10", 10), (2, "10:20", 20), (3, "20:30", 30)]]


def test_overlapping_and_odd_spans_join_by_leaving_early() -> None:
    routes = plan_routes(30, [record(1, "0:17"), record(2, "9:23"), record(3, "21:30")], head=HEAD, rtt_s=near)
    assert shape(routes[0]) == [(1, "0:17", 9), (2, "9:23", 21), (3, "21:30", 30)]


def test_a_whole_model_beats_an_equally_fast_chain() -> None:
    offered = [record(1, "0:15"), record(2, "15:30"), record(3, "0:30")]
    assert shape(plan_routes(30, offered, head=HEAD, rtt_s=near)[0]) == [(3, "0:30", 30)]


def test_layers_go_to_the_faster_of_two_that_overlap() -> None:
    offered = [record(1, "0:20", us=5000), record(2, "10:30", us=100)]
    assert shape(plan_routes(30, offered, head=HEAD, rtt_s=near)[0]) == [(1, "0:20", 10), (2, "10:30", 30)]


def test_a_near_slow_peer_loses_to_a_far_fast_one_only_when_distance_costs_less() -> None:
    def rtt_s(_head: PeerId, other: PeerId) -> float:
        return 0.001 if other == peer(1) else 0.040

    slow = record(1, "0:30", us=2000)  # 60 ms
    assert shape(plan_routes(30, [slow, record(2, "0:30", us=100)], head=HEAD, rtt_s=rtt_s)[0])[0][0] == 2
    assert shape(plan_routes(30, [slow, record(2, "0:30", us=1000)], head=HEAD, rtt_s=rtt_s)[0])[0][0] == 1


def test_the_prediction_adds_up() -> None:
    route = plan_routes(
        30,
        [record(1, "0:10", us=300, rtts={2: 8000}), record(2, "10:30", us=200)],
        head=HEAD,
        rtt_s=lambda _head, other: 0.010 if other == peer(1) else 0.006,
        queue_s={peer(2): 0.002},
    )[0]
    assert route.compute_s == pytest.approx(10 * 300e-6 + 20 * 200e-6)
    assert route.network_s == pytest.approx(0.005 + 0.004 + 0.003 + 2 * HOP_S)
    assert route.queue_s == pytest.approx(0.002)
    assert route.predicted_tpot_s == pytest.approx(route.compute_s + route.network_s + route.queue_s)


@pytest.mark.parametrize(("n_rows", "expected"), [(1, 100), (2, 120), (4, 160), (10, 280), (16, 400), (28, 640)])
def test_a_turn_of_several_sessions_is_priced_by_what_was_measured(n_rows: int, expected: float) -> None:
    assert turn_us(record(1, "0:30", us_4=160, us_16=400), n_rows) == pytest.approx(expected)


def test_a_turn_never_gets_faster_by_more_rows_and_may_be_unknown() -> None:
    assert [turn_us(record(1, "0:30", us=100), n) for n in (1, 8, 40)] == [100] * 3
    assert [turn_us(record(1, "0:30", us=100, us_4=1, us_16=2), n) for n in (1, 8, 40)] == [100] * 3
    assert turn_us(record(1, "0:30", us=100, us_16=250), 8) == pytest.approx(170)


def test_sessions_are_spread_over_equal_peers() -> None:
    offered = [record(number, "0:30", us_4=300, us_16=1200) for number in (1, 2)]
    assert shape(plan_routes(30, offered, head=HEAD, rtt_s=near)[0]) == [(1, "0:30", 30)]
    assert shape(plan_routes(30, offered, head=HEAD, rtt_s=near, sessions={peer(1): 1})[0]) == [(2, "0:30", 30)]


def test_a_peer_that_serves_whole_models_only_is_never_left_in_the_middle() -> None:
    slow = record(1, "0:30", us=5000, roles=("server", WHOLE_ONLY), rtts={2: 100})
    offered = [slow, record(2, "10:30", us=10)]
    assert shape(plan_routes(30, offered, head=HEAD, rtt_s=near)[0]) == [(1, "0:30", 30)]
    without = [replace(slow, roles=("server",)), offered[1]]
    assert shape(plan_routes(30, without, head=HEAD, rtt_s=near)[0]) == [(1, "0:30", 10), (2, "10:30", 30)]


def test_own_layers_cost_no_distance() -> None:
    own = CoverageRecord(HEAD, (), bytes(32), Span(0, 30), True, "cpu", 4096, 100, 10, 10_000)
    route = plan_routes(30, [own, record(1, "0:30", us=90)], head=HEAD, rtt_s=near)[0]
    assert route.hops[0].peer == HEAD
    assert route.network_s == pytest.approx(LOCAL_HOP_S)


def test_a_pair_nobody_measured_is_as_far_as_the_way_over_the_head() -> None:
    offered = [record(1, "0:10"), record(2, "10:30")]
    known = plan_routes(30, offered, head=HEAD, rtt_s=lambda _h, other: 0.010 if other == peer(1) else 0.030)[0]
    assert known.network_s == pytest.approx(0.005 + (0.005 + 0.015) + 0.015 + 2 * HOP_S)
    unknown = plan_routes(30, offered, head=HEAD, rtt_s=lambda _h, _p: None)[0]
    assert unknown.network_s == pytest.approx(2 * DEFAULT_RTT_S + 2 * HOP_S)


def test_a_peer_cannot_make_itself_look_near_on_its_own() -> None:
    honest = record(1, "0:10", rtts={2: 50_000})
    boaster = record(2, "10:30", rtts={1: 0})
    route = plan_routes(30, [honest, boaster], head=HEAD, rtt_s=near)[0]
    assert route.network_s == pytest.approx(0.0005 + 0.025 + 0.0005 + 2 * HOP_S)


def test_a_busy_peer_is_left_for_a_free_one() -> None:
    offered = [record(1, "0:30", us=100), record(2, "0:30", us=150)]
    assert shape(plan_routes(30, offered, head=HEAD, rtt_s=near)[0])[0][0] == 1
    assert shape(plan_routes(30, offered, head=HEAD, rtt_s=near, queue_s={peer(1): 0.01})[0])[0][0] == 2


def test_equal_routes_come_in_the_order_of_hops_and_keys() -> None:
    offered = [record(number, "0:30") for number in (4, 2, 3, 1)]
    assert [shape(r)[0][0] for r in plan_routes(30, offered, head=HEAD, rtt_s=near)] == [1, 2, 3, 4]


def test_one_numclass_is_preferred_when_it_costs_little() -> None:
    first, mixed, same = record(1, "0:15"), record(2, "15:30", us=100, numclass="gpu"), record(3, "15:30", us=120)
    routes = plan_routes(30, [first, mixed, same], head=HEAD, rtt_s=near)
    assert [len({hop.numclass for hop in route.hops}) for route in routes] == [1, 2]
    slow = record(3, "15:30", us=1000)
    routes = plan_routes(30, [first, mixed, slow], head=HEAD, rtt_s=near)
    assert [len({hop.numclass for hop in route.hops}) for route in routes] == [2, 1]


def test_layers_nobody_serves_are_named() -> None:
    with pytest.raises(MissingLayersError, match=r"layers 10:12, 20:30") as caught:
        plan_routes(30, [record(1, "0:10"), record(2, "12:20")], head=HEAD, rtt_s=near)
    assert caught.value.missing == (Span(10, 12), Span(20, 30))
    assert not caught.value.held
    assert caught.value.retry_after_s is not None


def test_layers_that_are_served_but_not_for_this_session_say_why() -> None:
    offered = [
        record(1, "0:10"),
        record(2, "10:20"),
        record(3, "10:20", n_ctx=512),
        record(4, "8:20", loaded=False),
        record(5, "10:20", free=10),
        record(6, "20:30"),
    ]
    with pytest.raises(MissingLayersError) as caught:
        plan_routes(30, offered, head=HEAD, rtt_s=near, avoid=frozenset({peer(2)}), n_ctx=2048, kv_tokens=100)
    assert caught.value.held
    assert caught.value.missing == (Span(10, 20),)
    text = str(caught.value)
    for reason in ("1 refused it", "context below the 2048", "1 only holding", "room for the 100 positions"):
        assert reason in text


def test_an_empty_swarm_misses_everything() -> None:
    with pytest.raises(MissingLayersError, match="layers 0:30"):
        plan_routes(30, [], head=HEAD, rtt_s=near)


def test_a_span_beyond_the_model_is_not_believed() -> None:
    with pytest.raises(MissingLayersError):
        plan_routes(30, [record(1, "0:31")], head=HEAD, rtt_s=near)


# -- against enumeration

N_LAYERS = 6


def told_us(one: CoverageRecord, other: CoverageRecord) -> list[int]:
    """The round trips between two peers that either of them tells."""
    return [us for x, y in ((one, other), (other, one)) for prefix, us in x.rtts if prefix == y.peer.key[:8]]


def cost_of(
    path: Sequence[CoverageRecord], rtts: Mapping[PeerId, float], head: CoverageRecord | None
) -> tuple[int, int, tuple[object, ...]]:
    """The order of routes, computed the plain way, in whole ns."""

    def half(r: CoverageRecord) -> int:
        if r.peer == HEAD:
            return 0
        told = told_us(r, head) if head else [us for prefix, us in r.rtts if prefix == HEAD.key[:8]]
        guess = max(told) / 1e6 if told else DEFAULT_RTT_S
        return round(rtts.get(r.peer, guess) * 1e9 / 2)

    stops = [r.span.start for r in path[1:]] + [N_LAYERS]
    cost = half(path[0]) + half(path[-1])
    for r, stop in zip(path, stops, strict=True):
        cost += (stop - r.span.start) * r.us_per_layer * 1000
        cost += round((LOCAL_HOP_S if r.peer == HEAD else HOP_S) * 1e9)
    for a, b in itertools.pairwise(path):
        told = told_us(a, b)
        if HEAD in (a.peer, b.peer) or not told:
            cost += half(a) + half(b)
        else:
            cost += round(max(told) * 1e3 / 2)
    mixed = len({r.numclass for r in path}) > 1
    return (cost * (MIXED_PERMILLE if mixed else 1000), len(path), tuple(r.peer for r in path))


def every_path(records: Sequence[CoverageRecord], start: int = 0) -> list[list[CoverageRecord]]:
    paths = []
    for r in records:
        if r.span.start == start:
            if r.span.stop == N_LAYERS:
                paths.append([r])
            for onward in range(start + 1, r.span.stop + 1):
                paths.extend([r, *rest] for rest in every_path(records, onward))
    return paths


@st.composite
def swarms(draw: st.DrawFn) -> list[CoverageRecord]:
    """Peer 0 is the head itself."""
    records = []
    for number in draw(st.sets(st.integers(0, 7), min_size=1)):
        start = draw(st.integers(0, N_LAYERS - 1))
        stop = draw(st.integers(start + 1, N_LAYERS))
        rtts = draw(st.dictionaries(st.integers(0, 7), st.sampled_from([0, 2000, 9000]), max_size=3))
        rtts.pop(number, None)
        numclass = draw(st.sampled_from(["cpu", "cpu", "gpu"]))
        us = draw(st.sampled_from([100, 100, 300, 2000]))
        records.append(record(number, f"{start}:{stop}", us, numclass=numclass, rtts=rtts))
    return draw(st.permutations(records))


@settings(max_examples=400, deadline=None)
@given(swarms(), st.dictionaries(st.integers(1, 7).map(peer), st.sampled_from([0.0, 0.004, 0.02])), st.integers(1, 5))
def test_the_plan_is_the_best_of_all_routes(
    records: list[CoverageRecord], rtts: dict[PeerId, float], limit: int
) -> None:
    head = next((r for r in records if r.peer == HEAD), None)
    best = sorted(every_path(records), key=lambda path: cost_of(path, rtts, head))[:limit]
    try:
        routes = plan_routes(N_LAYERS, records, head=HEAD, rtt_s=lambda _h, p: rtts.get(p), limit=limit)
    except MissingLayersError:
        routes = []
    assert [shape(route) for route in routes] == [
        [
            (int.from_bytes(r.peer.key[:8]), str(r.span), stop)
            for r, stop in zip(path, [n.span.start for n in path[1:]] + [N_LAYERS], strict=True)
        ]
        for path in best
    ]


def test_no_sequence_of_peers_comes_twice() -> None:
    offered = [record(1, "0:10"), record(1, "0:12"), record(2, "10:30"), record(2, "12:30", us=110)]
    routes = plan_routes(30, offered, head=HEAD, rtt_s=near)
    assert shape(routes[0]) == [(1, "0:10", 10), (2, "10:30", 30)]
    sequences = [tuple(hop.peer for hop in route.hops) for route in routes]
    assert len(set(sequences)) == len(sequences)


@settings(max_examples=200, deadline=None)
@given(swarms(), st.data())
def test_a_slow_peer_is_never_picked_over_a_faster_free_one(records: list[CoverageRecord], data: st.DataObject) -> None:
    """Everybody equally far: whoever computes the same layers faster, with no longer queue, is taken instead."""
    records = [replace(r, numclass="cpu", rtts=()) for r in records if r.peer != HEAD]
    queues = {r.peer: data.draw(st.sampled_from([0.0, 0.0, 0.001, 0.05])) for r in records}
    try:
        route = plan_routes(N_LAYERS, records, head=HEAD, rtt_s=near, queue_s=queues)[0]
    except MissingLayersError:
        return
    used = {hop.peer for hop in route.hops}
    speed = {r.peer: r.us_per_layer for r in records}
    for hop in route.hops:
        for r in records:
            could = r.peer not in used and r.span.start == hop.span.start and r.span.stop >= hop.stop
            is_better = r.us_per_layer < speed[hop.peer] and queues[r.peer] <= queues[hop.peer]
            assert not (could and is_better), f"{r.peer.short} computes {r.span} faster than {hop.peer.short}"


def test_what_was_measured_here_outranks_what_a_peer_says() -> None:
    offered = [record(1, "0:30", us=10), record(2, "0:30", us=100)]
    assert shape(plan_routes(30, offered, head=HEAD, rtt_s=near)[0])[0][0] == 1
    routes = plan_routes(30, offered, head=HEAD, rtt_s=near, measured_us={peer(1): 500.0})
    assert shape(routes[0])[0][0] == 2
    assert routes[1].compute_s == pytest.approx(30 * 500e-6)
