"""Session messages as bytes: every message survives the trip, nothing malformed gets in."""

import dataclasses
import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.config import Address
from meshswarm.errors import RemoteProtocolError
from meshswarm.identity import Identity, PeerId
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.sessions import messages as m
from meshswarm.stage.sessions.wire import decode, encode

IDENTITY = Identity.from_seed(b"\1" * 32)
OTHER = Identity.from_seed(b"\2" * 32)

peers = st.binary(min_size=32, max_size=32).map(PeerId)
optional_peers = st.none() | peers
hashes = st.binary(min_size=32, max_size=32)
counts = st.integers(0, 2**64 - 1)
hosts = st.sampled_from(["10.0.0.1", "2001:db8::1"])
addresses = st.lists(st.builds(Address, hosts, st.integers(1, 65535)), max_size=3).map(tuple)
spans = st.tuples(st.integers(0, 100), st.integers(1, 100)).map(lambda p: Span(p[0], p[0] + p[1]))
texts = st.text(max_size=100)


@st.composite
def steps(draw: st.DrawFn) -> m.Step:
    n_rows = draw(st.integers(1, 8))
    carries = draw(st.sampled_from(["tokens", "hidden", "both"]))
    tokens = draw(st.binary(min_size=4 * n_rows, max_size=4 * n_rows)) if carries != "hidden" else None
    hidden = draw(st.binary(max_size=200)) if carries != "tokens" else None
    return m.Step(
        draw(counts), draw(st.integers(0, 2**24)), n_rows, draw(st.none() | st.integers(0, 2**24)),
        draw(st.integers(0, 255)), tokens, m.Dtype.F32, hidden, draw(st.none() | hashes),
        draw(st.integers(1, n_rows)), draw(st.integers(0, 2**32 - 1)),
        draw(st.none() | st.lists(st.integers(0, 2**24), max_size=5).map(tuple)),
    )  # fmt: skip


rows = st.integers(1, 5).flatmap(
    lambda k: st.builds(
        m.Row,
        st.binary(min_size=4 * k, max_size=4 * k),
        st.binary(min_size=4 * k, max_size=4 * k),
        st.just(-math.inf) | st.floats(-1e6, 1e6),
    )
)
opens = st.builds(
    m.Open,
    session=st.binary(min_size=16, max_size=16), head=st.just(IDENTITY.peer_id), head_addresses=addresses,
    model_id=hashes, span=spans, n_layers=st.integers(1, 512), previous=optional_peers, next=optional_peers,
    next_addresses=addresses, returns=st.sampled_from(m.Returns), dtype=st.sampled_from(m.Dtype),
    n_ctx=st.integers(0, 2**24), profile=st.sampled_from(Profile), temperature=st.floats(0, 1000),
    top_k=st.integers(0, 4096), deadline_ms=st.integers(0, 2**40), max_wait_ms=st.integers(0, 2**40),
    fork=st.none() | st.builds(m.Fork, st.binary(min_size=16, max_size=16), st.integers(0, 2**24)),
)  # fmt: skip
anything = st.one_of(
    opens, steps(),
    st.builds(
        m.Opened, texts, st.integers(0, 2**32 - 1), hashes, st.sampled_from(Rollback), st.booleans(), st.integers(0, 99)
    ),
    st.builds(m.Waiting, st.integers(0, 2**32 - 1), st.integers(0, 2**40)), st.builds(m.Park),
    st.builds(m.Resume, st.floats(0, 1000), st.integers(0, 4096), st.integers(0, 2**40)),
    st.builds(m.Refused, st.sampled_from(m.RefusalReason), texts, st.integers(0, 2**32 - 1)),
    st.builds(m.Hop, peers, st.binary(min_size=16, max_size=16)),
    st.builds(m.Result, counts, st.lists(rows, max_size=3).map(tuple), st.none() | hashes),
    st.builds(m.Credit, counts), st.builds(m.FullRowRequest, counts, st.integers(0, m.MAX_DRAFT)),
    st.builds(m.FullRow, counts, st.integers(1, 25).map(lambda n: bytes(4 * n)), st.integers(0, m.MAX_DRAFT)),
    st.builds(m.Cancel), st.builds(m.Close),
    st.builds(m.ReceiptOffer, st.binary(max_size=100)), st.builds(m.ReceiptAck, st.binary(max_size=100)),
    st.builds(m.Failed, texts, optional_peers),
)  # fmt: skip


@given(anything)
def test_every_message_survives_the_trip(message: m.Message) -> None:
    assert decode(encode(message, IDENTITY)) == message


@given(st.binary(max_size=300))
def test_garbage_is_refused(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(frame)


@given(anything, st.data())
def test_a_damaged_frame_is_refused_or_another_valid_message(message: m.Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message, IDENTITY))
    index = data.draw(st.integers(0, len(frame) - 1))
    frame[index] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode(bytes(frame))
    except RemoteProtocolError:
        return
    assert not isinstance(decoded, m.Open), "an OPEN cannot be altered: it is signed"


@given(anything)
def test_a_frame_cut_short_is_refused(message: m.Message) -> None:
    frame = encode(message, IDENTITY)
    for end in range(min(len(frame), 40)):
        with pytest.raises(RemoteProtocolError):
            decode(frame[:end])


@given(anything)
def test_fields_of_a_later_version_are_ignored(message: m.Message) -> None:
    fields = msgpack.unpackb(encode(message, IDENTITY), raw=False)
    assert decode(msgpack.packb([*fields, "new field"])) == message


@pytest.mark.parametrize(
    ("message", "n_later"),
    [
        (m.Step(3, 5, 1, None, m.Flag.EMIT, bytes(4), m.Dtype.F32, None, None), 3),
        (m.Opened("cpu", 512, bytes(32)), 3),
        (m.Opened("cpu", 512, bytes(32), Rollback.STATE, True), 1),
        (m.FullRowRequest(3), 1),
        (m.FullRow(3, bytes(8)), 1),
    ],
)
def test_a_message_of_an_earlier_version_is_understood(message: m.Message, n_later: int) -> None:
    fields = msgpack.unpackb(encode(message), raw=False)
    assert decode(msgpack.packb(fields[:-n_later])) == message


def test_an_open_of_an_earlier_version_is_understood() -> None:
    frame = msgpack.unpackb(encode(example_open(), IDENTITY), raw=False)
    payload = msgpack.packb(msgpack.unpackb(frame[1], raw=False)[:-2])
    assert decode(msgpack.packb([frame[0], payload, IDENTITY.sign("open", payload)])) == example_open()


@pytest.mark.parametrize("fork", [[b"short", 3], [bytes(16)], [bytes(16), -1], [bytes(16), 2**25], 7, [[], []]])
def test_a_malformed_fork_is_refused(fork: object) -> None:
    frame = msgpack.unpackb(encode(example_open(), IDENTITY), raw=False)
    payload = msgpack.packb([*msgpack.unpackb(frame[1], raw=False)[:-1], fork])
    with pytest.raises(RemoteProtocolError, match="fork"):
        decode(msgpack.packb([frame[0], payload, IDENTITY.sign("open", payload)]))


def test_an_open_signed_by_somebody_else_is_refused() -> None:
    frame = msgpack.unpackb(encode(example_open(), IDENTITY), raw=False)
    frame[2] = OTHER.sign("open", frame[1])
    with pytest.raises(RemoteProtocolError, match="signature"):
        decode(msgpack.packb(frame))


def example_open() -> m.Open:
    return m.Open(
        bytes(16), IDENTITY.peer_id, (), bytes(32), Span(0, 30), 30, None, None, (), m.Returns.LOGITS, m.Dtype.F32,
        512, Profile.FAST, 0.0, 1, 1000,
    )  # fmt: skip


@pytest.mark.parametrize("field", ["head_addresses", "next_addresses"])
@pytest.mark.parametrize(
    "address",
    [
        Address("intranet.example", 80), Address("10.0.0.1", 0), Address("0.0.0.0", 80), Address("224.0.0.1", 80),
        Address("fe80::1%eth0", 80),
    ],
    ids=str,
)  # fmt: skip
def test_an_open_sends_nobody_to_what_is_no_peers_address(field: str, address: Address) -> None:
    """A span dials what its OPEN names: a head must not aim its resolver, or its packets at everybody."""
    opening = dataclasses.replace(example_open(), **{field: (address,)})
    with pytest.raises(RemoteProtocolError, match=f"bad {field}: not one host's IP address with a port"):
        decode(encode(opening, IDENTITY))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ([m.Kind.STEP, 0, 0, 0, None, 0, b"", "f32", None, None], "without rows"),
        ([m.Kind.STEP, 0, 0, 1, None, 0, None, "f32", None, None], "tokens or hidden"),
        ([m.Kind.STEP, 0, 0, 2, None, 0, b"1234", "f32", None, None], "another number of tokens"),
        ([m.Kind.STEP, 0, 0, 1, None, 0, b"1234", "f64", None, None], "dtype"),
        ([m.Kind.STEP, -1, 0, 1, None, 0, b"1234", "f32", None, None], "seq"),
        ([m.Kind.STEP, True, 0, 1, None, 0, b"1234", "f32", None, None], "seq"),
        ([m.Kind.STEP, 0, 0, m.MAX_ROWS_PER_STEP + 1, None, 0, b"", "f32", None, None], "n_rows"),
        ([m.Kind.STEP, 0, 0, 1, None, 0, b"1234", "f32", None, None, 2], "of 1 rows asked for the logits of 2"),
        ([m.Kind.STEP, 0, 0, 1, None, 0, b"1234", "f32", None, None, 0], "asked for the logits of 0"),
        ([m.Kind.STEP, 0, 0, 20, None, 0, bytes(80), "f32", None, None, 17], "n_outputs"),
        ([m.Kind.FULL_ROW_REQUEST, 0, 16], "row"),
        ([m.Kind.RESULT, 0, [[b"1234", b"12345678", 0.0]], None], "do not match"),
        ([m.Kind.RESULT, 0, [[b"1234", b"1234", math.nan]], None], "tail_log_mass"),
        ([m.Kind.STEP, 0, 0, 1, None, 0, b"1234", "f32", None, None, 1, -1], "turn"),
        ([m.Kind.OPENED, "cpu", 512, bytes(32), "time travel", False], "rollback"),
        ([m.Kind.OPENED, "cpu", 512, bytes(32), "kv", 1], "needs_tokens"),
        ([m.Kind.WAITING, -1, 0], "place"),
        ([m.Kind.RESUME, math.nan, 1, 1], "temperature"),
        ([m.Kind.RESUME, 1.0, 4097, 1], "top_k"),
        ([m.Kind.RESUME, 1.0, 1, -1], "deadline_ms"),
        ([99], "unknown kind"),
        ([], "starts with its kind"),
    ],
)
def test_malformed_fields_are_named(fields: list[object], complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        decode(msgpack.packb(fields))
