from __future__ import annotations

import pytest

from meshswarm.stage.engine.benchmark import Speed
from meshswarm.stage.engine.slowdown import MAX_STEPS, Slowdown

SPEED = Speed(us_per_layer=100, us_per_layer_4=160, us_per_layer_16=400, prefill_us_per_row_layer=20)


@pytest.mark.parametrize(("n_rows", "compute_s"), [(1, 1e-3), (4, 1.6e-3), (2, 1.2e-3), (16, 4e-3), (10, 2.8e-3)])
def test_an_undisturbed_step_is_as_long_as_usual(n_rows: int, compute_s: float) -> None:
    slowdown = Slowdown(SPEED, 10)
    slowdown.observe(n_rows, compute_s)
    assert slowdown.take() == pytest.approx(1.0)


def test_the_middle_step_counts_and_is_told_once() -> None:
    slowdown = Slowdown(SPEED, 10)
    for compute_s in (1e-3, 1.2e-3, 50e-3):
        slowdown.observe(1, compute_s)
    assert slowdown.take() == pytest.approx(1.2)
    assert slowdown.take() is None


def test_what_was_not_measured_is_compared_with_nothing() -> None:
    slowdown = Slowdown(Speed(100, 0, 0, 20), 10)
    slowdown.observe(4, 1.0)
    assert slowdown.take() is None


def test_only_the_last_steps_are_kept() -> None:
    slowdown = Slowdown(SPEED, 10)
    for _ in range(3 * MAX_STEPS):
        slowdown.observe(1, 9e-3)
    for _ in range(MAX_STEPS):
        slowdown.observe(1, 1e-3)
    assert slowdown.take() == pytest.approx(1.0)
