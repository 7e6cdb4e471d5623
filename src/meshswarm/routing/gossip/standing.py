"""Who is gone, and on whose word: this peer's own probes, the watchers a peer chose itself, or its own farewell.

The rule this file keeps: nobody but a peer itself can take it out for good. An accusation counts at once when three of
its watchers made it, later when there are fewer (Lifeguard's suspicion times, which shrink as independent confirmations
come in: Dadgar, Phillips, Currey, 2018), and never after the accused has made a newer appointment, or has said anything
that is clearly newer than what the watchers had heard.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from meshswarm.identity import PeerId
from meshswarm.routing.gossip.remembered import Remembered
from meshswarm.routing.gossip.words import FULL_COUNT, Accusation, Farewell

WAIT_S = {1: 4.0, 2: 2.0}
"""How long an accusation by one or two watchers waits for a refutation; by more it counts at once."""
HEARD_S = 2.0  # how long a sign of life to this very peer outweighs what others say
REMEMBERED_S = 1800.0  # as long as the longest-lived DHT record of a peer that died
OUTLIVED_MS = 30_000
"""Numbers follow their author's clock in ms. One this much higher than the highest a watcher had heard was said after
the silence that it speaks of: a report of at most 5 s is told each watcher again after 8 s, with a beat every 5 s."""
MAX_MARKS, MAX_OTHER_MARKS = 8192, 2048
MAX_NUMBERS, MAX_OTHER_NUMBERS = 16384, 2048


class Weight(Enum):
    """What an accusation brought."""

    STALE = "nothing: known already, or the accused has made a newer appointment"
    MORE = "another statement, but no more weight"
    NEW = "a first accusation of this number"
    FULL = "the statement that makes it count at once"


@dataclass(slots=True)
class _Mark:
    """What speaks against one peer. `counts`: the accusation does by now, which it does from `counts_at` on."""

    since: float
    farewell: Farewell | None = None
    accusation: Accusation | None = None
    accused_at: float = 0.0
    heard_at: float = float("-inf")
    counts_at: float = float("inf")
    counts: bool = False
    unreachable: bool = False

    @property
    def is_gone(self) -> bool:
        return self.unreachable or self.farewell is not None or (self.accusation is not None and self.counts)

    def acquit(self) -> None:
        """The accusation counts for nothing, unless it is made again."""
        self.counts_at, self.counts = float("inf"), False


class Standings:
    """The standing of every other peer. `now` is any clock that only rises. `known`: whom this peer knows otherwise
    than by what is said of its life and death; words about others never make it forget one about those."""

    def __init__(self, known: Callable[[PeerId], bool] = lambda peer: True) -> None:
        self._marks: Remembered[_Mark] = Remembered(known, MAX_MARKS, MAX_OTHER_MARKS)
        self._numbers: Remembered[tuple[int, int]] = Remembered(known, MAX_NUMBERS, MAX_OTHER_NUMBERS)
        self._gone: set[PeerId] = set()
        self._snapshot: frozenset[PeerId] | None = frozenset()  # None: `_gone` has changed since
        self._waiting: list[tuple[float, PeerId]] = []  # a heap: when accusations begin to count

    def gone(self, now: float) -> frozenset[PeerId]:
        """Peers that are dead or have left, as far as is known here."""
        while self._waiting and self._waiting[0][0] <= now:
            at, peer = heapq.heappop(self._waiting)
            mark = self._marks.get(peer)
            if mark is not None and mark.counts_at == at:
                mark.counts = True
                self._note(peer, mark)
        if self._snapshot is None:
            self._snapshot = frozenset(self._gone)
        return self._snapshot

    def number(self, peer: PeerId) -> int:
        """The highest number under which it has said anything alive, -1 when it has not."""
        return (self._numbers.get(peer) or (-1, -1))[0]

    def appointed(self, peer: PeerId) -> int:
        """The number of the newest appointment known, -1 when none is."""
        return (self._numbers.get(peer) or (-1, -1))[1]

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
        was_gone = peer in self.gone(now)
        mark.unreachable = False
        mark.heard_at = now
        mark.acquit()  # whatever was said before: it lives
        self._settle(peer, mark)
        return was_gone and mark.farewell is None

    def is_unreachable(self, peer: PeerId) -> bool:
        """Whether this peer's own probes of it failed, and it has not spoken since."""
        mark = self._marks.get(peer)
        return mark is not None and mark.unreachable

    def unreachable(self, peer: PeerId, now: float) -> None:
        """This peer's own probes of it failed."""
        mark = self._mark(peer, now)
        mark.unreachable = True
        self._note(peer, mark)

    def take_alive(self, peer: PeerId, number: int, *, appointment: bool = False) -> bool:
        """The peer has said something under `number`. True when that answers an accusation or takes back a farewell."""
        alive, appointed = self._numbers.get(peer) or (-1, -1)
        before = appointed
        alive, appointed = max(alive, number), max(appointed, number) if appointment else appointed
        self._numbers.put(peer, (alive, appointed))
        mark = self._marks.get(peer)
        if mark is None:
            return False
        returns = mark.farewell is not None and mark.farewell.number < number
        answers = appointment and mark.accusation is not None and before <= mark.accusation.number < number
        if mark.accusation is not None and not answers:
            mark.accusation = mark.accusation.only(lambda statement: alive <= statement.number + OUTLIVED_MS)
            answers = mark.accusation is None
        if answers:
            mark.accusation = None
            mark.acquit()
        if returns:
            mark.farewell = None
        self._settle(peer, mark)
        return answers or returns

    def take_farewell(self, farewell: Farewell, now: float) -> bool:
        """True when it is news. The caller has verified it."""
        if farewell.number <= max(self.number(farewell.peer), self.farewell_number(farewell.peer)):
            return False
        mark = self._mark(farewell.peer, now)
        mark.farewell = farewell
        self._note(farewell.peer, mark)
        return True

    def counting(self, accusation: Accusation) -> Accusation | None:
        """What is left of it: not the statements of watchers whom the accused has outlived since; None for nothing."""
        if accusation.number < self.appointed(accusation.peer):
            return None
        alive = self.number(accusation.peer)
        return accusation.only(lambda statement: alive <= statement.number + OUTLIVED_MS)

    def weigh(self, accusation: Accusation) -> Weight:
        """What `take_accusation` would make of it, before anything is verified."""
        counting = self.counting(accusation)
        if counting is None:
            return Weight.STALE
        accusation = counting
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
        weight, counting = self.weigh(accusation), self.counting(accusation)
        if weight is Weight.STALE or counting is None:
            return Weight.STALE
        accusation = counting
        mark = self._mark(accusation.peer, now)
        known = self.accusation(accusation.peer)
        if known is None or known.number < accusation.number:
            mark.accused_at, mark.accusation = now, accusation
            mark.acquit()
        else:
            mark.accusation = known.merged(accusation)
        wait_s = 0.0 if is_full(mark.accusation) else WAIT_S.get(len(mark.accusation.statements), 0.0)
        counts_at = max(now, mark.accused_at + wait_s, mark.heard_at + HEARD_S)
        if counts_at < mark.counts_at:
            mark.counts_at = counts_at
            heapq.heappush(self._waiting, (counts_at, accusation.peer))
        self._note(accusation.peer, mark)
        return weight

    def forget(self, now: float) -> None:
        """Let go of what happened long ago; call it now and then."""
        while old := [peer for peer, mark in self._marks.oldest() if mark.since + REMEMBERED_S <= now]:
            for peer in old:
                self._marks.pop(peer)
                self._unmarked(peer)

    # -- inside

    def _mark(self, peer: PeerId, now: float) -> _Mark:
        mark = self._marks.get(peer) or _Mark(now)
        mark.since = now
        for forgotten in self._marks.put(peer, mark):
            self._unmarked(forgotten)
        return mark

    def _settle(self, peer: PeerId, mark: _Mark) -> None:
        if mark.farewell is None and mark.accusation is None and not mark.unreachable:
            self._marks.pop(peer)
        self._note(peer, mark)

    def _note(self, peer: PeerId, mark: _Mark) -> None:
        """Keeps `_gone` what the marks say."""
        if mark.is_gone != (peer in self._gone):
            self._gone.symmetric_difference_update((peer,))
            self._snapshot = None

    def _unmarked(self, peer: PeerId) -> None:
        if peer in self._gone:
            self._gone.discard(peer)
            self._snapshot = None


def is_full(accusation: Accusation) -> bool:
    """Whether enough of the watchers speak for it to count at once."""
    return len(accusation.statements) >= FULL_COUNT


def weight_key(accusation: Accusation) -> bytes:
    """The same for accusations that bring the same, whoever's statements they hold."""
    return accusation.peer.key + accusation.number.to_bytes(8) + bytes([is_full(accusation)])
