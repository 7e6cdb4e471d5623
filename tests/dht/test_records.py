"""Coverage records: what goes in comes out, and nothing out of its limits goes in."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.config import Address
from meshswarm.dht import wire
from meshswarm.dht.records import MAX_RTTS, CoverageRecord
from meshswarm.dht.signed import MAX_RECORD_BYTES, RecordKind, SignedRecord
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity
from meshswarm.span import Span

AUTHOR = Identity.from_seed(bytes(32))


def sign(record: CoverageRecord, body: bytes | None = None) -> SignedRecord:
    return SignedRecord.sign(
        AUTHOR,
        RecordKind.COVERAGE,
        scope=bytes(16),
        subject=record.model_id,
        layers=(record.span.start, record.span.stop),
        seq=record.seq,
        expires_ms=record.expires_ms,
        body=record.body() if body is None else body,
    )


coverages = st.builds(
    CoverageRecord,
    peer=st.just(AUTHOR.peer_id),
    addresses=st.lists(
        st.builds(
            Address,
            st.one_of(
                st.ip_addresses(v=4).filter(lambda ip: not (ip.is_multicast or ip.is_unspecified)),
                st.ip_addresses(v=6).filter(lambda ip: not (ip.is_multicast or ip.is_unspecified)),
            ).map(str),
            st.integers(1, 65535),
        ),
        max_size=8,
    ).map(tuple),
    model_id=st.binary(min_size=32, max_size=32),
    span=st.integers(0, 511).flatmap(lambda start: st.builds(Span, st.just(start), st.integers(start + 1, 512))),
    loaded=st.booleans(),
    numclass=st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=96),
    n_ctx=st.integers(1, 2**31 - 1),
    us_per_layer=st.integers(1, 10**9),
    prefill_us_per_row_layer=st.integers(0, 10**9),
    free_kv_tokens=st.integers(0, 2**40),
    roles=st.lists(st.from_regex(r"[a-z][a-z-]{0,15}", fullmatch=True), max_size=8).map(tuple),
    rtts=st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.integers(0, 60_000_000)), max_size=MAX_RTTS).map(
        tuple
    ),
    us_per_layer_4=st.integers(0, 10**9),
    us_per_layer_16=st.integers(0, 10**9),
    read_bytes_per_s=st.integers(0, 2**50),
    paged_bytes=st.integers(0, 2**50),
    next_span=st.none() | st.just(Span(3, 512)),
    seq=st.integers(0, 2**53),
    expires_ms=st.integers(0, 2**53),
)


@given(coverages)
@settings(deadline=None)
def test_a_record_within_the_limits_fits_and_comes_back(record: CoverageRecord) -> None:
    signed = sign(record)
    assert len(signed.wire) <= MAX_RECORD_BYTES
    assert CoverageRecord.from_record(SignedRecord.decode(signed.wire)) == record


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_id", bytes(31)),
        ("addresses", (Address("127.0.0.1", 4000),) * 9),
        ("addresses", (Address("example.org", 4000),)),
        ("numclass", "x" * 97),
        ("numclass", "line\nbreak"),
        ("n_ctx", 0),
        ("n_ctx", 2**31),
        ("us_per_layer", 0),
        ("us_per_layer", -5),
        ("us_per_layer", 10**10),
        ("prefill_us_per_row_layer", -1),
        ("us_per_layer_4", -1),
        ("us_per_layer_16", 10**10),
        ("free_kv_tokens", -1),
        ("read_bytes_per_s", -1),
        ("paged_bytes", 2**51),
        ("roles", ("Server",)),
        ("roles", ("a",) * 9),
        ("rtts", ((b"short", 5),)),
        ("rtts", ((b"12345678", -5),)),
        ("rtts", ((b"12345678", 5),) * 17),
        ("seq", -1),
    ],
)
def test_a_value_out_of_its_limits_makes_no_record(
    make_coverage: Callable[..., CoverageRecord], field: str, value: object
) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        make_coverage(**{field: value})


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, [[b"\x00" * 4, 5]]),
        (0, "127.0.0.1"),
        (1, 1),
        (2, b"cpu"),
        (2, "\x00"),
        (3, True),
        (3, 0),
        (4, 0),
        (4, 1.5),
        (4, float("nan")),
        (5, -1),
        (6, None),
        (7, ["UPPER"]),
        (7, [5]),
        (8, [[b"12345678"]]),
        (8, [["12345678", 5]]),
        (8, [[b"12345678", 2**40]]),
        (9, -1),
        (10, "fast"),
        (11, 2**51),
        (12, -1),
    ],
)
def test_a_well_signed_lie_is_refused(make_coverage: Callable[..., CoverageRecord], position: int, value: Any) -> None:
    record = make_coverage()
    fields = wire.unpack_array(record.body(), 1000, "it")
    fields[position] = value
    with pytest.raises(WireError):
        CoverageRecord.from_record(sign(record, wire.pack(fields)))


@given(st.binary(min_size=1, max_size=500))
@settings(deadline=None)
def test_any_other_body_is_refused(body: bytes) -> None:
    record = CoverageRecord(
        AUTHOR.peer_id, (), bytes(32), Span(0, 1), True, "", n_ctx=1, us_per_layer=1,
        prefill_us_per_row_layer=0, free_kv_tokens=0,
    )  # fmt: skip
    if body != record.body():
        with pytest.raises(WireError):
            CoverageRecord.from_record(sign(record, body))


def test_a_later_versions_addition_is_read_past(make_coverage: Callable[..., CoverageRecord]) -> None:
    record = make_coverage()
    fields = wire.unpack_array(record.body(), 1000, "it")
    assert CoverageRecord.from_record(sign(record, wire.pack([*fields, "new"]))).span == record.span


def test_a_record_of_the_first_version_is_read(make_coverage: Callable[..., CoverageRecord]) -> None:
    record = make_coverage(peer=AUTHOR.peer_id)
    fields = wire.unpack_array(
        make_coverage(
            us_per_layer_4=500, us_per_layer_16=900, read_bytes_per_s=7, paged_bytes=7, next_span=Span(0, 2)
        ).body(),
        1000,
        "it",
    )
    assert CoverageRecord.from_record(sign(record, wire.pack(fields[:9]))) == record


@pytest.mark.parametrize("bad", [[3, 3], [5, 2], [-1, 4], [0, 513], [1], [1, 2, 3], "0:4", [0.0, 4]])
def test_a_next_span_that_is_none_is_refused(make_coverage: Callable[..., CoverageRecord], bad: object) -> None:
    fields = wire.unpack_array(make_coverage().body(), 1000, "it")
    with pytest.raises(WireError):
        CoverageRecord.from_record(sign(make_coverage(peer=AUTHOR.peer_id), wire.pack([*fields[:-1], bad])))


def test_a_tombstone_and_a_card_are_no_coverage(make_record: Callable[..., SignedRecord]) -> None:
    for record in (make_record(body=b""), make_record(kind=RecordKind.CARD, layers=(0, 0), body=b"card")):
        with pytest.raises(WireError):
            CoverageRecord.from_record(record)
