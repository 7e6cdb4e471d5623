"""Holder records: who has files of a model is found under one key of it, and disturbs nobody who serves."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.config import Address
from meshswarm.dht import wire
from meshswarm.dht.core import Core
from meshswarm.dht.holders import HolderRecord, read_holders
from meshswarm.dht.keys import Topics
from meshswarm.dht.listing import read_coverage
from meshswarm.dht.messages import StoreStatus
from meshswarm.dht.records import CoverageRecord
from meshswarm.dht.signed import MAX_RECORD_BYTES, RecordKind, SignedRecord
from meshswarm.dht.storage import MAX_PER_KEY, MAX_PER_NETWORK_AND_KEY, RecordStore
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.swarm import SEAL_BYTES, Swarm
from meshswarm.span import Span

MODEL, OTHER = bytes(range(32)), b"o" * 32
NOW = 1_800_000_000.0
AUTHOR = Identity.from_seed(bytes(32))

Identities = Callable[[int], Identity]


def holder(peer: PeerId, **changes: object) -> HolderRecord:
    fields: dict[str, object] = {
        "peer": peer,
        "addresses": (Address("192.0.2.1", 4000),),
        "model_id": MODEL,
        "torrent_port": 6881,
    }
    return HolderRecord(**(fields | changes))  # type: ignore[arg-type]


def sign(author: Identity, record: HolderRecord, topics: Topics, **changes: object) -> SignedRecord:
    fields: dict[str, object] = {
        "kind": RecordKind.HOLDER,
        "scope": topics.scope,
        "subject": record.model_id,
        "seq": 1,
        "expires_ms": int((NOW + 600) * 1000),
        "body": record.body(),
    }
    return SignedRecord.sign(author, **(fields | changes))  # type: ignore[arg-type]


records = st.builds(
    HolderRecord,
    peer=st.just(AUTHOR.peer_id),
    addresses=st.lists(
        st.builds(
            Address,
            st.ip_addresses().filter(lambda ip: not (ip.is_multicast or ip.is_unspecified)).map(str),
            st.integers(1, 65535),
        ),
        max_size=8,
    ).map(tuple),
    model_id=st.binary(min_size=32, max_size=32),
    torrent_port=st.integers(0, 65535),
    layers=st.none() | st.integers(0, 511).flatmap(lambda at: st.builds(Span, st.just(at), st.integers(at + 1, 512))),
    is_whole=st.booleans(),
)


@given(records)
@settings(deadline=None)
def test_a_record_within_the_limits_fits_and_comes_back(record: HolderRecord) -> None:
    signed = sign(AUTHOR, record, Topics(Swarm("tests")))
    assert len(signed.wire) <= MAX_RECORD_BYTES
    assert replace(HolderRecord.from_record(SignedRecord.decode(signed.wire)), seq=0, expires_ms=0) == record


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_id", bytes(31)),
        ("addresses", (Address("127.0.0.1", 4000),) * 9),
        ("addresses", (Address("example.org", 4000),)),
        ("torrent_port", -1),
        ("torrent_port", 65536),
        ("seq", -1),
        ("expires_ms", 2**60),
    ],
)
def test_a_value_out_of_its_limits_makes_no_record(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        holder(AUTHOR.peer_id, **{field: value})


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, [[b"\x00" * 4, 5]]),
        (0, [["example.org", 5]]),
        (0, [[b"\x7f\x00\x00\x01", 5]] * 9),
        (1, 65536),
        (1, -1),
        (1, True),
        (1, "6881"),
        (2, [3, 3]),
        (2, [5, 2]),
        (2, [-1, 4]),
        (2, [0, 513]),
        (2, [1]),
        (2, [0.0, 4]),
        (2, "0:4"),
        (2, None),
        (3, 1),
        (3, None),
    ],
)
def test_a_well_signed_lie_is_refused_and_left_out(topics: Topics, position: int, value: Any) -> None:
    good = holder(AUTHOR.peer_id)
    fields = wire.unpack_array(good.body(), 1000, "it")
    fields[position] = value
    lie = sign(AUTHOR, good, topics, body=wire.pack(fields))
    with pytest.raises(WireError):
        HolderRecord.from_record(lie)
    assert read_holders([lie], MODEL) == []


@given(st.binary(min_size=1, max_size=500))
@settings(deadline=None)
def test_any_other_body_is_refused(body: bytes) -> None:
    good = holder(AUTHOR.peer_id)
    if body != good.body():
        with pytest.raises(WireError):
            HolderRecord.from_record(sign(AUTHOR, good, Topics(Swarm("tests")), body=body))


def test_a_later_versions_addition_is_read_past(topics: Topics) -> None:
    good = holder(AUTHOR.peer_id, layers=Span(2, 9))
    fields = wire.unpack_array(good.body(), 1000, "it")
    [read] = read_holders([sign(AUTHOR, good, topics, body=wire.pack([*fields, "new"]))], MODEL)
    assert (read.layers, read.torrent_port, read.is_whole) == (Span(2, 9), 6881, False)


def test_a_holder_record_speaks_of_no_layers_outside_its_body(topics: Topics) -> None:
    """Its one key depends on the model alone: a record with layers would have to be found under others."""
    with pytest.raises(WireError):
        sign(AUTHOR, holder(AUTHOR.peer_id), topics, layers=(0, 4))


def test_what_is_too_large_for_a_record_is_not_signed(topics: Topics) -> None:
    with pytest.raises(WireError):
        sign(AUTHOR, holder(AUTHOR.peer_id), topics, body=bytes(MAX_RECORD_BYTES))


def test_what_a_holder_has_is_read_from_its_layers_or_from_its_being_whole() -> None:
    some, whole, parts = (
        holder(AUTHOR.peer_id, layers=Span(4, 10)),
        holder(AUTHOR.peer_id, is_whole=True),
        holder(AUTHOR.peer_id),
    )
    assert some.holds(Span(4, 10)) and some.holds(Span(5, 6))
    assert not some.holds(Span(3, 6)) and not some.holds(Span(9, 11))
    assert whole.holds(Span(0, 512)) and not parts.holds(Span(0, 1))


def test_neither_plans_nor_coverage_read_a_holder(topics: Topics, make_record: Callable[..., SignedRecord]) -> None:
    held = sign(AUTHOR, holder(AUTHOR.peer_id, is_whole=True), topics)
    assert read_coverage([held]) == []
    with pytest.raises(WireError):
        CoverageRecord.from_record(held)
    for other in (make_record(1), make_record(1, body=b""), make_record(1, kind=RecordKind.CARD, layers=(0, 0))):
        with pytest.raises(WireError):
            HolderRecord.from_record(other)


# -- what the store takes


def test_it_is_kept_under_its_models_key_and_no_other(topics: Topics) -> None:
    store, record = RecordStore(topics), sign(AUTHOR, holder(AUTHOR.peer_id), topics)
    foreign = [topics.holders(OTHER), topics.models, topics.block(MODEL, 0), bytes(20)]
    assert topics.of_record(record) == [topics.holders(MODEL)]
    assert store.put(record, foreign, NOW) == [StoreStatus.INVALID] * 4
    assert store.put(record, [topics.holders(MODEL)], NOW) == [StoreStatus.STORED]


def test_that_of_another_swarm_and_a_forged_one_are_refused(topics: Topics) -> None:
    store, key = RecordStore(topics), topics.holders(MODEL)
    for swarm in (Swarm("others"), Swarm("tests", b"k" * 32)):
        assert store.put(sign(AUTHOR, holder(AUTHOR.peer_id), Topics(swarm)), [key], NOW) == [StoreStatus.INVALID]
        assert Topics(swarm).holders(MODEL) != key
    good = sign(AUTHOR, holder(AUTHOR.peer_id), topics)
    at = good.wire.index(AUTHOR.peer_id.key)
    stolen = good.wire[:at] + Identity.from_seed(b"x" * 32).peer_id.key + good.wire[at + 32 :]
    assert store.put(SignedRecord.decode(stolen), [key], NOW) == [StoreStatus.INVALID]
    assert len(store) == 0


@pytest.mark.parametrize(
    ("change", "status"),
    [({"expires_ms": int(NOW * 1000)}, StoreStatus.EXPIRED), ({"expires_ms": 2**53}, StoreStatus.TOO_LONG)],
)
def test_a_dead_or_immortal_one_is_refused(topics: Topics, change: dict[str, object], status: StoreStatus) -> None:
    record = sign(AUTHOR, holder(AUTHOR.peer_id), topics, **change)
    assert RecordStore(topics).put(record, [topics.holders(MODEL)], NOW) == [status]


def test_a_flood_of_invented_holders_leaves_those_who_were_there_and_takes_a_networks_share(
    topics: Topics, identity: Identities
) -> None:
    """Keys cost nothing: one network's thousand authors get four places, whoever was there keeps his and renews it."""
    store, key = RecordStore(topics), topics.holders(MODEL)

    def put(number: int, network: bytes, seq: int = 1) -> StoreStatus:
        who = identity(number)
        return store.put(sign(who, holder(who.peer_id), topics, seq=seq), [key], NOW, network=network)[0]

    honest = [put(number, b"net%d" % number) for number in range(1, 11)]
    flood = [put(number, b"evil") for number in range(1000, 2000)]
    assert honest == [StoreStatus.STORED] * 10
    assert flood.count(StoreStatus.STORED) == MAX_PER_NETWORK_AND_KEY
    for number in range(3000, 3200):
        put(number, b"evil%d" % number)
    kept = {record.author for record in store.get(key, NOW)}
    assert len(kept) == MAX_PER_KEY
    assert kept >= {identity(number).peer_id for number in range(1, 11)}
    assert put(5, b"net5", seq=2) is StoreStatus.STORED


def test_one_author_has_one_word_about_a_model_however_often_he_says_it(topics: Topics) -> None:
    store, key = RecordStore(topics), topics.holders(MODEL)
    for seq in range(1, 30):
        store.put(sign(AUTHOR, holder(AUTHOR.peer_id, torrent_port=seq), topics, seq=seq), [key], NOW)
    [kept] = read_holders(store.get(key, NOW), MODEL)
    assert kept.torrent_port == 29


def test_a_tombstone_ends_older_copies(topics: Topics) -> None:
    store, key = RecordStore(topics), topics.holders(MODEL)
    old = sign(AUTHOR, holder(AUTHOR.peer_id), topics)
    assert store.put(sign(AUTHOR, holder(AUTHOR.peer_id), topics, seq=2, body=b""), [key], NOW) == [StoreStatus.STORED]
    assert store.put(old, [key], NOW) == [StoreStatus.STALE]


def test_a_private_swarm_keeps_it_sealed(identity: Identities) -> None:
    swarm = Swarm("ours", b"k" * 32)
    topics = Topics(swarm)
    store, key, record = RecordStore(topics), topics.holders(MODEL), sign(AUTHOR, holder(AUTHOR.peer_id), topics)
    assert store.put(record, [key], NOW) == [StoreStatus.STORED]
    [sealed] = store.sealed(key, NOW)
    assert len(sealed) == len(record.wire) + SEAL_BYTES and MODEL not in sealed
    assert Swarm("ours", b"x" * 32).unseal(key, sealed) is None
    swarm.renew([b"k" * 32], expelled=[AUTHOR.peer_id])
    store.renew()
    assert store.get(key, NOW) == []


def test_it_is_said_again_before_it_ends_without_taking_anything_back(
    make_core: Callable[[int], Core], identity: Identities
) -> None:
    core = make_core(1)
    body: Sequence[bytes] = [holder(core.own).body(), holder(core.own, is_whole=True).body()]
    for at, each in enumerate(body):
        [record] = core.publications.say(RecordKind.HOLDER, MODEL, each, NOW + at)
        assert not record.is_tombstone and core.topics.of_record(record) == [core.topics.holders(MODEL)]
    assert [r.body for r in core.publications.due(NOW + 901, every_s=900)] == [body[1]]
