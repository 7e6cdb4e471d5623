"""Who was given which of this peer's records, and who should have them now: repair between two publications.

The rule this file keeps: a record goes to everybody near one of its keys who has not got it, at once when such a peer
appears or moves up, and to nobody twice; when half of those who had it are gone, it is time to look for others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshswarm.dht.contact import Contact
from meshswarm.dht.keys import distance
from meshswarm.dht.region import SPACE
from meshswarm.dht.signed import RecordKey, SignedRecord


@dataclass(slots=True)
class _Given:
    """`covers`: within this distance of the key everybody was asked. `most`: so many had it at the best time.
    `refused`: those who did not take it; they are asked again with the next one."""

    seq: int
    covers: int
    peers: set[bytes] = field(default_factory=set)
    refused: set[bytes] = field(default_factory=set)
    most: int = 0


class Handover:
    """By record and key. Knows no times and asks nobody."""

    def __init__(self) -> None:
        self._given: dict[tuple[RecordKey, bytes], _Given] = {}

    def spreads(self, record: SignedRecord, key: bytes, covers: int) -> None:
        """`record` is being stored at everybody within `covers` of `key`."""
        self._given[record.key, key] = _Given(record.seq, covers)

    def gave(self, record: SignedRecord, key: bytes, peer: bytes) -> None:
        """The peer with this key has it."""
        given = self._given.setdefault((record.key, key), _Given(record.seq, SPACE))
        if given.seq == record.seq:
            given.peers.add(peer)
            given.most = max(given.most, len(given.peers))

    def refused(self, record: SignedRecord, key: bytes, peer: bytes) -> None:
        """The peer with this key did not take it: it is full, or not near, or finds the record wrong."""
        given = self._given.setdefault((record.key, key), _Given(record.seq, SPACE))
        if given.seq == record.seq:
            given.refused.add(peer)

    def lost(self, peer: bytes) -> None:
        """The peer with this key is gone, and with it what it kept."""
        for given in self._given.values():
            given.peers.discard(peer)

    def owes(self, record: SignedRecord, key: bytes, contact: Contact) -> bool:
        """True when `contact` is near enough to `key` for `record`, and has not got it as far as is known."""
        given = self._given.get((record.key, key))
        if given is None or given.seq != record.seq:
            return True
        peer = contact.peer.key
        return peer not in given.peers and peer not in given.refused and distance(contact.node_id, key) < given.covers

    def is_thin(self, record: SignedRecord, keys: Iterable[bytes]) -> bool:
        """True when under one of `keys` more than half of those who had `record` are gone."""
        all_given = (self._given.get((record.key, key)) for key in keys)
        return any(g is not None and g.seq == record.seq and 2 * len(g.peers) < g.most for g in all_given)

    def keep_only(self, records: Iterable[SignedRecord]) -> None:
        """Forgets all but the current records."""
        current = {record.key for record in records}
        self._given = {place: given for place, given in self._given.items() if place[0] in current}
