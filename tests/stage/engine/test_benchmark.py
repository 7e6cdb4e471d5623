"""Every kind of span is measured, in bounded time, and what would take too long is left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.stage.conftest import Cut

from meshswarm.span import Span
from meshswarm.stage.engine import benchmark
from meshswarm.stage.engine.benchmark import Speed, measure
from meshswarm.stage.engine.compute import SpanComputer
from meshswarm.stage.engine.jobs import Job, JobResult, SliceShape
from meshswarm.stage.engine.llama import LlamaSpan
from meshswarm.stage.families.table import FAMILIES


@pytest.mark.parametrize("span", [Span(0, 2), Span(1, 3), Span(2, 4), Span(0, 4)], ids=str)
@pytest.mark.parametrize("n_ctx", [1, 5, 200])
def test_every_kind_of_span_is_measured_and_left_empty(tiny: Path, cut: Cut, span: Span, n_ctx: int) -> None:
    llama = LlamaSpan(cut(tiny, span), n_cells=256, n_slots=2, n_threads=1, max_rows=64)
    shape = SliceShape(span, 4, llama.n_embd, llama.n_vocab, n_ctx, llama.max_rows, takes_hidden=True)
    computer = SpanComputer(llama, shape, FAMILIES["llama"], 2)
    speed = measure(computer, shape)
    assert speed.prefill_us_per_row_layer >= 1 and 1 <= speed.us_per_layer < 1_000_000
    assert (speed.us_per_layer_4 >= 1) is (n_ctx >= 2) and (speed.us_per_layer_16 >= 1) is (n_ctx >= 8)
    assert computer.n_held == [0, 0]
    assert not computer.full_rows
    computer.close()


class SlowLayers:
    """A computer whose turns take a known time of a clock that stands still otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, row_s: float, n_slots: int) -> None:
        self.n_held = [0] * n_slots
        self.now = 0.0
        self.turns: list[tuple[int, ...]] = []
        self._row_s = row_s
        self._monkeypatch = monkeypatch

    def compute(self, jobs: Sequence[Job]) -> list[JobResult]:
        rows = tuple(job.n_rows for job in jobs)
        self.turns.append(rows)
        self.now += self._row_s * sum(rows) ** 0.5
        return [JobResult(None, None, 0.0) for _ in jobs]

    def clear(self, slot: int) -> None:
        pass

    def measure(self, n_layers: int = 10) -> Speed:
        self._monkeypatch.setattr(benchmark.time, "perf_counter", lambda: self.now)
        shape = SliceShape(Span(1, 1 + n_layers), 40, 8, 8, 512, 128, takes_hidden=True)
        return measure(self, shape)  # type: ignore[arg-type]


def test_a_turn_is_as_many_sessions_as_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    many, few, one = (SlowLayers(monkeypatch, row_s=1e-3, n_slots=n) for n in (20, 6, 1))
    assert [computer.measure() for computer in (many, few, one)] == [Speed(100, 200, 400, 9)] * 3
    assert {(1,) * 4, (1,) * 16, (128,)} <= set(many.turns)
    assert {(1,) * 4, (4,) * 4, (128,)} <= set(few.turns)
    assert {(4,), (16,), (128,)} <= set(one.turns)


@pytest.mark.parametrize(("row_s", "limit_s"), [(1e-6, 0.1), (1e-3, 1.0), (0.02, 1.0), (0.3, 2.0), (30.0, 100.0)])
def test_the_time_it_takes_is_bounded(monkeypatch: pytest.MonkeyPatch, row_s: float, limit_s: float) -> None:
    computer = SlowLayers(monkeypatch, row_s=row_s, n_slots=16)
    speed = computer.measure()
    assert computer.now < limit_s
    assert speed.us_per_layer >= 1 and speed.prefill_us_per_row_layer >= 1
    assert (speed.us_per_layer_16 == 0) is (row_s >= 0.3)
