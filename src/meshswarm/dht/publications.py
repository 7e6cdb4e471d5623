"""What this peer says about itself: numbered, signed anew before it expires, and withdrawn in so many words.

The rule this file keeps: numbers only rise, also over restarts (they follow the clock), and what was said under a key
that no longer applies is withdrawn there, so that readers never see a peer serve layers it has moved away from.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshswarm.dht.keys import Topics, blocks
from meshswarm.dht.signed import LIFETIME_S, RecordKey, RecordKind, SignedRecord
from meshswarm.identity import Identity


@dataclass(frozen=True, slots=True)
class _Said:
    record: SignedRecord
    at: float


class Publications:
    """The records of one peer. Every method that returns records expects them to be stored in the swarm."""

    def __init__(self, identity: Identity, topics: Topics) -> None:
        self._identity = identity
        self._topics = topics
        self._said: dict[RecordKey, _Said] = {}
        self._last_seq = 0
        self._made: dict[int, int] = {}  # numbers and ends of all that this process has signed and that may be about
        self._began_ms: int | None = None

    def say(
        self, kind: RecordKind, subject: bytes, body: bytes, now: float, *, layers: tuple[int, int] = (0, 0)
    ) -> list[SignedRecord]:
        """A new statement in place of the last of this kind and subject.

        Raises WireError when it is too large for a record. When the layers changed, the old ones are withdrawn first.
        """
        previous = self._said.get((kind.value, self._identity.peer_id.key, subject))
        records = []
        if previous is not None and not previous.record.is_tombstone:
            old = previous.record.start, previous.record.stop
            if not set(blocks(*old)) <= set(blocks(*layers)):
                records.append(self._sign(kind, subject, b"", now, old))
        records.append(self._sign(kind, subject, body, now, layers))
        self._said[records[-1].key] = _Said(records[-1], now)
        return records

    def withdraw(self, kind: RecordKind, subject: bytes, now: float) -> list[SignedRecord]:
        """The end of a statement; nothing when there was none."""
        said = self._said.get((kind.value, self._identity.peer_id.key, subject))
        if said is None or said.record.is_tombstone:
            return []
        record = self._sign(kind, subject, b"", now, (said.record.start, said.record.stop))
        self._said[record.key] = _Said(record, now)
        return [record]

    def current(self, now: float) -> list[SignedRecord]:
        """The last word on everything, tombstones included, as far as it has not expired."""
        return [said.record for said in self._said.values() if not said.record.is_expired(now)]

    def due(self, now: float, *, every_s: float) -> list[SignedRecord]:
        """Statements that were last said `every_s` ago or earlier: say them again."""
        standing = [said for said in self._said.values() if not said.record.is_tombstone]
        return [said.record for said in standing if now - said.at >= every_s]

    def is_foreign(self, record: SignedRecord, now: float) -> bool:
        """True for a record of this peer that this process did not make and no earlier one can have made: a second
        peer runs with the same key."""
        if self._began_ms is None:
            self._began_ms = int(now * 1000)
        return record.seq > self._began_ms and record.seq not in self._made

    def _sign(self, kind: RecordKind, subject: bytes, body: bytes, now: float, layers: tuple[int, int]) -> SignedRecord:
        now_ms = int(now * 1000)
        self._began_ms = now_ms if self._began_ms is None else self._began_ms
        self._last_seq = max(self._last_seq + 1, now_ms)
        expires_ms = int((now + LIFETIME_S) * 1000)
        self._made = {seq: end for seq, end in self._made.items() if end > now_ms} | {self._last_seq: expires_ms}
        return SignedRecord.sign(
            self._identity,
            kind,
            scope=self._topics.scope,
            subject=subject,
            layers=layers,
            seq=self._last_seq,
            expires_ms=expires_ms,
            body=body,
        )
