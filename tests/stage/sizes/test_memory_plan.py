"""Which peers could hold a model together: legal spans, all of it counted, as few peers as can be."""

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stage.tiny_models import write_tiny

from meshswarm.artifacts.gguf.check import GgufHeader, read_header
from meshswarm.stage.sizes.memory import Load, MemoryModel
from meshswarm.stage.sizes.plan import longest_span, plan_memory

LOAD = Load(n_ctx=2047, n_sessions=4)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufHeader]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    names = ("qwen3", "smollm3", "gemma2")
    return {name: read_header(write_tiny(name, folder / f"{name}.gguf", n_layers=8)) for name in names}


def can_hold(model: MemoryModel, rooms: tuple[int, ...]) -> bool:
    """Whether peers in this order can, each taking all it can."""
    start = 0
    for room in rooms:
        span = longest_span(model, start, room)
        if span is None:
            return False
        start = span.stop
        if start == model.n_layers:
            return True
    return False


@pytest.mark.parametrize("name", ["qwen3", "smollm3", "gemma2"])
@given(shares=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_plan_is_legal_and_fits_and_no_fewer_peers_could(name, shares, headers):
    model = MemoryModel(headers[name], LOAD)
    program = model.span(model.whole).total - sum(
        (model.span(model.whole).weights, model.span(model.whole).kv, model.span(model.whole).work)
    )
    rooms = [program + int(share * (model.span(model.whole).total - program)) for share in shares]
    plan = plan_memory(headers[name], rooms, LOAD)
    orders = [order for n in range(1, len(rooms) + 1) for order in itertools.permutations(rooms, n)]
    fewest = next((len(order) for order in orders if can_hold(model, order)), None)
    if fewest is None:
        assert not plan.spans and "cannot hold this model" in plan.refusal
        return
    assert len(plan.spans) == fewest
    assert [part.span.start for part in plan.spans] == [0, *(part.span.stop for part in plan.spans[:-1])]
    assert plan.spans[-1].span.stop == model.n_layers
    assert len({part.peer for part in plan.spans}) == fewest
    for part in plan.spans:
        assert model.cuts.allow(part.span)
        assert model.span(part.span).total == part.memory.total <= part.room == rooms[part.peer]


def test_what_would_fit_fits(headers):
    whole = MemoryModel(headers["qwen3"], Load(255, 1)).span(MemoryModel(headers["qwen3"], LOAD).whole).total
    plan = plan_memory(headers["qwen3"], [whole], Load(n_ctx=1023, n_sessions=8))
    assert plan.refusal is not None and "they could with one session of 255 positions" in plan.refusal
    assert plan_memory(headers["qwen3"], [whole], Load(255, 1)).spans


def test_a_model_that_is_served_whole_needs_one_peer_for_it(tmp_path, headers):
    path = write_tiny("qwen3", tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"qwen9"))
    header = read_header(path)
    model = MemoryModel(header, LOAD)
    assert not model.is_exact
    assert plan_memory(header, [model.span(model.whole).total], LOAD).spans[0].span == model.whole
    refusal = plan_memory(header, [10**8] * 3, LOAD).refusal or ""
    assert "served whole" in refusal and "one peer needs" in refusal


def test_parts_of_a_model_may_have_shorter_sessions_than_the_whole(tmp_path):
    """Where llama.cpp takes other factors for positions in a large context than in a small one."""
    keys = {"rope.scaling.original_context_length": 256}
    header = read_header(
        write_tiny("phi3", tmp_path / "tiny.gguf", keys=keys, without=r".*[._]scale|.*\.bias|attn_[qkv]\..*")
    )
    model = MemoryModel(header, Load(511, 1))
    assert model.cuts.max_ctx == 256
    room = max(model.span(span).total for span in model.smallest_spans)
    assert room < model.span(model.whole).total
    assert plan_memory(header, [room] * 8, Load(255, 1)).spans
    refused = plan_memory(header, [room] * 8, Load(511, 1)).refusal or ""
    assert "they could with one session of 255 positions" in refused
