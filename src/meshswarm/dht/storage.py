"""The records this peer keeps for others: many under each key, one of each author and subject.

The rule this file keeps: what is stored was verified, belongs under its key, and is alive; nothing of one author is
touched by another; and every count is bounded, so that a flood costs an attacker room, never this peer its memory.
A full key turns newcomers away rather than dropping what is there, except that a model nobody there speaks of yet may
take the place of the newest record of the most repeated subject. What peers of one network bring has a share of a key.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from meshswarm.dht.have import NOTHING, Have
from meshswarm.dht.keys import Topics
from meshswarm.dht.messages import StoreStatus
from meshswarm.dht.signed import RecordKey, SignedRecord, replaces
from meshswarm.identity import PeerId

MAX_PER_KEY = 64
MAX_PER_NETWORK_AND_KEY = 4
MAX_PER_AUTHOR_AND_KEY = 16
MAX_KEYS = 8192
MAX_RECORDS = 32768  # at most about 32 MiB
MAX_PER_AUTHOR = 512  # under all keys: 4 models of 512 layers
MAX_PER_NETWORK = MAX_RECORDS // 16
MAX_MODELS_KNOWN = 1024


@dataclass(frozen=True, slots=True)
class _Kept:
    """`network`: of the peer that brought it, None for a local one. `sealed`: as it is sent under this key."""

    record: SignedRecord
    network: bytes | None
    sealed: bytes


class RecordStore:
    """Records by key. Whether a peer may store at all (token, nearness, rate) is decided before, by `Responder`."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._under: dict[bytes, dict[RecordKey, _Kept]] = {}
        self._count = 0
        self._of_author: Counter[PeerId] = Counter()
        self._of_network: Counter[bytes | None] = Counter()
        self._n_layers: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def learn_layers(self, model_id: bytes, n_layers: int) -> None:
        """A model is known to have so many layers, from its own header: who says that he serves others lies."""
        if self._n_layers.get(model_id) == n_layers:
            return
        self._n_layers[model_id] = n_layers
        if len(self._n_layers) > MAX_MODELS_KNOWN:
            self._n_layers.popitem(last=False)
        for key, records in list(self._under.items()):
            for identity in [identity for identity, kept in records.items() if not self._can_be(kept.record)]:
                self._remove(key, identity)

    def has_of(self, author: PeerId) -> bool:
        """Whether anything that it signed is kept here."""
        return author in self._of_author

    def get(self, key: bytes, now: float) -> list[SignedRecord]:
        """Everything alive under `key`, tombstones included: they end older copies elsewhere."""
        return [kept.record for kept in self._under.get(key, {}).values() if not kept.record.is_expired(now)]

    def sealed(self, key: bytes, now: float, have: Have = NOTHING) -> list[bytes]:
        """The same as it is sent, without what the asker has."""
        kept = (kept for kept in self._under.get(key, {}).values() if not kept.record.is_expired(now))
        return [each.sealed for each in kept if have.mark(each.record.wire) is None]

    def all(self, now: float) -> list[SignedRecord]:
        """Everything alive, once for each key it is under."""
        return [record for key in self._under for record in self.get(key, now)]

    def check(self, record: SignedRecord, now: float) -> StoreStatus:
        """`STORED` when the record is well signed, of this swarm, alive, and not known to be a lie, wherever it may
        belong."""
        if record.scope != self._topics.scope or not self._topics.admits(record.author) or not self._can_be(record):
            return StoreStatus.INVALID
        if record.is_expired(now):
            return StoreStatus.EXPIRED
        if record.is_too_long(now):
            return StoreStatus.TOO_LONG
        return StoreStatus.STORED if record.verify() else StoreStatus.INVALID

    def put(
        self, record: SignedRecord, keys: Iterable[bytes], now: float, *, network: bytes | None = None
    ) -> list[StoreStatus]:
        """Stores `record` under each of `keys`; one status for each, in their order. `network`: where it came from."""
        wanted = list(keys)
        status = self.check(record, now)
        if status is not StoreStatus.STORED:
            return [status] * len(wanted)
        allowed = frozenset(self._topics.of_record(record))
        return [self._put_under(k, record, now, network) if k in allowed else StoreStatus.INVALID for k in wanted]

    def renew(self) -> None:
        """The swarm has changed: what is sent from now on is sealed with its new key, and what members said who have
        been expelled since is forgotten."""
        for key, records in list(self._under.items()):
            for identity, kept in list(records.items()):
                if self._topics.admits(kept.record.author):
                    records[identity] = replace(kept, sealed=self._topics.seal(key, kept.record.wire))
                else:
                    self._remove(key, identity)

    def expire(self, now: float) -> None:
        """Forgets what has ended."""
        for key in list(self._under):
            self._sweep(key, now)

    def _can_be(self, record: SignedRecord) -> bool:
        """False for layers that the model, as far as it is known here, has not."""
        return record.stop <= self._n_layers.get(record.subject, record.stop)

    def _put_under(self, key: bytes, record: SignedRecord, now: float, network: bytes | None) -> StoreStatus:
        records = self._under.get(key, {})
        known = records.get(record.key)
        if known is not None:
            if known.record.wire == record.wire:
                return StoreStatus.STORED  # whoever brought it first: nobody takes up another network's share so
            if not replaces(record, known.record):
                return StoreStatus.STALE
            if known.network != network and not self._has_share(key, network):
                network = known.network
        elif not self._has_share(key, network) or not self._make_room(key, record, now):
            return StoreStatus.FULL
        else:
            self._count += 1
        if known is not None:
            _take_one(self._of_network, known.network)
        else:
            self._of_author[record.author] += 1
        self._of_network[network] += 1
        kept = _Kept(record, network, self._topics.seal(key, record.wire))
        self._under.setdefault(key, {})[record.key] = kept
        return StoreStatus.STORED

    def _has_share(self, key: bytes, network: bytes | None) -> bool:
        """True unless the network has all the places under `key` that one may have."""
        if network is None or self._topics.is_private:
            return True
        if self._of_network[network] >= MAX_PER_NETWORK:
            return False
        kept = self._under.get(key, {}).values()
        return sum(other.network == network for other in kept) < MAX_PER_NETWORK_AND_KEY

    def _make_room(self, key: bytes, record: SignedRecord, now: float) -> bool:
        self._sweep(key, now)
        records = self._under.get(key, {})
        if self._count >= MAX_RECORDS or (not records and len(self._under) >= MAX_KEYS):
            return False
        if self._of_author[record.author] >= MAX_PER_AUTHOR:
            return False
        if sum(other.record.author == record.author for other in records.values()) >= MAX_PER_AUTHOR_AND_KEY:
            return False
        if len(records) < MAX_PER_KEY:
            return True
        subjects = Counter(other.record.subject for other in records.values())
        crowded, count = subjects.most_common(1)[0]
        if record.subject in subjects or count == 1:
            return False
        newest = next(identity for identity in reversed(records) if records[identity].record.subject == crowded)
        self._remove(key, newest)
        return True

    def _sweep(self, key: bytes, now: float) -> None:
        for identity, kept in list(self._under.get(key, {}).items()):
            if kept.record.is_expired(now):
                self._remove(key, identity)

    def _remove(self, key: bytes, identity: RecordKey) -> None:
        gone = self._under[key].pop(identity)
        self._count -= 1
        _take_one(self._of_author, gone.record.author)
        _take_one(self._of_network, gone.network)
        if not self._under[key]:
            del self._under[key]


def _take_one(counter: Counter[Any], who: object) -> None:
    counter[who] -= 1
    if not counter[who]:
        del counter[who]
