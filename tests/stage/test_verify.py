"""Proving a file: parts that compute the same pass, whatever differs does not, and no dtype that loses what matters."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.stage.tiny_models import N_VOCAB, write_tiny

from meshswarm.artifacts.gguf import read_header
from meshswarm.errors import ConfigError
from meshswarm.stage import verify as verifying
from meshswarm.stage.messages import Dtype
from meshswarm.stage.verify import Material, SplitDiffersError, chosen_spans, kl_divergence, obstacle, verify
from meshswarm.stage.wire_proofs import Divergence, Thresholds

PROMPTS = [[(7 * n * n + 13 * n + seed) % N_VOCAB for n in range(40 + 30 * seed)] for seed in range(2)]
NOISE = Divergence(agreement=0.97, mean_kl=0.004, p99_kl=0.03)


@pytest.fixture(autouse=True)
def no_children(monkeypatch):
    """The files are this test's own: trying each in a child process first would take most of the time."""
    monkeypatch.setattr(verifying, "probe", lambda _: None)


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
    proof = await verify(material(write_tiny(name, tmp_path / "tiny.gguf")), folder=tmp_path)
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
    proof = await verify(material(path), folder=tmp_path)
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
    proof = await verify(material(path), folder=tmp_path)
    f16, q8 = proof.results
    assert q8.obstacle is not None and q8.divergence.mean_kl > 10 * f16.divergence.mean_kl
    assert Dtype.Q8 not in proof.proved()


async def test_parts_of_another_model_are_found_out(tmp_path, monkeypatch):
    path = write_tiny("qwen3", tmp_path / "tiny.gguf")
    other = write_tiny("qwen3", tmp_path / "other.gguf")
    scale(other, "blk.2.ffn_down.weight", np.float32(1.001))
    write_slice = verifying.write_slice
    monkeypatch.setattr(verifying, "write_slice", lambda _, *rest, **named: write_slice(other, *rest, **named))
    with pytest.raises(SplitDiffersError, match=r"do not compute what the whole does: .* serve it whole"):
        await verify(material(path), folder=tmp_path)


async def test_it_says_how_much_memory_it_would_take(tmp_path):
    with pytest.raises(ConfigError, match=r"takes the whole model into memory, 0\.2 GB, and 0\.1 GB are free"):
        await verify(
            material(write_tiny("qwen3", tmp_path / "tiny.gguf")), folder=tmp_path, available_bytes=100_000_000
        )


def test_it_takes_as_many_spans_as_cuts_allow(tmp_path):
    many = read_header(write_tiny("qwen3", tmp_path / "many.gguf", n_layers=12))
    assert [str(span) for span in chosen_spans(many)] == ["0:2", "2:4", "4:6", "6:8", "8:10", "10:12"]
    few = read_header(write_tiny("smollm3", tmp_path / "few.gguf"))
    assert [str(span) for span in chosen_spans(few)] == ["0:4", "4:8", "8:12"]


def test_what_is_never_split_needs_no_proof(tmp_path):
    path = write_tiny("qwen3", tmp_path / "tiny.gguf")
    raw = path.read_bytes().replace(b"qwen3", b"qwen9")
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"there is nothing to verify: .* served whole"):
        chosen_spans(read_header(path))


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
