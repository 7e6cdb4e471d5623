"""Control frames: what is understood, and that nothing else does harm."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.net.control import Ping, Pong, RttEstimate, unpack


@given(st.integers(0, 2**63), st.booleans())
def test_what_is_packed_is_understood(token: int, held: bool) -> None:
    assert unpack(Ping(token, held).pack()) == Ping(token, held)
    assert unpack(Pong(token).pack()) == Pong(token)
    assert len(Pong(token).pack()) <= len(Ping(token, held).pack())


def test_newer_peers_may_say_more() -> None:
    assert unpack(msgpack.packb([1, 7, True, "news", {}])) == Ping(7, True)
    assert unpack(msgpack.packb([99, "something new"])) is None


@given(st.binary(max_size=100))
def test_garbage_is_ignored(garbage: bytes) -> None:
    assert unpack(garbage) is None or isinstance(unpack(garbage), Ping | Pong)


@pytest.mark.parametrize("message", [[1], [1, "7", True], [1, 7, 1], [2, None], {}, 5, None, [[[[]]]]])
def test_the_wrong_shape_is_ignored(message: object) -> None:
    assert unpack(msgpack.packb(message)) is None


def test_round_trips_are_smoothed() -> None:
    rtt = RttEstimate()
    assert rtt.smoothed_s is None
    rtt.add(0.08)
    assert rtt.smoothed_s == 0.08
    rtt.add(0.16)
    assert rtt.smoothed_s == pytest.approx(0.09)
