"""Questions and answers: what is sent is what is read, and anything else is refused."""

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.config import Address
from meshswarm.dht import messages, wire
from meshswarm.dht.contact import Contact, merge_addresses
from meshswarm.dht.messages import FindAnswer, FindQuestion, Sender, StoreAnswer, StoreQuestion, StoreStatus, Verdict
from meshswarm.dht.region import MAX_REACH
from meshswarm.dht.wire import WireError
from meshswarm.identity import PeerId

addresses = st.lists(
    st.builds(Address, st.just("10.1.2.3") | st.just("2001:db8::7"), st.integers(1, 65535)), max_size=8
).map(tuple)
senders = st.builds(Sender, st.booleans(), addresses)
timed = st.builds(Sender, st.booleans(), addresses, st.integers(0, 2**53))
keys = st.binary(min_size=20, max_size=20)
peers = st.binary(min_size=32, max_size=32).map(PeerId)
contacts = st.builds(Contact, peers, addresses.filter(bool))

DECODERS = [
    messages.decode_ping,
    messages.decode_find,
    messages.decode_found,
    messages.decode_store,
    messages.decode_stored,
    messages.decode_dial_back,
    messages.decode_dial,
    messages.decode_verdict,
]


@given(timed)
def test_pings(sender: Sender) -> None:
    assert messages.decode_ping(messages.encode_ping(sender)) == sender


@given(
    st.builds(
        FindQuestion,
        senders,
        st.lists(keys, min_size=1, max_size=8).map(tuple),
        st.booleans(),
        st.integers(0, MAX_REACH),
    )
)
def test_finds(question: FindQuestion) -> None:
    assert messages.decode_find(messages.encode_find(question)) == question


@given(
    st.builds(
        FindAnswer,
        timed,
        st.binary(max_size=64),
        st.lists(contacts, max_size=20).map(tuple),
        st.lists(st.binary(max_size=1024), max_size=10).map(tuple),
    )
)
def test_found(answer: FindAnswer) -> None:
    assert messages.decode_found(messages.encode_found(answer)) == answer


@given(
    st.builds(
        StoreQuestion,
        senders,
        st.binary(max_size=64),
        st.lists(
            st.tuples(st.binary(max_size=1024), st.lists(keys, min_size=1, max_size=5).map(tuple)),
            min_size=1,
            max_size=8,
        ).map(tuple),
    )
)
def test_stores(question: StoreQuestion) -> None:
    assert messages.decode_store(messages.encode_store(question)) == question


@given(
    st.builds(
        StoreAnswer,
        senders,
        st.lists(st.lists(st.sampled_from(StoreStatus), max_size=8).map(tuple), max_size=8).map(tuple),
    )
)
def test_stored(answer: StoreAnswer) -> None:
    assert messages.decode_stored(messages.encode_stored(answer)) == answer


@given(senders, contacts, st.sampled_from(Verdict))
def test_dials(sender: Sender, contact: Contact, verdict: Verdict) -> None:
    assert messages.decode_dial_back(messages.encode_dial_back(sender)) == sender
    assert messages.decode_dial(messages.encode_dial(sender, contact)) == (sender, contact)
    assert messages.decode_verdict(messages.encode_verdict(sender, verdict)) == (sender, verdict)


def test_what_older_peers_leave_out_has_a_meaning_and_what_newer_ones_add_is_ignored() -> None:
    """The first version's messages ended before clocks, reach and marks."""
    head = [1, True, []]
    assert messages.decode_ping(wire.pack(head)).clock_ms == 0
    assert messages.decode_find(wire.pack([*head, [bytes(20)], True])).reach == 0
    assert messages.decode_found(wire.pack([*head, b"t", [], []])).sender.clock_ms == 0
    assert messages.decode_find(wire.pack([*head, [bytes(20)], True, 7, b"saltsalt", b"mark", "new"])).reach == 7
    assert messages.decode_found(wire.pack([*head, b"t", [], [], 5, b"mark", "new"])).sender.clock_ms == 5
    for reach in (-1, MAX_REACH + 1, 1.5, None, True):
        with pytest.raises(WireError):
            messages.decode_find(wire.pack([*head, [bytes(20)], True, reach]))


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=400))
def test_garbage_is_refused_in_good_order(decode: Callable[[bytes], object], data: bytes) -> None:
    with contextlib.suppress(WireError):
        decode(data)


@pytest.mark.parametrize("decode", DECODERS)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=6),
        max_leaves=20,
    )
)
def test_any_shape_is_read_or_refused(decode: Callable[[bytes], object], value: object) -> None:
    with contextlib.suppress(WireError):
        decode(wire.pack([1, True, [], value, value, value]))


def test_the_largest_messages_fit_their_limits() -> None:
    sender = Sender(True, tuple(Address("2001:db8::7", 60000 + n) for n in range(8)))
    item = (bytes(messages.MAX_SEALED_BYTES), tuple(bytes([n]) * 20 for n in range(messages.MAX_KEYS_OF_RECORD)))
    question = messages.encode_store(StoreQuestion(sender, bytes(16), (item,) * messages.MAX_STORE_ITEMS))
    assert messages.decode_store(question).items[0] == item
    crowd = tuple(Contact(PeerId(n.to_bytes(32)), sender.addresses) for n in range(messages.MAX_CONTACTS))
    records = (bytes(messages.MAX_SEALED_BYTES),) * messages.MAX_FIND_RECORDS
    answer = messages.encode_found(FindAnswer(sender, bytes(16), crowd, records))
    assert len(messages.decode_found(answer).contacts) == messages.MAX_CONTACTS


def test_more_than_the_limits_is_refused() -> None:
    sender = [1, True, []]
    too_many_keys = wire.pack([*sender, [bytes(20)] * 9, True])
    no_key = wire.pack([*sender, [], True])
    crowd = wire.pack([*sender, b"", [[bytes(32), [[b"\x01\x01\x01\x01", 1]]]] * 161, []])
    large_record = wire.pack([*sender, b"", [[bytes(messages.MAX_SEALED_BYTES + 1), [bytes(20)]]]])
    other_version = wire.pack([2, True, [], [bytes(20)], True])
    for decode, data in (
        (messages.decode_find, too_many_keys),
        (messages.decode_find, no_key),
        (messages.decode_found, crowd),
        (messages.decode_store, large_record),
        (messages.decode_find, other_version),
        (messages.decode_stored, wire.pack([*sender, [[99]]])),
    ):
        with pytest.raises(WireError):
            decode(data)


def test_a_contact_without_an_address_is_refused() -> None:
    with pytest.raises(WireError):
        Contact.unpack([bytes(32), []])


def test_addresses_are_merged_in_order_and_bounded() -> None:
    one, two = Address("10.0.0.1", 1), Address("10.0.0.2", 2)
    assert merge_addresses((one,), (two, one)) == (one, two)
    assert len(merge_addresses(Address("10.0.0.1", port) for port in range(1, 20))) == 8
