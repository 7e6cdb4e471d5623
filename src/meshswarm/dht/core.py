"""One node of the table without a network: what it knows, what it answers, what it makes of answers.

The rule this file keeps: everything a node decides is decided here and below, from arguments. The shell (`node`,
`requests`) and the simulation carry the bytes between cores and bring the time; neither decides anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.contact import Contact, merge_addresses
from meshswarm.dht.keys import Topics, distance, node_id
from meshswarm.dht.lookup import ALPHA, Lookup
from meshswarm.dht.messages import FindAnswer, FindQuestion, Sender, StoreAnswer, StoreQuestion, StoreStatus
from meshswarm.dht.publications import Publications
from meshswarm.dht.responder import Responder
from meshswarm.dht.signed import SignedRecord
from meshswarm.dht.storage import RecordStore
from meshswarm.dht.table import K, RoutingTable
from meshswarm.dht.tokens import TokenIssuer
from meshswarm.errors import RemoteProtocolError
from meshswarm.identity import Identity, PeerId

_Item = tuple[bytes, tuple[bytes, ...]]  # a record and the keys to store it under


@dataclass(frozen=True, slots=True)
class Delivery:
    """One store question for one peer."""

    contact: Contact
    question: bytes


class Core:
    """The state of one node. `secret`: random bytes for its write tokens; `sender`: what it says about itself."""

    def __init__(
        self, identity: Identity, topics: Topics, *, secret: bytes, sender: Sender, k: int = K, alpha: int = ALPHA
    ) -> None:
        self.own = identity.peer_id
        self.topics = topics
        self.sender = sender
        self.table = RoutingTable(self.own, k=k)
        self.store = RecordStore(topics)
        self.publications = Publications(identity, topics)
        self._alpha = alpha
        self._responder = Responder(self.table, self.store, TokenIssuer(secret))

    def answer(
        self, kind: str, peer: PeerId, came_from: Address | None, data: bytes, now: float
    ) -> tuple[bytes, Contact | None]:
        """As `Responder.answer`."""
        return self._responder.answer(kind, peer, came_from, data, self.sender, now)

    def lookup(self, target: bytes, now: float) -> Lookup:
        start = self.table.closest(target, now)
        return Lookup(target, start, own=self.own, k=self.table.k, alpha=self._alpha)

    def find_question(self, lookups: Sequence[Lookup], *, wants_records: bool) -> bytes:
        keys = tuple(lookup.target for lookup in lookups)
        return messages.encode_find(FindQuestion(self.sender, keys, wants_records))

    def take_pong(self, contact: Contact, answer: bytes, now: float, rtt_s: float | None) -> bool:
        """A peer answered a ping. True when it is new in the table. Raises WireError."""
        return self._saw(contact, messages.decode_ping(answer), now, rtt_s)

    def take_found(
        self, contact: Contact, found: FindAnswer, lookups: Sequence[Lookup], now: float, rtt_s: float | None
    ) -> bool:
        """A peer answered a find made for `lookups`. True when it is new in the table."""
        contacts = [c for c in found.contacts if not self.table.back_off.holds(c.peer, now)]
        for lookup in lookups:
            lookup.answered(contact, found.token, contacts)
        return self._saw(contact, found.sender, now, rtt_s)

    def take_stored(self, contact: Contact, answer: bytes, now: float) -> StoreAnswer:
        """A peer answered a store. Raises WireError."""
        stored = messages.decode_stored(answer)
        self._saw(contact, stored.sender, now, None)
        return stored

    def failed(self, contact: Contact, lookups: Iterable[Lookup], now: float, *, unreachable: bool) -> None:
        """A peer did not answer a question made for `lookups`. `unreachable` False: it refused in good order."""
        for lookup in lookups:
            lookup.failed(contact)
        if unreachable:
            self.table.failed(contact.peer, now)

    def read_record(self, data: bytes, now: float) -> SignedRecord | None:
        """The record when it is well formed, signed, of this swarm and alive; None otherwise."""
        try:
            record = SignedRecord.decode(data)
        except RemoteProtocolError:
            return None
        return record if self.store.check(record, now) is StoreStatus.STORED else None

    def deliveries(self, records: Iterable[SignedRecord], lookups: Iterable[Lookup], now: float) -> list[Delivery]:
        """How to store `records` at the nearest peers that the finished `lookups` of their keys found.

        What belongs here as well is stored here at once.
        """
        by_key = {lookup.target: lookup for lookup in lookups}
        parcels: dict[PeerId, tuple[Contact, bytes, list[_Item]]] = {}
        for record in records:
            keys = [key for key in self.topics.of_record(record) if key in by_key]
            self.store.put(record, [key for key in keys if self._is_near(by_key[key])], now)
            places: dict[PeerId, list[bytes]] = {}
            for key in keys:
                for found in by_key[key].found():
                    places.setdefault(found.contact.peer, []).append(key)
                    parcels.setdefault(found.contact.peer, (found.contact, found.token, []))
            for peer, held in places.items():
                parcels[peer][2].append((record.wire, tuple(held)))
        return [delivery for parcel in parcels.values() for delivery in self._packed(*parcel)]

    def owed_deliveries(self, contact: Contact, token: bytes, now: float) -> list[Delivery]:
        """How to give `contact` what it is owed."""
        items = [(record.wire, tuple(keys)) for record, keys in self.owed_to(contact, now)]
        return self._packed(contact, token, items)

    def owed_to(self, contact: Contact, now: float) -> list[tuple[SignedRecord, list[bytes]]]:
        """Own records, with their keys, that `contact` should hold: it is among the k nearest this peer knows."""
        owed = []
        for record in self.publications.current(now):
            keys = [
                key
                for key in self.topics.of_record(record)
                if any(near.peer == contact.peer for near in self.table.closest(key, now))
            ]
            if keys:
                owed.append((record, keys))
        return owed

    def _is_near(self, lookup: Lookup) -> bool:
        own = distance(node_id(self.own), lookup.target)
        closer = sum(distance(found.contact.node_id, lookup.target) < own for found in lookup.found())
        return closer < self.table.k

    def _saw(self, contact: Contact, sender: Sender, now: float, rtt_s: float | None) -> bool:
        if not sender.server:
            return False
        known = Contact(contact.peer, merge_addresses(contact.addresses, sender.addresses))
        return self.table.saw(known, now, rtt_s=rtt_s)

    def _packed(self, contact: Contact, token: bytes, items: list[_Item]) -> list[Delivery]:
        size = messages.MAX_STORE_ITEMS
        parts = [tuple(items[first : first + size]) for first in range(0, len(items), size)]
        return [Delivery(contact, messages.encode_store(StoreQuestion(self.sender, token, part))) for part in parts]
