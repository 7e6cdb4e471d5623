"""With whom this peer gossips: a bounded set of neighbours, and others to turn to when one is lost.

Some neighbours were chosen because they serve the same models, some at random, so that the whole stays connected, some
because routes lead through them, and some chose this peer (active and passive views as in HyParView: Leitão, Pereira,
Rodrigues, DSN 2007). The rule this file keeps: both sides agree on being neighbours, neither has more than
`MAX_NEIGHBOURS`, and only peers that really answered become any.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from meshswarm.config import Address
from meshswarm.dht.contact import Contact, merge_addresses
from meshswarm.identity import PeerId

MAX_NEIGHBOURS = 24
KIN = 5  # chosen among those who serve the same models
OTHERS = 5  # chosen at random
ROUTES = 4  # chosen because sessions go through them
MAX_INCOMING = 12  # that chose this peer: strangers never take the places of those it chose itself
MAX_PASSIVE = 128
LONELY = 2  # who has fewer neighbours is taken in even where it is full
DECLINED_S = 60.0
FAILED_S = 20.0
MISBEHAVED_S = 600.0
SILENT_S = 120.0  # a neighbour that nobody swapped with for this long is none


@dataclass(slots=True)
class Neighbour:
    """`is_chosen`: by this peer; `swapped_at`: the last exchange in either direction. `told_number`: of the last own
    report it got, at `told_at`."""

    peer: PeerId
    addresses: tuple[Address, ...]
    is_chosen: bool
    since: float
    swapped_at: float
    told_number: int = -1
    told_at: float = float("-inf")


@dataclass(slots=True)
class _Known:
    addresses: tuple[Address, ...]
    not_before: float = float("-inf")
    is_met: bool = False  # it was connected, or the table knows it: it is more than an address somebody told


@dataclass(slots=True)
class Neighbours:
    """`active`: the neighbours. `kin`: peers that serve what this one serves or asks for; `routes`: peers in use."""

    own: PeerId
    rng: random.Random
    active: dict[PeerId, Neighbour] = field(default_factory=dict)
    kin: set[PeerId] = field(default_factory=set)
    routes: frozenset[PeerId] = frozenset()
    _passive: OrderedDict[PeerId, _Known] = field(default_factory=OrderedDict)
    _asked: set[PeerId] = field(default_factory=set)

    def met(self, peer: PeerId, addresses: Iterable[Address], *, is_hearsay: bool = False) -> None:
        """A peer exists, or so a neighbour says (`is_hearsay`); the newest addresses come first."""
        if peer == self.own:
            return
        neighbour = self.active.get(peer)
        if neighbour is not None:
            neighbour.addresses = merge_addresses(addresses, neighbour.addresses)
            return
        known = self._passive.pop(peer, None) or _Known(())
        known.addresses = merge_addresses(addresses, known.addresses)
        known.is_met = known.is_met or not is_hearsay
        self._passive[peer] = known
        while len(self._passive) > MAX_PASSIVE:
            spare = [each for each in self._passive if each not in self.kin and each not in self.routes]
            heard_of = (each for each in spare[:-1] if not self._passive[each].is_met)
            self._passive.pop(next(heard_of, next(iter(spare or self._passive))))

    def has_met(self, peer: PeerId) -> bool:
        """Whether it is more than a contact that some neighbour told."""
        known = self._passive.get(peer)
        return peer in self.active or peer in self.routes or (known is not None and known.is_met)

    def known(self) -> list[PeerId]:
        """Neighbours and others."""
        return [*self.active, *self._passive]

    def forget(self, peer: PeerId) -> None:
        """As if it had never been heard of."""
        self.active.pop(peer, None)
        self._passive.pop(peer, None)
        self.kin.discard(peer)
        self._asked.discard(peer)

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        neighbour = self.active.get(peer)
        if neighbour is not None:
            return neighbour.addresses
        known = self._passive.get(peer)
        return () if known is None else known.addresses

    def wanted(self, now: float, gone: Collection[PeerId]) -> PeerId | None:
        """Somebody to ask to become a neighbour; None when there are enough, or nobody is left to ask."""
        if len(self.active) + len(self._asked) >= MAX_NEIGHBOURS:
            return None
        chosen = [peer for peer, neighbour in self.active.items() if neighbour.is_chosen]
        chosen += self._asked
        free = [
            peer
            for peer, known in self._passive.items()
            if known.not_before <= now and peer not in gone and peer not in self._asked
        ]
        for pool, n_wanted in ((self.routes, ROUTES), (self.kin, KIN)):
            candidates = [peer for peer in free if peer in pool]
            if candidates and sum(peer in pool for peer in chosen) < n_wanted:
                return self.rng.choice(candidates)
        if free and sum(peer not in self.kin for peer in chosen) < OTHERS:
            return self.rng.choice(free)
        return None

    def lost_one(self, now: float, gone: Collection[PeerId]) -> PeerId | None:
        """One of those that are thought dead, to see whether it is back."""
        lost = [peer for peer, known in self._passive.items() if peer in gone and known.not_before <= now]
        return self.rng.choice(lost) if lost else None

    def asked(self, peer: PeerId) -> None:
        self._asked.add(peer)

    def accept(self, peer: PeerId, *, is_lonely: bool, keep: Collection[PeerId], now: float) -> bool:
        """Whether the peer that just asked is a neighbour from now on. `keep`: never given up for a lonely one."""
        neighbour = self.active.get(peer)
        if neighbour is not None:
            neighbour.swapped_at = now
            return True
        incoming = [each for each, one in self.active.items() if not one.is_chosen]
        if len(incoming) >= MAX_INCOMING or len(self.active) >= MAX_NEIGHBOURS:
            spare = [each for each in incoming if each not in keep]
            if not is_lonely or not spare:
                return False
            self.drop(self.rng.choice(spare), now)
        self._enter(peer, now, is_chosen=False)
        return True

    def answered(self, peer: PeerId, accepted: bool, now: float) -> None:
        """What became of a swap that this peer asked for."""
        self._asked.discard(peer)
        if not accepted:
            self.drop(peer, now, not_before=now + DECLINED_S)
        elif peer in self.active:
            self.active[peer].swapped_at = now
        elif len(self.active) < MAX_NEIGHBOURS:
            self._enter(peer, now, is_chosen=True)

    def drop(self, peer: PeerId, now: float, *, not_before: float = float("-inf")) -> None:
        """No neighbour any more, and not asked again before that time."""
        self._asked.discard(peer)
        neighbour = self.active.pop(peer, None)
        if neighbour is not None:
            self.met(peer, neighbour.addresses)
        if peer in self._passive:
            self._passive[peer].not_before = max(self._passive[peer].not_before, not_before)

    def forget_silent(self, now: float) -> None:
        for peer in [peer for peer, one in self.active.items() if now - one.swapped_at > SILENT_S]:
            self.drop(peer, now)

    def next_partner(self, skip: Collection[PeerId]) -> Neighbour | None:
        """The neighbour that was swapped with longest ago, but for those in `skip`."""
        waiting = [one for one in self.active.values() if one.peer not in skip and one.peer not in self._asked]
        return min(waiting, key=lambda one: one.swapped_at, default=None)

    def sample(self, n: int, skip: Collection[PeerId] = ()) -> list[Neighbour]:
        choice = [one for one in self.active.values() if one.peer not in skip]
        return self.rng.sample(choice, min(n, len(choice)))

    def contacts(self, n: int, skip: Collection[PeerId]) -> tuple[Contact, ...]:
        """Some peers that somebody else may turn to."""
        known = [Contact(one.peer, one.addresses) for one in self.active.values()]
        known += [Contact(peer, one.addresses) for peer, one in self._passive.items()]
        usable = [contact for contact in known if contact.addresses and contact.peer not in skip]
        return tuple(self.rng.sample(usable, min(n, len(usable))))

    @property
    def knows_few(self) -> bool:
        return len(self._passive) < 16

    def _enter(self, peer: PeerId, now: float, *, is_chosen: bool) -> None:
        known = self._passive.pop(peer, None)
        self.active[peer] = Neighbour(peer, () if known is None else known.addresses, is_chosen, now, now)
