"""How many new words each neighbour may bring: enough for any honest one, too few for a flood.

The rule this file keeps: words about peers that are known here otherwise have an allowance of their own, which words
about anybody else never use up; and all who are no neighbours share one allowance, so keys are worth nothing.
"""

from __future__ import annotations

from meshswarm.dht.limits import RateLimit
from meshswarm.identity import PeerId

KNOWN_PER_S, KNOWN_BURST = 4.0, 128.0
OTHERS_PER_S, OTHERS_BURST = 1.0, 16.0  # the deaths of 10,000 peers, a fifth of which leaves in an hour: 0.56 a second


class Gate:
    """Asked only for words that would change something here."""

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._known = RateLimit(per_s=KNOWN_PER_S, burst=KNOWN_BURST)
        self._others = RateLimit(per_s=OTHERS_PER_S, burst=OTHERS_BURST)

    def lets_in(self, sender: PeerId, now: float, *, is_near: bool, is_known: bool) -> bool:
        """`is_near`: the sender is a neighbour, speaks of itself, or watches the same peer. `is_known`: whom it speaks
        of is. A stranger has nothing to say of a stranger."""
        if not is_near and not is_known:
            return False
        limit = self._known if is_known else self._others
        return limit.take(sender if is_near else self._own, 1, now) == 0.0
