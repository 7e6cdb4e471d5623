"""Who is gone, and on whose word: this peer's own probes, the watchers a peer chose itself, or its own farewell.

The rule this file keeps: nobody but a peer itself can take it out for good. An accusation counts at once when three of
its watchers made it, later when there are fewer (Lifeguard's suspicion times, which shrink as independent confirmations
come in: Dadgar, Phillips, Currey, 2018), and never after the accused has made a newer appointment.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from meshswarm.identity import PeerId
from meshswarm.routing.gossip.words import FULL_COUNT, Accusation, Farewell

WAIT_S = {1: 4.0, 2: 2.0}
"""How long an accusation by one or two watchers waits for a refutation; by more it counts at once."""
HEARD_S = 2.0  # how long a sign of life to this very peer outweighs what others say
REMEMBERED_S = 1800.0  # as long as the longest-lived DHT record of a peer that died
MAX_REMEMBERED = 8192
MAX_NUMBERS = 16384


class Weight(Enum):
    """What an accusation brought."""

    STALE = "nothing: known already, or the accused has made a newer appointment"
    MORE = "another statement, but no more weight"
    NEW = "a first accusation of this number"
    FULL = "the statement that makes it count at once"


@dataclass(slots=True)
class _Mark:
    """What speaks against one peer."""

    since: float
    farewell: Farewell | None = None
    accusation: Accusation | None = None
    accused_at: float = 0.0
    heard_at: float = float("-inf")
    counts_at: float = float("inf")
    unreachable: bool = False


class Standings:
    """The standing of every other peer. `now` is any clock that only rises."""

    def __init__(self) -> None:
        self._marks: OrderedDict[PeerId, _Mark] = OrderedDict()
        self._numbers: OrderedDict[PeerId, tuple[int, int]] = OrderedDict()  # highest alive number, of appointments
        self._gone: frozenset[PeerId] = frozenset()
        self._stale_at = float("inf")  # when `_gone` has to be made anew

    def gone(self, now: float) -> frozenset[PeerId]:
        """Peers that are dead or have left, as far as is known here."""
        if now >= self._stale_at:
            gone = {peer for peer, mark in self._marks.items() if self._is_gone(peer, mark, now)}
            waiting = [mark.counts_at for mark in self._marks.values() if now < mark.counts_at < float("inf")]
            self._gone, self._stale_at = frozenset(gone), min(waiting, default=float("inf"))
        return self._gone

    def appointed(self, peer: PeerId) -> int:
        """The number of the newest appointment known, -1 when none is."""
        return self._numbers.get(peer, (-1, -1))[1]

    def accusation(self, peer: PeerId) -> Accusation | None:
        """What the peer is accused of, unless it has answered."""
        mark = self._marks.get(peer)
        if mark is None or mark.accusation is None or mark.accusation.number < self.appointed(peer):
            return None
        return mark.accusation

    def farewell_number(self, peer: PeerId) -> int:
        mark = self._marks.get(peer)
        return -1 if mark is None or mark.farewell is None else mark.farewell.number

    def farewell(self, peer: PeerId) -> Farewell | None:
        mark = self._marks.get(peer)
        return None if mark is None else mark.farewell

    # -- what was learned

    def heard(self, peer: PeerId, now: float) -> bool:
        """A sign of life came from the peer itself. True when it had been thought dead here."""
        mark = self._marks.get(peer)
        if mark is None:
            return False
        was_gone = self._is_gone(peer, mark, now)
        mark.unreachable = False
        mark.heard_at, mark.counts_at = now, float("inf")  # whatever was said before: it lives
        self._settle(peer, mark)
        return was_gone and mark.farewell is None

    def is_unreachable(self, peer: PeerId) -> bool:
        """Whether this peer's own probes of it failed, and it has not spoken since."""
        mark = self._marks.get(peer)
        return mark is not None and mark.unreachable

    def unreachable(self, peer: PeerId, now: float) -> None:
        """This peer's own probes of it failed."""
        self._mark(peer, now).unreachable = True
        self._stale_at = now

    def take_alive(self, peer: PeerId, number: int, *, appointment: bool = False) -> bool:
        """The peer has said something under `number`. True when that answers an accusation or takes back a farewell."""
        alive, appointed = self._numbers.pop(peer, (-1, -1))
        before = appointed
        self._numbers[peer] = max(alive, number), max(appointed, number) if appointment else appointed
        if len(self._numbers) > MAX_NUMBERS:
            self._numbers.popitem(last=False)
        mark = self._marks.get(peer)
        if mark is None:
            return False
        answers = appointment and mark.accusation is not None and before <= mark.accusation.number < number
        returns = mark.farewell is not None and mark.farewell.number < number
        if answers:
            mark.accusation, mark.counts_at = None, float("inf")
        if returns:
            mark.farewell = None
        self._settle(peer, mark)
        return answers or returns

    def take_farewell(self, farewell: Farewell, now: float) -> bool:
        """True when it is news. The caller has verified it."""
        if farewell.number <= max(self._numbers.get(farewell.peer, (-1, -1))[0], self.farewell_number(farewell.peer)):
            return False
        self._mark(farewell.peer, now).farewell = farewell
        self._stale_at = now
        return True

    def weigh(self, accusation: Accusation) -> Weight:
        """What `take_accusation` would make of it, before anything is verified."""
        if accusation.number < self.appointed(accusation.peer):
            return Weight.STALE
        known = self.accusation(accusation.peer)
        if known is None or known.number < accusation.number:
            return Weight.FULL if is_full(accusation) else Weight.NEW
        if known.number > accusation.number or known.appointment != accusation.appointment:
            return Weight.STALE
        if accusation.statements.keys() <= known.statements.keys():
            return Weight.STALE
        return Weight.FULL if is_full(known.merged(accusation)) and not is_full(known) else Weight.MORE

    def take_accusation(self, accusation: Accusation, now: float) -> Weight:
        """The caller has verified it."""
        weight = self.weigh(accusation)
        if weight is Weight.STALE:
            return weight
        mark = self._mark(accusation.peer, now)
        known = self.accusation(accusation.peer)
        if known is None or known.number < accusation.number:
            mark.accused_at, mark.counts_at = now, float("inf")
            mark.accusation = accusation
        else:
            mark.accusation = known.merged(accusation)
        wait_s = 0.0 if is_full(mark.accusation) else WAIT_S.get(len(mark.accusation.statements), 0.0)
        mark.counts_at = min(mark.counts_at, max(now, mark.accused_at + wait_s, mark.heard_at + HEARD_S))
        self._stale_at = min(self._stale_at, mark.counts_at)
        return weight

    def forget(self, now: float) -> None:
        """Let go of what happened long ago; call it now and then."""
        while self._marks:
            peer, mark = next(iter(self._marks.items()))
            if mark.since + REMEMBERED_S > now and len(self._marks) <= MAX_REMEMBERED:
                return
            del self._marks[peer]
            self._stale_at = now

    # -- inside

    def _mark(self, peer: PeerId, now: float) -> _Mark:
        mark = self._marks.pop(peer, None) or _Mark(now)
        mark.since = now
        self._marks[peer] = mark
        if len(self._marks) > MAX_REMEMBERED:
            self._marks.popitem(last=False)
        return mark

    def _settle(self, peer: PeerId, mark: _Mark) -> None:
        if mark.farewell is None and mark.accusation is None and not mark.unreachable:
            del self._marks[peer]
        self._stale_at = float("-inf")

    def _is_gone(self, peer: PeerId, mark: _Mark, now: float) -> bool:
        return mark.unreachable or mark.farewell is not None or (mark.accusation is not None and mark.counts_at <= now)


def is_full(accusation: Accusation) -> bool:
    """Whether enough of the watchers speak for it to count at once."""
    return len(accusation.statements) >= FULL_COUNT


def weight_key(accusation: Accusation) -> bytes:
    """The same for accusations that bring the same, whoever's statements they hold."""
    return accusation.peer.key + accusation.number.to_bytes(8) + bytes([is_full(accusation)])
