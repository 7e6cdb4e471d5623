"""What is remembered of peers, with one room for those known otherwise and a smaller one for all others.

The rule this file keeps: however many peers are invented, what is remembered of a known one is given up only for
another known one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from meshswarm.identity import PeerId

V = TypeVar("V")


class Remembered(Generic[V]):
    """At most `n_known` peers for whom `known` holds, and `n_others` for whom it does not. Put last is kept longest."""

    def __init__(self, known: Callable[[PeerId], bool], n_known: int, n_others: int) -> None:
        self._known = known
        self._rooms: tuple[OrderedDict[PeerId, V], OrderedDict[PeerId, V]] = (OrderedDict(), OrderedDict())
        self._sizes = n_known, n_others

    def __len__(self) -> int:
        return sum(len(room) for room in self._rooms)

    def __contains__(self, peer: PeerId) -> bool:
        return any(peer in room for room in self._rooms)

    def get(self, peer: PeerId) -> V | None:
        known, others = self._rooms
        found = known.get(peer)
        return others.get(peer) if found is None else found

    def pop(self, peer: PeerId) -> V | None:
        known, others = self._rooms
        found = known.pop(peer, None)
        return others.pop(peer, None) if found is None else found

    def put(self, peer: PeerId, value: V) -> list[PeerId]:
        """Remembers it, in place of what was; who had to be forgotten for that."""
        self.pop(peer)
        known, others = self._rooms
        (known if self._known(peer) else others)[peer] = value
        while len(others) > self._sizes[1]:
            oldest, what = others.popitem(last=False)
            if not self._known(oldest):
                return [oldest]
            known[oldest] = what  # it has become known since
        return [known.popitem(last=False)[0]] if len(known) > self._sizes[0] else []

    def oldest(self) -> list[tuple[PeerId, V]]:
        """What was put longest ago, of each room."""
        return [next(iter(room.items())) for room in self._rooms if room]

    def newest(self, *, known: bool) -> Iterator[V]:
        """One room's, put last first."""
        return reversed(self._rooms[0 if known else 1].values())
