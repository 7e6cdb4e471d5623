"""Models of the size people aim at, without their weights: through the parser, legal cuts, slices and memory plans."""

import itertools
import math
from pathlib import Path

import pytest
from tests.stage.llama_memory import PRECISION, reported_memory
from tests.stage.real_sizes import REAL_SIZES, RealSize

from meshswarm.artifacts.gguf.check import GgufHeader, check_hyperparameters, read_header
from meshswarm.span import Span
from meshswarm.stage.sizes.memory import Load, MemoryModel
from meshswarm.stage.sizes.plan import plan_memory
from meshswarm.stage.slices.slicing import slice_bytes

GB = 10**9
LOAD = Load(n_ctx=8191, n_sessions=4)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sizes")
    return {name: size.write(folder / f"{name}.gguf") for name, size in REAL_SIZES.items()}


@pytest.fixture(scope="module")
def headers(paths) -> dict[str, GgufHeader]:
    return {name: read_header(path) for name, path in paths.items()}


@pytest.mark.parametrize("size", REAL_SIZES.values(), ids=REAL_SIZES)
def test_what_was_assumed_adds_up_to_what_is_published(size: RealSize):
    n_parameters = sum(math.prod(shape) for shape in size.tensors().values())
    assert n_parameters == pytest.approx(size.n_parameters, rel=0.005)
    assert not set(size.published) & set(size.assumed)


@pytest.mark.parametrize("name", REAL_SIZES)
def test_llama_cpp_takes_the_file_and_reserves_what_the_model_says(name, paths, headers):
    model = MemoryModel(headers[name], LOAD)
    memory, reported = model.span(model.whole), reported_memory(paths[name], LOAD)
    assert 0 <= memory.weights - reported.weights_bytes < 10_000, "but for the padding between tensors"
    assert abs(memory.kv - reported.kv_bytes) < PRECISION
    assert reported.compute_bytes <= memory.work <= 3 * reported.compute_bytes


def test_layers_that_only_predict_further_tokens_are_not_served(headers):
    assert check_hyperparameters(headers["GLM-5.2"]).n_layers == 78


def test_where_they_may_be_cut(headers):
    cuts = {name: MemoryModel(header, LOAD).cuts for name, header in headers.items()}
    assert cuts["GLM-5.2"].starts == (0, 1, 2, *range(6, 78, 4)), "where a layer has an indexer of its own"
    assert cuts["DeepSeek-V4-Flash"].starts == tuple(range(43))
    assert cuts["Ornith-1.0-397B"].starts == tuple(range(60))
    assert all(cut.refusal is None for cut in cuts.values())


@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [
        # Latent and rotary part, of 78 layers; beside them an indexer's keys in each fourth.
        ("GLM-5.2", 2 * (78 * 576 + 21 * 128)),
        # A window's row in all; compressed ones for each 4 or 128 positions, and an indexer's for each 4.
        ("DeepSeek-V4-Flash", 2 * (43 * 512 + 21 * (512 + 128) / 4 + 20 * 512 / 128)),
        ("Ornith-1.0-397B", 2 * 15 * 2 * 2 * 256),
    ],
)
def test_what_a_token_costs(name, n_bytes, headers):
    model = MemoryModel(headers[name], LOAD)
    assert model.token_bytes(model.whole) == n_bytes


def test_what_a_session_costs_however_short(headers):
    model = MemoryModel(headers["Ornith-1.0-397B"], LOAD)
    state, convolution = 128 * 8192, 3 * (8192 + 2 * 16 * 128)
    assert model.state_bytes(model.whole) == 45 * 4 * (state + convolution)
    assert MemoryModel(headers["GLM-5.2"], LOAD).state_bytes(Span(0, 78)) == 0


@pytest.mark.parametrize("name", REAL_SIZES)
def test_spans_are_weighed_without_writing_them(name, headers):
    model = MemoryModel(headers[name], LOAD)
    for start, stop in itertools.pairwise([*model.cuts.starts[::3], model.n_layers]):
        span = Span(start, stop)
        assert model.span(span).weights == slice_bytes(model.header, span)


@pytest.mark.parametrize(
    ("name", "rooms", "spans"),
    [
        ("GLM-5.2", [96, 128, 120, 128], ["0:22", "22:42", "42:62", "62:78"]),
        ("DeepSeek-V4-Flash", [192, 16], ["0:43"]),
        ("DeepSeek-V4-Flash", [64, 64, 64], ["0:16", "16:33", "33:43"]),
        ("Ornith-1.0-397B", [256, 192], ["0:35", "35:60"]),
    ],
)
def test_a_plan_for_given_peers(name, rooms, spans, headers):
    plan = plan_memory(headers[name], [room * GB for room in rooms], LOAD)
    assert [str(part.span) for part in plan.spans] == spans, plan.refusal
    assert all(part.memory.total <= part.room == rooms[part.peer] * GB for part in plan.spans)
    assert len({part.peer for part in plan.spans}) == len(spans)


def test_many_small_peers_hold_the_largest_model(headers):
    plan = plan_memory(headers["GLM-5.2"], [32 * GB] * 30, LOAD)
    assert plan.spans[0].span.start == 0 and plan.spans[-1].span.stop == 78
    assert len(plan.spans) < 25


def test_a_refusal_says_what_would_fit(headers):
    long = plan_memory(headers["GLM-5.2"], [192 * GB] * 3, Load(n_ctx=(1 << 20) - 1, n_sessions=4))
    assert "with 4 sessions of 1048575 positions; they could with one session of 917503" in (long.refusal or "")
    small = plan_memory(headers["Ornith-1.0-397B"], [24 * GB, 16 * GB], LOAD)
    assert "not even for one session of 255 positions: it takes 422" in (small.refusal or "")
    tiny = plan_memory(headers["GLM-5.2"], [16 * GB] * 50, LOAD)
    assert "its layers 74:78 alone, which cannot be cut further, take 24.7 GB" in (tiny.refusal or "")
