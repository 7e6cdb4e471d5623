"""Ranges of bytes, against sets of numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.ranges import covers, merged, missing, n_bytes_of

some_ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: range(pair[0], sum(pair))))


def numbers(ranges: list[range] | tuple[range, ...]) -> set[int]:
    return {number for each in ranges for number in each}


@given(some_ranges)
def test_merged_is_the_same_bytes_in_order_with_gaps(ranges: list[range]) -> None:
    joined = merged(ranges)
    assert numbers(joined) == numbers(ranges)
    assert all(left.stop < right.start for left, right in pairwise(joined))
    assert all(len(each) for each in joined)
    assert n_bytes_of(ranges) == len(numbers(ranges))


@given(some_ranges, some_ranges)
def test_what_is_missing_is_the_difference(have: list[range], wanted: list[range]) -> None:
    gaps = missing(have, wanted)
    assert numbers(gaps) == numbers(wanted) - numbers(have)
    assert gaps == merged(gaps)
    assert covers(have, wanted) == (numbers(wanted) <= numbers(have))
