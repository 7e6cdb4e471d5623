"""What a node answers, and to whom it does not."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.core import Core
from meshswarm.dht.messages import (
    FIND,
    PING,
    STORE,
    FindAnswer,
    FindQuestion,
    Sender,
    StoreAnswer,
    StoreQuestion,
    StoreStatus,
)
from meshswarm.dht.signed import RecordKind, SignedRecord
from meshswarm.dht.wire import WireError
from meshswarm.errors import RefusedError
from meshswarm.identity import Identity, PeerId

HERE = Address("10.0.0.9", 4000)
SENDER = Sender(True, (Address("10.0.0.9", 4009),))
Identities = Callable[[int], Identity]


class Asker:
    """Another peer, asking one core."""

    def __init__(self, core: Core, peer: PeerId, now: float) -> None:
        self.core, self.peer, self.now = core, peer, now

    def find(self, *keys: bytes, wants_records: bool = True, sender: Sender = SENDER) -> FindAnswer:
        question = messages.encode_find(FindQuestion(sender, keys, wants_records))
        return messages.decode_found(self.core.answer(FIND, self.peer, HERE, question, self.now)[0])

    def store(self, token: bytes, *items: tuple[bytes, tuple[bytes, ...]]) -> StoreAnswer:
        question = messages.encode_store(StoreQuestion(SENDER, token, items))
        return messages.decode_stored(self.core.answer(STORE, self.peer, HERE, question, self.now)[0])


@pytest.fixture
def core(make_core: Callable[[int], Core]) -> Core:
    return make_core(1)


@pytest.fixture
def asker(core: Core, identity: Identities, now: float) -> Asker:
    return Asker(core, identity(2).peer_id, now)


def test_who_asks_is_known_from_then_on_where_it_came_from_first(core: Core, asker: Asker, now: float) -> None:
    reply, newcomer = core.answer(PING, asker.peer, HERE, messages.encode_ping(SENDER), now)
    assert messages.decode_ping(reply) == replace(core.sender, clock_ms=int(now * 1000))
    assert newcomer is not None
    assert newcomer.addresses == (HERE, *SENDER.addresses)
    assert core.answer(PING, asker.peer, HERE, messages.encode_ping(SENDER), now)[1] is None
    assert asker.peer in core.table


def test_a_peer_that_cannot_be_dialled_never_enters_the_table(core: Core, asker: Asker) -> None:
    asker.find(bytes(20), sender=Sender(False, SENDER.addresses))
    assert asker.peer not in core.table


def test_find_gives_contacts_but_not_the_asker_itself(
    core: Core, asker: Asker, identity: Identities, now: float
) -> None:
    others = [identity(number).peer_id for number in range(3, 8)]
    for other in (*others, asker.peer):
        core.answer(PING, other, HERE, messages.encode_ping(SENDER), now)
    found = asker.find(bytes(20), bytes([255]) * 20)
    assert {contact.peer for contact in found.contacts} == set(others)


def test_a_record_is_stored_with_the_token_of_a_find_and_then_found(
    core: Core, asker: Asker, make_record: Callable[..., SignedRecord]
) -> None:
    record = make_record(2)
    keys = tuple(core.topics.of_record(record))
    token = asker.find(*keys).token
    assert asker.store(token, (record.wire, keys)).statuses == ((StoreStatus.STORED,) * 3,)
    assert asker.find(*keys).records == (record.wire,)
    assert asker.find(*keys, wants_records=False).records == ()


def test_no_token_no_store(
    core: Core, asker: Asker, identity: Identities, make_record: Callable[..., SignedRecord], now: float
) -> None:
    record = make_record(2)
    keys = tuple(core.topics.of_record(record))
    somebody_elses = Asker(core, identity(3).peer_id, now).find(*keys).token
    for token in (b"", bytes(16), somebody_elses):
        assert asker.store(token, (record.wire, keys)).statuses == ((StoreStatus.BAD_TOKEN,) * 3,)
    assert len(core.store) == 0


def test_what_belongs_to_nearer_peers_is_refused(
    core: Core, asker: Asker, identity: Identities, make_record: Callable[..., SignedRecord], now: float
) -> None:
    record = make_record(2)
    keys = tuple(core.topics.of_record(record))
    for number in range(3, 400):
        core.answer(PING, identity(number).peer_id, HERE, messages.encode_ping(SENDER), now)
    statuses = asker.store(asker.find(*keys).token, (record.wire, keys)).statuses[0]
    near = [core.table.closer_than_own(key) < 40 for key in keys]
    assert statuses == tuple(StoreStatus.STORED if it else StoreStatus.NOT_NEAR for it in near)
    assert not all(near)


def test_garbage_among_good_records_spoils_nothing(
    core: Core, asker: Asker, make_record: Callable[..., SignedRecord]
) -> None:
    record = make_record(2)
    keys = tuple(core.topics.of_record(record))
    token = asker.find(*keys).token
    statuses = asker.store(token, (b"garbage", keys), (record.wire, keys), (record.wire[:-1], keys)).statuses
    assert statuses == ((StoreStatus.INVALID,) * 3, (StoreStatus.STORED,) * 3, (StoreStatus.INVALID,) * 3)


def test_somebody_elses_record_may_be_brought_but_not_changed(
    core: Core, asker: Asker, make_record: Callable[..., SignedRecord]
) -> None:
    theirs, newer = make_record(7, seq=5), make_record(7, seq=4)
    keys = tuple(core.topics.of_record(theirs))
    token = asker.find(*keys).token
    assert asker.store(token, (theirs.wire, keys)).statuses == ((StoreStatus.STORED,) * 3,)
    assert asker.store(token, (newer.wire, keys)).statuses == ((StoreStatus.STALE,) * 3,)


def test_a_question_that_is_none_is_an_error_of_the_asker(core: Core, asker: Asker, now: float) -> None:
    for kind in (PING, FIND, STORE, "dht/unheard-of"):
        with pytest.raises(WireError):
            core.answer(kind, asker.peer, HERE, b"garbage", now)
    assert asker.peer not in core.table


def test_too_many_questions_are_refused_with_a_time(core: Core, asker: Asker, identity: Identities, now: float) -> None:
    keys = [bytes([number]) * 20 for number in range(8)]
    with pytest.raises(RefusedError) as refused:
        for _ in range(1000):
            asker.find(*keys)
    assert refused.value.retry_after_s is not None
    Asker(core, identity(3).peer_id, now).find(*keys)


def test_a_flood_of_stores_is_refused(core: Core, asker: Asker, make_record: Callable[..., SignedRecord]) -> None:
    record = make_record(2)
    keys = tuple(core.topics.of_record(record))
    token = asker.find(*keys).token
    with pytest.raises(RefusedError):
        for _ in range(1000):
            asker.store(token, *[(record.wire, keys)] * 30)


def test_an_answer_never_carries_more_than_its_limits(
    core: Core, asker: Asker, identity: Identities, make_record: Callable[..., SignedRecord], now: float
) -> None:
    for number in range(70):
        for subject in (bytes([n]) * 32 for n in range(9)):
            record = make_record(number, subject=subject)
            core.store.put(record, core.topics.of_record(record)[:1], now)
    keys = [core.topics.block(bytes([n]) * 32, 0) for n in range(8)]
    found = asker.find(*keys)
    assert len(found.records) == messages.MAX_FIND_RECORDS


def test_a_tombstone_is_given_out_so_that_older_copies_end(
    core: Core, asker: Asker, make_record: Callable[..., SignedRecord]
) -> None:
    gone = make_record(2, body=b"", kind=RecordKind.COVERAGE)
    keys = tuple(core.topics.of_record(gone))
    asker.store(asker.find(*keys).token, (gone.wire, keys))
    assert asker.find(keys[0]).records == (gone.wire,)
