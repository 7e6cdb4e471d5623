"""The door of the engine: what must not get past it would end the process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshswarm.span import Span
from meshswarm.stage.engine.jobs import (
    MAX_ACTIVATION,
    MAX_OUTPUTS,
    EngineInputError,
    Job,
    SliceShape,
    check_job,
    check_position,
)
from meshswarm.stage.engine.profile import EXACT_MAX_ROWS, Profile

FIRST = SliceShape(Span(0, 10), 30, n_embd=8, n_vocab=100, n_ctx=256, max_rows=128, takes_hidden=True)
MIDDLE = replace(FIRST, span=Span(10, 20), n_vocab=32)
LAST = replace(FIRST, span=Span(20, 30))
ZEROS = np.zeros((3, 8), np.float32)
TOKENS = Job(0, 0, None, np.array([0, 5, 99], np.int32), None, 10, (), 1, 0.0, Profile.FAST)
HIDDEN = replace(TOKENS, tokens=None, hidden=ZEROS, stop_layer=20)
OUTPUTS = replace(HIDDEN, stop_layer=30, outputs=(0, 2))


def bent(value: float) -> Job:
    hidden = ZEROS.copy()
    hidden[1, 7] = value
    return replace(HIDDEN, hidden=hidden)


@pytest.mark.parametrize(
    ("job", "shape"),
    [
        (TOKENS, FIRST),
        (replace(TOKENS, stop_layer=1), FIRST),
        (replace(TOKENS, tokens=None, hidden=ZEROS), FIRST),
        (HIDDEN, MIDDLE),
        (replace(HIDDEN, stop_layer=11), MIDDLE),
        (bent(-MAX_ACTIVATION), MIDDLE),
        (replace(HIDDEN, hidden=np.zeros((128, 8), np.float32)), MIDDLE),
        (replace(HIDDEN, hidden=ZEROS[::-1]), MIDDLE),
        (replace(HIDDEN, checkpoints=(3,)), MIDDLE),
        (replace(HIDDEN, is_window=True, checkpoints=(1,)), MIDDLE),
        (OUTPUTS, LAST),
        (replace(OUTPUTS, outputs=()), LAST),
        (replace(OUTPUTS, top_k=10_000, temperature=-1.0), LAST),
        (replace(HIDDEN, stop_layer=25), LAST),
    ],
)
def test_what_fits_passes(job: Job, shape: SliceShape) -> None:
    check_job(job, shape)


@pytest.mark.parametrize(
    ("job", "shape", "match"),
    [
        (replace(TOKENS, tokens=None), FIRST, "either token ids or hidden states"),
        (replace(TOKENS, hidden=ZEROS), FIRST, "either token ids or hidden states"),
        (TOKENS, MIDDLE, "take hidden states, not token ids"),
        (replace(TOKENS, tokens=np.array([], np.int32)), FIRST, "has 0 rows"),
        (replace(TOKENS, tokens=np.array([0, 100], np.int32)), FIRST, "outside the vocabulary of 100"),
        (replace(TOKENS, tokens=np.array([-1], np.int32)), FIRST, "outside the vocabulary"),
        (replace(TOKENS, tokens=np.array([1], np.int64)), FIRST, "int32"),
        (replace(TOKENS, tokens=np.array([[1]], np.int32)), FIRST, "one row"),
        (replace(TOKENS, tokens=[1, 2]), FIRST, "int32"),
        (replace(HIDDEN, hidden=ZEROS[:, :7]), MIDDLE, "7 wide; this model's are 8"),
        (replace(HIDDEN, hidden=ZEROS[0]), MIDDLE, "rows of float32"),
        (replace(HIDDEN, hidden=ZEROS.astype(np.float64)), MIDDLE, "rows of float32"),
        (replace(HIDDEN, hidden=ZEROS[:0]), MIDDLE, "has 0 rows"),
        (replace(HIDDEN, hidden=np.zeros((129, 8), np.float32)), MIDDLE, "129 rows; this engine takes 1 to 128"),
        (bent(np.nan), MIDDLE, "not a number"),
        (bent(np.inf), MIDDLE, "not a number or above"),
        (bent(-np.inf), MIDDLE, "not a number or above"),
        (bent(MAX_ACTIVATION * 1.001), MIDDLE, "not a number or above"),
        (HIDDEN, replace(MIDDLE, takes_hidden=False), "cannot enter"),
        (replace(HIDDEN, stop_layer=10), MIDDLE, "layer 10 is not an exit of the layers 10:20"),
        (replace(HIDDEN, stop_layer=21), MIDDLE, "layer 21 is not an exit"),
        (replace(HIDDEN, outputs=(0,)), MIDDLE, "logits were asked for at layer 20 of 30"),
        (replace(OUTPUTS, stop_layer=29), LAST, "logits were asked for at layer 29"),
        (replace(OUTPUTS, outputs=(3,)), LAST, "among the step's 3"),
        (replace(OUTPUTS, outputs=(-1,)), LAST, "must rise"),
        (replace(OUTPUTS, outputs=(1, 1)), LAST, "must rise"),
        (replace(OUTPUTS, top_k=0), LAST, "at least one logit"),
        (replace(OUTPUTS, temperature=float("nan")), LAST, "finite"),
        (
            replace(OUTPUTS, hidden=np.zeros((65, 8), np.float32), outputs=tuple(range(MAX_OUTPUTS + 1))),
            LAST,
            "64 is the most",
        ),
        (
            replace(HIDDEN, hidden=np.zeros((EXACT_MAX_ROWS + 1, 8), np.float32), profile=Profile.EXACT),
            MIDDLE,
            "49 rows; this engine takes 1 to 48",
        ),
        (replace(HIDDEN, profile=Profile.EXACT), replace(MIDDLE, exact_obstacle="not here"), "not here"),
        (replace(HIDDEN, is_window=True, checkpoints=(3,)), MIDDLE, "a checkpoint stands behind a draft or a lone row"),
        (
            replace(HIDDEN, hidden=ZEROS[:1], checkpoints=(1,)),
            MIDDLE,
            "a checkpoint stands behind a draft or a lone row",
        ),
    ],
)
def test_what_does_not_fit_is_refused(job: Job, shape: SliceShape, match: str) -> None:
    with pytest.raises(EngineInputError, match=match):
        check_job(job, shape)


@pytest.mark.parametrize(
    ("pos0", "truncate_to", "n_held"), [(0, None, 0), (7, None, 7), (5, 5, 7), (7, 7, 7), (0, 0, 7), (253, None, 253)]
)
def test_a_step_continues_what_is_held(pos0: int, truncate_to: int | None, n_held: int) -> None:
    check_position(replace(HIDDEN, pos0=pos0, truncate_to=truncate_to), n_held, n_ctx=256)


@pytest.mark.parametrize(
    ("pos0", "truncate_to", "n_held", "match"),
    [
        (1, None, 0, "starts at position 1 where 0 was expected"),
        (6, None, 7, "starts at position 6 where 7 was expected"),
        (-1, None, 0, "starts at position -1"),
        (7, 5, 7, "starts at position 7 where 5 was expected"),
        (8, 8, 7, "truncates to position 8, but only 7 are held"),
        (-1, -1, 7, "truncates to position -1"),
        (254, None, 254, "257 positions do not fit the context of 256"),
    ],
)
def test_a_position_out_of_order_is_refused(pos0: int, truncate_to: int | None, n_held: int, match: str) -> None:
    with pytest.raises(EngineInputError, match=match):
        check_position(replace(HIDDEN, pos0=pos0, truncate_to=truncate_to), n_held, n_ctx=256)
