"""Guesses at the next tokens: always the longest match, always in bounded work."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.head.drafting import MAX_CANDIDATES, MAX_MATCH, MIN_MATCH, Draft, SuffixDrafter

texts = st.lists(st.integers(0, 3), max_size=60)


def common_suffix(text: Sequence[int], place: int) -> int:
    """How many tokens before `place` equal those at the end of `text`."""
    length = 0
    while length < place and text[place - 1 - length] == text[len(text) - 1 - length]:
        length += 1
    return min(length, MAX_MATCH)


def continued(text: Sequence[int], place: int, n_tokens: int) -> tuple[int, ...]:
    """`n_tokens` copied from `place` on, one at a time, also beyond the end."""
    longer = list(text)
    for offset in range(n_tokens):
        longer.append(longer[place + offset])
    return tuple(longer[len(text) :])


@given(texts, st.integers(0, 60), st.integers(1, 15))
def test_a_draft_is_what_followed_a_match_and_is_the_same_however_the_text_came(
    text: list[int], known: int, n_tokens: int
) -> None:
    at_once = SuffixDrafter(text)
    piecewise = SuffixDrafter(text[:known])
    for token in text[known:]:
        piecewise.push(token)
    draft = at_once.draft(n_tokens)
    assert piecewise.draft(n_tokens) == draft
    sources = [place for place in range(len(text)) if common_suffix(text, place) == draft.match]
    if draft.match:
        assert draft.tokens in {continued(text, place, n_tokens) for place in sources}
    else:
        assert draft == Draft()


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 15))
def test_no_match_is_longer_while_few_places_look_alike(text: list[int], n_tokens: int) -> None:
    longest = max((common_suffix(text, place) for place in range(len(text))), default=0)
    draft = SuffixDrafter(text).draft(n_tokens)
    alike = sum(common_suffix(text, place) >= MIN_MATCH for place in range(len(text)))
    if alike <= MAX_CANDIDATES // 2:  # room for hashes that collide
        assert draft.match == (longest if longest >= MIN_MATCH else 0)


@given(texts, st.lists(st.integers(0, 3), max_size=30))
def test_drafting_on_the_way_changes_no_match_for_the_worse(text: list[int], more: list[int]) -> None:
    asked, silent = SuffixDrafter(text), SuffixDrafter(text)
    for token in more:
        asked.draft(4)
        asked.push(token)
        silent.push(token)
    assert asked.draft(4).match >= silent.draft(4).match


def test_of_equal_matches_the_newest_is_followed() -> None:
    drafter = SuffixDrafter([1, 2, 7, 1, 2, 8, 1, 2])
    assert drafter.draft(2) == Draft((8, 1), 2)


def test_a_longer_match_wins_over_a_newer_one() -> None:
    drafter = SuffixDrafter([9, 1, 2, 7, 5, 1, 2, 8, 9, 1, 2])
    assert drafter.draft(1) == Draft((7,), 3)


def test_a_match_once_found_is_followed_however_crowded_its_neighbourhood_is() -> None:
    passage = list(range(100, 140))
    crowd = [token for _ in range(4 * MAX_CANDIDATES) for token in (1, 2, 3)]
    text = [*passage[:20], 1, 2, 55, 56, 57, *crowd, 99]
    drafter = SuffixDrafter(text)
    for token in [*passage[:20], 1, 2]:
        drafter.push(token)
        guess = drafter.draft(3)
    assert guess == Draft((55, 56, 57), 22)


def test_a_repeating_text_is_guessed_beyond_its_end() -> None:
    drafter = SuffixDrafter([5, 6, 7, 5, 6])
    assert drafter.draft(7).tokens == (7, 5, 6, 7, 5, 6, 7)


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 2, 3, 4]])
def test_nothing_is_guessed_where_nothing_was_said_twice(text: list[int]) -> None:
    assert SuffixDrafter(text).draft(5) == Draft()


def test_a_long_text_costs_each_lookup_no_more_than_a_short_one() -> None:
    drafter = SuffixDrafter([3, 4] * 65_536)
    visited = [len(chain.places(drafter._tokens)) for chain in drafter._chains]
    assert max(visited) <= MAX_CANDIDATES
    assert drafter.draft(15) == Draft((3, 4) * 7 + (3,), MAX_MATCH)
