"""What a slice's header says, for every rule by which a family's settings change in a part of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.stage.tiny_models import write_tiny

from meshswarm.artifacts.gguf.check import GgufHeader, read_header
from meshswarm.artifacts.gguf.container import ValueType
from meshswarm.span import Span
from meshswarm.stage.slices.slicing import MIDDLE_VOCABULARY, write_slice

Slice = Callable[..., GgufHeader]


@pytest.fixture
def sliced(tmp_path: Path) -> Slice:
    """`sliced(name, start, stop, **changes)`: the header of a slice of a tiny model."""

    def header_of(name: str, start: int, stop: int, **changes: Any) -> GgufHeader:
        source = write_tiny(name, tmp_path / "model.gguf", **changes)
        target = tmp_path / f"{start}-{stop}.gguf"
        write_slice(source, read_header(source), Span(start, stop), target)
        return read_header(target)

    return header_of


def items(header: GgufHeader, key: str) -> list[int]:
    values = header.numbers(key)
    assert values is not None
    return [int(value) for value in values]


@pytest.mark.parametrize(
    ("start", "stop", "n_dense"), [(0, 1, 2), (0, 2, 2), (0, 4, 2), (1, 4, 1), (2, 4, 0), (3, 6, 0), (1, 2, 1)]
)
def test_a_count_of_layers_becomes_the_spans_own(sliced: Slice, start: int, stop: int, n_dense: int) -> None:
    """The zero layer behind a first span counts too: it is shaped like the next layer, which here may be dense."""
    header = sliced("glm4moe", start, stop)
    assert header.scalar("glm4moe.leading_dense_block_count") == n_dense
    dense = {name.split(".")[1] for name in header.tensors if name.endswith("ffn_gate.weight")}
    assert len(dense) == n_dense


def test_blocks_that_guess_further_tokens_are_left_out(sliced: Slice) -> None:
    header = sliced("glm4moe", 4, 6)
    assert header.scalar("glm4moe.block_count") == 2
    assert "glm4moe.nextn_predict_layers" not in header.metadata
    assert not [name for name in header.tensors if "nextn" in name]


def test_a_scale_of_the_embedding_stays_where_tokens_enter(sliced: Slice) -> None:
    assert sliced("granite", 0, 2).scalar("granite.embedding_scale") == 12.0
    assert "granite.embedding_scale" not in sliced("granite", 2, 4).metadata


@pytest.mark.parametrize(
    ("keys", "start", "stop", "windows"),
    [
        ({}, 0, 2, [1, 1, 1]),
        ({}, 2, 8, [1, 1, 1, 0, 1, 1]),
        ({}, 5, 6, [0, 1]),
        ({"attention.sliding_window_pattern": 3}, 1, 4, [1, 0, 1]),
        ({"attention.sliding_window_pattern": [True, False] * 4}, 3, 6, [0, 1, 0]),
    ],
)
def test_a_pattern_is_written_out(
    sliced: Slice, keys: dict[str, Any], start: int, stop: int, windows: list[int]
) -> None:
    header = sliced("gemma3", start, stop, keys=keys)
    key = "gemma3.attention.sliding_window_pattern"
    assert items(header, key) == windows
    assert header.metadata[key].item_type is ValueType.BOOL


def test_a_model_without_the_pattern_has_none_in_its_slices(sliced: Slice) -> None:
    assert "olmo2.attention.sliding_window_pattern" not in sliced("olmo2", 1, 3).metadata


def test_the_period_of_a_pattern_is_left_out(sliced: Slice) -> None:
    header = sliced("qwen35", 2, 5)
    assert items(header, "qwen35.attention.recurrent_layers") == [1, 0, 1]
    assert "qwen35.full_attention_interval" not in header.metadata


def test_an_array_has_items_for_the_zero_layers_too(sliced: Slice) -> None:
    assert items(sliced("lfm2", 0, 2), "lfm2.attention.head_count_kv") == [0, 0, 2]
    assert items(sliced("lfm2", 4, 5), "lfm2.attention.head_count_kv") == [2, 0]


@pytest.mark.parametrize(
    ("changes", "rank", "gating"),
    [
        ({}, 48, 2),
        ({"keys": {"expert_gating_func": None}}, 48, 1),
        ({"n_layers": 27, "keys": {"attention.q_lora_rank": None}}, 0, 2),
    ],
)
def test_what_llama_cpp_would_guess_is_written_out(
    sliced: Slice, changes: dict[str, Any], rank: int, gating: int
) -> None:
    header = sliced("deepseek2", 1, 3, **changes)
    assert header.scalar("deepseek2.attention.q_lora_rank") == rank
    assert header.scalar("deepseek2.expert_gating_func") == gating


def test_every_context_is_a_small_one_where_factors_depend_on_it(sliced: Slice) -> None:
    key = "phi3.rope.scaling.original_context_length"
    assert sliced("phi3", 1, 3).scalar(key) == 64
    header = sliced("phi3", 1, 3, without=r".*[._]scale|.*\.bias")
    assert header.scalar(key) == 1 << 24
    assert {"rope_factors_long.weight", "rope_factors_short.weight"} <= header.tensors.keys()


def test_an_output_that_llama_cpp_insists_on_is_zeros_of_the_right_shape(sliced: Slice, tmp_path: Path) -> None:
    for start, stop, n_vocab in ((0, 2, 160), (1, 3, MIDDLE_VOCABULARY)):
        header = sliced("gpt-oss", start, stop)
        output = header.tensors["output.weight"]
        assert output.dims == (128, n_vocab)
        data = (tmp_path / f"{start}-{stop}.gguf").read_bytes()
        at = header.data_offset + output.offset
        assert not any(data[at : at + output.n_bytes])
    assert "output.weight" not in sliced("llama", 0, 2).tensors


def test_tensors_that_go_with_the_output_stay_with_it(sliced: Slice) -> None:
    assert "output.bias" in sliced("qwen2", 2, 4).tensors
    assert "output.bias" not in sliced("qwen2", 0, 2).tensors
