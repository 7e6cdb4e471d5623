"""Proving a file: parts that compute the same pass, whatever differs does not, and no dtype that loses what matters."""

import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from tests.stage.tiny_models import N_VOCAB, write_tiny

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.errors import ConfigError
from meshswarm.span import Span
from meshswarm.stage.engine import engine
from meshswarm.stage.engine.engine import SpanEngine, Speed
from meshswarm.stage.engine.llama import numclass
from meshswarm.stage.families import cuts
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.families.proofs import Proofs
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.proving import verify as verifying
from meshswarm.stage.proving.talk import LEAST_PROMPT, MARGIN, MAX_PROMPT, TAIL, prompt_lengths, proved_context, reach
from meshswarm.stage.proving.verify import (
    Material,
    SplitDiffersError,
    affordable_spans,
    chosen_chains,
    kl_divergence,
    obstacle,
    verify,
)
from meshswarm.stage.proving.wire_proofs import Divergence, Thresholds
from meshswarm.stage.sessions.messages import Dtype
from meshswarm.stage.sizes.memory import Load, MemoryModel

PROMPTS = [[(7 * n * n + 13 * n + seed) % N_VOCAB for n in range(40 + 30 * seed)] for seed in range(2)]
NO_PATTERN = {"patterns": (), "needed_kinds": ()}
NOISE = Divergence(agreement=0.97, mean_kl=0.004, p99_kl=0.03)


@pytest.fixture(autouse=True)
def no_children(monkeypatch):
    """The files are this test's own: trying each in a child process first would take most of the time, and so would
    timing each engine."""
    monkeypatch.setattr(verifying, "probe", lambda _: None)
    monkeypatch.setattr(SpanEngine, "measure", lambda _engine, _budget_s: Speed(0, 0, 0, 0))


@pytest.fixture
def new_build(monkeypatch):
    """A build of llama.cpp on which this project's tests never ran."""
    monkeypatch.setattr("meshswarm.stage.families.proofs.installed_build", lambda: "9.9.9")


def material(path: Path) -> Material:
    return Material(path, read_header(path), bytes(32), PROMPTS)


def scale(path: Path, name: str, factors: np.ndarray) -> None:
    """Multiply the columns of a float32 tensor in place."""
    header = read_header(path)
    tensor = header.tensors[name]
    assert tensor.type.name == "F32"
    numbers = np.memmap(path, np.float32, "r+", header.data_offset + tensor.offset, tensor.dims[::-1])
    numbers *= factors
    numbers.flush()


@pytest.mark.parametrize("name", ["qwen3", "qwen35moe", "deepseek4"])
async def test_parts_that_compute_what_the_whole_does(name, tmp_path):
    verified = await verify(material(write_tiny(name, tmp_path / "tiny.gguf")), folder=tmp_path)
    proof = verified.wire
    assert verified.cuts.starts == tuple(Span.parse(text).start for text in proof.spans)
    assert (verified.cuts.numclass, verified.cuts.max_ctx, verified.cuts.refusal) == (numclass(), None, None)
    assert proof.hops == len(proof.spans) - 1 >= 3
    assert proof.n_rows == sum(map(len, PROMPTS)) + 2 * verifying.N_ANSWER
    assert [result.dtype for result in proof.results] == [Dtype.F16, Dtype.Q8]
    assert 0 < proof.largest < 1000
    f16, q8 = (result.divergence for result in proof.results)
    assert f16.mean_kl < q8.mean_kl, "the coarser dtype must show, or the rows never went over the wire"
    assert not list(tmp_path.glob("verify-*")), "its slices are gone"


async def test_f16_is_refused_where_hidden_states_are_too_large(tmp_path):
    path = write_tiny("qwen3", tmp_path / "tiny.gguf")
    scale(path, "token_embd.weight", np.float32(1e5))
    proof = (await verify(material(path), folder=tmp_path)).wire
    f16, _ = proof.results
    assert "does not fit the wire dtype f16" in f16.obstacle
    assert Dtype.F16 not in proof.proved()


async def test_q8_is_refused_where_one_large_number_drowns_its_block(tmp_path):
    """Each block of 32 has one number so large that the others, on which all depends, become zero beside it."""
    path = write_tiny("qwen3", tmp_path / "tiny.gguf")
    header = read_header(path)
    is_large = np.arange(128) % 32 == 0
    large = np.where(is_large, np.float32(1000), np.float32(1)).astype(np.float32)
    scale(path, "token_embd.weight", large)
    heard = np.where(is_large, np.float32(0), np.float32(170)).astype(np.float32)
    for name, tensor in header.tensors.items():
        if name.endswith("norm.weight") and tensor.dims == (128,):
            scale(path, name, heard)
    proof = (await verify(material(path), folder=tmp_path)).wire
    f16, q8 = proof.results
    assert q8.obstacle is not None and q8.divergence.mean_kl > 10 * f16.divergence.mean_kl
    assert Dtype.Q8 not in proof.proved()


async def test_parts_of_another_model_are_found_out(tmp_path, monkeypatch):
    path = write_tiny("qwen3", tmp_path / "tiny.gguf")
    other = write_tiny("qwen3", tmp_path / "other.gguf")
    scale(other, "blk.2.ffn_down.weight", np.float32(1.001))
    write_slice = verifying.write_slice
    monkeypatch.setattr(verifying, "write_slice", lambda _, *rest, **named: write_slice(other, *rest, **named))
    with pytest.raises(SplitDiffersError, match=r"do not compute what the whole does: .* is served whole here"):
        await verify(material(path), folder=tmp_path)


async def test_it_says_how_much_memory_it_would_take(tmp_path):
    with pytest.raises(ConfigError, match=r"takes the whole model into memory, 0\.2 GB, and 0\.1 GB are free"):
        await verify(
            material(write_tiny("qwen3", tmp_path / "tiny.gguf")), folder=tmp_path, available_bytes=100_000_000
        )


@pytest.mark.parametrize(
    ("name", "what", "wrong", "keys"),
    [
        ("gpt-oss", "windows start anew in each span", NO_PATTERN, {"attention.sliding_window": 128}),
        ("gpt-oss", "and are longer than any prompt here", NO_PATTERN, {"attention.sliding_window": 300}),
        ("gemma3", "received rows are scaled", {"inject_node": "embd"}, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_wrong_row_is_not_proved(name, what, wrong, keys, tmp_path, monkeypatch, new_build):
    path = write_tiny(name, tmp_path / "tiny.gguf", keys=keys)
    right = FAMILIES[name]
    with pytest.MonkeyPatch.context() as patch:
        for module in (cuts, engine):
            patch.setattr(module, "FAMILIES", dict(FAMILIES) | {name: dataclasses.replace(right, **wrong)})
        with pytest.raises(SplitDiffersError, match="do not compute what the whole does") as caught:
            await verify(material(path), folder=tmp_path)
    assert not list(tmp_path.glob("verify-*"))
    assert "the build 9.9.9" in str(caught.value) and "9.9.9" not in caught.value.refusal


@pytest.mark.parametrize("name", ["gpt-oss", "qwen35", "deepseek4"])
async def test_on_a_new_build_every_span_that_it_allows_is_tried(name, tmp_path, monkeypatch, new_build):
    path = write_tiny(name, tmp_path / "tiny.gguf")
    tried = defaultdict(set)
    parts = verifying._Bench.parts

    async def noting(bench, spans):
        tried[bench.options.flash_attn].update(spans)
        return await parts(bench, spans)

    monkeypatch.setattr(verifying._Bench, "parts", noting)
    verified = await verify(material(path), folder=tmp_path)
    header = read_header(path)
    allowed = legal_cuts(header, Proofs("9.9.9", verified.cuts))
    assert allowed.refusal is None and allowed.max_ctx is None
    assert allowed.starts == legal_cuts(header, Proofs.trial()).starts
    ends = (*allowed.starts, allowed.n_layers)
    spans = {Span(start, stop) for start in ends for stop in ends if start < stop} - {Span(0, allowed.n_layers)}
    assert tried[True] == spans
    assert tried[False] == (set() if FAMILIES[name].needs_flash_attention else spans), "as an engine may compute it"


async def test_where_time_allows_fewer_cuts_only_those_are_proved(tmp_path, new_build):
    path = write_tiny("qwen3", tmp_path / "tiny.gguf", n_layers=8)
    verified = await verify(material(path), folder=tmp_path, budget_s=0)
    assert verified.cuts.starts == (0, 4)
    cuts = legal_cuts(read_header(path), Proofs("9.9.9", verified.cuts))
    why = "with llama-cpp-python 9.9.9 no other cut of it was tried on this machine"
    assert cuts.sentence == f"can be cut before 4 of its layers 0:8: {why}"
    assert cuts.allow(Span(0, 4)) and not cuts.allow(Span(0, 2))


def test_more_cuts_are_tried_the_more_time_there_is():
    assert [affordable_spans(30, whole_s, 60) for whole_s in (100, 20, 5, 1, 0.1)] == [2, 3, 6, 12, 12]
    assert affordable_spans(3, 0.1, 60) == 3


async def test_a_session_is_as_long_as_what_was_tried(tmp_path, new_build):
    """Where there is no room for a talk beyond a window, no part is served beyond what the talk had."""
    path = write_tiny(
        "gpt-oss", tmp_path / "tiny.gguf", keys={"attention.sliding_window": 4096, "context_length": 8192}
    )
    header = read_header(path)
    long, short = (
        MemoryModel(header, Load(n_prompt + TAIL, 1)).span(Span(0, 4)).total for n_prompt in prompt_lengths(header)
    )
    assert short < long
    verified = await verify(material(path), folder=tmp_path, available_bytes=long - 1, budget_s=0)
    assert verified.cuts.max_ctx == LEAST_PROMPT + TAIL
    cuts = legal_cuts(header, Proofs("9.9.9", verified.cuts))
    assert cuts.max_ctx == LEAST_PROMPT + TAIL
    assert cuts.sentence.endswith(f"a session in parts of it has at most {LEAST_PROMPT + TAIL} positions")


@pytest.mark.parametrize(
    ("name", "keys", "positions"),
    [
        ("qwen3", {}, 0),
        ("gpt-oss", {"attention.sliding_window": 128}, 128),
        ("gemma2", {"attention.sliding_window": None}, 4096),
        ("llama4", {}, 8192),
        ("phi3", {"attention.sliding_window": 2047}, 0),  # llama.cpp computes none
        ("deepseek32", {"attention.indexer.top_k": 2048}, 2048),
        ("deepseek4", {"attention.indexer.top_k": 512}, 2048),  # of blocks of 4
        ("deepseek4", {"attention.indexer.top_k": 8}, 128),
    ],
)
def test_how_far_a_talk_has_to_go(name, keys, positions, tmp_path):
    header = read_header(write_tiny(name, tmp_path / "tiny.gguf", keys={"context_length": 1 << 20} | keys))
    assert reach(header) == positions
    longest = prompt_lengths(header)[0]
    assert longest == max(LEAST_PROMPT, positions + MARGIN) < MAX_PROMPT
    assert proved_context(header, longest) is None
    if positions:
        assert proved_context(header, LEAST_PROMPT) == LEAST_PROMPT + TAIL


def test_no_talk_is_longer_than_the_model_allows(tmp_path):
    header = read_header(write_tiny("gpt-oss", tmp_path / "tiny.gguf", keys={"attention.sliding_window": 4096}))
    assert prompt_lengths(header)[0] == 512 - TAIL
    assert proved_context(header, 512 - TAIL) is None


def chains_of(path, n_spans):
    return [[str(span) for span in chain] for chain in chosen_chains(legal_cuts(read_header(path)), n_spans)]


def test_it_takes_as_many_spans_as_cuts_allow(tmp_path):
    many = chains_of(write_tiny("qwen3", tmp_path / "many.gguf", n_layers=12), 6)
    assert many[0] == ["0:2", "2:4", "4:6", "6:8", "8:10", "10:12"]
    few = chains_of(write_tiny("smollm3", tmp_path / "few.gguf"), 6)
    assert few == [["0:4", "4:8", "8:12"], ["0:8", "8:12"], ["0:4", "4:12"]]


async def test_what_is_never_split_needs_no_proof(tmp_path):
    path = write_tiny("qwen3", tmp_path / "tiny.gguf")
    raw = path.read_bytes().replace(b"qwen3", b"qwen9")
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"there is nothing to verify: .* served whole"):
        await verify(material(path), folder=tmp_path)


def test_divergence_is_zero_for_the_same_rows_and_known_for_others():
    row = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    assert kl_divergence(row, row + 7) == pytest.approx([0], abs=1e-6)
    assert kl_divergence(row, other) == pytest.approx([0.25 * np.log(2)], rel=1e-5)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"agreement": 0.9599}, "the best token is the same at 96.0% of the rows only, below 96.0%"),
        ({"mean_kl": 0.0061}, "diverge by 0.0061 nats on average, above 0.006"),
        ({"p99_kl": 0.046}, "one row in a hundred"),
        ({"mean_kl": float("nan")}, "on average"),
        ({}, None),
    ],
)
def test_a_dtype_may_go_little_farther_than_the_model_is_from_itself(found, why):
    result = obstacle(Dtype.F16, dataclasses.replace(NOISE, **found), NOISE, largest=100.0)
    assert result is None if why is None else why in result


def test_a_model_without_noise_is_held_to_what_nobody_notices():
    limits = Thresholds()
    assert limits.within(Divergence(1.0, 0.0, 0.0)) == Divergence(0.985, 1e-3, 1e-2)
    assert "too near the 65504" in obstacle(Dtype.F16, NOISE, NOISE, largest=33_000.0)
    assert obstacle(Dtype.Q8, NOISE, NOISE, largest=33_000.0) is None
