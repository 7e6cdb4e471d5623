"""What a peer says of its own load."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from meshswarm.config import Address
from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.serving.load import load_report
from meshswarm.serving.reading import MANY_READ_S, READ_S, Holders, read_after_s
from meshswarm.span import Span

ME = PeerId(bytes(range(32)))
RECORD = CoverageRecord(
    peer=ME, addresses=(Address("10.0.0.1", 4000),), model_id=bytes(32), span=Span(10, 20), loaded=True, numclass="cpu",
    n_ctx=4096, us_per_layer=500, prefill_us_per_row_layer=90, free_kv_tokens=8192, roles=("server", "mobile"),
)  # fmt: skip


def test_a_server_says_its_layers_its_room_and_its_queue() -> None:
    report = load_report(ME, RECORD, 30, 4, draining=False)
    assert report.model_id == RECORD.model_id and report.span == RECORD.span and report.n_layers == 30
    assert report.free_kv_tokens == 8192 and report.sessions == 4 and report.role == "server"
    assert report.queue_s == 0.01, "half a turn of 5 ms for each of four sessions"
    assert load_report(ME, RECORD, 30, 0, draining=False).queue_s == 0.0


def test_a_spare_and_one_without_layers_say_so() -> None:
    assert load_report(ME, replace(RECORD, roles=("standby", "mobile")), 30, 0, draining=False).role == "standby"
    for nothing in (None, replace(RECORD, loaded=False)):
        report = load_report(ME, nothing, 0, 1, draining=True)
        assert report.span is None and report.role == "standby" and report.draining and report.sessions == 1


@pytest.mark.parametrize(("n_known", "n_read"), [(5, 4), (9, 2), (64, 1)])
async def test_the_more_strangers_the_rarer_holders_are_read(n_known: int, n_read: int) -> None:
    """One reading of a large model's holders costs megabytes there; among a few peers next to nothing."""
    reads = 0

    async def coverage(model_id: bytes, n_layers: int) -> list[CoverageRecord]:
        nonlocal reads
        reads += 1
        return [RECORD]

    known = [(PeerId(bytes([number]) * 32), ()) for number in range(n_known)]
    dht: Any = SimpleNamespace(known_peers=lambda: known, coverage=coverage)
    at = [0.0]
    holders = Holders(dht, RECORD.model_id, 30, lambda: at[0])
    for at[0] in (0.0, 60.0, 119.0, 121.0):
        assert await holders.read() == [RECORD]
    assert reads == n_read


def test_one_reading_lasts_longer_where_more_are_known() -> None:
    (few, _), (some, _) = READ_S
    assert read_after_s(few) == 0 < read_after_s(few + 1) == read_after_s(some) < read_after_s(some + 1) == MANY_READ_S
