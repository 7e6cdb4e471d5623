from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshswarm.artifacts.files import FileStamp
from meshswarm.fetching.seeder import Holding, changes

WHOLE = Holding(b"w" * 32, "whole", ((range(100),),), True, ((Path("w.gguf"), FileStamp(100, 1, 1)),))
PART = Holding(b"p" * 32, "part", ((range(10),),), False)


def test_what_comes_is_opened_and_what_goes_is_closed() -> None:
    plan = changes([], [WHOLE, PART])
    assert plan.opened == (PART, WHOLE)
    assert not plan.closed and not plan.grown
    plan = changes([WHOLE, PART], [PART])
    assert plan.closed == (WHOLE.model_id,)
    assert not plan.opened and not plan.grown


def test_nothing_is_done_when_nothing_changed() -> None:
    plan = changes([WHOLE, PART], [PART, WHOLE])
    assert (plan.closed, plan.opened, plan.grown) == ((), (), ())


def test_a_whole_file_that_was_touched_and_found_right_is_opened_anew() -> None:
    touched = replace(WHOLE, stamps=((Path("w.gguf"), FileStamp(100, 2, 1)),))
    plan = changes([WHOLE], [touched])
    assert plan.closed == (WHOLE.model_id,)
    assert plan.opened == (touched,)


def test_a_part_that_grew_stays_open_and_is_announced() -> None:
    more = replace(PART, ranges=((range(20),),))
    assert changes([PART], [more]).grown == (more,)
    whole = replace(PART, is_whole=True, stamps=((Path("p"), FileStamp(10, 1, 1)),))
    plan = changes([PART], [whole])
    assert plan.grown == (whole,)
    assert not plan.closed, "pieces go on coming and going while it becomes whole"


def test_a_whole_model_that_is_only_a_part_now_is_closed_first() -> None:
    part = replace(WHOLE, ranges=((range(50),),), is_whole=False, stamps=())
    plan = changes([WHOLE], [part])
    assert plan.closed == (WHOLE.model_id,)
    assert plan.opened == (part,)
