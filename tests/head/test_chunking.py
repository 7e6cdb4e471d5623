"""How a prompt is cut into steps: what a route's own speeds make fastest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.head.chunking import TAIL_ROWS, cut_prompt
from meshswarm.routing.prompt_time import CHUNK_MULTIPLE, MIN_CHUNK_ROWS, Pace, chunk_rows, prompt_s
from meshswarm.stage.engine.profile import EXACT_MAX_ROWS, Profile
from meshswarm.stage.sessions.messages import MAX_ROWS_PER_STEP

# 24 layers of a 1B model on one core: about 10 ms a row, and a decode row costs three times a prefill row
PACE = Pace(row_s=0.010, step_s=0.020)


def simulated_s(n_rows: int, size: int, route: list[Pace]) -> float:
    """Steps through a pipe, one by one: a span takes the next step when it has it and is free."""
    sizes = [size] * (n_rows // size) + ([n_rows % size] if n_rows % size else [])
    free = [0.0] * len(route)
    done = 0.0
    for rows in sizes:
        done = 0.0
        for span, pace in enumerate(route):
            done = free[span] = max(done, free[span]) + pace.turn_s(rows)
    return done


def test_two_even_spans_overlap_on_a_long_prompt() -> None:
    route = [PACE, PACE]
    size = chunk_rows(1024, route, Profile.FAST)
    one_after_the_other = sum(pace.turn_s(1024) for pace in route)
    assert one_after_the_other / simulated_s(1024, size, route) >= 1.7


@given(
    st.integers(33, 4000),
    st.sampled_from(range(32, 129, 16)),
    st.lists(st.builds(Pace, st.floats(1e-5, 0.1), st.floats(0, 1)), min_size=2, max_size=4),
)
def test_the_prediction_is_what_a_pipe_takes(n_rows: int, size: int, route: list[Pace]) -> None:
    assert simulated_s(n_rows, size, route) == pytest.approx(prompt_s(n_rows, size, route))


def test_a_span_that_reads_many_weights_gets_larger_steps() -> None:
    cheap, dear = Pace(0.001, 0.001), Pace(0.001, 0.500)
    assert chunk_rows(1024, [cheap, cheap], Profile.FAST) < chunk_rows(1024, [dear, dear], Profile.FAST)


def test_where_nothing_overlaps_or_nothing_is_known_steps_are_as_large_as_they_may_be() -> None:
    assert chunk_rows(1024, [PACE], Profile.FAST) == MAX_ROWS_PER_STEP
    assert chunk_rows(1024, [], Profile.FAST) == MAX_ROWS_PER_STEP
    assert chunk_rows(1024, [], Profile.EXACT) == EXACT_MAX_ROWS


@given(st.integers(1, 5000), st.floats(0, 0.1), st.floats(0, 1), st.sampled_from(Profile))
def test_steps_are_whole_multiples_within_the_profile(
    n_rows: int, row_s: float, step_s: float, profile: Profile
) -> None:
    size = chunk_rows(n_rows, [Pace(row_s, step_s)] * 2, profile)
    assert MIN_CHUNK_ROWS <= size <= (EXACT_MAX_ROWS if profile is Profile.EXACT else MAX_ROWS_PER_STEP)
    assert size % CHUNK_MULTIPLE == 0


def marks(n_rows: int, size: int, n_checkpoints: int, *, is_first: bool) -> list[int]:
    """How far before the end each checkpoint stands."""
    left, found = n_rows, []
    for cut in cut_prompt(n_rows, size, n_checkpoints, is_first=is_first):
        left -= cut.n_rows
        if cut.is_checkpoint:
            found.append(left)
    return found


def test_a_prompt_leaves_checkpoints_before_its_end_and_further_on() -> None:
    assert marks(1008, 100, 4, is_first=True) == [408, 208, 108, 8]
    assert marks(1008, 100, 2, is_first=True) == [108, 8]
    assert marks(1008, 100, 4, is_first=False) == [8], "the others are worth more than places in between"
    assert marks(40, 100, 4, is_first=True) == [TAIL_ROWS]
    assert marks(1008, 100, 0, is_first=True) == []
    assert marks(TAIL_ROWS + 1, 100, 4, is_first=True) == []


@given(st.integers(1, 2000), st.sampled_from(range(32, 129, 16)), st.integers(0, 6), st.booleans())
def test_steps_hold_the_prompt_and_checkpoints_are_no_lone_rows(
    n_rows: int, size: int, n_checkpoints: int, is_first: bool
) -> None:
    cuts = cut_prompt(n_rows, size, n_checkpoints, is_first=is_first)
    assert sum(cut.n_rows for cut in cuts) == n_rows
    assert all(1 <= cut.n_rows <= size for cut in cuts)
    assert all(cut.n_rows > 1 for cut in cuts if cut.is_checkpoint)
    assert sum(cut.is_checkpoint for cut in cuts) <= n_checkpoints
    assert not cuts[-1].is_checkpoint
