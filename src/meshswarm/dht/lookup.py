"""One iterative lookup as a state machine: whom to ask next, and when enough of the right peers have answered.

Kademlia's lookup (Maymounkov and Mazieres 2002, section 2.3) over disjoint paths (Baumgart and Mies, "S/Kademlia",
2007, section 4.4): the contacts to start from are dealt out to four paths; what a peer names counts for the path on
which it was asked; nobody is asked twice. It ends when, for every path, the k nearest that this path knows of have
answered, and so have those of the region around the key that should hold k peers (`region`). Records are united from
all answers. So a peer that hides or invents some changes its own path, and peers that crowd around a key hide nobody.

The rule this file keeps: no answer of anybody makes a lookup longer than its budgets, or a path stop another one.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from meshswarm.dht.contact import Contact, merge_addresses
from meshswarm.dht.keys import node_id
from meshswarm.dht.networks import Networks
from meshswarm.dht.region import SPACE, is_crowded, spread
from meshswarm.dht.table import STRANGERS, K
from meshswarm.identity import PeerId

ALPHA = 5
PATHS = 4
STALL_S = 0.5  # a question unanswered this long no longer keeps others from being asked
PATH_QUESTIONS = 3 * K // 2  # of one path, so that liars on it cannot use up what the others need
REGION_QUESTIONS = 2 * K  # beyond the paths' own: the rest of the region
MAX_QUESTIONS = PATHS * PATH_QUESTIONS + REGION_QUESTIONS
MAX_PLACES = 3 * K  # at which one record is stored


@dataclass(frozen=True, slots=True)
class Found:
    """A peer near the target that answered, with the token it gave for storing there."""

    contact: Contact
    token: bytes


class _State(Enum):
    NEW = "not asked yet"
    ASKED = "asked"
    FOUND = "answered"
    FAILED = "did not answer"


class _Candidate:
    """One contact. `paths`: bit p is set when somebody asked on path p named it; `path`: on which it was asked."""

    __slots__ = ("contact", "is_retried", "network", "path", "paths", "rounds", "state", "token")

    def __init__(self, contact: Contact, network: bytes | None, paths: int, rounds: int) -> None:
        self.contact = contact
        self.network = network
        self.paths = paths
        self.path: int | None = None
        self.rounds = rounds
        self.state = _State.NEW
        self.token = b""
        self.is_retried = False


class Lookup:
    """Drive it: ask everybody `next_questions` returns; report `answered` or `failed` for each; until `done`.

    `own` never appears among those to be asked. `start`: the nearest contacts the table knows. `radius`: within which
    k peers are expected, 0 when nobody knows; `is_sure`: that it is well enough known to call a crowd one. Of one
    network, `per_network` peers count on one path.
    """

    def __init__(
        self,
        target: bytes,
        start: Iterable[Contact],
        *,
        own: PeerId,
        k: int = K,
        alpha: int = ALPHA,
        radius: int = 0,
        is_sure: bool = False,
        networks: Networks | None = None,
        per_network: int = STRANGERS.per_path,
    ) -> None:
        self.target = target
        self.radius = radius
        self.is_noted = False
        """What it found out about the swarm's size has been taken note of."""
        self.is_dense = False
        """More peers crowd around the target than a swarm of this size explains: somebody may want to hide what is
        there. The region has been widened since."""
        self._place = int.from_bytes(target)
        self._own = int.from_bytes(node_id(own))
        self._k = k
        self._alpha = alpha
        self._is_sure = is_sure
        self._networks = networks or Networks()
        self._per_network = per_network
        self._of_network: Counter[tuple[int, bytes]] = Counter()  # candidates by path, as a bit, and network
        self._known: dict[int, _Candidate] = {}  # by distance
        self._order: list[int] = []  # distances of all but those that failed, ascending
        self._pending: dict[int, float] = {}  # asked when
        self._spent = [0] * (PATHS + 1)  # questions of each path, and of the region's rest
        self._reached = 0  # paths that know anybody, as bits
        self._short: list[list[int]] | None = None  # who matters to each path; None: to be found out again
        self._rest: list[int] = []  # who else matters, the outermost first
        self._deal(start)

    @property
    def done(self) -> bool:
        """True when nobody is left to ask and nobody asked is still owed an answer that could matter."""
        shortlists, rest = self._wanted()
        for path, wanted in enumerate((*shortlists, rest)):
            for at in wanted:
                state = self._known[at].state
                if state is _State.ASKED or (state is _State.NEW and self._may_ask(path)):
                    return False
        return True

    @property
    def rounds(self) -> int:
        """How many questions had to follow one another to come to the peers that were found."""
        return max((c.rounds for c in self._found()), default=0)

    def next_questions(self, now: float) -> list[Contact]:
        """Whom to ask now, nearest first: at most alpha are waited for at a time, not counting the slow ones."""
        room = self._alpha - sum(now - when < STALL_S for when in self._pending.values())
        chosen: list[int] = []
        if room > 0:
            shortlists, rest = self._wanted()
            waiting = [self._unasked(shortlist) for shortlist in shortlists]
            while len(chosen) < room:
                for each in waiting:
                    while each and self._known[each[-1]].state is not _State.NEW:
                        each.pop()
                turns = [(self._spent[p], waiting[p][-1], p) for p in range(PATHS) if waiting[p] and self._may_ask(p)]
                if not turns:
                    break
                _, at, path = min(turns)  # the path that has asked least
                self._ask(at, path, now)
                chosen.append(at)
            for at in rest:
                if len(chosen) >= room or not self._may_ask(PATHS):
                    break
                if self._known[at].state is _State.NEW:
                    chosen.append(at)
                    self._ask(at, PATHS, now)
        return [self._known[at].contact for at in sorted(chosen)]

    def joins_question(self, contact: Contact, now: float) -> bool:
        """True when this lookup would ask `contact` anyway and does so now, along with another one."""
        at = contact.place ^ self._place
        known = self._known.get(at)
        if known is None or known.state is not _State.NEW:
            return False
        shortlists, rest = self._wanted()
        for path, wanted in enumerate((*shortlists, rest)):
            if self._may_ask(path) and at in wanted:
                self._ask(at, path, now)
                return True
        return False

    def answered(self, peer: Contact, token: bytes, contacts: Sequence[Contact]) -> None:
        """An asked peer answered. Of what it names only as many count as a region may have."""
        at = peer.place ^ self._place
        if at not in self._known:
            self._learn(at, peer, (1 << PATHS) - 1, 1)
        asked = self._known.get(at)
        self._pending.pop(at, None)
        if asked is None or asked.state is _State.FAILED or not self._counts_where_it_is(asked, peer):
            return
        self._short = None
        asked.contact, asked.token, asked.state = peer, token, _State.FOUND
        named = {contact.place ^ self._place: contact for contact in contacts}
        named.pop(self._own ^ self._place, None)
        on = self._paths_of(asked)
        for number, each in enumerate(spread(sorted(named), self._k, self.radius)):
            self._learn(each, named[each], on[number % len(on)], asked.rounds + 1)
        self._widen_if_dense()

    def failed(self, peer: Contact) -> None:
        """An asked peer did not answer, or not in order."""
        at = peer.place ^ self._place
        known = self._known.get(at)
        if known is not None and known.state is not _State.FAILED:
            known.state = _State.FAILED
            self._order.remove(at)
            self._uncount(known)
        self._pending.pop(at, None)
        self._short = None
        self._widen_if_dense()

    def found(self) -> list[Found]:
        """The peers that answered and matter, nearest first: the k nearest of each path, and the region's."""
        return [Found(each.contact, each.token) for each in self._found()[:MAX_PLACES]]

    def distances(self) -> list[int]:
        """From the target to the k nearest peers that answered, ascending."""
        answered = (at for at in self._order if self._known[at].state is _State.FOUND)
        return [at for at, _ in zip(answered, range(self._k), strict=False)]

    def nearest(self) -> list[Contact]:
        """Those known to it, whether they were asked or not, that answers are likely to name again: the nearest, and
        such a share of the others as answers hold."""
        return [self._known[at].contact for at in spread(self._order, self._k, self.radius)]

    def covers(self) -> int:
        """Within this distance of the target everybody who should keep something here was found."""
        found = self._found()
        if len(found) < self._k:
            return SPACE
        return max(self.radius, found[-1].contact.place ^ self._place)

    # -- inside

    def _deal(self, start: Iterable[Contact]) -> None:
        """Contacts of one network start on one path: a network that somebody owns holds no more than that."""
        sizes = [0] * PATHS
        path_of: dict[bytes, int] = {}
        for contact in sorted(start, key=lambda contact: contact.place ^ self._place):
            network = self._networks.of(contact.addresses[0]) if contact.addresses else None
            path = sizes.index(min(sizes)) if network is None or network not in path_of else path_of[network]
            if network is not None:
                path_of[network] = path
            sizes[path] += 1
            if contact.place != self._own:
                self._learn(contact.place ^ self._place, contact, 1 << path, 1)

    def _paths_of(self, asked: _Candidate) -> list[int]:
        """The paths, as bits, for which the answer of `asked` counts: its own, and those that know nobody yet."""
        if asked.path is None or asked.path == PATHS:
            return [asked.paths & -asked.paths]
        return [1 << asked.path, *(1 << path for path in range(PATHS) if not self._reached >> path & 1)]

    def _learn(self, at: int, contact: Contact, paths: int, rounds: int) -> None:
        self._reached |= paths
        known = self._known.get(at)
        if known is None:
            network = self._networks.of(contact.addresses[0])
            counted = self._count(network, paths)
            if not counted:
                return
            self._known[at] = _Candidate(contact, network, counted, rounds)
            bisect.insort(self._order, at)
        elif known.state is not _State.FAILED:
            known.paths |= self._count(known.network, paths & ~known.paths)
        else:
            if known.is_retried or set(contact.addresses) <= set(known.contact.addresses):
                return
            known.contact = Contact(contact.peer, merge_addresses(contact.addresses, known.contact.addresses))
            known.is_retried = True
            known.network = self._networks.of(known.contact.addresses[0])
            known.paths = self._count(known.network, known.paths | paths)
            if known.paths:
                known.state = _State.NEW
                bisect.insort(self._order, at)
        self._short = None

    def _count(self, network: bytes | None, paths: int) -> int:
        """Those of `paths` on which one more of `network` may count; it does from now on."""
        if network is None:
            return paths
        for path in range(PATHS):
            bit = paths & 1 << path
            if bit and self._of_network[bit, network] < self._per_network:
                self._of_network[bit, network] += 1
            else:
                paths &= ~bit
        return paths

    def _uncount(self, candidate: _Candidate) -> None:
        if candidate.network is not None:
            for path in range(PATHS):
                if candidate.paths >> path & 1:
                    self._of_network[1 << path, candidate.network] -= 1

    def _counts_where_it_is(self, candidate: _Candidate, peer: Contact) -> bool:
        """`candidate` answered, from the first address of `peer`, which may not be the one it was named at. Where its
        network has its share already, the answer counts for nothing."""
        network = self._networks.of(peer.addresses[0]) if peer.addresses else None
        if network != candidate.network:
            self._uncount(candidate)
            candidate.network = network
            candidate.paths = self._count(network, candidate.paths)
            if not candidate.paths:
                candidate.state, candidate.is_retried = _State.FAILED, True
                self._order.remove(peer.place ^ self._place)
                self._short = None
        return candidate.paths != 0

    def _wanted(self) -> tuple[list[list[int]], list[int]]:
        """The k nearest on each path, ascending; and who else is in the region, the outermost first."""
        if self._short is None:
            shortlists: list[list[int]] = [[] for _ in range(PATHS)]
            open_paths = (1 << PATHS) - 1
            for at in self._order:
                paths = self._known[at].paths & open_paths
                for path in range(PATHS):
                    if paths >> path & 1:
                        shortlists[path].append(at)
                        if len(shortlists[path]) == self._k:
                            open_paths &= ~(1 << path)
                if not open_paths:
                    break
            self._short = shortlists
            self._rest = []
            if self.radius:
                own = set().union(*shortlists)
                self._rest = [at for at in reversed(spread(self._order, self._k, self.radius)) if at not in own]
                self._rest.sort(reverse=True)
        return self._short, self._rest

    def _unasked(self, shortlist: list[int]) -> list[int]:
        """Farthest first: the nearest is popped first."""
        return [at for at in reversed(shortlist) if self._known[at].state is _State.NEW]

    def _may_ask(self, path: int) -> bool:
        return self._spent[path] < (REGION_QUESTIONS if path == PATHS else PATH_QUESTIONS)

    def _ask(self, at: int, path: int, now: float) -> None:
        known = self._known[at]
        known.state, known.path = _State.ASKED, path
        self._spent[path] += 1
        self._pending[at] = now

    def _found(self) -> list[_Candidate]:
        shortlists, rest = self._wanted()
        found = (self._known[at] for at in sorted(set(rest).union(*shortlists)))
        return [each for each in found if each.state is _State.FOUND]

    def _widen_if_dense(self) -> None:
        if self.is_dense or not self._is_sure or not self.radius or not self.done:
            return
        nearest = self.distances()
        if len(nearest) == self._k and is_crowded(nearest[-1], self.radius):
            self.is_dense = True
            self.radius = min(SPACE, 2 * self.radius)
            self._short = None


def next_batch(lookups: Sequence[Lookup], now: float, max_keys: int) -> list[tuple[Contact, list[Lookup]]]:
    """The next questions of many lookups, those to one peer put together: a small swarm answers all in one round trip.

    At most `max_keys` lookups share one question.
    """
    wanted: dict[PeerId, tuple[Contact, list[Lookup]]] = {}
    for lookup in lookups:
        for contact in lookup.next_questions(now):
            wanted.setdefault(contact.peer, (contact, []))[1].append(lookup)
    for contact, together in wanted.values():
        together += [lookup for lookup in lookups if lookup.joins_question(contact, now)]
    return [
        (contact, together[first : first + max_keys])
        for contact, together in wanted.values()
        for first in range(0, len(together), max_keys)
    ]
