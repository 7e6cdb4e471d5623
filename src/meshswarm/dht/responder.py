"""What this peer answers to ping, find and store: one pure function of its state, the question, and the time.

The rule this file keeps: the order of the checks is the order of their cost. The rate comes first, then the shape, then
the token and the distance, and only then a seal and a signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, zip_longest

from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.contact import Contact, merge_addresses
from meshswarm.dht.have import Have, what_of
from meshswarm.dht.keys import Topics, distance, node_id
from meshswarm.dht.limits import RateLimit
from meshswarm.dht.messages import FIND, PING, STORE, FindAnswer, Sender, StoreAnswer, StoreStatus
from meshswarm.dht.region import REACH_SHIFT
from meshswarm.dht.signed import SignedRecord
from meshswarm.dht.storage import RecordStore
from meshswarm.dht.table import RoutingTable
from meshswarm.dht.tokens import TokenIssuer
from meshswarm.dht.wire import WireError
from meshswarm.errors import RefusedError
from meshswarm.identity import PeerId

FIND_KEYS_PER_S = 100.0
FIND_KEYS_BURST = 600.0
STORE_KEYS_PER_S = 40.0
STORE_KEYS_BURST = 1200.0
_REGIONS = 3  # a record is kept this many times as far out as its region should reach: sizes are judged, not known


class Responder:
    """Answers for one peer. It changes `table` (who asked is alive) and `store` (what was accepted), nothing else.

    `radius(now)`: how far around a key its records should be kept, 0 when that is not known.
    """

    def __init__(
        self,
        table: RoutingTable,
        store: RecordStore,
        tokens: TokenIssuer,
        topics: Topics,
        radius: Callable[[float], int],
    ) -> None:
        self._table = table
        self._store = store
        self._tokens = tokens
        self._topics = topics
        self._radius = radius
        self._finds = RateLimit(per_s=FIND_KEYS_PER_S, burst=FIND_KEYS_BURST)
        self._stores = RateLimit(per_s=STORE_KEYS_PER_S, burst=STORE_KEYS_BURST)

    def answer(
        self, kind: str, peer: PeerId, came_from: Address | None, data: bytes, own: Sender, now: float
    ) -> tuple[bytes, Sender, Contact | None]:
        """The answer to one question of the authenticated `peer`, what it says of itself, and its contact when it is
        new in the table.

        `came_from`: where its connection comes from; `own`: what this peer says about itself. Raises WireError for
        bytes that are no question, RefusedError for too many of them.
        """
        own = replace(own, clock_ms=int(now * 1000))
        if kind == PING:
            self._spend(self._finds, peer, 1, now)
            sender, reply = messages.decode_ping(data), messages.encode_ping(own)
        elif kind == FIND:
            sender, reply = self._find(peer, data, own, now)
        elif kind == STORE:
            sender, reply = self._store_records(peer, came_from, data, own, now)
        else:
            raise WireError(f"{kind[:40]!r} is not a question of the table")
        contact = Contact(peer, merge_addresses(() if came_from is None else (came_from,), sender.addresses))
        is_new = sender.server and self._table.saw(contact, now)
        return reply, sender, contact if is_new else None

    def _find(self, peer: PeerId, data: bytes, own: Sender, now: float) -> tuple[Sender, bytes]:
        question = messages.decode_find(data)
        self._spend(self._finds, peer, len(question.keys), now)
        radius = question.reach << REACH_SHIFT
        near = [self._table.around(key, now, radius=radius) for key in question.keys]
        in_turn = chain.from_iterable(zip_longest(*near))  # so that no key takes up the places of another
        contacts = {c.peer: c for c in in_turn if c is not None and c.peer != peer}
        records = self._records(question.keys, question.have, now) if question.wants_records else ()
        token = self._tokens.issue(peer, now)
        told = list(contacts.values())[: messages.MAX_CONTACTS]
        had = {c.peer: made for c in told if (made := question.have.mark(what_of(c))) is not None}
        news = tuple(each for each in told if each.peer not in had)
        answer = FindAnswer(own, token, news, tuple(records), tuple(had.values()))
        return question.sender, messages.encode_found(answer)

    def _records(self, keys: Iterable[bytes], have: Have, now: float) -> list[bytes]:
        found = {sealed: None for key in keys for sealed in self._store.sealed(key, now, have)}
        return list(found)[: messages.MAX_FIND_RECORDS]

    def _store_records(
        self, peer: PeerId, came_from: Address | None, data: bytes, own: Sender, now: float
    ) -> tuple[Sender, bytes]:
        question = messages.decode_store(data)
        self._spend(self._stores, peer, sum(len(keys) for _, keys in question.items), now)
        if self._tokens.accepts(question.token, peer, now):
            network = None if came_from is None else self._table.networks.of(came_from)
            statuses = tuple(tuple(self._accept(record, keys, network, now)) for record, keys in question.items)
        else:
            statuses = tuple((StoreStatus.BAD_TOKEN,) * len(keys) for _, keys in question.items)
        return question.sender, messages.encode_stored(StoreAnswer(own, statuses))

    def _accept(self, data: bytes, keys: tuple[bytes, ...], network: bytes | None, now: float) -> list[StoreStatus]:
        statuses = dict.fromkeys(keys, StoreStatus.NOT_NEAR)
        near = [key for key in statuses if self._is_near(key, now)]
        if self._topics.is_private:  # a seal is good for one key
            for key in near:
                record = self._topics.unseal(key, data)
                statuses[key] = StoreStatus.INVALID if record is None else self._put(record, [key], network, now)[0]
        elif near:
            statuses.update(zip(near, self._put(data, near, network, now), strict=True))
        return [statuses[key] for key in keys]

    def _put(self, data: bytes, keys: list[bytes], network: bytes | None, now: float) -> list[StoreStatus]:
        try:
            record = SignedRecord.decode(data)
        except WireError:
            return [StoreStatus.INVALID] * len(keys)
        return self._store.put(record, keys, now, network=network)

    def _is_near(self, key: bytes, now: float) -> bool:
        """Among the 2 k nearest that this peer knows; or in the key's region, however many crowd in there."""
        if self._table.closer_than_own(key) < 2 * self._table.k:
            return True
        return distance(node_id(self._table.own), key) < _REGIONS * self._radius(now)

    @staticmethod
    def _spend(limit: RateLimit, peer: PeerId, units: int, now: float) -> None:
        wait_s = limit.take(peer, units, now)
        if wait_s > 0:
            raise RefusedError(f"too many questions from {peer.short}", peer=str(peer), retry_after_s=round(wait_s, 1))
