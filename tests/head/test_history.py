"""What a session holds, and how much of it a later prompt may take over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.head.history import History
from meshswarm.stage.families.family import Rollback

KV, STATE = Rollback.KV, Rollback.STATE


def history(*steps: list[int]) -> History:
    held = History()
    for tokens in steps:
        held.add(tokens)
    return held


CHAT = history([1, 2, 3, 4], [5, 6, 7, 8], [9], [10])


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 10),  # goes on
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 77], 9),  # parts where a step ended
        ([1, 2, 3, 4, 5, 6, 77], 4),  # parts in the middle of a step
        ([1, 2, 77], 0),
        ([77], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),  # its last token must be computed again
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 9),
    ],
)
def test_what_is_kept_ends_where_a_step_ended(prompt: list[int], kept: int) -> None:
    assert CHAT.reusable(prompt, KV) == kept


def test_a_running_state_is_kept_whole_or_not_at_all() -> None:
    assert CHAT.reusable([*range(1, 11), 77], STATE) == 10
    assert CHAT.reusable([*range(1, 10), 77], STATE) == 0


def test_a_running_state_is_kept_up_to_a_checkpoint() -> None:
    held = History()
    for start in range(0, 20, 4):
        held.add(list(range(start, start + 4)))
        if start != 8:
            held.add_checkpoint(3)
    assert held.checkpoints == [8, 16, 20], "the newest three"
    assert held.reusable([*range(19), 77], STATE) == 16
    assert held.reusable(list(range(20)), STATE) == 16, "its last token must be computed again"
    assert held.reusable([*range(13), 77], STATE) == 8
    assert held.reusable([*range(7), 77], STATE) == 0
    held.truncate(16)
    assert held.checkpoints == [8, 16]
    assert held.beginning(8).checkpoints == []
    held.truncate(0)
    assert held.checkpoints == []


def test_of_too_many_checkpoints_the_oldest_goes_but_for_the_pinned_one() -> None:
    held = History()
    for token in range(6):
        held.add([token])
        held.add_checkpoint(3)
        if token == 1:
            held.pinned = 2
    assert held.checkpoints == [2, 5, 6]
    held.truncate(1)
    assert held.pinned is None


@pytest.mark.parametrize("rollback", Rollback)
def test_guesses_that_nobody_settled_can_be_left_out(rollback: Rollback) -> None:
    held = history([1, 2, 3, 4])
    held.add([5, 6, 7], n_draft=2)
    assert held.reusable([1, 2, 3, 4, 5, 6, 99], rollback) == 6
    assert held.reusable([1, 2, 3, 4, 5, 99], rollback) == 5
    assert held.reusable([1, 2, 3, 4, 99], KV) == 4


def test_taking_rows_back_makes_the_place_an_end() -> None:
    held = history([1, 2, 3, 4], [5, 6, 7, 8])
    held.truncate(6)
    held.add([9])
    assert held.tokens == [1, 2, 3, 4, 5, 6, 9]
    assert held.ends == [4, 6, 7]
    held.truncate(4)
    assert held.ends == [4]
    held.truncate(0)
    assert (held.tokens, held.ends) == ([], [])


def test_a_copy_of_the_beginning_is_its_own() -> None:
    copy = CHAT.beginning(8)
    copy.add([77])
    assert copy.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 77]
    assert copy.ends == [4, 8, 9]
    assert CHAT.tokens[8:] == [9, 10]


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), max_size=6), st.lists(st.integers(0, 1), min_size=1)
)
def test_what_is_kept_is_a_common_beginning_that_leaves_a_token(steps: list[list[int]], prompt: list[int]) -> None:
    held = history(*steps)
    for rollback in Rollback:
        kept = held.reusable(prompt, rollback)
        assert kept < len(prompt)
        assert held.tokens[:kept] == prompt[:kept]
        assert kept in (0, *held.ends)


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), min_size=1, max_size=40))
def test_of_single_tokens_everything_common_is_kept(tokens: list[int], prompt: list[int]) -> None:
    held = history(*([token] for token in tokens))
    common = next((at for at, pair in enumerate(zip(tokens, prompt, strict=False)) if pair[0] != pair[1]), None)
    if common is None:
        common = min(len(tokens), len(prompt))
    assert held.reusable(prompt, KV) == min(common, len(prompt) - 1)
