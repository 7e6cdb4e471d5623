"""The tap against real graphs of llama.cpp: the native one and the one in Python do the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from meshswarm.stage.engine.llama import LlamaSpan
from meshswarm.stage.engine.tap import Port, TapError, native_available

WIDTH = 64
KINDS = [
    pytest.param(
        True, id="native", marks=pytest.mark.skipif(not native_available(), reason="built without a compiler")
    ),
    pytest.param(False, id="python"),
]


@pytest.fixture(params=KINDS)
def llama(request: pytest.FixtureRequest, tiny: Path) -> Iterator[LlamaSpan]:
    span = LlamaSpan(tiny, n_cells=256, n_slots=4, n_threads=1, max_rows=32, native=request.param)
    assert span.tap.is_native is request.param
    yield span
    span.close()


def fill(llama: LlamaSpan, n_rows: int, slots: tuple[int, ...] = (0,)) -> int:
    """`n_rows` rows from position 0 on for each slot, all kept; the rows of the batch."""
    for index, slot in enumerate(slots):
        rows = slice(index * n_rows, (index + 1) * n_rows)
        llama.slots[rows], llama.positions[rows] = slot, np.arange(n_rows)
        llama.tokens[rows], llama.wanted[rows] = np.arange(n_rows) + index, 1
        llama.remove(slot, 0)
    return n_rows * len(slots)


def capture(llama: LlamaSpan, node: str, n_rows: int, inject: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    rows = np.full((n_rows, WIDTH), np.nan, np.float32)
    llama.tap.start(n_rows, inject=None if inject is None else Port("embd", inject), capture=Port(node, rows))
    assert llama.decode(n_rows) == 0
    llama.tap.finish()
    return rows


def test_rows_put_in_where_the_embedding_stands_run_like_the_tokens_they_come_from(llama: LlamaSpan) -> None:
    n_rows = fill(llama, 7)
    embedded = capture(llama, "embd", n_rows)
    expected = capture(llama, "l_out-2", fill(llama, 7))
    fill(llama, 7)
    llama.tokens[:7] = 0
    assert np.array_equal(capture(llama, "l_out-2", n_rows, inject=embedded), expected)
    assert not np.array_equal(capture(llama, "l_out-2", fill(llama, 7), inject=embedded[::-1].copy()), expected)


def test_a_batch_that_runs_as_several_graphs_is_filled_and_read_row_by_row(llama: LlamaSpan) -> None:
    """Slots with a gap between them: llama.cpp runs one graph for each."""
    slots = (0, 2)
    rows = np.random.default_rng(1).normal(size=(6, WIDTH)).astype(np.float32)
    together = capture(llama, "l_out-3", fill(llama, 3, slots), inject=rows)
    alone = [
        capture(llama, "l_out-3", fill(llama, 3, (slot,)), inject=rows[3 * i : 3 * i + 3])
        for i, slot in enumerate(slots)
    ]
    assert np.array_equal(together, np.concatenate(alone))


def test_an_earlier_layer_ends_the_graph_earlier(llama: LlamaSpan) -> None:
    early = capture(llama, "l_out-0", fill(llama, 4))
    late = capture(llama, "l_out-3", fill(llama, 4))
    assert np.isfinite(early).all() and np.isfinite(late).all()
    assert not np.array_equal(early, late)


def test_without_a_node_to_read_the_graph_runs_to_its_logits(llama: LlamaSpan) -> None:
    n_rows = fill(llama, 4)
    llama.tap.start(n_rows)
    assert llama.decode(n_rows) == 0
    llama.tap.finish()
    assert llama.logits(n_rows).shape == (4, 32)
    assert np.ptp(llama.logits(n_rows)) > 0


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ("l_out-4", "gave 0 of 4 rows of its node 'l_out-4'"),
        ("Kcur-0", "another width"),
        ("cache_k_l0 (view)", "does not hold float32 rows"),
    ],
)
def test_a_graph_that_does_not_fit_is_an_error_and_harms_nothing(llama: LlamaSpan, node: str, problem: str) -> None:
    expected = capture(llama, "l_out-3", fill(llama, 4))
    with pytest.raises(TapError, match=f"(?s){problem}".replace("(view)", r"\(view\)")):
        capture(llama, node, fill(llama, 4))
    assert np.array_equal(capture(llama, "l_out-3", fill(llama, 4)), expected)


def test_a_missing_entry_is_an_error(llama: LlamaSpan) -> None:
    llama.tap.start(fill(llama, 4), inject=Port("nowhere", np.zeros((4, WIDTH), np.float32)))
    assert llama.decode(4) == 0
    with pytest.raises(TapError, match="gave 0 of 4 rows of its node 'nowhere'"):
        llama.tap.finish()


@pytest.mark.parametrize("node", ["embd", "l_out-3"])
def test_more_rows_than_announced_are_not_touched(llama: LlamaSpan, node: str) -> None:
    rows = np.zeros((4, WIDTH), np.float32)
    beyond = rows[2:]
    fill(llama, 4)
    if node == "embd":
        llama.tap.start(2, inject=Port(node, rows[:2]))
    else:
        llama.tap.start(2, capture=Port(node, rows[:2]))
    assert llama.decode(4) == 0
    with pytest.raises(TapError, match="more rows than it was given"):
        llama.tap.finish()
    assert not beyond.any()


def test_a_cancelled_computation_ends_at_once(tiny: Path) -> None:
    if not native_available():
        pytest.skip("built without a compiler")
    llama = LlamaSpan(tiny, n_cells=256, n_slots=1, n_threads=1, max_rows=32)
    llama.tap.start(fill(llama, 4))
    llama.tap.cancel()
    assert llama.decode(4) == 2
    llama.close()
