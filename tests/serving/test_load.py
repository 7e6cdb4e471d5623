"""What a peer says of its own load."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from meshswarm.config import Address
from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.serving.load import LoadTeller, load_report, role_of
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
    spare = replace(RECORD, roles=("standby", "mobile"))
    assert load_report(ME, spare, 30, 0, draining=False).role == "standby"
    for nothing, role in ((None, "client"), (replace(RECORD, loaded=False), "server")):
        report = load_report(ME, nothing, 0, 1, draining=True)
        assert report.span is None and report.role == role and report.draining and report.sessions == 1
    for record, role in ((None, "seeder"), (spare, "seeder"), (RECORD, "server")):
        assert role_of(record, seeds=True) == role


def test_who_begins_or_ends_to_seed_is_told_once() -> None:
    """What its layers make of it is told by them."""
    said: list[str] = []
    record, seeds = [None], [False]
    serving: Any = SimpleNamespace(
        record=lambda: record[0], public_record=lambda: record[0], model=SimpleNamespace(n_layers=30)
    )
    gossip: Any = SimpleNamespace(publish=lambda report: None)
    spans: Any = SimpleNamespace(sessions=(), n_parked=0, draining=False)
    teller = LoadTeller(
        ME, gossip, None, spans, lambda: serving if record[0] else None, frozenset,  # type: ignore[arg-type]
        lambda: seeds[0], lambda event: said.append(event["role"]),
    )  # fmt: skip
    to_serve = LoadTeller(
        ME, gossip, None, spans, lambda: None, frozenset, lambda: True, is_to_serve=True  # type: ignore[arg-type]
    )  # fmt: skip
    assert to_serve.role == "server", "its layers are on the way"
    states = [(None, False), (None, True), (None, True), (None, False), (RECORD, False), (RECORD, True)]
    states += [(replace(RECORD, roles=("standby",)), True), (RECORD, True), (RECORD, False)]
    for record[0], seeds[0] in states:  # type: ignore[assignment]
        teller.tell()
    assert said == ["seeder", "client", "seeder"]
    record[0], seeds[0] = None, False
    assert teller.facts() == {"role": "client", "role_reason": "it asks, and serves nothing"}


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
    assert read_after_s(READ_S[0][0]) == 0
    waits = [read_after_s(most) for most, _ in READ_S] + [MANY_READ_S]
    assert waits == sorted(set(waits))
    for (most, wait_s), longer_s in zip(READ_S, waits[1:], strict=True):
        assert read_after_s(most) == wait_s and read_after_s(most + 1) == longer_s
