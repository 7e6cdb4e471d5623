"""What a head sees of its sessions outranks what peers say of themselves: liars are priced out after their first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.routing.peers import HEAD, near, peer, record

from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.cost import layer_us
from meshswarm.routing.measured import HALF_LIFE_S, MAX_MODELS, MAX_SEEN, MeasuredSpeeds, Share
from meshswarm.routing.planner import Route, plan_routes

MODEL = bytes(32)


def us(speeds: MeasuredSpeeds, other: int, claim: float, now: float = 0.0) -> float | None:
    found = speeds.of(MODEL, {peer(other): claim}, now).get(peer(other))
    return None if found is None else found.us_per_layer


def note(speeds: MeasuredSpeeds, claims: dict[int, float], n_layers: int, seconds: float, now: float = 0.0) -> None:
    shares = [Share(HEAD if number == 0 else peer(number), claim, n_layers) for number, claim in claims.items()]
    speeds.note(MODEL, shares, seconds, now)


def test_a_peer_alone_on_its_route_is_known_after_one_session() -> None:
    speeds = MeasuredSpeeds(HEAD)
    note(speeds, {1: 10.0}, 20, 0.100)
    assert us(speeds, 1, 10.0) == pytest.approx(5000, rel=0.01)
    assert us(speeds, 2, 10.0) is None, "who was never seen is not guessed"


def test_what_it_claims_afterwards_changes_nothing() -> None:
    speeds = MeasuredSpeeds(HEAD)
    note(speeds, {1: 10.0}, 20, 0.100)
    assert us(speeds, 1, 1.0) == pytest.approx(5000, rel=0.01)


def test_an_honest_peer_stays_at_its_word() -> None:
    speeds = MeasuredSpeeds(HEAD)
    for _ in range(3):
        note(speeds, {1: 300.0, 2: 500.0}, 10, 0.008)
    assert us(speeds, 1, 300.0) == pytest.approx(300, rel=0.1)
    assert us(speeds, 2, 500.0) == pytest.approx(500, rel=0.1)


def test_blame_is_shared_until_another_route_tells_whose_it_was() -> None:
    speeds = MeasuredSpeeds(HEAD)
    note(speeds, {1: 100.0, 2: 100.0}, 10, 0.102)  # 2 takes 10,100
    assert us(speeds, 1, 100.0) == pytest.approx(us(speeds, 2, 100.0), rel=0.01)
    note(speeds, {1: 100.0, 3: 100.0}, 10, 0.002)
    assert us(speeds, 1, 100.0) == pytest.approx(100, rel=1.0)
    assert us(speeds, 2, 100.0) == pytest.approx(10_100, rel=0.05)


def test_the_head_that_measured_itself_takes_no_blame() -> None:
    speeds = MeasuredSpeeds(HEAD)
    note(speeds, {0: 200.0, 1: 20.0}, 15, 0.150)
    assert us(speeds, 1, 20.0) == pytest.approx(9800, rel=0.02)
    assert HEAD not in speeds.of(MODEL, {HEAD: 200.0}, 0.0)


def test_what_shared_turns_took_is_not_held_against_a_peer() -> None:
    speeds = MeasuredSpeeds(HEAD)
    speeds.note(MODEL, [Share(peer(1), 100.0, 10, batch=3.0)], 0.003, 0.0)
    assert us(speeds, 1, 100.0) == pytest.approx(100, rel=0.02)


def test_the_excess_halves_and_is_forgotten_at_last() -> None:
    speeds = MeasuredSpeeds(HEAD)
    note(speeds, {1: 100.0}, 10, 0.010)
    assert us(speeds, 1, 100.0, HALF_LIFE_S) == pytest.approx(550, rel=0.02)
    assert us(speeds, 1, 100.0, 3 * HALF_LIFE_S) == pytest.approx(100 + 900 / 8, rel=0.02)
    assert us(speeds, 1, 100.0, 13 * HALF_LIFE_S) is None


def test_a_peer_that_recovered_is_believed_by_what_it_does_now() -> None:
    speeds = MeasuredSpeeds(HEAD)
    note(speeds, {1: 100.0}, 10, 0.050, now=0.0)
    for session in range(4):
        note(speeds, {1: 100.0}, 10, 0.001, now=2 * HALF_LIFE_S + session)
    assert us(speeds, 1, 100.0, 2 * HALF_LIFE_S + 4) < 400  # type: ignore[operator]


def test_memory_is_bounded() -> None:
    speeds = MeasuredSpeeds(HEAD)
    for number in range(3 * MAX_SEEN):
        speeds.note(bytes([number % (2 * MAX_MODELS)]) * 32, [Share(peer(number), 1.0, 1)], 1e-3, 0.0)
        note(speeds, {number: 1.0}, 1, 1e-3)
    assert len(speeds._seen) == MAX_MODELS
    assert all(len(seen) <= MAX_SEEN for seen in speeds._seen.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(1, 9), st.floats(1, 1e9), st.integers(1, 512)), min_size=1, max_size=4),
            st.floats(-1, 1e4),
            st.floats(0, 1e5),
        ),
        max_size=20,
    ),
    st.floats(0, 1e5),
)
def test_whatever_was_seen_a_speed_is_a_positive_number(
    seen: list[tuple[list[tuple[int, float, int]], float, float]], now: float
) -> None:
    speeds = MeasuredSpeeds(HEAD)
    for spans, seconds, at in seen:
        speeds.note(MODEL, [Share(peer(number), claim, n) for number, claim, n in spans], seconds, at)
    for found in speeds.of(MODEL, {peer(number): 50.0 for number in range(1, 10)}, now).values():
        assert 0 < found.us_per_layer < 1e12


# -- with the planner


def plan(records: list[CoverageRecord], speeds: MeasuredSpeeds, now: float) -> Route:
    claims = {each.peer: float(each.us_per_layer) for each in records}
    measured = {other: found.us_per_layer for other, found in speeds.of(MODEL, claims, now).items()}
    return plan_routes(30, records, head=HEAD, rtt_s=near, limit=1, measured_us=measured)[0]


def true_compute_s(route: Route, truth: dict[PeerId, float], rng: random.Random) -> float:
    took = sum(truth[hop.peer] * (hop.stop - hop.span.start) / 1e6 for hop in route.hops)
    return took * rng.uniform(0.95, 1.1)


@pytest.mark.parametrize("seed", range(5))
def test_liars_are_priced_out_after_their_first_sessions(seed: int) -> None:
    """60 peers in three parts of the model, a fifth of them say they are 50 times as fast as they are."""
    rng = random.Random(seed)
    records, truth, liars = [], {}, set()
    for number in range(1, 61):
        part = ("0:10", "10:20", "20:30")[number % 3]
        real = rng.randint(300, 900)
        is_liar = rng.random() < 0.2
        records.append(record(number, part, max(1, real * 10 // 500) if is_liar else real))
        truth[peer(number)] = real * 10.0 if is_liar else real
        if is_liar:
            liars.add(peer(number))
    speeds = MeasuredSpeeds(HEAD)
    used: list[int] = []
    for session in range(60):
        route = plan(records, speeds, float(session))
        shares = [Share(hop.peer, _claim(records, hop.peer), hop.stop - hop.span.start) for hop in route.hops]
        speeds.note(MODEL, shares, true_compute_s(route, truth, rng), float(session))
        used.append(sum(hop.peer in liars for hop in route.hops))
    assert used[0] > 0, "nothing gives a liar away before its first session"
    settled = used[2 * len(liars) :]
    assert sum(settled) == 0, f"seed {seed}: {len(liars)} liars, used {used}"


def _claim(records: list[CoverageRecord], other: PeerId) -> float:
    return next(float(each.us_per_layer) for each in records if each.peer == other)


# -- what pages


def test_a_span_that_pages_costs_what_its_disk_takes() -> None:
    pages = record(1, "0:10", us=100, us_4=300, read_bytes_per_s=10**9, paged_bytes=50 * 10**6)
    assert layer_us(pages, 1) == pytest.approx(5000)
    assert layer_us(pages, 4) == pytest.approx(5000), "the weights are read once a turn, whoever shares it"
    offered = [pages, record(2, "0:10", us=2000), record(3, "10:30")]
    assert [hop.peer for hop in plan_routes(30, offered, head=HEAD, rtt_s=near)[0].hops] == [peer(2), peer(3)]


def test_what_was_measured_outranks_what_a_disk_was_said_to_take() -> None:
    pages = record(1, "0:10", us=100, read_bytes_per_s=10**9, paged_bytes=50 * 10**6)
    assert layer_us(pages, 1, measured_us=400.0) == pytest.approx(400)


def test_a_disk_that_nobody_measured_is_not_guessed() -> None:
    assert layer_us(record(1, "0:10", us=100, paged_bytes=50 * 10**6), 1) == 100
