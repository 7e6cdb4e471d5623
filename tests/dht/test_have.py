"""What an asker has is not sent to it again, and what it says of that can harm nobody but itself."""

from collections.abc import Callable
from typing import Any

import pytest

from meshswarm.config import Address
from meshswarm.dht import messages, wire
from meshswarm.dht.contact import Contact
from meshswarm.dht.core import Core
from meshswarm.dht.have import MARK_BYTES, MAX_CONTACT_MARKS, MAX_MARKS, NOTHING, Have, Marker, mark
from meshswarm.dht.messages import FIND, FindQuestion, Sender
from meshswarm.dht.signed import SignedRecord
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity

SENDER = Sender(True, (Address("10.0.0.9", 4009),))
MakeRecord = Callable[..., SignedRecord]


def test_what_is_marked_is_had_and_nothing_else() -> None:
    have = Marker(b"saltsalt").have([b"one", b"two"])
    assert have.mark(b"one") == mark(b"one", b"saltsalt") and have.mark(b"two") and have.mark(b"three") is None
    assert NOTHING.mark(b"one") is None and Marker(b"saltsalt").have([]) is NOTHING


def test_a_mark_depends_on_the_salt_so_that_no_two_records_look_alike_to_everybody() -> None:
    """Two records with one mark can be found in seconds for a salt that is known; each lookup has another."""
    seen: dict[bytes, bytes] = {}
    number = 0
    while True:
        record = b"record %d" % number
        twin = seen.setdefault(mark(record, b"saltsalt")[:2], record)  # half a mark: found at once
        if twin != record:
            break
        number += 1
    assert mark(twin, b"saltsalt")[:2] == mark(record, b"saltsalt")[:2]
    assert any(mark(twin, bytes([salt]) * 8)[:2] != mark(record, bytes([salt]) * 8)[:2] for salt in range(2))


def test_of_a_flood_of_records_only_so_many_are_told_of() -> None:
    have = Marker(b"saltsalt").have(b"%d" % number for number in range(3 * MAX_MARKS))
    assert len(have.marks) <= MAX_MARKS
    question = FindQuestion(SENDER, (bytes(20),), True, 0, have)
    assert messages.decode_find(messages.encode_find(question)) == question


@pytest.mark.parametrize(
    ("salt", "marks"),
    [
        (b"short", bytes(8)),
        (b"saltsalt", bytes(MARK_BYTES + 1)),
        (b"saltsalt", bytes(MARK_BYTES * (MAX_MARKS + 1))),
        ("saltsalt", bytes(8)),
        (b"saltsalt", [bytes(4)]),
        (None, None),
    ],
)
def test_marks_that_are_none_are_refused(salt: Any, marks: Any) -> None:
    fields = [messages.MESSAGE_VERSION, True, [], [bytes(20)], True, 0, salt, marks]
    with pytest.raises(WireError):
        messages.decode_find(wire.pack(fields))


def test_a_question_of_an_older_or_a_later_peer_is_read() -> None:
    fields = [messages.MESSAGE_VERSION, True, [], [bytes(20)], True, 0]
    assert messages.decode_find(wire.pack(fields)).have == NOTHING
    assert messages.decode_find(wire.pack([*fields, b"saltsalt", bytes(4), "new"])).have.marks == {bytes(4)}
    assert len(messages.encode_find(FindQuestion(SENDER, (bytes(20),), True))) < 64


def test_an_answer_leaves_out_what_the_asker_has_and_only_that(
    make_core: Callable[[int], Core], make_record: MakeRecord, identity: Callable[[int], Identity], now: float
) -> None:
    core = make_core(1)
    records = [make_record(number) for number in range(2, 12)]
    key = core.topics.of_record(records[0])[0]
    for record in records:
        core.store.put(record, [key], now)

    def told(have: Have) -> set[bytes]:
        question = messages.encode_find(FindQuestion(SENDER, (key,), True, 0, have))
        answer, _ = core.answer(FIND, identity(2).peer_id, Address("10.0.0.9", 4000), question, now)
        return set(messages.decode_found(answer).records)

    everything = {record.wire for record in records}
    assert told(NOTHING) == everything
    some = [record.wire for record in records[:7]]
    assert told(Marker(b"saltsalt").have(some)) == everything - set(some)
    newer = make_record(2, seq=9)
    core.store.put(newer, [key], now)
    assert newer.wire in told(Marker(b"saltsalt").have(everything))


def test_of_contacts_that_the_asker_has_come_marks_and_of_those_at_another_address_all(
    make_core: Callable[[int], Core], identity: Callable[[int], Identity], now: float
) -> None:
    core = make_core(1)
    known = [Contact(identity(number).peer_id, (Address("10.0.0.1", 4000 + number),)) for number in range(3, 15)]
    for contact in known:
        core.table.saw(contact, now)
    key = bytes(20)
    marker = Marker(b"saltsalt")
    moved = Contact(known[0].peer, (Address("10.9.9.9", 1),))
    question = FindQuestion(SENDER, (key,), True, 0, marker.have([], [moved, *known[1:6]]))
    answer, _ = core.answer(FIND, identity(2).peer_id, Address("10.0.0.9", 4000), messages.encode_find(question), now)
    found = messages.decode_found(answer)
    assert set(found.contacts) == {known[0], *known[6:]}
    assert set(marker.contacts(found.had)) == set(known[1:6])
    assert marker.contacts([b"none", *found.had[:1]]) == marker.contacts(found.had[:1]), "invented marks are nobody"
    plain = messages.encode_find(FindQuestion(SENDER, (key,), True))
    whole, _ = core.answer(FIND, identity(2).peer_id, Address("10.0.0.9", 4000), plain, now)
    assert len(messages.decode_found(whole).contacts) == 12 and messages.decode_found(whole).had == ()


def test_many_contacts_leave_room_for_the_records(identity: Callable[[int], Identity]) -> None:
    contacts = [Contact(identity(number).peer_id, (Address("10.0.0.1", 4000),)) for number in range(400)]
    have = Marker(b"saltsalt").have([b"record"], contacts)
    assert len(have.marks) == MAX_CONTACT_MARKS + 1 and have.mark(b"record") is not None
