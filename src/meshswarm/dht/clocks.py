"""Whose clock is wrong: what other peers' clocks show against this one's, and what that says.

Records end by the clock, so a peer whose clock is hours off is heard by nobody, or hears nobody. The rule this file
keeps: a single peer that lies about the time makes nobody doubt his own clock; more than half of at least three do.
"""

from __future__ import annotations

from collections import OrderedDict
from statistics import median

from meshswarm.identity import PeerId

TOLERANCE_S = 240.0  # below what records tolerate (`signed.CLOCK_SKEW_S`)
_JURY = 3
_MAX_PEERS = 64

OWN = "own clock"


class Clocks:
    """The last known difference to each peer's clock."""

    def __init__(self) -> None:
        self._ahead_s: OrderedDict[PeerId, float] = OrderedDict()

    def heard(self, peer: PeerId, clock_ms: int, now: float) -> tuple[object, str] | None:
        """`peer` says that it is `clock_ms` (Unix time; 0: it does not say). What a person should know, and of whom:
        `OWN` or the peer; None when all is well or nothing can be told."""
        if clock_ms <= 0:
            return None
        ahead_s = clock_ms / 1000 - now
        self._ahead_s.pop(peer, None)
        self._ahead_s[peer] = ahead_s
        if len(self._ahead_s) > _MAX_PEERS:
            self._ahead_s.popitem(last=False)
        if not _is_off(ahead_s):
            return None
        others = list(self._ahead_s.values())
        middle_s = median(others)
        if len(others) >= _JURY and _is_off(middle_s):
            agree = sum(_is_off(each) and (each > 0) == (middle_s > 0) for each in others)
            side = "behind" if middle_s > 0 else "ahead of"
            return OWN, (
                f"this machine's clock is about {duration(middle_s)} {side} the clocks of {agree} of {len(others)} "
                "peers: set it, or what this peer says will count as expired or as not yet true"
            )
        side = "ahead of" if ahead_s > 0 else "behind"
        if len(others) < _JURY:
            return peer, (
                f"the clock of peer {peer.short} is about {duration(ahead_s)} {side} this machine's: one of them is "
                "wrong, and until it is set the two may not see what the other says"
            )
        return peer, (
            f"the clock of peer {peer.short} is about {duration(ahead_s)} {side} this machine's and those of other "
            "peers: until it is set, what that peer says may count as expired or as not yet true"
        )


def duration(seconds: float) -> str:
    """A length of time in words, whatever its sign."""
    minutes = round(abs(seconds) / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = round(minutes / 60)
    return f"{hours} h" if hours < 72 else f"{round(hours / 24)} days"


def _is_off(ahead_s: float) -> bool:
    return abs(ahead_s) > TOLERANCE_S
