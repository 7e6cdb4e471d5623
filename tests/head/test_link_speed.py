"""How fast links are, from what prompts took."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshswarm.head.link_speed import LinkSpeed
from meshswarm.routing.prompt_time import Pace, prompt_s, with_links

PACES = st.builds(Pace, st.floats(1e-6, 1.0), st.floats(0.0, 1.0))


@given(
    route=st.lists(PACES, min_size=2, max_size=6),
    n_rows=st.integers(1, 4000),
    size=st.integers(1, 128),
    surplus=st.floats(-1.0, 10.0) | st.floats(0.0, 0.01),
)
@example(route=[Pace(0.001, 0.01)] * 3, n_rows=41, size=32, surplus=0.001)  # more than no link, less than the fastest
def test_whatever_a_prompt_took_is_understood(route: list[Pace], n_rows: int, size: int, surplus: float) -> None:
    speed = LinkSpeed()
    seconds = max(1e-6, prompt_s(n_rows, size, route) + surplus)
    speed.note(seconds, n_rows, size, route, row_bytes=1)
    assert 0 <= speed.byte_s <= seconds / n_rows
    if speed.byte_s:  # then it explains the time, to one part in a hundred of the links' share
        explained = [prompt_s(n_rows, size, with_links(route, factor * speed.byte_s)) for factor in (1.0, 1.02)]
        assert explained[0] <= seconds <= explained[1]


@pytest.mark.parametrize("row_s", [1e-5, 1e-4, 1e-3])
def test_a_link_is_found_as_fast_as_it_is(row_s: float) -> None:
    route = [Pace(1e-4, 1e-3), Pace(2e-4, 1e-3)]
    speed = LinkSpeed()
    speed.note(prompt_s(1024, 128, with_links(route, row_s)), 1024, 128, route, row_bytes=2304)
    assert speed.byte_s * 2304 == pytest.approx(row_s, rel=0.02)
