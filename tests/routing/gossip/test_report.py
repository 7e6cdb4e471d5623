"""Load reports: what may be in one, what travels, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.routing.gossip.virtual import MODEL, SCOPE

from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity
from meshswarm.routing.gossip.report import MAX_DEMANDS, MAX_REPORT_BYTES, LoadReport, SignedReport, is_news
from meshswarm.span import Span

ME = Identity.from_seed(bytes(32))


def test_what_was_signed_is_what_is_read(make_report: Callable[..., SignedReport]) -> None:
    signed = make_report(3, demand=((MODEL, 1.5), (bytes(32), 0.25)), draining=True)
    read = SignedReport.decode(signed.wire)
    assert read == signed and read.verify()
    assert read.report.demand[0] == (MODEL, 1.5) and read.report.queue_s == 0.25 and read.report.draining


def test_the_largest_report_keeps_its_limit(make_report: Callable[..., SignedReport]) -> None:
    demand = tuple((bytes([n]) * 32, 1e6) for n in range(MAX_DEMANDS))
    largest = make_report(
        seq=2**53, at_ms=2**53, queue_s=3600.0, sessions=2**31 - 1, free_kv_tokens=2**40, us_per_layer=10**9,
        span=Span(500, 512), n_layers=512, demand=demand,
    )  # fmt: skip
    assert len(largest.wire) <= MAX_REPORT_BYTES
    assert SignedReport.decode(largest.wire) == largest


@pytest.mark.parametrize(
    "changes",
    [
        {"queue_s": float("nan")}, {"queue_s": -1.0}, {"queue_s": 1e9}, {"seq": 2**53 + 1}, {"sessions": -1},
        {"free_kv_tokens": -1}, {"us_per_layer": 10**10}, {"role": "boss"}, {"model_id": b"short"},
        {"span": None}, {"n_layers": 5}, {"demand": ((MODEL, -1.0),)}, {"demand": ((MODEL, 1.0),) * 7},
    ],
)  # fmt: skip
def test_values_out_of_their_limits_are_refused(make_report: Callable[..., SignedReport], changes: Any) -> None:
    with pytest.raises(ValueError):
        make_report(**changes)


def test_a_peer_reports_on_itself_only(make_report: Callable[..., SignedReport]) -> None:
    with pytest.raises(ValueError, match="own load"):
        SignedReport.sign(ME, SCOPE, make_report(2).report)


def test_a_changed_byte_is_seen(make_report: Callable[..., SignedReport]) -> None:
    wire = make_report().wire
    for at in range(len(wire)):
        forged = wire[:at] + bytes([wire[at] ^ 1]) + wire[at + 1 :]
        try:
            assert not SignedReport.decode(forged).verify(), at
        except WireError:
            continue


def test_anothers_signature_is_seen(make_report: Callable[..., SignedReport]) -> None:
    payload, _ = msgpack.unpackb(make_report(1).wire)
    _, signature = msgpack.unpackb(make_report(2).wire)
    assert not SignedReport.decode(msgpack.packb([payload, signature])).verify()


@given(st.binary(max_size=600))
def test_any_bytes_are_a_report_or_an_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        SignedReport.decode(data)


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.binary(max_size=40),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    )
)
def test_any_fields_are_a_report_or_an_error(field: Any) -> None:
    for at in range(15):
        fields: list[Any] = [1, ME.peer_id.key, SCOPE, 7, 7, MODEL, 30, [0, 10], 0, 0, 0, False, 300, 1, []]
        fields[at] = field
        try:
            payload = msgpack.packb(fields)
            read = SignedReport.decode(msgpack.packb([payload, ME.sign("load", payload)]))
        except WireError:
            continue
        assert isinstance(read.report, LoadReport) and read.verify()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False), ({"sessions": 3}, False), ({"queue_s": 0.3}, False), ({"queue_s": 0.6}, True),
        ({"draining": True}, True), ({"free_kv_tokens": 0}, True), ({"free_kv_tokens": 1}, False),
        ({"span": Span(10, 20)}, True), ({"role": "standby"}, True),
    ],
)  # fmt: skip
def test_what_others_should_hear_of_soon(
    make_report: Callable[..., SignedReport], changes: Any, expected: bool
) -> None:
    assert is_news(make_report(**changes).report, make_report().report) is expected
