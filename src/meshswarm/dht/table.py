"""The routing table: the peers this one knows, in the kademlia package's buckets, and those it should leave alone.

The rule this file keeps: only peers whose key was proved on a connection enter; a peer that answers is pushed out by a
newcomer only where it has more than its kind's share; no network has more than a few places; and a peer that does not
answer costs one time-out and is then left alone for a while that grows.

One bucket for each length of the prefix that a contact shares with this peer, the last for all longer ones, which is
split when it is full (section 2.2 of the Kademlia paper). Shares and caps: docs/decisions/0012-dht-for-strangers.md.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest

from kademlia.node import Node
from kademlia.routing import KBucket

from meshswarm.config import Address
from meshswarm.dht.contact import Contact, merge_addresses
from meshswarm.dht.keys import ID_BYTES, node_id
from meshswarm.dht.networks import Networks
from meshswarm.dht.region import spread
from meshswarm.identity import PeerId

K = 20
MAX_FAILURES = 2
BACK_OFF_S = (20.0, 60.0, 300.0, 900.0)  # after one failure, two, three, and all later ones
_MAX_REMEMBERED_FAILURES = 1024
_MAX_TRIED = 8  # addresses of one peer that failed; beyond that its new ones are not tried any more either
_ID_BITS = 8 * ID_BYTES


@dataclass(frozen=True, slots=True)
class Caps:
    """How many contacts of one network there may be in one bucket, in the whole table, and on one path of a lookup."""

    per_bucket: int
    per_table: int
    per_path: int  # of a lookup


STRANGERS = Caps(per_bucket=2, per_table=10, per_path=3)
FRIENDS = Caps(per_bucket=2**30, per_table=2**30, per_path=2**30)
"""Of a private swarm: whoever is there holds its key, and often they all are in one network."""


class Neighbour(Node):  # type: ignore[misc]
    """A contact in the table. `last_seen`: Unix time of the last answer or question; `rtt_s`: measured, None before.

    `is_outbound`: this peer dialled it, rather than being dialled by it. `network`: of the address it was met at.
    """

    __slots__ = ("contact", "is_outbound", "last_seen", "network", "rtt_s")

    def __init__(
        self, contact: Contact, now: float, rtt_s: float | None, is_outbound: bool, network: bytes | None
    ) -> None:
        super().__init__(contact.node_id)
        self.contact = contact
        self.last_seen = now
        self.rtt_s = rtt_s
        self.is_outbound = is_outbound
        self.network = network


class Bucket(KBucket):  # type: ignore[misc]
    """The package's bucket, with shares: who gives way when it is full, and who follows when somebody is gone."""

    def full(self) -> bool:
        return len(self.nodes) >= int(self.ksize)

    def count_of(self, network: bytes) -> int:
        return sum(each.network == network for each in self.nodes.values())

    def giving_way_to(self, newcomer: Neighbour) -> Neighbour | None:
        """The newest member of a kind that has more than its share, when `newcomer` is not of that kind.

        Peers that dialled this one may have two thirds while there are others, peers of local networks half.
        """
        members: list[Neighbour] = list(self.nodes.values())
        inbound = [each for each in members if not each.is_outbound]
        if newcomer.is_outbound and 3 * len(inbound) > 2 * self.ksize:
            return inbound[-1]
        local = [each for each in members if each.network is None]
        if newcomer.network is not None and 2 * len(local) > self.ksize:
            return local[-1]
        return None

    def wait(self, newcomer: Neighbour) -> None:
        """Keeps `newcomer` for when a place is free, in place of the one that has waited longest if need be."""
        self.replacement_nodes.pop(newcomer.id, None)
        self.replacement_nodes[newcomer.id] = newcomer
        while len(self.replacement_nodes) > self.ksize // 2:
            self.replacement_nodes.popitem(last=False)


class BackOff:
    """Peers that failed, and until when they are left alone.

    What fails is a peer at the addresses that were tried: who is named at another one may be asked there, so that
    nobody can keep others away from a peer by spreading wrong addresses of it.
    """

    def __init__(self) -> None:
        self._failed: OrderedDict[bytes, tuple[PeerId, int, float, tuple[Address, ...]]] = OrderedDict()

    def __bool__(self) -> bool:
        """True when there is anybody in it."""
        return bool(self._failed)

    def failed(self, peer: PeerId, now: float, tried: Iterable[Address] = ()) -> int:
        """Counts one more failure in a row; returns how many it are."""
        _, count, _, before = self._failed.pop(peer.key, (peer, 0, 0.0, ()))
        count += 1
        addresses = tuple(dict.fromkeys((*before, *tried)))[:_MAX_TRIED]
        self._failed[peer.key] = (peer, count, now + BACK_OFF_S[min(count, len(BACK_OFF_S)) - 1], addresses)
        if len(self._failed) > _MAX_REMEMBERED_FAILURES:
            self._failed.popitem(last=False)
        return count

    def cleared(self, peer: PeerId) -> None:
        self._failed.pop(peer.key, None)

    def holds(self, peer: PeerId, now: float) -> bool:
        known = self._failed.get(peer.key)
        return known is not None and known[2] > now

    def holds_at(self, contact: Contact, now: float) -> bool:
        """True when `contact` is held and names no address that has not been tried."""
        known = self._failed.get(contact.peer.key)
        if known is None or known[2] <= now:
            return False
        tried = known[3]
        return not tried or len(tried) >= _MAX_TRIED or all(address in tried for address in contact.addresses)

    def held(self, now: float) -> frozenset[PeerId]:
        return frozenset(peer for peer, _, until, _ in self._failed.values() if until > now)


class RoutingTable:
    """Contacts by distance from `own`."""

    def __init__(self, own: PeerId, *, k: int = K, caps: Caps = STRANGERS) -> None:
        self.own = own
        self.k = k
        self.back_off = BackOff()
        self.caps = caps
        self.networks = Networks()
        self._place = int.from_bytes(node_id(own))
        self._buckets = [Bucket(0, 2**_ID_BITS - 1, k)]
        self._looked_through: list[float] = [float("-inf")]
        self._networks: Counter[bytes] = Counter()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, peer: PeerId) -> bool:
        return self.get(peer) is not None

    def saw(self, contact: Contact, now: float, *, rtt_s: float | None = None, is_outbound: bool = False) -> bool:
        """A peer proved its key on a connection, at its first address, and can be dialled. True when it is new here.

        In a full bucket it only waits for a place (`doubtful` names who should be asked whether he still lives).
        """
        if contact.peer == self.own or not contact.addresses:
            return False
        self.back_off.cleared(contact.peer)
        bucket = self._bucket(contact.node_id)
        known: Neighbour | None = bucket.nodes.get(contact.node_id)
        was_there = known is not None
        waiting: Neighbour | None = bucket.replacement_nodes.pop(contact.node_id, None)
        before = known or waiting
        network = self.networks.of(contact.addresses[0])
        if before is None:
            return self._admit(Neighbour(contact, now, rtt_s, is_outbound, network))
        if contact.addresses != before.contact.addresses:
            before.contact = Contact(contact.peer, merge_addresses(contact.addresses, before.contact.addresses))
        before.last_seen = now
        before.rtt_s = before.rtt_s if rtt_s is None else rtt_s
        before.is_outbound = before.is_outbound or is_outbound
        if was_there and network == before.network:
            return False
        if was_there:
            self._remove(bucket, before)
        before.network = network
        return self._admit(before) and not was_there

    def failed(self, peer: PeerId, now: float, tried: Iterable[Address] = ()) -> bool:
        """A peer did not answer: it is left alone for a while, and given up the second time in a row (then True)."""
        if self.back_off.failed(peer, now, tried) < MAX_FAILURES:
            return False
        self.drop(peer)
        return True

    def drop(self, peer: PeerId) -> None:
        """Forgets a peer; one that waited for a place takes its own."""
        bucket = self._bucket(node_id(peer))
        bucket.replacement_nodes.pop(node_id(peer), None)
        dropped: Neighbour | None = bucket.nodes.get(node_id(peer))
        if dropped is None:
            return
        self._remove(bucket, dropped)
        for follower in reversed(list(bucket.replacement_nodes.values())):
            if self._has_room_for(bucket, follower):
                del bucket.replacement_nodes[follower.id]
                self._add(bucket, follower)
                break

    def get(self, peer: PeerId) -> Neighbour | None:
        identity = node_id(peer)
        found: Neighbour | None = self._bucket(identity).nodes.get(identity)
        return found

    def known(self, contact: Contact) -> Neighbour | None:
        """As `get`."""
        found: Neighbour | None = self._buckets[self._index(contact.place)].nodes.get(contact.node_id)
        return found

    def neighbours(self) -> list[Neighbour]:
        """Everybody in the table, also those left alone at present."""
        return [each for bucket in self._buckets for each in bucket.nodes.values()]

    def worth_keeping(self) -> list[Neighbour]:
        """Everybody as above, one of each bucket after the other: the first few know the whole space. Of a bucket those
        that were dialled from here come first, then those heard last: to be heard costs a stranger nothing."""
        ranked = (
            sorted(bucket.nodes.values(), key=lambda each: (not each.is_outbound, -each.last_seen))
            for bucket in self._buckets
        )
        return [each for each in chain.from_iterable(zip_longest(*ranked)) if each is not None]

    def closest(self, target: bytes, now: float, *, count: int | None = None) -> list[Contact]:
        """The `count` (default k) contacts nearest to `target`, nearest first, without those left alone at present."""
        wanted = self.k if count is None else count
        return [each.contact for each in self._nearest(int.from_bytes(target), now, wanted, 0)[:wanted]]

    def around(self, target: bytes, now: float, *, radius: int) -> list[Contact]:
        """The k nearest contacts as above, and a share of the others within `radius` (see `region.spread`)."""
        place = int.from_bytes(target)
        near = self._nearest(place, now, self.k, radius)
        if len(near) <= self.k:
            return [each.contact for each in near]
        by_distance = {each.long_id ^ place: each for each in near}
        return [by_distance[distance].contact for distance in spread(list(by_distance), self.k, radius)]

    def distances(self, target: bytes, now: float) -> list[int]:
        """From `target` to its k nearest contacts, ascending."""
        place = int.from_bytes(target)
        return [each.long_id ^ place for each in self._nearest(place, now, self.k, 0)[: self.k]]

    def closer_than_own(self, target: bytes) -> int:
        """How many contacts are nearer to `target` than this peer is."""
        place = int.from_bytes(target)
        apart, last = self._place ^ place, len(self._buckets) - 1
        whole = sum(len(self._buckets[index].nodes) for index in range(last) if apart >> (_ID_BITS - 1 - index) & 1)
        mixed = sum(each.long_id ^ place < apart for each in self._buckets[last].nodes.values())
        return int(whole + mixed)

    def doubtful(self, now: float, *, unseen_s: float) -> list[Contact]:
        """Whom to ask for a sign of life: everybody not seen for `unseen_s`, the one longest unseen first."""
        silent = [n for n in self.neighbours() if now - n.last_seen >= unseen_s]
        silent.sort(key=lambda n: n.last_seen)
        return [n.contact for n in silent if not self.back_off.holds(n.contact.peer, now)]

    def looked_through(self, target: bytes, now: float) -> None:
        """A lookup of `target` begins: its bucket needs no refresh for a while."""
        self._looked_through[self._index(int.from_bytes(target))] = now

    def refresh_targets(self, now: float, *, older_than_s: float, rng: random.Random) -> list[bytes]:
        """One random id in each bucket that no lookup went through for `older_than_s`; marks them as looked through.

        With one bucket the lookup of the own id has met everybody there is, and nothing needs a refresh.
        """
        if len(self._buckets) == 1:
            return []
        targets = []
        for index, bucket in enumerate(self._buckets):
            if now - self._looked_through[index] >= older_than_s:
                self._looked_through[index] = now
                targets.append(rng.randint(*bucket.range).to_bytes(ID_BYTES))
        return targets

    # -- inside

    def _index(self, place: int) -> int:
        return min(_ID_BITS - (self._place ^ place).bit_length(), len(self._buckets) - 1)

    def _bucket(self, identity: bytes) -> Bucket:
        return self._buckets[self._index(int.from_bytes(identity))]

    def _outwards(self, place: int) -> Iterator[Bucket]:
        """All buckets, so that everybody in one is nearer to `place` than everybody in the next."""
        apart, last = self._place ^ place, len(self._buckets) - 1
        on_its_side = [index for index in range(last) if apart >> (_ID_BITS - 1 - index) & 1]
        yield from (self._buckets[index] for index in on_its_side)
        yield self._buckets[last]
        others = set(range(last)).difference(on_its_side)
        yield from (self._buckets[index] for index in sorted(others, reverse=True))

    def _nearest(self, place: int, now: float, count: int, radius: int) -> list[Neighbour]:
        """At least `count` of those not left alone, and all within `radius`, nearest first."""
        found: list[Neighbour] = []
        holds = self.back_off.holds if self.back_off else None
        for bucket in self._outwards(place):
            members = [each for each in bucket.nodes.values() if holds is None or not holds(each.contact.peer, now)]
            members.sort(key=lambda each: each.long_id ^ place)
            if len(found) >= count and members and members[0].long_id ^ place >= radius:
                break
            found += members
        return [each for at, each in enumerate(found) if at < count or each.long_id ^ place < radius]

    def _admit(self, newcomer: Neighbour) -> bool:
        while True:
            index = self._index(newcomer.long_id)
            bucket = self._buckets[index]
            if not bucket.full() or index < len(self._buckets) - 1 or index >= _ID_BITS - 1:
                break
            self._split_last()
        if not self._has_room_for(bucket, newcomer):
            return False
        if bucket.full():
            leaver = bucket.giving_way_to(newcomer)
            if leaver is None:
                bucket.wait(newcomer)
                return False
            self._remove(bucket, leaver)
            bucket.wait(leaver)
        self._add(bucket, newcomer)
        return True

    def _has_room_for(self, bucket: Bucket, newcomer: Neighbour) -> bool:
        """True when its network has not got its share of places already."""
        network = newcomer.network
        if network is None:
            return True
        return self._networks[network] < self.caps.per_table and bucket.count_of(network) < self.caps.per_bucket

    def _add(self, bucket: Bucket, newcomer: Neighbour) -> None:
        bucket.nodes[newcomer.id] = newcomer
        self._count += 1
        if newcomer.network is not None:
            self._networks[newcomer.network] += 1

    def _remove(self, bucket: Bucket, leaver: Neighbour) -> None:
        del bucket.nodes[leaver.id]
        self._count -= 1
        if leaver.network is not None:
            self._networks[leaver.network] -= 1
            if not self._networks[leaver.network]:
                del self._networks[leaver.network]

    def _split_last(self) -> None:
        """The last bucket becomes one for its length of prefix, and a new last one."""
        depth = len(self._buckets) - 1
        full = self._buckets.pop()
        low, high = full.range
        middle = (low + high) // 2
        own_is_low = self._place <= middle
        apart = Bucket(middle + 1, high, self.k) if own_is_low else Bucket(low, middle, self.k)
        last = Bucket(low, middle, self.k) if own_is_low else Bucket(middle + 1, high, self.k)
        for member in full.nodes.values():
            half = apart if (self._place ^ member.long_id).bit_length() == _ID_BITS - depth else last
            half.nodes[member.id] = member
        for member in full.replacement_nodes.values():
            half = apart if (self._place ^ member.long_id).bit_length() == _ID_BITS - depth else last
            half.wait(member)
        self._buckets += [apart, last]
        self._looked_through.append(self._looked_through[-1])
