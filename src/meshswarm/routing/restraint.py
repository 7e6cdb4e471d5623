"""How far a peer relies on what others claim, and how long it stays where it is after each of its moves.

The rule this file keeps: only what somebody has claimed for minutes, seen from here all the while, lets a peer leave
layers for better ones; and whoever has moved often of late moves ever more rarely, whatever is claimed.
"""

from __future__ import annotations

from meshswarm.identity import PeerId
from meshswarm.routing.view import View
from meshswarm.span import Span

TRUST_S = 180.0
"""A claim that stood for so long is relied on."""
SETTLE_S = 300.0
"""A peer that came or moved stays for so long, and for twice as long after each further move."""
MAX_SETTLE_S = 3600.0
N_FREE_MOVES = 3
"""So many moves in `MEMORY_S` keep nobody from a layer that has no holder: where many leave at once, peers move two or
three times."""
URGENT_SETTLE_S = 30.0
"""After those a peer waits so long before it goes to such a layer, and twice as long each further time."""
MAX_URGENT_SETTLE_S = 900.0
MEMORY_S = 2 * 3600.0
"""Moves are forgotten after that."""


class Claims:
    """Since when others have claimed what they claim now, as seen from here. Times in seconds."""

    def __init__(self) -> None:
        self._since: dict[tuple[PeerId, Span], float] = {}

    def see(self, view: View, now: float) -> None:
        """What is claimed at this moment; a claim that was taken back meanwhile begins anew."""
        standing = ((holder.peer, holder.span) for holder in view.holders if holder.stays)
        self._since = {claim: self._since.get(claim, now) for claim in standing}

    def trusted(self, now: float) -> frozenset[PeerId]:
        """Whose claims have stood for long enough."""
        return frozenset(peer for (peer, _), since in self._since.items() if now - since >= TRUST_S)


class Moves:
    """This peer's own moves of late. `came_s`: when it took its first layers."""

    def __init__(self, came_s: float) -> None:
        self.last_s = came_s
        self._at: list[float] = []

    def moved(self, now: float) -> None:
        self._at = [at for at in self._at if now - at < MEMORY_S] + [now]
        self.last_s = now

    def n_lately(self, now: float) -> int:
        return sum(now - at < MEMORY_S for at in self._at)


def settle_s(n_moves: int, *, is_urgent: bool) -> float:
    """How long a peer stays that has moved so often of late: where a move would be an improvement only, and where
    layers have no holder."""
    if not is_urgent:
        return min(SETTLE_S * 2.0 ** max(0, n_moves - 1), MAX_SETTLE_S)
    if n_moves <= N_FREE_MOVES:
        return 0.0
    return min(URGENT_SETTLE_S * 2.0 ** (n_moves - N_FREE_MOVES - 1), MAX_URGENT_SETTLE_S)
