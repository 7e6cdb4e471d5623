"""Where things are in the table's 160-bit space: node ids, topics and their keys.

The rule this file keeps: no position is free to choose. A node id is the hash of a public key; a record's keys follow
from what the record says and from the swarm, so that a stored record can be checked against the key it is under.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from meshswarm.dht.signed import RecordKind, SignedRecord
from meshswarm.identity import PeerId
from meshswarm.net.swarm import Swarm

ID_BYTES = 20  # the kademlia package works with 160 bits
BLOCK_LAYERS = 4  # layers that share one key: a span of 10 layers is found under 3 or 4 keys


@lru_cache(maxsize=16384)
def node_id(peer: PeerId) -> bytes:
    """The 20-byte place of `peer`: the first bytes of SHA-256 of its public key."""
    return hashlib.sha256(peer.key).digest()[:ID_BYTES]


def distance(a: bytes, b: bytes) -> int:
    """Kademlia's XOR metric of two 20-byte ids."""
    return int.from_bytes(a) ^ int.from_bytes(b)


def blocks(start: int, stop: int) -> range:
    """The layer blocks that layers `[start, stop)` touch."""
    return range(start // BLOCK_LAYERS, -(-stop // BLOCK_LAYERS))


class Topics:
    """The keys of one swarm.

    `scope` names the swarm inside signed records, so that a record of one swarm is worthless in another. In a private
    swarm all of these depend on its key, and tell an outsider nothing; records are sealed for the key they are under.
    """

    def __init__(self, swarm: Swarm) -> None:
        self.is_private = swarm.is_private
        self.seal = swarm.seal
        """`seal(key, record)`: the bytes that are kept and sent under `key`. In a public swarm they are the record."""
        self.admits = swarm.admits
        """`admits(peer)`: False for a peer that the swarm's owner has expelled: nothing it says counts any more."""
        self.unseal = swarm.unseal
        """`unseal(key, bytes)`: the record, or None when these bytes were not sealed for `key` in this swarm."""
        self._dht_key = lru_cache(maxsize=8192)(swarm.dht_key)
        self.scope = swarm.swarm_id
        self.models = self._dht_key(b"models")

    def block(self, model_id: bytes, block: int) -> bytes:
        """The key of the `block`-th group of `BLOCK_LAYERS` layers of a model."""
        return self._dht_key(b"layers" + model_id + block.to_bytes(4))

    def span(self, model_id: bytes, start: int, stop: int) -> list[bytes]:
        """The keys of all blocks that layers `[start, stop)` of a model touch."""
        return [self.block(model_id, block) for block in blocks(start, stop)]

    def holders(self, model_id: bytes) -> bytes:
        """The key of all who hold files of a model."""
        return self._dht_key(b"holders" + model_id)

    def of_record(self, record: SignedRecord) -> list[bytes]:
        """Every key this record belongs under, and no other."""
        if record.kind is RecordKind.CARD:
            return [self.models]
        if record.kind is RecordKind.HOLDER:
            return [self.holders(record.subject)]
        return self.span(record.subject, record.start, record.stop)
