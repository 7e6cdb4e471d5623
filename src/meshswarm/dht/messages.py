"""The questions of the table, as msgpack arrays over authenticated streams.

The rule this file keeps: who asks is known from the connection, never from the message. Every message starts with its
version and the sender's own addresses, so that each exchange keeps both tables up to date without one of its own.
Fields are only ever appended, and what an older peer leaves out has a meaning.

| kind | question | answer |
|---|---|---|
| `dht/ping` | sender, clock | sender, clock |
| `dht/find` | sender, keys, wants records, reach, salt, marks | sender, write token, contacts, records, clock, marks |
| `dht/store` | sender, write token, (record, keys) pairs | sender, one status per pair and key |
| `dht/dial-back` | sender | sender, verdict: whether a third peer could dial the asker |
| `dht/dial` | sender, contact | sender, verdict: whether the contact could be dialled afresh from here |

`reach`: how far around the keys contacts are wanted beyond the k nearest (`region`). `clock`: the sender's Unix time in
ms. `salt` and `marks`: of what the asker has (`have`); such records are left out of the answer, and of such contacts
it has the marks alone. Records are sealed
for the key they are stored under where the swarm is private.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from meshswarm.config import Address
from meshswarm.dht import wire
from meshswarm.dht.contact import Contact
from meshswarm.dht.have import MARK_BYTES, MAX_MARKS, NOTHING, SALT_BYTES, Have
from meshswarm.dht.keys import ID_BYTES
from meshswarm.dht.region import MAX_REACH
from meshswarm.dht.signed import MAX_RECORD_BYTES
from meshswarm.dht.wire import MAX_INT, WireError
from meshswarm.net.swarm import SEAL_BYTES

PING = "dht/ping"
FIND = "dht/find"
STORE = "dht/store"
DIAL_BACK = "dht/dial-back"
DIAL = "dht/dial"

MESSAGE_VERSION = 1
MAX_FIND_KEYS = 8
MAX_STORE_ITEMS = 32
MAX_KEYS_OF_RECORD = 128  # 512 layers in blocks of 4
TOKEN_BYTES = 16
MAX_CONTACTS = 160  # 20 for each of 8 keys
MAX_FIND_RECORDS = 512  # 64 for each of 8 keys
MAX_QUESTION_BYTES = 128 * 1024
MAX_SEALED_BYTES = MAX_RECORD_BYTES + SEAL_BYTES
MAX_ANSWER_BYTES = 640 * 1024  # all of these at their largest


class StoreStatus(IntEnum):
    """What became of one record under one key. Everything but `STORED` leaves the store as it was."""

    STORED = 0
    STALE = 1  # a record with a higher number is there
    BAD_TOKEN = 2
    NOT_NEAR = 3  # others are much closer to the key
    FULL = 4
    EXPIRED = 5  # or the clocks of the two peers differ by more than its remaining life
    TOO_LONG = 6  # lives longer than allowed, or the author's clock is ahead
    INVALID = 7  # unreadable, badly signed, of another swarm, or under a key that is not its own


class Verdict(IntEnum):
    """What became of an attempt to dial somebody afresh."""

    UNKNOWN = 0  # nobody could be asked to try
    REACHED = 1
    SILENT = 2


@dataclass(frozen=True, slots=True)
class Sender:
    """`server`: it can be dialled and answers questions; only such peers enter routing tables. `clock_ms`: its Unix
    time when it said this, 0 where it did not say."""

    server: bool
    addresses: tuple[Address, ...]
    clock_ms: int = 0


@dataclass(frozen=True, slots=True)
class FindQuestion:
    sender: Sender
    keys: tuple[bytes, ...]
    wants_records: bool
    reach: int = 0
    have: Have = NOTHING


@dataclass(frozen=True, slots=True)
class FindAnswer:
    """`contacts` and `records` of all keys asked for, each once. `records` are still unread and unverified bytes.
    `had`: the marks of further contacts, which the asker has."""

    sender: Sender
    token: bytes
    contacts: tuple[Contact, ...]
    records: tuple[bytes, ...]
    had: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreQuestion:
    sender: Sender
    token: bytes
    items: tuple[tuple[bytes, tuple[bytes, ...]], ...]


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    sender: Sender
    statuses: tuple[tuple[StoreStatus, ...], ...]


def encode_ping(sender: Sender) -> bytes:
    """The question and the answer alike."""
    return wire.pack([*_head(sender), sender.clock_ms])


def decode_ping(data: bytes) -> Sender:
    fields = wire.unpack_array(data, MAX_QUESTION_BYTES, "a ping")
    return _sender(fields, clock_at=3)


def encode_find(question: FindQuestion) -> bytes:
    fields = [*_head(question.sender), list(question.keys), question.wants_records, question.reach]
    if question.have.marks:
        fields += [question.have.salt, b"".join(sorted(question.have.marks))]
    return wire.pack(fields)


def decode_find(data: bytes) -> FindQuestion:
    fields = wire.array(wire.unpack_array(data, MAX_QUESTION_BYTES, "a find"), "a find", at_least=5)
    keys = wire.array(fields[3], "keys", at_least=1, at_most=MAX_FIND_KEYS)
    reach = wire.integer(fields[5], "reach", high=MAX_REACH) if len(fields) > 5 else 0
    wants_records = wire.boolean(fields[4], "wants records")
    have = _have(fields[6], fields[7]) if len(fields) > 7 else NOTHING
    return FindQuestion(_sender(fields), tuple(_key(key) for key in keys), wants_records, reach, have)


def encode_found(answer: FindAnswer) -> bytes:
    contacts = [contact.pack() for contact in answer.contacts]
    fields = [*_head(answer.sender), answer.token, contacts, list(answer.records), answer.sender.clock_ms]
    return wire.pack([*fields, b"".join(answer.had)] if answer.had else fields)


def decode_found(data: bytes) -> FindAnswer:
    fields = wire.array(wire.unpack_array(data, MAX_ANSWER_BYTES, "an answer"), "an answer", at_least=6)
    contacts = wire.array(fields[4], "contacts", at_most=MAX_CONTACTS)
    records = wire.array(fields[5], "records", at_most=MAX_FIND_RECORDS)
    return FindAnswer(
        sender=_sender(fields, clock_at=6),
        token=wire.binary(fields[3], "token", at_most=64),
        contacts=tuple(Contact.unpack(contact) for contact in contacts),
        records=tuple(wire.binary(record, "record", at_most=MAX_SEALED_BYTES) for record in records),
        had=_marks(fields[7], MAX_CONTACTS) if len(fields) > 7 else (),
    )


def encode_store(question: StoreQuestion) -> bytes:
    items = [[record, list(keys)] for record, keys in question.items]
    return wire.pack([*_head(question.sender), question.token, items])


def decode_store(data: bytes) -> StoreQuestion:
    fields = wire.array(wire.unpack_array(data, MAX_QUESTION_BYTES, "a store"), "a store", at_least=5)
    items = wire.array(fields[4], "records", at_least=1, at_most=MAX_STORE_ITEMS)
    token = wire.binary(fields[3], "token", at_most=64)
    return StoreQuestion(_sender(fields), token, tuple(_item(item) for item in items))


def encode_stored(answer: StoreAnswer) -> bytes:
    return wire.pack([*_head(answer.sender), [[int(status) for status in row] for row in answer.statuses]])


def decode_stored(data: bytes) -> StoreAnswer:
    fields = wire.array(wire.unpack_array(data, MAX_QUESTION_BYTES, "an answer"), "an answer", at_least=4)
    rows = wire.array(fields[3], "statuses", at_most=MAX_STORE_ITEMS)
    return StoreAnswer(_sender(fields), tuple(tuple(_statuses(row)) for row in rows))


def encode_dial_back(sender: Sender) -> bytes:
    return wire.pack(_head(sender))


def decode_dial_back(data: bytes) -> Sender:
    return _sender(wire.unpack_array(data, MAX_QUESTION_BYTES, "a dial-back"))


def encode_dial(sender: Sender, contact: Contact) -> bytes:
    return wire.pack([*_head(sender), contact.pack()])


def decode_dial(data: bytes) -> tuple[Sender, Contact]:
    fields = wire.array(wire.unpack_array(data, MAX_QUESTION_BYTES, "a dial"), "a dial", at_least=4)
    return _sender(fields), Contact.unpack(fields[3])


def encode_verdict(sender: Sender, verdict: Verdict) -> bytes:
    return wire.pack([*_head(sender), int(verdict)])


def decode_verdict(data: bytes) -> tuple[Sender, Verdict]:
    fields = wire.array(wire.unpack_array(data, MAX_QUESTION_BYTES, "a verdict"), "a verdict", at_least=4)
    return _sender(fields), Verdict(wire.integer(fields[3], "a verdict", high=max(Verdict)))


def _head(sender: Sender) -> list[object]:
    return [MESSAGE_VERSION, sender.server, wire.pack_addresses(sender.addresses)]


def _sender(fields: list[Any], clock_at: int | None = None) -> Sender:
    """`clock_at`: which field of this message is the sender's clock, when it has one."""
    wire.array(fields, "a message", at_least=3)
    wire.integer(fields[0], "message version", low=MESSAGE_VERSION, high=MESSAGE_VERSION)
    says_time = clock_at is not None and len(fields) > clock_at
    clock_ms = wire.integer(fields[clock_at], "clock", high=MAX_INT) if says_time and clock_at is not None else 0
    return Sender(wire.boolean(fields[1], "server"), wire.addresses(fields[2], "the sender's addresses"), clock_ms)


def _key(value: object) -> bytes:
    return wire.binary(value, "a key", size=ID_BYTES)


def _item(value: object) -> tuple[bytes, tuple[bytes, ...]]:
    pair = wire.array(value, "a record and its keys", at_least=2, at_most=2)
    keys = wire.array(pair[1], "keys of a record", at_least=1, at_most=MAX_KEYS_OF_RECORD)
    return wire.binary(pair[0], "record", at_most=MAX_SEALED_BYTES), tuple(_key(key) for key in keys)


def _have(salt: object, marks: object) -> Have:
    return Have(wire.binary(salt, "salt", size=SALT_BYTES), frozenset(_marks(marks, MAX_MARKS)))


def _marks(value: object, at_most: int) -> tuple[bytes, ...]:
    together = wire.binary(value, "marks", at_most=at_most * MARK_BYTES)
    if len(together) % MARK_BYTES:
        raise WireError(f"marks are {MARK_BYTES} bytes each")
    return tuple(together[at : at + MARK_BYTES] for at in range(0, len(together), MARK_BYTES))


def _statuses(row: object) -> list[StoreStatus]:
    values = wire.array(row, "statuses", at_most=MAX_KEYS_OF_RECORD)
    try:
        return [StoreStatus(wire.integer(value, "a status", high=255)) for value in values]
    except ValueError:
        raise WireError("a status that does not exist") from None
