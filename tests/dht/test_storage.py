"""The store: verified, under its own keys, one of each author, and never more than its limits."""

from collections.abc import Callable

import pytest

from meshswarm.dht.keys import Topics
from meshswarm.dht.messages import StoreStatus
from meshswarm.dht.signed import RecordKind, SignedRecord
from meshswarm.dht.storage import (
    MAX_PER_AUTHOR,
    MAX_PER_AUTHOR_AND_KEY,
    MAX_PER_KEY,
    MAX_PER_NETWORK,
    MAX_PER_NETWORK_AND_KEY,
    RecordStore,
)
from meshswarm.identity import Identity
from meshswarm.net.swarm import SEAL_BYTES, Swarm

MODEL = bytes(range(32))
MakeRecord = Callable[..., SignedRecord]


@pytest.fixture
def store(topics: Topics) -> RecordStore:
    return RecordStore(topics)


@pytest.fixture
def key(topics: Topics) -> bytes:
    return topics.block(MODEL, 0)


def test_a_record_is_found_under_each_of_its_keys(
    store: RecordStore, topics: Topics, make_record: MakeRecord, now: float
) -> None:
    record = make_record(span="3:9")
    keys = topics.of_record(record)
    assert store.put(record, keys, now) == [StoreStatus.STORED] * 3
    assert all(store.get(each, now) == [record] for each in keys)
    assert store.get(topics.block(MODEL, 3), now) == []


def test_it_is_refused_under_any_other_key(
    store: RecordStore, topics: Topics, make_record: MakeRecord, now: float
) -> None:
    foreign = [topics.block(MODEL, 9), topics.models, bytes(20), topics.block(bytes(32), 0)]
    assert store.put(make_record(), foreign, now) == [StoreStatus.INVALID] * 4
    assert len(store) == 0


def test_many_authors_share_a_key_and_none_overwrites_another(
    store: RecordStore, key: bytes, make_record: MakeRecord, now: float
) -> None:
    records = [make_record(number, seq=100 - number) for number in range(1, 9)]
    for record in records:
        assert store.put(record, [key], now) == [StoreStatus.STORED]
    assert store.get(key, now) == records


def test_numbers_only_rise(store: RecordStore, key: bytes, make_record: MakeRecord, now: float) -> None:
    old, new = make_record(seq=1), make_record(seq=2, span="0:20")
    store.put(new, [key], now)
    assert store.put(old, [key], now) == [StoreStatus.STALE]
    assert store.put(new, [key], now) == [StoreStatus.STORED]
    assert store.get(key, now) == [new]


def test_a_tombstone_stays_and_keeps_older_copies_out(
    store: RecordStore, key: bytes, make_record: MakeRecord, now: float
) -> None:
    store.put(make_record(seq=1), [key], now)
    gone = make_record(seq=2, body=b"")
    assert store.put(gone, [key], now) == [StoreStatus.STORED]
    assert store.put(make_record(seq=1), [key], now) == [StoreStatus.STALE]
    assert store.get(key, now) == [gone]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"life_s": 0}, StoreStatus.EXPIRED),
        ({"life_s": -10}, StoreStatus.EXPIRED),
        ({"life_s": 4000}, StoreStatus.TOO_LONG),
        ({"scope": bytes(16)}, StoreStatus.INVALID),
    ],
)
def test_what_is_dead_immortal_or_of_another_swarm_is_refused(
    store: RecordStore, key: bytes, make_record: MakeRecord, now: float, change: dict[str, object], status: StoreStatus
) -> None:
    assert store.put(make_record(**change), [key], now) == [status]
    assert len(store) == 0


def test_a_forged_record_is_refused(store: RecordStore, key: bytes, make_record: MakeRecord, now: float) -> None:
    good = make_record()
    at = good.wire.index(good.body)
    forged = SignedRecord.decode(good.wire[: at + 20] + bytes([good.wire[at + 20] ^ 1]) + good.wire[at + 21 :])
    assert store.put(forged, [key], now) == [StoreStatus.INVALID]
    store.put(good, [key], now)
    assert store.put(forged, [key], now) == [StoreStatus.INVALID]
    assert store.get(key, now) == [good]


def test_what_has_ended_is_neither_given_out_nor_kept(
    store: RecordStore, topics: Topics, key: bytes, make_record: MakeRecord, now: float
) -> None:
    store.put(make_record(1, life_s=10), topics.of_record(make_record(1)), now)
    store.put(make_record(2, life_s=100), [key], now)
    assert len(store) == 4
    assert [record.seq for record in store.get(key, now + 11)] == [1]
    store.expire(now + 11)
    assert len(store) == 1
    store.expire(now + 101)
    assert len(store) == 0
    assert store.all(now) == []


def test_a_full_key_keeps_what_it_has_and_lets_its_authors_renew(
    store: RecordStore, key: bytes, make_record: MakeRecord, now: float
) -> None:
    for number in range(MAX_PER_KEY):
        store.put(make_record(number), [key], now)
    assert store.put(make_record(999), [key], now) == [StoreStatus.FULL]
    assert store.put(make_record(5, seq=2), [key], now) == [StoreStatus.STORED]
    assert len(store.get(key, now)) == MAX_PER_KEY


def test_a_full_key_takes_newcomers_when_somebody_has_ended(
    store: RecordStore, key: bytes, make_record: MakeRecord, now: float
) -> None:
    store.put(make_record(0, life_s=5), [key], now)
    for number in range(1, MAX_PER_KEY):
        store.put(make_record(number), [key], now)
    assert store.put(make_record(999), [key], now + 6) == [StoreStatus.STORED]


def card(identity: Identity, topics: Topics, subject: bytes, now: float) -> SignedRecord:
    return SignedRecord.sign(
        identity,
        RecordKind.CARD,
        scope=topics.scope,
        subject=subject,
        seq=1,
        expires_ms=int(now * 1000) + 1000,
        body=b"card",
    )


def test_one_author_cannot_fill_the_list_of_models(
    store: RecordStore, topics: Topics, identity: Callable[[int], Identity], now: float
) -> None:
    statuses = [
        store.put(card(identity(1), topics, bytes([number]) * 32, now), [topics.models], now)[0]
        for number in range(MAX_PER_AUTHOR_AND_KEY + 5)
    ]
    assert statuses.count(StoreStatus.STORED) == MAX_PER_AUTHOR_AND_KEY
    assert statuses[-5:] == [StoreStatus.FULL] * 5


def test_a_model_that_everybody_holds_does_not_crowd_out_a_rare_one(
    store: RecordStore, topics: Topics, identity: Callable[[int], Identity], now: float
) -> None:
    for number in range(MAX_PER_KEY):
        store.put(card(identity(number), topics, b"c" * 32, now), [topics.models], now)
    rare = card(identity(500), topics, b"r" * 32, now)
    assert store.put(rare, [topics.models], now) == [StoreStatus.STORED]
    assert store.put(card(identity(501), topics, b"r" * 32, now), [topics.models], now) == [StoreStatus.FULL]
    kept = store.get(topics.models, now)
    assert rare in kept
    assert len(kept) == MAX_PER_KEY


ONE, OTHER = b"\xcb\x00\x71", b"\xc6\x33\x64"


def test_what_one_network_brings_has_four_places_under_a_key(
    store: RecordStore, key: bytes, make_record: MakeRecord, now: float
) -> None:
    statuses = [store.put(make_record(number), [key], now, network=ONE)[0] for number in range(10)]
    assert statuses == [StoreStatus.STORED] * MAX_PER_NETWORK_AND_KEY + [StoreStatus.FULL] * 6
    assert store.put(make_record(20), [key], now, network=OTHER) == [StoreStatus.STORED]
    assert store.put(make_record(2, seq=2), [key], now, network=ONE) == [StoreStatus.STORED]
    for number in range(30, 60):
        assert store.put(make_record(number), [key], now, network=None) == [StoreStatus.STORED]


def test_bringing_a_record_of_others_takes_nothing_from_them(
    store: RecordStore, key: bytes, make_record: MakeRecord, now: float
) -> None:
    """Somebody carries a victim's record here, and fills the share of the victim's network: it can still renew."""
    store.put(make_record(1), [key], now, network=ONE)
    for number in range(2, 2 + MAX_PER_NETWORK_AND_KEY):
        store.put(make_record(number), [key], now, network=OTHER)
    assert store.put(make_record(1, seq=2), [key], now, network=OTHER) == [StoreStatus.STORED]
    assert make_record(1, seq=2) in store.get(key, now)


def test_a_private_swarm_keeps_and_gives_out_sealed_bytes_that_only_its_members_read(
    identity: Callable[[int], Identity], now: float
) -> None:
    swarm, outsider = Swarm("ours", b"k" * 32), Swarm("ours", b"x" * 32)
    topics = Topics(swarm)
    store = RecordStore(topics)
    record = SignedRecord.sign(
        identity(1),
        RecordKind.COVERAGE,
        scope=topics.scope,
        subject=MODEL,
        layers=(0, 8),
        seq=1,
        expires_ms=int(now * 1000) + 60_000,
        body=b"body",
    )
    one, two = topics.of_record(record)
    assert store.put(record, [one, two], now, network=ONE) == [StoreStatus.STORED] * 2
    [sealed], [elsewhere] = store.sealed(one, now), store.sealed(two, now)
    assert record.wire not in sealed and record.author.key not in sealed and MODEL not in sealed
    assert len(sealed) == len(record.wire) + SEAL_BYTES
    assert sealed != elsewhere
    assert swarm.unseal(one, sealed) == record.wire
    assert swarm.unseal(two, sealed) is None
    assert outsider.unseal(one, sealed) is None
    for number in range(2, 20):
        member = SignedRecord.sign(
            identity(number), RecordKind.COVERAGE, scope=topics.scope, subject=MODEL, layers=(0, 4), seq=1,
            expires_ms=int(now * 1000) + 60_000, body=b"b",
        )  # fmt: skip
        assert store.put(member, [one], now, network=ONE) == [StoreStatus.STORED], "members are not counted by network"
    swarm.renew([b"n" * 32, b"k" * 32])
    assert store.sealed(one, now)[0] == sealed
    store.renew()
    assert Swarm.of_keys("ours", [b"n" * 32], lineage=b"k" * 32).unseal(one, store.sealed(one, now)[0]) == record.wire
    assert outsider.unseal(one, store.sealed(one, now)[0]) is None
    swarm.renew([b"n" * 32], expelled=[identity(1).peer_id])
    store.renew()
    assert record not in store.get(one, now) and len(store.get(one, now)) == 18
    assert store.put(record, [one], now) == [StoreStatus.INVALID]


def test_neither_an_author_nor_a_network_fills_the_store(
    store: RecordStore, topics: Topics, make_record: MakeRecord, now: float
) -> None:
    """Four records of 512 layers are an author's share; a network's is a sixteenth, whatever keys they are under."""

    def flood(number: int, network: bytes, at: float) -> None:
        for model in range(6):
            subject = bytes([model, number]) + bytes(30)
            record = make_record(number, subject=subject, layers=(0, 512), expires_ms=int((at + 60) * 1000))
            store.put(record, topics.of_record(record), at, network=network)

    flood(1, b"one", now)
    assert len(store) == MAX_PER_AUTHOR
    for number in range(2, 8):
        flood(number, b"one", now)
    assert len(store) == MAX_PER_NETWORK
    flood(9, b"two", now)
    assert len(store) == MAX_PER_NETWORK + MAX_PER_AUTHOR
    store.expire(now + 61.0)
    assert len(store) == 0
    flood(1, b"one", now + 61.0)
    assert len(store) == MAX_PER_AUTHOR


def test_layers_that_a_model_is_known_not_to_have_are_neither_kept_nor_taken(
    store: RecordStore, topics: Topics, make_record: MakeRecord, now: float
) -> None:
    good, lie = make_record(1, span="0:30"), make_record(2, span="28:40")
    for record in (good, lie):
        assert StoreStatus.STORED in store.put(record, topics.of_record(record), now)
    store.learn_layers(MODEL, 30)
    assert {record.author for record in store.all(now)} == {good.author}
    assert set(store.put(make_record(3, span="0:31"), topics.span(MODEL, 0, 31), now)) == {StoreStatus.INVALID}
    assert store.check(lie, now) is StoreStatus.INVALID
    other = make_record(3, span="0:31", subject=b"s" * 32)
    assert store.check(other, now) is StoreStatus.STORED, "nothing is known of other models"
    gone = make_record(1, span="0:30", seq=2, body=b"")
    assert set(store.put(gone, topics.of_record(gone), now)) == {StoreStatus.STORED}
