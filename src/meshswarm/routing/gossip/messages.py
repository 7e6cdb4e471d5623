"""What neighbours say to each other, as msgpack arrays over authenticated streams.

The rule this file keeps: who speaks is known from the connection, never from the message; every list has a hard limit,
and what a neighbour passes on from others is opaque bytes here, read and checked one by one where it is used.

| kind | question | answer |
|---|---|---|
| `gossip/swap` | own state, digests of what I know, what I care about | are we neighbours, own state, what you lack |
| `gossip/push` | urgent words | nothing |
| `gossip/watch` | my appointment, where its watchers live | whether I watch you |
| `gossip/probe` | nothing | nothing |
| `gossip/witness` | whom to look after, by which appointment | how long ago I heard of it |
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from meshswarm.config import Address
from meshswarm.dht import wire
from meshswarm.dht.contact import Contact
from meshswarm.dht.wire import MAX_INT, WireError
from meshswarm.identity import PeerId
from meshswarm.routing.gossip.words import MAX_ACCUSATION_BYTES, MAX_APPOINTMENT_BYTES, MAX_WATCHERS

SWAP = "gossip/swap"
PUSH = "gossip/push"
WATCH = "gossip/watch"
PROBE = "gossip/probe"
WITNESS = "gossip/witness"
KINDS = (SWAP, PUSH, WATCH, PROBE, WITNESS)

MESSAGE_VERSION = 2
"""2: statements of silence hold their time. Whoever speaks an older version is told so, and is no neighbour."""
MAX_MESSAGE_BYTES = 4096
MAX_WORDS = 8
MAX_EVENT_TAGS = 32
MAX_DIGEST = 24
MAX_INTERESTS = 4
MAX_CONTACTS = 4
TAG_BITS = 32
STEP_MS = 128
"""Numbers are compared in steps of this: they follow their author's clock."""


class OutdatedError(WireError):
    """A message of an older version than is spoken here."""


class WordKind(IntEnum):
    """What a passed-on word is. The numbers travel."""

    REPORT = 0
    FAREWELL = 1
    APPOINTMENT = 2
    ACCUSATION = 3
    SUMMARY = 4


@dataclass(frozen=True, slots=True)
class Word:
    """Bytes that somebody signed, unread and unverified."""

    kind: WordKind
    data: bytes


@dataclass(frozen=True, slots=True)
class Digest:
    """What the asker has of reports or summaries: (tag, number in steps) of each. `is_all`: it has no others, so that
    what is not listed is news to it."""

    entries: tuple[tuple[int, int], ...] = ()
    is_all: bool = True


@dataclass(frozen=True, slots=True)
class Swap:
    """`is_lonely`: the asker has hardly any neighbour. `wants_contacts`: it knows few others. `events`: tags of the
    urgent words it knows of lately. `interests`: tags of the models it wants reports of."""

    words: tuple[Word, ...] = ()
    events: tuple[int, ...] = ()
    reports: Digest | None = None
    summaries: Digest | None = None
    interests: tuple[int, ...] = ()
    wants_contacts: bool = False
    is_lonely: bool = False


@dataclass(frozen=True, slots=True)
class Swapped:
    """`accepted` False: the answerer has enough neighbours, and `contacts` may have room."""

    accepted: bool
    words: tuple[Word, ...] = ()
    contacts: tuple[Contact, ...] = ()


def tag(data: bytes) -> int:
    """A short name of `data` for digests: two things with one tag cost a message more, nothing else."""
    return int.from_bytes(hashlib.sha256(b"meshswarm/gossip-tag/1\0" + data).digest()[:4])


def encode_swap(swap: Swap) -> bytes:
    flags = swap.wants_contacts | swap.is_lonely << 1
    return wire.pack(
        [
            MESSAGE_VERSION,
            flags,
            _pack_words(swap.words),
            list(swap.events),
            _pack_digest(swap.reports),
            _pack_digest(swap.summaries),
            list(swap.interests),
        ]
    )


def decode_swap(data: bytes) -> Swap:
    fields = _open(data, "a swap", at_least=7)
    flags = wire.integer(fields[1], "flags", high=255)
    return Swap(
        words=_words(fields[2]),
        events=_tags(fields[3], "events", MAX_EVENT_TAGS),
        reports=_digest(fields[4]),
        summaries=_digest(fields[5]),
        interests=_tags(fields[6], "interests", MAX_INTERESTS),
        wants_contacts=bool(flags & 1),
        is_lonely=bool(flags & 2),
    )


def encode_swapped(swapped: Swapped) -> bytes:
    contacts = [contact.pack() for contact in swapped.contacts]
    return wire.pack([MESSAGE_VERSION, swapped.accepted, _pack_words(swapped.words), contacts])


def decode_swapped(data: bytes) -> Swapped:
    fields = _open(data, "an answer to a swap", at_least=4)
    contacts = wire.array(fields[3], "contacts", at_most=MAX_CONTACTS)
    return Swapped(
        wire.boolean(fields[1], "accepted"), _words(fields[2]), tuple(Contact.unpack(contact) for contact in contacts)
    )


def encode_push(words: tuple[Word, ...]) -> bytes:
    return wire.pack([MESSAGE_VERSION, _pack_words(words)])


def decode_push(data: bytes) -> tuple[Word, ...]:
    return _words(_open(data, "a push", at_least=2)[1])


def encode_watch(appointment: bytes, where: tuple[tuple[Address, ...], ...]) -> bytes:
    """`where`: the addresses of each watcher, in the appointment's order; empty where they are not known."""
    return wire.pack([MESSAGE_VERSION, appointment, [wire.pack_addresses(addresses) for addresses in where]])


def decode_watch(data: bytes) -> tuple[bytes, tuple[tuple[Address, ...], ...]]:
    fields = _open(data, "an appointment's message", at_least=3)
    where = wire.array(fields[2], "watchers' addresses", at_most=MAX_WATCHERS)
    return (
        wire.binary(fields[1], "appointment", at_most=MAX_APPOINTMENT_BYTES),
        tuple(wire.addresses(addresses, "watchers' addresses") for addresses in where),
    )


def encode_watched(accepted: bool) -> bytes:
    return wire.pack([MESSAGE_VERSION, accepted])


def decode_watched(data: bytes) -> bool:
    return wire.boolean(_open(data, "an answer to an appointment", at_least=2)[1], "accepted")


def encode_witness(peer: PeerId, number: int) -> bytes:
    return wire.pack([MESSAGE_VERSION, peer.key, number])


def decode_witness(data: bytes) -> tuple[PeerId, int]:
    fields = _open(data, "a call for a witness", at_least=3)
    return wire.peer_id(fields[1], "peer"), wire.integer(fields[2], "number")


def encode_heard(ago_s: float | None) -> bytes:
    """How long ago the peer in question was heard; None when there is nothing to say."""
    return wire.pack([MESSAGE_VERSION, -1 if ago_s is None else min(round(max(0.0, ago_s) * 1000), 2**31)])


def decode_heard(data: bytes) -> float | None:
    ago_ms = wire.integer(_open(data, "a witness's answer", at_least=2)[1], "time", low=-1, high=2**31)
    return None if ago_ms < 0 else ago_ms / 1000


def encode_empty() -> bytes:
    return wire.pack([MESSAGE_VERSION])


def decode_empty(data: bytes) -> None:
    _open(data, "an answer", at_least=1)


def _open(data: bytes, what: str, *, at_least: int) -> list[Any]:
    fields = wire.array(wire.unpack_array(data, MAX_MESSAGE_BYTES, what), what, at_least=1)
    version = wire.integer(fields[0], f"version of {what}", high=MAX_INT)  # fields are only ever appended
    if version < MESSAGE_VERSION:
        raise OutdatedError(
            f"{what} in version {version} of gossip; version {MESSAGE_VERSION} or newer is spoken here, so the peer "
            "that sent it needs a newer meshswarm"
        )
    return wire.array(fields, what, at_least=at_least)


def _pack_words(words: tuple[Word, ...]) -> list[list[object]]:
    return [[int(word.kind), word.data] for word in words]


def _words(value: object) -> tuple[Word, ...]:
    """Words of kinds that are not known here are left out: a newer peer may have sent them."""
    words = []
    for item in wire.array(value, "words", at_most=MAX_WORDS):
        pair = wire.array(item, "a word", at_least=2, at_most=2)
        kind = wire.integer(pair[0], "kind of a word", high=255)
        data = wire.binary(pair[1], "a word", at_most=MAX_ACCUSATION_BYTES)
        if kind in _WORD_KINDS:
            words.append(Word(WordKind(kind), data))
    return tuple(words)


_WORD_KINDS = frozenset(int(kind) for kind in WordKind)


def _tags(value: object, what: str, at_most: int) -> tuple[int, ...]:
    return tuple(wire.integer(item, what, high=2**TAG_BITS - 1) for item in wire.array(value, what, at_most=at_most))


def _pack_digest(digest: Digest | None) -> list[object]:
    """One flat list: whether it is all, then tag and number in turn, as few bytes as msgpack can."""
    if digest is None:
        return []
    return [digest.is_all, *(number for entry in digest.entries for number in entry)]


def _digest(value: object) -> Digest | None:
    flat = wire.array(value, "a digest", at_most=1 + 2 * MAX_DIGEST)
    if not flat:
        return None
    if len(flat) % 2 == 0:
        raise WireError("a digest with a tag that has no number")
    pairs = zip(flat[1::2], flat[2::2], strict=True)
    entries = tuple((wire.integer(t, "tag", high=2**TAG_BITS - 1), wire.integer(n, "number")) for t, n in pairs)
    return Digest(entries, wire.boolean(flat[0], "is all"))
