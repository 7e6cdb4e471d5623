"""The records this peer keeps for others: many under each key, one of each author and subject.

The rule this file keeps: what is stored was verified, belongs under its key, and is alive; nothing of one author is
touched by another; and every count is bounded, so that a flood costs an attacker room, never this peer its memory.
A full key turns newcomers away rather than dropping what is there, except that a model nobody there speaks of yet may
take the place of the newest record of the most repeated subject.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from meshswarm.dht.keys import Topics
from meshswarm.dht.messages import StoreStatus
from meshswarm.dht.signed import RecordKey, SignedRecord, replaces

MAX_PER_KEY = 64
MAX_PER_AUTHOR_AND_KEY = 16
MAX_KEYS = 8192
MAX_RECORDS = 32768  # at most about 32 MiB


class RecordStore:
    """Records by key. Whether a peer may store at all (token, nearness, rate) is decided before, by `Responder`."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._under: dict[bytes, dict[RecordKey, SignedRecord]] = {}
        self._verified: dict[RecordKey, bytes] = {}  # bytes whose signature was checked: one record has many keys
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: bytes, now: float) -> list[SignedRecord]:
        """Everything alive under `key`, tombstones included: they end older copies elsewhere."""
        return [record for record in self._under.get(key, {}).values() if not record.is_expired(now)]

    def all(self, now: float) -> list[SignedRecord]:
        """Everything alive, once for each key it is under."""
        return [record for key in self._under for record in self.get(key, now)]

    def check(self, record: SignedRecord, now: float) -> StoreStatus:
        """`STORED` when the record is well signed, of this swarm and alive, wherever it may belong."""
        if record.scope != self._topics.scope:
            return StoreStatus.INVALID
        if record.is_expired(now):
            return StoreStatus.EXPIRED
        if record.is_too_long(now):
            return StoreStatus.TOO_LONG
        if self._verified.get(record.key) != record.wire:
            if not record.verify():
                return StoreStatus.INVALID
            self._remember(record)
        return StoreStatus.STORED

    def put(self, record: SignedRecord, keys: Iterable[bytes], now: float) -> list[StoreStatus]:
        """Stores `record` under each of `keys`; one status for each, in their order."""
        wanted = list(keys)
        status = self.check(record, now)
        if status is not StoreStatus.STORED:
            return [status] * len(wanted)
        allowed = frozenset(self._topics.of_record(record))
        return [self._put_under(key, record, now) if key in allowed else StoreStatus.INVALID for key in wanted]

    def expire(self, now: float) -> None:
        """Forgets what has ended."""
        for key in list(self._under):
            self._sweep(key, now)
        alive = {identity for records in self._under.values() for identity in records}
        self._verified = {identity: data for identity, data in self._verified.items() if identity in alive}

    def _put_under(self, key: bytes, record: SignedRecord, now: float) -> StoreStatus:
        records = self._under.get(key, {})
        known = records.get(record.key)
        if known is not None:
            if known.wire != record.wire and not replaces(record, known):
                return StoreStatus.STALE
        elif not self._make_room(key, record, now):
            return StoreStatus.FULL
        else:
            self._count += 1
        self._under.setdefault(key, {})[record.key] = record
        return StoreStatus.STORED

    def _make_room(self, key: bytes, record: SignedRecord, now: float) -> bool:
        self._sweep(key, now)
        records = self._under.get(key, {})
        if self._count >= MAX_RECORDS or (not records and len(self._under) >= MAX_KEYS):
            return False
        if sum(other.author == record.author for other in records.values()) >= MAX_PER_AUTHOR_AND_KEY:
            return False
        if len(records) < MAX_PER_KEY:
            return True
        subjects = Counter(other.subject for other in records.values())
        crowded, count = subjects.most_common(1)[0]
        if record.subject in subjects or count == 1:
            return False
        newest = next(identity for identity in reversed(records) if records[identity].subject == crowded)
        self._remove(key, newest)
        return True

    def _sweep(self, key: bytes, now: float) -> None:
        for identity, record in list(self._under.get(key, {}).items()):
            if record.is_expired(now):
                self._remove(key, identity)

    def _remove(self, key: bytes, identity: RecordKey) -> None:
        del self._under[key][identity]
        self._count -= 1
        if not self._under[key]:
            del self._under[key]

    def _remember(self, record: SignedRecord) -> None:
        if len(self._verified) >= MAX_RECORDS:
            self._verified.clear()
        self._verified[record.key] = record.wire
