"""Sets of bytes of one file, as sorted ranges that neither overlap nor touch.

The rule this file keeps: every function gives such ranges, whatever it was given.
"""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[range, ...]
"""Half-open, step 1, not empty, sorted, with gaps between."""


def merged(ranges: Iterable[range]) -> Ranges:
    """The bytes of all `ranges` together."""
    joined: list[range] = []
    for each in sorted((one for one in ranges if len(one)), key=lambda one: one.start):
        if joined and each.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, each.stop))
        else:
            joined.append(range(each.start, each.stop))
    return tuple(joined)


def missing(have: Iterable[range], wanted: Iterable[range]) -> Ranges:
    """The bytes of `wanted` that are not in `have`."""
    gaps = []
    held = merged(have)
    for want in merged(wanted):
        at = want.start
        for each in held:
            if each.stop <= at or each.start >= want.stop:
                continue
            gaps.append(range(at, max(at, each.start)))
            at = each.stop
        gaps.append(range(at, max(at, want.stop)))
    return merged(gaps)


def covers(have: Iterable[range], wanted: Iterable[range]) -> bool:
    return not missing(have, wanted)


def n_bytes_of(ranges: Iterable[range]) -> int:
    return sum(map(len, merged(ranges)))
