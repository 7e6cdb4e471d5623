"""What a peer says of its own load."""

from __future__ import annotations

from dataclasses import replace

from meshswarm.config import Address
from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.serving.load import load_report
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
