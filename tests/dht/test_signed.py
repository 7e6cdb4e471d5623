"""The signed envelope: exact bytes, one purpose, every field within its limits."""

from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.dht import wire
from meshswarm.dht.signed import (
    CLOCK_SKEW_S,
    LIFETIME_S,
    MAX_RECORD_BYTES,
    RecordKind,
    RecordSet,
    SignedRecord,
    replaces,
)
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity

AUTHOR = Identity.from_seed(bytes(32))
VALID = [1, "coverage", AUTHOR.peer_id.key, bytes(16), bytes(32), 0, 10, 7, 99, b"body"]


def signed(fields: list[object], author: Identity = AUTHOR, what: str = "record") -> bytes:
    payload = wire.pack(fields)
    return wire.pack([payload, author.sign(what, payload)])


@given(
    st.integers(0, 2**53),
    st.integers(0, 2**53),
    st.binary(min_size=0, max_size=700),
    st.integers(0, 511).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, 512))),
)
@settings(deadline=None)
def test_a_record_comes_back_as_it_was(seq: int, expires_ms: int, body: bytes, layers: tuple[int, int]) -> None:
    record = SignedRecord.sign(
        AUTHOR,
        RecordKind.COVERAGE,
        scope=bytes(16),
        subject=bytes(32),
        layers=layers,
        seq=seq,
        expires_ms=expires_ms,
        body=body,
    )
    again = SignedRecord.decode(record.wire)
    assert again == record
    assert (again.seq, again.expires_ms, again.body, (again.start, again.stop)) == (seq, expires_ms, body, layers)
    assert again.author == AUTHOR.peer_id
    assert again.verify()


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(deadline=None)
def test_no_bit_can_be_changed(position: int, flip: int) -> None:
    data = bytearray(signed(VALID))
    data[position % len(data)] ^= flip
    try:
        record = SignedRecord.decode(bytes(data))
    except WireError:
        return
    assert not record.verify()


@given(st.binary(max_size=1500))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        SignedRecord.decode(data)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, 2),
        (0, True),
        (1, "rumour"),
        (1, b"coverage"),
        (1, 5),
        (2, bytes(31)),
        (2, "x" * 32),
        (3, bytes(15)),
        (4, bytes(33)),
        (5, -1),
        (5, 10),
        (5, 0.0),
        (6, 513),
        (7, -1),
        (7, 2**60),
        (7, None),
        (8, 2**64 - 1),
        (9, "body"),
        (9, None),
    ],
)
def test_a_field_out_of_its_limits_is_refused_however_well_signed(position: int, value: object) -> None:
    fields: list[object] = list(VALID)
    fields[position] = value
    with pytest.raises(WireError):
        SignedRecord.decode(signed(fields))


def test_a_missing_field_is_refused_and_a_later_versions_addition_is_not() -> None:
    with pytest.raises(WireError):
        SignedRecord.decode(signed(VALID[:-1]))
    assert SignedRecord.decode(signed([*VALID, "new"])).verify()


def test_a_card_is_about_no_layers_and_coverage_about_some() -> None:
    with pytest.raises(WireError):
        SignedRecord.decode(signed([1, "card", *VALID[2:]]))
    with pytest.raises(WireError):
        SignedRecord.decode(signed([*VALID[:5], 0, 0, *VALID[7:]]))


def test_a_signature_of_somebody_else_or_for_something_else_is_none() -> None:
    assert not SignedRecord.decode(signed(VALID, author=Identity.from_seed(b"1" * 32))).verify()
    assert not SignedRecord.decode(signed(VALID, what="receipt")).verify()


def test_a_record_above_its_size_can_be_neither_made_nor_read() -> None:
    fields = [*VALID[:9], bytes(MAX_RECORD_BYTES)]
    with pytest.raises(WireError):
        SignedRecord.decode(signed(fields))
    with pytest.raises(WireError, match="1024"):
        SignedRecord.sign(
            AUTHOR,
            RecordKind.CARD,
            scope=bytes(16),
            subject=bytes(32),
            seq=1,
            expires_ms=1,
            body=bytes(MAX_RECORD_BYTES),
        )


def test_other_outer_shapes_are_refused() -> None:
    payload = wire.pack(VALID)
    signature = AUTHOR.sign("record", payload)
    for outer in ([payload], [payload, signature[:63]], [payload, signature, b""], [payload.hex(), signature]):
        with pytest.raises(WireError):
            SignedRecord.decode(msgpack.packb(outer))


def test_life_is_bounded_at_both_ends(make_record: Callable[..., SignedRecord], now: float) -> None:
    assert make_record(life_s=0).is_expired(now)
    assert not make_record(life_s=0.001).is_expired(now)
    assert not make_record(life_s=LIFETIME_S + CLOCK_SKEW_S).is_too_long(now)
    assert make_record(life_s=LIFETIME_S + CLOCK_SKEW_S + 0.001).is_too_long(now)


def test_the_higher_number_wins_in_any_order(make_record: Callable[..., SignedRecord], now: float) -> None:
    old, new, gone = make_record(seq=1), make_record(seq=2, span="10:20"), make_record(seq=3, body=b"")
    for records in ([old, new], [new, old]):
        assert RecordSet(records).live(now) == [new]
    for records in ([old, gone, new], [gone, new, old]):
        assert RecordSet(records).live(now) == []


def test_equal_numbers_are_settled_alike_everywhere(make_record: Callable[..., SignedRecord], now: float) -> None:
    one, other = make_record(seq=5, span="0:4"), make_record(seq=5, span="0:8")
    assert replaces(one, other) != replaces(other, one)
    assert RecordSet([one, other]).live(now) == RecordSet([other, one]).live(now)


def test_authors_and_subjects_do_not_touch_each_other(make_record: Callable[..., SignedRecord], now: float) -> None:
    mine, theirs, another = make_record(1), make_record(2, seq=9), make_record(1, seq=9, subject=b"s" * 32)
    assert len(RecordSet([mine, theirs, another]).live(now)) == 3
    assert RecordSet([mine]).live(now + 601) == []


def test_a_set_with_a_limit_keeps_everything_until_it_is_full(make_record: Callable[..., SignedRecord]) -> None:
    records = [make_record(number) for number in range(20)]
    full = RecordSet(limit=20)
    full.update(records[:12], "one")
    full.update(records[8:], "other")
    assert set(full) == set(records)
    full.update([make_record(5, seq=2)], "one")
    assert len(full) == 20 and make_record(5, seq=2) in full


def test_a_flood_from_one_source_crowds_out_nothing_but_its_own(
    make_record: Callable[..., SignedRecord], now: float
) -> None:
    """Ten honest records come before, in the middle of, and after 100 authors that one source invented."""
    honest = [make_record(number) for number in range(30)]
    flood = [make_record(number) for number in range(100, 200)]
    for order in ([honest, flood], [flood, honest], [flood[:50], honest, flood[50:]]):
        kept = RecordSet(limit=40)
        for records in order:
            if records is honest:
                kept.update(honest[:10], "a")
                kept.update(honest[10:20], "b")
                kept.update(honest[20:], "c")
            else:
                kept.update(records, "liar")
        assert len(kept) == 40
        assert set(honest) <= set(kept)


def test_who_repeats_others_records_takes_no_places_from_them(make_record: Callable[..., SignedRecord]) -> None:
    """The liar tells the honest records first, so that they count as brought by him, and then his own."""
    honest = [make_record(number) for number in range(10)]
    kept = RecordSet(limit=40)
    kept.update([*honest, *(make_record(number) for number in range(100, 200))], "liar")
    kept.update(honest, "a")
    kept.update([make_record(number) for number in range(10, 18)], "b")
    kept.update([make_record(number) for number in range(300, 400)], "another liar")
    assert {*honest, *(make_record(number) for number in range(10, 18))} <= set(kept)
    assert len(kept) == 40
