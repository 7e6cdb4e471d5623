"""What a peer reports from second to second counts for more than its record, where both speak of the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.routing.peers import peer, record

from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.loads import dated, queues, with_loads
from meshswarm.span import Span

RECORD = record(1, "0:10", us=100, us_4=250, us_16=900, free=4096)
REPORT = LoadReport(
    peer(1), at_ms=7, model_id=bytes(32), span=Span(0, 10), n_layers=30, queue_s=0.25, free_kv_tokens=512,
    us_per_layer=200,
)  # fmt: skip


def test_a_report_overlays_room_and_speed_in_turns_of_every_size() -> None:
    (found,) = with_loads([RECORD], {peer(1): REPORT})
    assert (found.free_kv_tokens, found.us_per_layer) == (512, 200)
    assert (found.us_per_layer_4, found.us_per_layer_16) == (500, 1800)
    assert queues([RECORD], {peer(1): REPORT}) == {peer(1): 0.25}
    assert dated([RECORD], {peer(1): REPORT}) == {peer(1): 7}


def test_a_peer_that_does_not_know_its_speed_keeps_what_its_record_says() -> None:
    (found,) = with_loads([RECORD], {peer(1): replace(REPORT, us_per_layer=0)})
    assert (found.us_per_layer, found.us_per_layer_4, found.free_kv_tokens) == (100, 250, 512)


@pytest.mark.parametrize(
    "other",
    [
        replace(REPORT, span=Span(0, 12)),
        replace(REPORT, model_id=b"x" * 32),
        replace(REPORT, model_id=None, span=None),
    ],
)
def test_a_report_of_something_else_changes_nothing(other: LoadReport) -> None:
    loads = {peer(1): other}
    assert with_loads([RECORD], loads) == [RECORD]
    assert not queues([RECORD], loads) and not dated([RECORD], loads)


@given(st.integers(1, 10**9), st.integers(0, 10**9), st.integers(1, 10**9), st.integers(0, 2**40))
def test_whatever_is_reported_the_record_stays_within_its_limits(us: int, us_4: int, now: int, free: int) -> None:
    before = record(1, "0:10", us=us, us_4=us_4, us_16=us_4)
    (found,) = with_loads([before], {peer(1): replace(REPORT, us_per_layer=now, free_kv_tokens=free)})
    assert found.us_per_layer == now
