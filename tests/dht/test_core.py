"""A node without a network: what it makes of answers, and where it sends its records."""

from collections.abc import Callable

from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.contact import Contact
from meshswarm.dht.core import Core
from meshswarm.dht.keys import distance
from meshswarm.dht.messages import FindAnswer, Sender
from meshswarm.dht.signed import RecordKind, SignedRecord
from meshswarm.identity import Identity

MODEL = bytes(range(32))
Identities = Callable[[int], Identity]


def contact(identity: Identities, number: int) -> Contact:
    return Contact(identity(number).peer_id, (Address("10.0.0.1", 4000 + number),))


def test_two_peers_store_and_find_through_their_bytes_alone(
    make_core: Callable[[int], Core], identity: Identities, now: float
) -> None:
    one, two = make_core(1), make_core(2)
    two.table.saw(contact(identity, 1), now)
    records = two.publications.say(RecordKind.COVERAGE, MODEL, b"body", now, layers=(0, 10))
    lookups = [two.lookup(key, now) for key in two.topics.of_record(records[0])]
    for lookup in lookups:
        [asked] = lookup.next_questions(now)
    question = two.find_question(lookups, wants_records=True)
    answer, newcomer = one.answer(messages.FIND, two.own, None, question, now)
    assert newcomer is not None
    two.take_found(asked, messages.decode_found(answer), lookups, now, 0.001)
    assert all(lookup.done for lookup in lookups)
    [delivery] = two.deliveries(records, lookups, now)
    stored, _ = one.answer(messages.STORE, two.own, None, delivery.question, now)
    assert set(two.take_stored(asked, stored, now).statuses[0]) == {messages.StoreStatus.STORED}
    for core in (one, two):
        assert core.store.get(core.topics.block(MODEL, 0), now) == records


def test_records_go_to_the_k_nearest_of_each_key(
    make_core: Callable[[int], Core], identity: Identities, now: float
) -> None:
    core = make_core(1)
    everybody = [contact(identity, number) for number in range(2, 60)]
    [record] = core.publications.say(RecordKind.COVERAGE, MODEL, b"body", now, layers=(0, 8))
    lookups = [core.lookup(key, now) for key in core.topics.of_record(record)]
    for lookup in lookups:
        for each in everybody:
            lookup.answered(each, b"t", [])
    told: dict[bytes, set[bytes]] = {}
    for delivery in core.deliveries([record], lookups, now):
        for _, keys in messages.decode_store(delivery.question).items:
            for key in keys:
                told.setdefault(key, set()).add(delivery.contact.node_id)
    for key in core.topics.of_record(record):
        nearest = sorted((each.node_id for each in everybody), key=lambda place: distance(place, key))[:20]
        assert told[key] == set(nearest)


def test_own_records_are_kept_here_only_where_this_peer_is_near(
    make_core: Callable[[int], Core], identity: Identities, now: float
) -> None:
    core = make_core(1)
    [record] = core.publications.say(RecordKind.COVERAGE, MODEL, b"body", now, layers=(0, 40))
    lookups = [core.lookup(key, now) for key in core.topics.of_record(record)]
    everybody = [contact(identity, number) for number in range(2, 60)]
    for lookup in lookups:
        for each in everybody:
            lookup.answered(each, b"t", [])
    core.deliveries([record], lookups, now)
    own = contact(identity, 1).node_id
    for lookup in lookups:
        closer = sum(distance(e.node_id, lookup.target) < distance(own, lookup.target) for e in everybody)
        assert (core.store.get(lookup.target, now) == [record]) == (closer < 20)


def test_contacts_left_alone_are_not_learned_again_from_others(
    make_core: Callable[[int], Core], identity: Identities, now: float
) -> None:
    core = make_core(1)
    teller, gone = contact(identity, 2), contact(identity, 3)
    core.table.saw(teller, now)
    core.failed(gone, (), now, unreachable=True)
    lookup = core.lookup(bytes(20), now)
    lookup.next_questions(now)
    core.take_found(teller, FindAnswer(Sender(True, ()), b"t", (gone,), ()), [lookup], now, None)
    assert lookup.done


def test_a_refusal_is_no_reason_to_leave_a_peer_alone(
    make_core: Callable[[int], Core], identity: Identities, now: float
) -> None:
    core = make_core(1)
    core.table.saw(contact(identity, 2), now)
    lookup = core.lookup(bytes(20), now)
    [asked] = lookup.next_questions(now)
    core.failed(asked, [lookup], now, unreachable=False)
    assert lookup.done
    assert core.table.closest(bytes(20), now) == [asked]


def test_only_good_records_are_read(
    make_core: Callable[[int], Core], make_record: Callable[..., SignedRecord], now: float
) -> None:
    core = make_core(1)
    good = make_record()
    keys = core.topics.of_record(good)
    assert all(core.read_record(good.wire, now, [bytes(20), key]) == good for key in keys)
    for bad in (b"", b"garbage", good.wire[:-1], make_record(scope=bytes(16)).wire, make_record(life_s=0).wire):
        assert core.read_record(bad, now, keys) is None


def test_a_good_record_that_nobody_asked_for_is_not_read(
    make_core: Callable[[int], Core], make_record: Callable[..., SignedRecord], now: float
) -> None:
    """Otherwise whoever is asked for anything could fill what is remembered with whatever he likes."""
    core = make_core(1)
    card = make_record(kind=RecordKind.CARD, layers=(0, 0), body=b"card")
    assert (
        core.read_record(make_record(span="0:10").wire, now, [core.topics.block(MODEL, 3), core.topics.models]) is None
    )
    assert core.read_record(card.wire, now, core.topics.span(MODEL, 0, 30)) is None
    assert core.read_record(make_record().wire, now, []) is None


def test_a_newcomer_is_owed_what_it_is_near_enough_to_keep(
    make_core: Callable[[int], Core], identity: Identities, now: float
) -> None:
    core = make_core(1)
    newcomer = contact(identity, 2)
    core.table.saw(newcomer, now)
    assert core.owed_to(newcomer, now) == []
    [record] = core.publications.say(RecordKind.COVERAGE, MODEL, b"body", now, layers=(0, 8))
    assert core.owed_to(newcomer, now) == [(record, core.topics.of_record(record))]
    [delivery] = core.owed_deliveries(newcomer, b"t", now)
    assert messages.decode_store(delivery.question).items[0][0] == record.wire
    for number in range(3, 400):
        core.table.saw(contact(identity, number), now)
    near = {key for _, keys in core.owed_to(newcomer, now) for key in keys}
    assert near == {key for key in core.topics.of_record(record) if newcomer in core.table.closest(key, now)}
