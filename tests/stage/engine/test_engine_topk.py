from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from meshswarm.stage.engine.jobs import EngineError
from meshswarm.stage.engine.topk import TopKReducer

LOGITS = arrays(np.float32, st.integers(1, 700), elements=st.sampled_from([-7.5, -1.0, 0.0, 0.25, 3.0, 11.0]))


def by_sorting(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    return np.argsort(-row, kind="stable")[:k]


@given(LOGITS, st.integers(1, 800), st.sampled_from([0.0, 0.3, 1.0, 2.5]))
def test_it_is_what_a_full_stable_sort_gives(row: NDArray[np.float32], k: int, temperature: float) -> None:
    top = TopKReducer(row.size).reduce(row, k, temperature)
    ids = by_sorting(row, k)
    assert top.ids.dtype == np.int32 and top.logits.dtype == np.float32
    assert top.ids.tolist() == ids.tolist()
    assert np.array_equal(top.logits, row[ids])
    tail = np.delete(row.astype(np.float64), ids) / (temperature or 1.0)
    expected = np.logaddexp.reduce(tail) if tail.size else -math.inf
    if temperature == 0:  # nobody draws from the tail
        expected = 0.0
    assert top.tail_log_mass == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("k", [1, 2, 40, 64, 384, 385, 5000, 49_151, 49_152])
def test_a_real_vocabulary(k: int) -> None:
    row = np.random.default_rng(k).normal(0, 3, 49_152).astype(np.float32)
    top = TopKReducer(row.size).reduce(row, k, 0.7)
    assert top.ids.tolist() == by_sorting(row, k).tolist()
    assert math.isfinite(top.tail_log_mass) == (k < row.size)


def test_the_tail_keeps_its_mass_far_below_the_top() -> None:
    row = np.full(1000, -900.0, np.float32)
    row[3] = 50.0
    top = TopKReducer(row.size).reduce(row, 1, 1.0)
    assert top.ids.tolist() == [3]
    assert top.tail_log_mass == pytest.approx(-900.0 + math.log(999), rel=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-9, 1e-45])
def test_a_tiny_temperature_leaves_the_largest_of_the_tail(temperature: float) -> None:
    row = np.array([2.0, 1.0, 0.5] + [-1.0] * 500, np.float32)
    assert TopKReducer(row.size).reduce(row, 1, temperature).tail_log_mass == pytest.approx(1.0 / temperature)


def test_the_row_is_left_alone() -> None:
    row = np.arange(300, dtype=np.float32)
    TopKReducer(row.size).reduce(row, 5, 0.5)
    assert np.array_equal(row, np.arange(300))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("k", [1, 5, 300])
@pytest.mark.parametrize("where", [slice(200, 201), slice(0, 300), slice(0, 3)], ids=["one", "all", "first"])
def test_logits_that_are_not_numbers_are_an_error(bad: float, k: int, where: slice) -> None:
    row = np.zeros(300, np.float32)
    row[where] = bad
    with pytest.raises(EngineError, match="not numbers"):
        TopKReducer(row.size).reduce(row, k, 1.0)


def test_forbidden_tokens_are_no_error() -> None:
    row = np.zeros(300, np.float32)
    row[200] = -math.inf
    top = TopKReducer(row.size).reduce(row, 1, 1.0)
    assert top.tail_log_mass == pytest.approx(math.log(298))
