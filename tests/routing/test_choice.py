"""What a peer serves: what was asked for or refused with what would fit; otherwise what fits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.stage.tiny_models import write_tiny

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.errors import OutOfMemoryError
from meshswarm.routing.choice import Choice, Limits, choose, has_room
from meshswarm.span import Span
from meshswarm.stage.engine.memory import Room
from meshswarm.stage.sizes.memory import PROCESS_BYTES, Load, MemoryModel

LOAD = Load(n_ctx=4095, n_sessions=64)
PLENTY = 1 << 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MemoryModel:
    """12 layers whose sessions take most of the memory."""
    return MemoryModel(read_header(write_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "m.gguf", n_layers=12)), LOAD)


def bytes_of(model: MemoryModel, span: Span) -> int:
    return model.span(span).total


def room(free: int, total: int = PLENTY) -> Limits:
    return Limits(Room(free, total))


def refusal(model: MemoryModel, asked: Span | None, limits: Limits) -> str:
    with pytest.raises(OutOfMemoryError) as caught:
        choose(model, asked, limits, [], "Tiny")
    return str(caught.value)


def test_the_whole_model_goes_without_saying(model: MemoryModel) -> None:
    needed = bytes_of(model, model.whole)
    assert choose(model, None, room(needed), [], "Tiny") == Choice(model.whole, LOAD.n_ctx)
    assert choose(model, None, room(needed), [Span(0, 6)], "Tiny").span == model.whole
    assert choose(model, None, Limits(Room(PLENTY, PLENTY), allowed=needed), [], "Tiny").span == model.whole


def test_a_smaller_machine_serves_the_layers_that_fit_and_says_so(model: MemoryModel) -> None:
    has = room(bytes_of(model, Span(0, 5)))
    chosen = choose(model, None, has, [], "Tiny")
    assert chosen.span == Span(0, 5)
    assert re.fullmatch(
        r"Tiny takes \d+ MB with 64 sessions of 4095 positions, and \d+ MB are free: serving the layers 0:5, which fit",
        chosen.notice,
    )
    others = [Span(0, 5)]
    assert choose(model, None, has, others, "Tiny").span.start >= 5, "those nobody holds"


def test_a_limit_that_a_person_set_needs_no_explanation(model: MemoryModel) -> None:
    limits = Limits(Room(PLENTY, PLENTY), allowed=bytes_of(model, Span(0, 5)))
    assert choose(model, None, limits, [], "Tiny") == Choice(Span(0, 5), LOAD.n_ctx)


def test_a_limit_above_what_is_free_does_not_make_more_free(model: MemoryModel) -> None:
    limits = Limits(Room(bytes_of(model, Span(0, 5)), PLENTY), allowed=PLENTY)
    assert choose(model, None, limits, [], "Tiny").span == Span(0, 5)


@pytest.mark.parametrize("limit", ["machine", "memory"])
def test_what_was_asked_for_and_does_not_fit_is_refused_with_what_would(model: MemoryModel, limit: str) -> None:
    asked, n_bytes = Span(2, 11), bytes_of(model, Span(0, 5))
    limits = room(n_bytes) if limit == "machine" else Limits(Room(PLENTY, PLENTY), allowed=n_bytes)
    said = refusal(model, asked, limits)
    assert said.startswith("the layers 2:11 of Tiny take ")
    assert ("MB are free; " if limit == "machine" else "MB allowed; ") in said
    found = re.search(r"; the layers (\S+) would fit, or these would fit with --sessions (\d+) or --ctx (\d+)$", said)
    assert found is not None, said
    choose(model, Span.parse(found[1]), limits, [], "Tiny")
    for load, more in (
        (replace(LOAD, n_sessions=int(found[2])), replace(LOAD, n_sessions=int(found[2]) + 1)),
        (replace(LOAD, n_ctx=int(found[3])), replace(LOAD, n_ctx=int(found[3]) + 256)),
    ):
        assert choose(model.under(load), asked, limits, [], "Tiny").span == asked
        refusal(model.under(more), asked, limits)


def test_weights_of_layers_that_were_asked_for_may_push_other_file_pages_out(model: MemoryModel) -> None:
    memory = model.span(Span(0, 5))
    tight = Room(memory.kv + memory.work, PLENTY)
    assert choose(model, Span(0, 5), Limits(tight), [], "Tiny").span == Span(0, 5)
    assert "are free" in refusal(model, Span(0, 5), Limits(tight, is_mapped=False))
    assert "are free" in refusal(model, Span(0, 5), Limits(Room(tight.free, tight.free)))
    assert choose(model, None, Limits(tight), [], "Tiny").span != Span(0, 5)


def test_where_nothing_fits_it_is_said_what_is_needed_at_least(model: MemoryModel) -> None:
    said = refusal(model, None, room(PROCESS_BYTES // 100))
    assert re.search(r"; at least \d+ MB are needed, for the layers \d+:\d+ and one short session$", said), said


def test_where_no_layers_fit_so_many_sessions_fewer_would(model: MemoryModel) -> None:
    load = Load(100_000, 16)
    has = room(min(bytes_of(model.under(replace(load, n_sessions=3)), span) for span in model.smallest_spans))
    said = refusal(model.under(load), None, has)
    found = re.search(r"; they would fit with --sessions 3 or --ctx (\d+)$", said)
    assert found is not None, said
    for smaller in (replace(load, n_sessions=3), replace(load, n_ctx=int(found[1]))):
        assert len(choose(model.under(smaller), None, has, [], "Tiny").span) == 1


def test_a_model_that_is_not_split_is_served_whole_as_long_as_it_can_be(tmp_path: Path) -> None:
    path = write_tiny("qwen3", tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"qwen9"))
    model = MemoryModel(read_header(path), LOAD)
    assert choose(model, None, room(1), [], "Tiny").span == model.whole, "its size is a guess: llama.cpp decides"
    said = refusal(model, None, Limits(Room(PLENTY, PLENTY), allowed=bytes_of(model, model.whole) - 1))
    assert "the layers" not in said and "it would fit with --sessions" in said


def test_gpus_hold_whole_models_and_no_parts(model: MemoryModel) -> None:
    needed = bytes_of(model, model.whole)
    assert choose(model, None, Limits(Room(needed // 2, needed), gpu_bytes=needed), [], "Tiny").span == model.whole
    assert "are free" in refusal(model, Span(0, 11), Limits(Room(needed // 2, needed), gpu_bytes=needed))


def test_layers_that_may_not_be_cut_out_are_for_the_cutting_to_refuse(model: MemoryModel) -> None:
    assert choose(model, Span(5, 40), room(1), [], "Tiny").span == Span(5, 40)


def test_parts_may_have_shorter_sessions_than_the_whole(tmp_path: Path) -> None:
    keys = {"rope.scaling.original_context_length": 256}
    path = write_tiny("phi3", tmp_path / "t.gguf", keys=keys, without=r".*[._]scale|.*\.bias|attn_[qkv]\..*")
    model = MemoryModel(read_header(path), Load(511, 1))
    assert choose(model, None, room(PLENTY), [], "Tiny").n_ctx == 511
    assert choose(model, Span(0, 1), room(PLENTY), [], "Tiny").n_ctx == 256


def test_the_layers_that_can_do_least_are_taken_where_that_is_known(model: MemoryModel) -> None:
    has = room(bytes_of(model, Span(0, 5)))
    levels = [9] * 7 + [1] * 2 + [9] * 3
    chosen = choose(model, None, has, [Span(7, 12)], "Tiny", levels).span
    assert chosen.start <= 7 and chosen.stop >= 9


@pytest.mark.parametrize("of", ["machine", "person"])
def test_other_layers_go_beside_those_that_are_loaded_or_in_their_place(model: MemoryModel, of: str) -> None:
    old, new = Span(0, 5), Span(5, 9)
    taken, needed = bytes_of(model, old) - PROCESS_BYTES, bytes_of(model, new) - PROCESS_BYTES

    def limits(for_layers: int) -> Limits:
        """Room for so much beside the program, of which `taken` is taken."""
        if of == "machine":
            return room(for_layers - taken)
        return Limits(Room(PLENTY, PLENTY), allowed=for_layers + PROCESS_BYTES)

    assert has_room(model, new, limits(taken + needed), taken=taken, beside=True)
    assert not has_room(model, new, limits(taken + needed - 1), taken=taken, beside=True)
    most = max(taken, needed)
    assert has_room(model, new, limits(most), taken=taken, beside=False)
    assert not has_room(model, new, limits(needed - 1), taken=taken, beside=False)
