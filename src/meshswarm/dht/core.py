"""One node of the table without a network: what it knows, what it answers, what it makes of answers.

The rule this file keeps: everything a node decides is decided here and below, from arguments. The shell (`node`,
`questions`) and the simulation carry the bytes between cores and bring the time; neither decides anything.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.clocks import OWN, Clocks
from meshswarm.dht.contact import Contact, merge_addresses
from meshswarm.dht.handover import Handover
from meshswarm.dht.have import NOTHING, Have
from meshswarm.dht.keys import Topics, distance, node_id
from meshswarm.dht.limits import RateLimit
from meshswarm.dht.lookup import ALPHA, Found, Lookup
from meshswarm.dht.messages import FindAnswer, FindQuestion, Sender, StoreAnswer, StoreQuestion, StoreStatus
from meshswarm.dht.networks import Networks, credible, network_of
from meshswarm.dht.notices import Notices
from meshswarm.dht.publications import Publications
from meshswarm.dht.region import REACH_SHIFT, SizeEstimate, radius_of
from meshswarm.dht.responder import Responder
from meshswarm.dht.signed import SignedRecord
from meshswarm.dht.storage import RecordStore
from meshswarm.dht.table import FRIENDS, STRANGERS, K, RoutingTable
from meshswarm.dht.tokens import TokenIssuer
from meshswarm.dht.twins import OWN_TWIN_SENTENCE, Instances, twins_sentence
from meshswarm.errors import RefusedError, RemoteProtocolError
from meshswarm.identity import Identity, PeerId

REFRESH_K = 8
DIALS_PER_S = 5 / 60  # that one peer may cause here
DIALS_BURST = 5.0
MAX_CLIENTS = 1024  # remembered
MAX_DIALLERS = 3  # asked one after another until one has no connection yet to who is to be dialled
_Item = tuple[SignedRecord, bytes, tuple[bytes, ...]]  # a record, its bytes as they travel, the keys to store it under


@dataclass(frozen=True, slots=True)
class Delivery:
    """One store question for one peer. `items`: which record is stored under which keys, in the question's order."""

    contact: Contact
    question: bytes
    items: tuple[tuple[SignedRecord, tuple[bytes, ...]], ...] = ()


class Core:
    """The state of one node. `secret`: random bytes for its write tokens; `sender`: what it says about itself."""

    def __init__(
        self, identity: Identity, topics: Topics, *, secret: bytes, sender: Sender, k: int = K, alpha: int = ALPHA
    ) -> None:
        self.own = identity.peer_id
        self.topics = topics
        self.table = RoutingTable(self.own, k=k, caps=FRIENDS if topics.is_private else STRANGERS)
        self.sender = sender
        self.store = RecordStore(topics)
        self.publications = Publications(identity, topics)
        self.notices = Notices()
        self._alpha = alpha
        self._size = SizeEstimate()
        self._radius = 0
        self._radius_known = (-1, -1)  # the second and the size of the table that it was judged at
        self._clocks = Clocks()
        self._handover = Handover()
        self._instances = Instances()
        self._clients: OrderedDict[PeerId, None] = OrderedDict()
        self._dials = RateLimit(per_s=DIALS_PER_S, burst=DIALS_BURST)
        self._responder = Responder(self.table, self.store, TokenIssuer(secret), topics, self.radius)

    @property
    def sender(self) -> Sender:
        """What this node says about itself."""
        return self._sender

    @sender.setter
    def sender(self, sender: Sender) -> None:
        self._sender = sender
        self.table.networks = Networks(sender.addresses)

    def is_client(self, peer: PeerId) -> bool:
        """True for a peer that said, when it was last heard of, that nobody can dial it."""
        return peer in self._clients

    def swarm_changed(self) -> None:
        """The swarm has other keys, or admits others, than before."""
        self.store.renew()
        for neighbour in self.table.neighbours():
            if not self.topics.admits(neighbour.contact.peer):
                self.table.drop(neighbour.contact.peer)

    # -- answering

    def answer(
        self, kind: str, peer: PeerId, came_from: Address | None, data: bytes, now: float
    ) -> tuple[bytes, Contact | None]:
        """As `Responder.answer`, without the sender."""
        reply, sender, newcomer = self._responder.answer(kind, peer, came_from, data, self.sender, now)
        self._hear_clock(peer, sender, now)
        self._hear_kind(peer, sender)
        return reply, newcomer

    def saw_instance(self, peer: PeerId, instance: bytes) -> None:
        """A connection to `peer` was made, to this instance of it."""
        if self._instances.saw(peer, instance):
            self.notices.say("two peers with one key", twins_sentence(peer), peer)

    def spend_dial(self, peer: PeerId, now: float) -> None:
        """`peer` asks for a dial. Raises RefusedError when it has asked for too many."""
        wait_s = self._dials.take(peer, 1.0, now)
        if wait_s > 0:
            raise RefusedError(f"too many dials for {peer.short}", peer=str(peer), retry_after_s=round(wait_s, 1))

    def diallers_for(self, peer: PeerId, address: Address, rng: random.Random) -> list[Contact]:
        """Who may try to dial `peer` at the public `address`: a few in other public networks, at random."""
        network = network_of(address)
        others = [
            n.contact
            for n in self.table.neighbours()
            if n.contact.peer != peer and n.network is not None and n.network != network
        ]
        return rng.sample(others, min(len(others), MAX_DIALLERS))

    # -- asking

    def radius(self, now: float) -> int:
        """How far around a key k peers are to be expected; 0 as long as too few are known to tell."""
        if len(self.table) < self.table.k:
            return 0
        known = int(now), len(self.table)
        if self._radius_known != known:
            self._radius_known = known
            self._radius = radius_of(self.swarm_size(now), self.table.k)
        return self._radius

    def swarm_size(self, now: float) -> float:
        """How many peers there are, as far as can be told from how near they are to each other."""
        return self._size.value(self.table.distances(node_id(self.own), now))

    def refresh(self, target: bytes, now: float) -> Lookup:
        """A lookup that only fills a bucket of the table: a few peers are enough, and nothing is looked for."""
        self.table.looked_through(target, now)
        start = self.table.closest(target, now, count=REFRESH_K)
        caps = self.table.caps
        return Lookup(
            target,
            start,
            own=self.own,
            k=REFRESH_K,
            alpha=self._alpha,
            networks=self.table.networks,
            per_network=caps.per_path,
        )

    def lookup(self, target: bytes, now: float) -> Lookup:
        self.table.looked_through(target, now)
        return Lookup(
            target,
            self.table.closest(target, now),
            own=self.own,
            k=self.table.k,
            alpha=self._alpha,
            radius=self.radius(now),
            is_sure=self._size.is_sure,
            networks=self.table.networks,
            per_network=self.table.caps.per_path,
        )

    def ping_question(self, now: float) -> bytes:
        return messages.encode_ping(replace(self.sender, clock_ms=int(now * 1000)))

    def find_question(self, lookups: Sequence[Lookup], *, wants_records: bool, have: Have = NOTHING) -> bytes:
        """`have`: the records that need not be sent."""
        keys = tuple(lookup.target for lookup in lookups)
        reach = max(lookup.radius for lookup in lookups) >> REACH_SHIFT
        return messages.encode_find(FindQuestion(self.sender, keys, wants_records, reach, have))

    def contacts_had(self, lookups: Sequence[Lookup]) -> list[Contact]:
        """Contacts that answers to a question for `lookups` are likely to name, and which are known to these."""
        in_turn = chain.from_iterable(zip_longest(*(lookup.nearest() for lookup in lookups)))
        return list({each.peer: each for each in in_turn if each is not None}.values())

    def take_pong(
        self, contact: Contact, answer: bytes, now: float, rtt_s: float | None, *, is_outbound: bool = False
    ) -> bool:
        """A peer answered a ping. True when it is new in the table. Raises WireError.

        `is_outbound`: it was dialled for this, at the first address of `contact`.
        """
        sender = messages.decode_ping(answer)
        self._hear_clock(contact.peer, sender, now)
        return self._saw(contact, sender, now, rtt_s, is_outbound)

    def take_found(
        self,
        contact: Contact,
        found: FindAnswer,
        lookups: Sequence[Lookup],
        now: float,
        rtt_s: float | None,
        *,
        is_outbound: bool = False,
    ) -> bool:
        """A peer answered a find made for `lookups`. True when it is new in the table."""
        told = [each for each in (credible(told, contact) for told in found.contacts) if each is not None]
        contacts = [self._as_known(c) for c in told if not self.table.back_off.holds_at(c, now)]
        for lookup in lookups:
            lookup.answered(contact, found.token, contacts)
        self._hear_clock(contact.peer, found.sender, now)
        is_new = self._saw(contact, found.sender, now, rtt_s, is_outbound)
        self._conclude(lookups)
        return is_new

    def take_stored(self, contact: Contact, answer: bytes, now: float) -> StoreAnswer:
        """A peer answered a store. Raises WireError."""
        stored = messages.decode_stored(answer)
        self._saw(contact, stored.sender, now, None, False)
        return stored

    def failed(self, contact: Contact, lookups: Sequence[Lookup], now: float, *, unreachable: bool) -> None:
        """A peer did not answer a question made for `lookups`. `unreachable` False: it refused in good order."""
        for lookup in lookups:
            lookup.failed(contact)
        if unreachable and self.table.failed(contact.peer, now, contact.addresses):
            self._handover.lost(contact.peer.key)
        self._conclude(lookups)

    def read_record(self, data: bytes, now: float, keys: Iterable[bytes]) -> SignedRecord | None:
        """The record when it is well formed, signed, of this swarm, alive, and under one of `keys`; None otherwise.

        `keys`: that were asked for. In a private swarm `data` is sealed for one of them.
        """
        wanted, opened = frozenset(keys), data
        if self.topics.is_private:
            unsealed = ((key, self.topics.unseal(key, data)) for key in wanted)
            found = ((frozenset({key}), each) for key, each in unsealed if each is not None)
            wanted, opened = next(found, (wanted, b""))
        try:
            record = SignedRecord.decode(opened)
        except RemoteProtocolError:
            return None
        if wanted.isdisjoint(self.topics.of_record(record)) or self.store.check(record, now) is not StoreStatus.STORED:
            return None
        if record.author == self.own and self.publications.is_foreign(record, now):
            self.notices.say("own key", OWN_TWIN_SENTENCE)
        return record

    def source_of(self, contact: Contact) -> object:
        """Whose word an answer counts as: that of the network it came from, in a private swarm that of the peer."""
        network = None if self.topics.is_private else self.table.networks.of(contact.addresses[0])
        return contact.peer if network is None else network

    # -- storing

    def deliveries(self, records: Iterable[SignedRecord], lookups: Iterable[Lookup], now: float) -> list[Delivery]:
        """How to store `records` at the peers near their keys that the finished `lookups` found.

        What belongs here as well is stored here at once.
        """
        by_key = {lookup.target: lookup for lookup in lookups}
        found = {key: lookup.found() for key, lookup in by_key.items()}
        parcels: dict[PeerId, tuple[Contact, bytes, list[_Item]]] = {}
        for record in records:
            keys = [key for key in self.topics.of_record(record) if key in by_key]
            self.store.put(record, [key for key in keys if self._is_near(key, found[key])], now)
            places: dict[PeerId, list[bytes]] = {}
            for key in keys:
                self._handover.spreads(record, key, by_key[key].covers())
                for each in found[key]:
                    places.setdefault(each.contact.peer, []).append(key)
                    parcels.setdefault(each.contact.peer, (each.contact, each.token, []))
            for peer, held in places.items():
                parcels[peer][2].extend(self._items(record, held))
        self._handover.keep_only(self.publications.current(now))
        return [delivery for parcel in parcels.values() for delivery in self._packed(*parcel)]

    def delivered(self, delivery: Delivery, stored: StoreAnswer) -> None:
        """The peer answered `delivery`: who has what is remembered."""
        has_it = (StoreStatus.STORED, StoreStatus.STALE)
        for (record, keys), statuses in zip(delivery.items, stored.statuses, strict=False):
            for key, status in zip(keys, statuses, strict=False):
                if status in has_it:
                    self._handover.gave(record, key, delivery.contact.peer.key)
                elif status is not StoreStatus.BAD_TOKEN:
                    self._handover.refused(record, key, delivery.contact.peer.key)

    def owed_deliveries(self, contact: Contact, token: bytes, now: float) -> list[Delivery]:
        """How to give `contact` what it is owed."""
        items = [item for record, keys in self.owed_to(contact, now) for item in self._items(record, keys)]
        return self._packed(contact, token, items)

    def owed_to(self, contact: Contact, now: float) -> list[tuple[SignedRecord, list[bytes]]]:
        """Own records, with their keys, that `contact` should hold and does not: it is among the k nearest this peer
        knows, and within what the last publication covered."""
        owed = []
        for record in self.publications.current(now):
            keys = [
                key
                for key in self.topics.of_record(record)
                if self._handover.owes(record, key, contact)
                and any(near.peer == contact.peer for near in self.table.closest(key, now))
            ]
            if keys:
                owed.append((record, keys))
        return owed

    def creditors(self, now: float) -> list[Contact]:
        """Everybody in the table who is owed a record: others went, and they are among the nearest now."""
        found: dict[PeerId, Contact] = {}
        for record in self.publications.current(now):
            for key in self.topics.of_record(record):
                near = self.table.closest(key, now)
                found.update((each.peer, each) for each in near if self._handover.owes(record, key, each))
        return list(found.values())

    def thin(self, now: float) -> list[SignedRecord]:
        """Own records of which half of the keepers are gone: to be published again."""
        current = self.publications.current(now)
        return [record for record in current if self._handover.is_thin(record, self.topics.of_record(record))]

    # -- inside

    def _conclude(self, lookups: Sequence[Lookup]) -> None:
        for lookup in lookups:
            if lookup.is_noted or not lookup.done:
                continue
            lookup.is_noted = True
            nearest = lookup.distances()
            if len(nearest) == self.table.k:
                self._size.note(lookup.target, nearest)
            if lookup.is_dense:
                self.notices.say(
                    "crowd",
                    "more peers crowd around some records' place in the table than a swarm of this size explains: "
                    "somebody may be trying to hide them; this peer looks and stores further around",
                )

    def _as_known(self, contact: Contact) -> Contact:
        """`contact` with the addresses that worked first: what others say of a known peer is only added."""
        known = self.table.known(contact)
        if known is None or known.contact.addresses == contact.addresses:
            return contact
        return Contact(contact.peer, merge_addresses(known.contact.addresses, contact.addresses))

    def _hear_clock(self, peer: PeerId, sender: Sender, now: float) -> None:
        heard = self._clocks.heard(peer, sender.clock_ms, now)
        if heard is not None:
            about, sentence = heard
            self.notices.say(OWN if about == OWN else "clocks of others", sentence, about)

    def _hear_kind(self, peer: PeerId, sender: Sender) -> None:
        """A peer may find out that nobody can dial it, or that somebody can."""
        self._clients.pop(peer, None)
        if not sender.server:
            self.table.drop(peer)
            self._clients[peer] = None
            if len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)

    def _is_near(self, key: bytes, found: Sequence[Found]) -> bool:
        own = distance(node_id(self.own), key)
        return sum(distance(each.contact.node_id, key) < own for each in found) < self.table.k

    def _saw(self, contact: Contact, sender: Sender, now: float, rtt_s: float | None, is_outbound: bool) -> bool:
        self._hear_kind(contact.peer, sender)
        if not sender.server:
            return False
        known = Contact(contact.peer, merge_addresses(contact.addresses, sender.addresses))
        return self.table.saw(known, now, rtt_s=rtt_s, is_outbound=is_outbound)

    def _items(self, record: SignedRecord, keys: Sequence[bytes]) -> list[_Item]:
        """One item for all keys; where records are sealed, one for each, because a seal is good for one key."""
        if not self.topics.is_private:
            return [(record, record.wire, tuple(keys))]
        return [(record, self.topics.seal(key, record.wire), (key,)) for key in keys]

    def _packed(self, contact: Contact, token: bytes, items: list[_Item]) -> list[Delivery]:
        size = messages.MAX_STORE_ITEMS
        parts = [items[first : first + size] for first in range(0, len(items), size)]
        return [
            Delivery(
                contact,
                messages.encode_store(StoreQuestion(self.sender, token, tuple((data, keys) for _, data, keys in part))),
                tuple((record, keys) for record, _, keys in part),
            )
            for part in parts
        ]
