"""The swarm's size from distances, and what a region of the space is."""

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.dht.region import SPACE, SizeEstimate, is_crowded, radius_of, spread, swarm_size

K = 20


def nearest(rng: random.Random, size: int, liars: int = 0) -> list[int]:
    """Distances of the k nearest of `size` peers; `liars` more have come as near as they liked."""
    honest, at = [], 0.0
    for _ in range(min(size, K)):
        at += rng.expovariate(size)  # the gaps between many even points
        honest.append(int(at * SPACE))
    return sorted([*honest, *(rng.randrange(1, SPACE // 10**6) for _ in range(liars))])[:K]


@pytest.mark.parametrize("size", [50, 1000, 20_000])
@pytest.mark.parametrize("liars", [0, 3, 5])
def test_the_size_is_judged_from_one_neighbourhood_whether_or_not_a_few_lie(size: int, liars: int) -> None:
    rng = random.Random(size + liars)
    judged = [swarm_size(nearest(rng, size, liars)) / size for _ in range(40)]
    assert 0.8 < mean(judged) < 1.4
    assert min(judged) > 0.3 and max(judged) < 4


def test_somebody_who_surrounds_one_peer_or_some_keys_does_not_change_the_estimate() -> None:
    rng = random.Random(1)
    estimate = SizeEstimate()
    for number in range(15):
        crowd = 20 if number < 5 else 0
        estimate.note(number.to_bytes(20), nearest(rng, 2000, crowd))
    surrounded = nearest(rng, 2000, 20)
    assert swarm_size(surrounded) > 10**6
    assert 1000 < estimate.value(surrounded) < 4000


def test_an_estimate_follows_the_swarm_and_keeps_one_value_of_each_place() -> None:
    rng = random.Random(2)
    estimate = SizeEstimate()
    for _ in range(50):
        estimate.note(bytes(20), nearest(rng, 10**6))
    assert not estimate.is_sure
    for number in range(1, 16):
        estimate.note(number.to_bytes(20), nearest(rng, 500))
    assert estimate.is_sure
    assert 300 < estimate.value(nearest(rng, 500)) < 900


def test_few_peers_are_counted_not_judged() -> None:
    assert swarm_size([]) == 1
    assert swarm_size([5]) == 2
    assert radius_of(3, K) == radius_of(K, K) == SPACE
    assert radius_of(2 * K, K) == SPACE // 2


def test_chance_is_no_crowd() -> None:
    rng = random.Random(3)
    radius = radius_of(1000, K)
    assert not any(is_crowded(nearest(rng, 1000)[-1], radius) for _ in range(300))
    assert all(is_crowded(nearest(rng, 1000, K)[-1], radius) for _ in range(20))


@given(st.sets(st.integers(1, SPACE - 1), max_size=200).map(sorted), st.integers(1, 30), st.integers(0, SPACE))
def test_a_spread_holds_the_nearest_and_never_more_than_three_times_k(
    distances: list[int], k: int, radius: int
) -> None:
    chosen = spread(distances, k, radius)
    assert chosen[:k] == distances[:k]
    assert len(chosen) == len(set(chosen)) <= 3 * k
    assert all(distance < radius for distance in chosen[k:])
    assert set(chosen) <= set(distances)


def test_a_crowd_inside_hides_nobody_at_the_outside_of_a_region() -> None:
    rng = random.Random(4)
    radius = radius_of(1000, K)
    honest = [rng.randrange(radius) for _ in range(K)]
    crowd = [rng.randrange(1, radius // 100) for _ in range(500)]
    outside = {each for each in honest if each >= radius // 8}
    assert outside <= set(spread(sorted([*honest, *crowd]), K, radius))
