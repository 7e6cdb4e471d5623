"""What this peer answers to ping, find and store: one pure function of its state, the question, and the time.

The rule this file keeps: the order of the checks is the order of their cost. The rate comes first, then the shape, then
the token and the distance, and only then a signature.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.contact import Contact, merge_addresses
from meshswarm.dht.limits import RateLimit
from meshswarm.dht.messages import FIND, PING, STORE, FindAnswer, Sender, StoreAnswer, StoreStatus
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


class Responder:
    """Answers for one peer. It changes `table` (who asked is alive) and `store` (what was accepted), nothing else."""

    def __init__(self, table: RoutingTable, store: RecordStore, tokens: TokenIssuer) -> None:
        self._table = table
        self._store = store
        self._tokens = tokens
        self._finds = RateLimit(per_s=FIND_KEYS_PER_S, burst=FIND_KEYS_BURST)
        self._stores = RateLimit(per_s=STORE_KEYS_PER_S, burst=STORE_KEYS_BURST)

    def answer(
        self, kind: str, peer: PeerId, came_from: Address | None, data: bytes, own: Sender, now: float
    ) -> tuple[bytes, Contact | None]:
        """The answer to one question of the authenticated `peer`, and its contact when it is new in the table.

        `came_from`: where its connection comes from; `own`: what this peer says about itself. Raises WireError for
        bytes that are no question, RefusedError for too many of them.
        """
        if kind == PING:
            self._spend(self._finds, peer, 1, now)
            sender, reply = messages.decode_ping(data), messages.encode_ping(own)
        elif kind == FIND:
            sender, reply = self._find(peer, data, own, now)
        elif kind == STORE:
            sender, reply = self._store_records(peer, data, own, now)
        else:
            raise WireError(f"{kind[:40]!r} is not a question of the table")
        contact = Contact(peer, merge_addresses(() if came_from is None else (came_from,), sender.addresses))
        is_new = sender.server and self._table.saw(contact, now)
        return reply, contact if is_new else None

    def _find(self, peer: PeerId, data: bytes, own: Sender, now: float) -> tuple[Sender, bytes]:
        question = messages.decode_find(data)
        self._spend(self._finds, peer, len(question.keys), now)
        near = (contact for key in question.keys for contact in self._table.closest(key, now))
        contacts = {contact.peer: contact for contact in near if contact.peer != peer}
        records = self._records(question.keys, now) if question.wants_records else ()
        token = self._tokens.issue(peer, now)
        answer = FindAnswer(own, token, tuple(contacts.values())[: messages.MAX_CONTACTS], tuple(records))
        return question.sender, messages.encode_found(answer)

    def _records(self, keys: Iterable[bytes], now: float) -> list[bytes]:
        found = {record.wire: None for key in keys for record in self._store.get(key, now)}
        return list(found)[: messages.MAX_FIND_RECORDS]

    def _store_records(self, peer: PeerId, data: bytes, own: Sender, now: float) -> tuple[Sender, bytes]:
        question = messages.decode_store(data)
        self._spend(self._stores, peer, sum(len(keys) for _, keys in question.items), now)
        if self._tokens.accepts(question.token, peer, now):
            statuses = tuple(tuple(self._accept(record, keys, now)) for record, keys in question.items)
        else:
            statuses = tuple((StoreStatus.BAD_TOKEN,) * len(keys) for _, keys in question.items)
        return question.sender, messages.encode_stored(StoreAnswer(own, statuses))

    def _accept(self, data: bytes, keys: tuple[bytes, ...], now: float) -> list[StoreStatus]:
        near = {key for key in keys if self._table.closer_than_own(key) < 2 * self._table.k}
        if not near:
            return [StoreStatus.NOT_NEAR] * len(keys)
        try:
            record = SignedRecord.decode(data)
        except WireError:
            return [StoreStatus.INVALID] * len(keys)
        chosen = [key for key in keys if key in near]
        stored = iter(self._store.put(record, chosen, now))
        return [next(stored) if key in near else StoreStatus.NOT_NEAR for key in keys]

    @staticmethod
    def _spend(limit: RateLimit, peer: PeerId, units: int, now: float) -> None:
        wait_s = limit.take(peer, units, now)
        if wait_s > 0:
            raise RefusedError(f"too many questions from {peer.short}", peer=str(peer), retry_after_s=round(wait_s, 1))
