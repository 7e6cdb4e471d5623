"""How much one peer may ask of this one: a token bucket for each, kept for the peers heard of last."""

from __future__ import annotations

from collections import OrderedDict

from meshswarm.identity import PeerId

_MAX_PEERS = 4096


class RateLimit:
    """At most `burst` units at once and `per_s` units a second in the long run, for each peer on its own."""

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()  # units left, when that was true

    def take(self, peer: PeerId, units: float, now: float) -> float:
        """Takes `units` when they are there and returns 0.0; otherwise takes none and returns the seconds to wait."""
        left, since = self._buckets.pop(peer, (self._burst, now))
        left = min(self._burst, left + max(0.0, now - since) * self._per_s)
        granted = units <= left
        self._buckets[peer] = (left - units if granted else left, now)
        if len(self._buckets) > _MAX_PEERS:
            self._buckets.popitem(last=False)
        return 0.0 if granted else (min(units, self._burst) - left) / self._per_s
