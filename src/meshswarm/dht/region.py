"""How large the swarm is, judged by how near its peers are to each other, and how far around a key that means to look.

Node ids are hashes of keys, so they lie evenly: of n peers, the i-th nearest to any point is expected at i/n of the
space. The rule this file keeps: everything here is a pure function of distances, and a few peers that lie about where
they are (or were made to be near) change none of it much. Distances are XOR distances, below `SPACE`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from statistics import median

from meshswarm.dht.keys import ID_BYTES

SPACE = 1 << (8 * ID_BYTES)
REACH_SHIFT = 8 * ID_BYTES - 52  # a reach on the wire counts steps of 2^108: fine enough for 2^40 peers
MAX_REACH = SPACE >> REACH_SHIFT
DENSE = 3  # so many times nearer than expected is the k-th peer only around a key that somebody crowds
_MAX_SAMPLES = 15
_ENOUGH_SAMPLES = 3


def swarm_size(distances: Sequence[int]) -> float:
    """How many peers there are when `distances`, ascending, are those of all the nearest ones to some point.

    The median of all stretches over half of them: liars who sit at the point itself shorten fewer than half of the
    stretches as long as they are at most a quarter, and the others are as long as they were.
    """
    half = len(distances) // 2
    if not half:
        return float(len(distances) + 1)
    marks = [0, *distances]
    stretch = median(marks[first + half] - marks[first] for first in range(len(marks) - half))
    return max(float(len(distances)), half * SPACE / max(1, stretch))


def radius_of(size: float, k: int) -> int:
    """The distance within which `k` of `size` peers are expected around any key; at most `SPACE`."""
    return SPACE if size <= k else min(SPACE, int(k / size * SPACE))


def is_crowded(kth_distance: int, radius: int) -> bool:
    """True when the k-th nearest peer is so near that chance does not explain it.

    With 20 peers expected within `radius`, 20 within a third of it is a chance of 2 in 100,000 when the size is known
    exactly, and of 3 in 1000 when it was judged two standard deviations (45 %) too small.
    """
    return kth_distance * DENSE < radius


def spread(distances: Sequence[int], k: int, radius: int) -> list[int]:
    """Of ascending `distances` the k nearest, and beyond those a share of every halving of `radius`.

    The outer half of a region is where half of its honest peers are. It gets k places, the next half k / 2 and so on,
    never below k / 4; whoever fills the inside of a region thereby hides nobody at its outside. At most 3 k in all.
    """
    chosen = list(distances[:k])
    halvings: dict[int, list[int]] = {}
    for distance in distances[k:]:
        if distance >= radius:
            break
        halvings.setdefault((radius // max(1, distance)).bit_length() - 1, []).append(distance)
    for halving in sorted(halvings):
        members, share = halvings[halving], max(k >> halving, k // 4, 1)
        if len(members) > share:
            members = [members[place * len(members) // share] for place in range(share)]
        chosen += members[: 3 * k - len(chosen)]
    return chosen


class SizeEstimate:
    """The swarm's size from this peer's own neighbourhood and those that its last lookups ended in.

    Whoever crowds around one peer or some keys moves some of the values, and the median of all but little.
    """

    def __init__(self) -> None:
        self._samples: OrderedDict[bytes, float] = OrderedDict()

    def note(self, target: bytes, distances: Iterable[int]) -> None:
        """The k nearest peers to `target` are at `distances`, ascending."""
        self._samples.pop(target, None)
        self._samples[target] = swarm_size(list(distances))
        if len(self._samples) > _MAX_SAMPLES:
            self._samples.popitem(last=False)

    @property
    def is_sure(self) -> bool:
        """True when there are enough values to call a neighbourhood unlike them suspicious."""
        return len(self._samples) >= _ENOUGH_SAMPLES

    def value(self, own_distances: Sequence[int]) -> float:
        """`own_distances`: from this peer to the k nearest that it knows, ascending."""
        return median([swarm_size(own_distances), *self._samples.values()])
