from __future__ import annotations

from pathlib import Path

import pytest
from tests.stage.conftest import Cut

from meshswarm.span import Span
from meshswarm.stage.benchmark import measure
from meshswarm.stage.engine_compute import SpanComputer
from meshswarm.stage.engine_jobs import SliceShape
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.llama import LlamaSpan


@pytest.mark.parametrize("span", [Span(0, 2), Span(1, 3), Span(2, 4), Span(0, 4)], ids=str)
@pytest.mark.parametrize("n_ctx", [1, 5, 200])
def test_every_kind_of_span_is_measured_and_left_empty(tiny: Path, cut: Cut, span: Span, n_ctx: int) -> None:
    llama = LlamaSpan(cut(tiny, span), n_cells=256, n_slots=2, n_threads=1, max_rows=64)
    shape = SliceShape(span, 4, llama.n_embd, llama.n_vocab, n_ctx, llama.max_rows, takes_hidden=True)
    computer = SpanComputer(llama, shape, FAMILIES["llama"], 2)
    speed = measure(computer, shape)
    assert speed.prefill_us_per_row_layer >= 1 and 1 <= speed.us_per_layer < 1_000_000
    assert computer.n_held == [0, 0]
    assert not computer.full_rows
    computer.close()
