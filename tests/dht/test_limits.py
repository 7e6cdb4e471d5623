"""Token buckets: a burst, then the rate, each peer on its own."""

import pytest

from meshswarm.dht.limits import RateLimit
from meshswarm.identity import PeerId

ONE, OTHER = PeerId(b"1" * 32), PeerId(b"2" * 32)


def test_a_burst_then_the_rate() -> None:
    limit = RateLimit(per_s=2.0, burst=10.0)
    assert limit.take(ONE, 10, 0.0) == 0.0
    assert limit.take(ONE, 1, 0.0) == pytest.approx(0.5)
    assert limit.take(ONE, 1, 0.5) == 0.0
    assert limit.take(ONE, 10, 1000.0) == 0.0


def test_peers_do_not_share() -> None:
    limit = RateLimit(per_s=1.0, burst=1.0)
    assert limit.take(ONE, 1, 0.0) == 0.0
    assert limit.take(OTHER, 1, 0.0) == 0.0


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    limit = RateLimit(per_s=1.0, burst=1.0)
    assert limit.take(ONE, 1, 100.0) == 0.0
    assert limit.take(ONE, 1, 0.0) > 0.0


def test_only_so_many_peers_are_remembered() -> None:
    limit = RateLimit(per_s=1.0, burst=1.0)
    for number in range(5000):
        limit.take(PeerId(number.to_bytes(32)), 1, 0.0)
    assert len(limit._buckets) <= 4096
