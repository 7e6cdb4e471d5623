"""The routing table: the peers this one knows, in the kademlia package's buckets, and those it should leave alone.

The rule this file keeps: only peers whose key was proved on a connection enter, a peer that answers is never pushed out
by a newcomer, and a peer that does not answer costs one time-out and is then left alone for a while that grows.
The package's buckets do the arithmetic; its clock, its pings and its neighbour search are not used (`find_neighbors`
takes the first k it walks over, which need not be the k nearest; see docs/decisions/0003-dht.md).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kademlia.node import Node
from kademlia.routing import KBucket
from kademlia.routing import RoutingTable as Buckets

from meshswarm.dht.contact import Contact, merge_addresses
from meshswarm.dht.keys import ID_BYTES, distance, node_id
from meshswarm.identity import PeerId

K = 20
MAX_FAILURES = 2
BACK_OFF_S = (20.0, 60.0, 300.0, 900.0)  # after one failure, two, three, and all later ones
_MAX_REMEMBERED_FAILURES = 1024


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A contact in the table. `last_seen`: Unix time of the last answer or question; `rtt_s`: measured, None before."""

    contact: Contact
    last_seen: float
    rtt_s: float | None


class BackOff:
    """Peers that failed, and until when they are left alone."""

    def __init__(self) -> None:
        self._failed: OrderedDict[PeerId, tuple[int, float]] = OrderedDict()

    def failed(self, peer: PeerId, now: float) -> int:
        """Counts one more failure in a row; returns how many it are."""
        count = self._failed.pop(peer, (0, 0.0))[0] + 1
        self._failed[peer] = (count, now + BACK_OFF_S[min(count, len(BACK_OFF_S)) - 1])
        if len(self._failed) > _MAX_REMEMBERED_FAILURES:
            self._failed.popitem(last=False)
        return count

    def cleared(self, peer: PeerId) -> None:
        self._failed.pop(peer, None)

    def holds(self, peer: PeerId, now: float) -> bool:
        return self._failed.get(peer, (0, 0.0))[1] > now

    def held(self, now: float) -> frozenset[PeerId]:
        return frozenset(peer for peer, (_, until) in self._failed.items() if until > now)


class RoutingTable:
    """Contacts by distance from `own`."""

    def __init__(self, own: PeerId, *, k: int = K) -> None:
        self.own = own
        self.k = k
        self.back_off = BackOff()
        self._own_node = Node(node_id(own))
        self._buckets = Buckets(None, k, self._own_node)
        self._known: dict[bytes, Neighbour] = {}
        self._refreshed: dict[tuple[int, int], float] = {}

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._buckets.buckets)

    def __contains__(self, peer: PeerId) -> bool:
        return not self._bucket(node_id(peer)).is_new_node(Node(node_id(peer)))

    def saw(self, contact: Contact, now: float, *, rtt_s: float | None = None) -> bool:
        """A peer proved its key on a connection and can be dialled. True when it is new in the table.

        In a full bucket it only waits for a place (`doubtful` names who should be asked whether he still lives).
        """
        if contact.peer == self.own or not contact.addresses:
            return False
        self.back_off.cleared(contact.peer)
        known = self._known.get(contact.node_id)
        was_there = contact.peer in self
        if known is not None:
            contact = Contact(contact.peer, merge_addresses(contact.addresses, known.contact.addresses))
            rtt_s = known.rtt_s if rtt_s is None else rtt_s
        self._known[contact.node_id] = Neighbour(contact, now, rtt_s)
        self._insert(Node(contact.node_id))
        self._forget_evicted()
        return not was_there and contact.peer in self

    def failed(self, peer: PeerId, now: float) -> None:
        """A peer did not answer: it is left alone for a while, and dropped the second time in a row."""
        if self.back_off.failed(peer, now) >= MAX_FAILURES:
            self._buckets.remove_contact(Node(node_id(peer)))
            if peer not in self:
                self._known.pop(node_id(peer), None)

    def get(self, peer: PeerId) -> Neighbour | None:
        return self._known.get(node_id(peer)) if peer in self else None

    def neighbours(self) -> list[Neighbour]:
        """Everybody in the table, also those left alone at present."""
        return [self._known[identity] for bucket in self._buckets.buckets for identity in bucket.nodes]

    def closest(self, target: bytes, now: float, *, count: int | None = None) -> list[Contact]:
        """The `count` (default k) contacts nearest to `target`, nearest first, without those left alone at present."""
        usable = [n.contact for n in self.neighbours() if not self.back_off.holds(n.contact.peer, now)]
        usable.sort(key=lambda contact: distance(contact.node_id, target))
        return usable[: self.k if count is None else count]

    def closer_than_own(self, target: bytes) -> int:
        """How many contacts are nearer to `target` than this peer is."""
        own = distance(self._own_node.id, target)
        return sum(distance(n.contact.node_id, target) < own for n in self.neighbours())

    def doubtful(self, now: float, *, unseen_s: float) -> list[Contact]:
        """Whom to ask for a sign of life: everybody not seen for `unseen_s`, the one longest unseen first."""
        silent = [n for n in self.neighbours() if now - n.last_seen >= unseen_s]
        silent.sort(key=lambda n: n.last_seen)
        return [n.contact for n in silent if not self.back_off.holds(n.contact.peer, now)]

    def refresh_targets(self, now: float, *, older_than_s: float, rng: random.Random) -> list[bytes]:
        """One random id in each bucket that no lookup went through for `older_than_s`; marks them as looked through.

        With one bucket the lookup of the own id has met everybody there is, and nothing needs a refresh.
        """
        if len(self._buckets.buckets) == 1:
            return []
        targets = []
        for bucket in self._buckets.buckets:
            low, high = bucket.range
            if now - self._refreshed.get((low, high), float("-inf")) >= older_than_s:
                self._refreshed[(low, high)] = now
                targets.append(rng.randint(low, min(high, 2 ** (8 * ID_BYTES) - 1)).to_bytes(ID_BYTES))
        live = {bucket.range for bucket in self._buckets.buckets}
        self._refreshed = {span: when for span, when in self._refreshed.items() if span in live}
        return targets

    def _insert(self, node: Node) -> None:
        """The package's `add_contact` without its ping: splits as section 4.2 of the Kademlia paper says."""
        while True:
            index = self._buckets.get_bucket_for(node)
            bucket = self._buckets.buckets[index]
            if bucket.add_node(node):
                return
            if not bucket.has_in_range(self._own_node) and bucket.depth() % 5 == 0:
                return
            self._buckets.split_bucket(index)

    def _bucket(self, identity: bytes) -> KBucket:
        return self._buckets.buckets[self._buckets.get_bucket_for(Node(identity))]

    def _forget_evicted(self) -> None:
        """A bucket drops the oldest of those who wait for a place on its own: drop what is known of them too."""
        waiting = sum(len(bucket.replacement_nodes) for bucket in self._buckets.buckets)
        if len(self._known) > 2 * (len(self) + waiting) + self.k:
            keep = set(_members(self._buckets.buckets))
            self._known = {identity: known for identity, known in self._known.items() if identity in keep}


def _members(buckets: Iterable[KBucket]) -> Iterable[bytes]:
    for bucket in buckets:
        yield from bucket.nodes
        yield from bucket.replacement_nodes
