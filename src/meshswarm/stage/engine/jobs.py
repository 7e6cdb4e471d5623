"""What the engine is asked and what it answers, and the door checks in between.

The rule this file keeps: nothing that could reach an assertion of llama.cpp, which ends the process, gets past the
door. `check_job` needs nothing but the job and the slice's shape; `check_position` also what the slot holds, and runs
when the job's turn comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshswarm.errors import LocalError, RemoteProtocolError
from meshswarm.span import Span
from meshswarm.stage.engine.profile import EXACT_MAX_ROWS, EXACT_MIN_ROWS, Profile
from meshswarm.stage.engine.tap import is_within

MAX_OUTPUTS = 64
"""Rows whose logits one job, and one turn of the engine, may ask for: it bounds the logits kept in memory."""
MAX_ACTIVATION = 1e9
"""Largest |x| accepted in a hidden state; far above any model's outliers, far below what overflows in a norm."""


class EngineError(LocalError):
    """This peer's engine failed to compute, or was stopped."""


class EngineInputError(RemoteProtocolError):
    """What was handed to the engine cannot be computed: the fault of whoever sent it. Nothing changed."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Compute n consecutive positions of one slot.

    `tokens` int32 [n] (a first span) or `hidden` float32 [n, row_width] (any span) is the input, and stays unchanged
    until the answer; a family that needs the tokens in every span has them beside the rows. The positions from
    `truncate_to` on are forgotten first. The residual after layer `stop_layer - 1` (absolute) leaves; in a last span
    that runs to the model's end, the logits of the rows `outputs` do instead, reduced to `top_k` with the tail's mass
    at `temperature`. `is_window`: a later job may truncate to a position among these rows, in any family.
    `checkpoints`: positions that one may truncate to whatever comes between; the one behind these rows is new if it is
    among them, others that are not are given up. None: as they were.
    """

    slot: int
    pos0: int
    truncate_to: int | None
    tokens: NDArray[np.int32] | None
    hidden: NDArray[np.float32] | None
    stop_layer: int
    outputs: tuple[int, ...]
    top_k: int
    temperature: float
    profile: Profile
    is_window: bool = False
    checkpoints: tuple[int, ...] | None = None

    @property
    def is_checkpoint(self) -> bool:
        """Whether the position behind its rows is to be one."""
        return self.checkpoints is not None and self.pos0 + self.n_rows in self.checkpoints

    @property
    def n_rows(self) -> int:
        rows = self.tokens if self.hidden is None else self.hidden
        assert rows is not None
        return len(rows)

    @property
    def n_computed(self) -> int:
        """Rows the engine computes: in `EXACT` a lone row is joined by a dummy one, for the kernels of 2 rows."""
        return max(EXACT_MIN_ROWS, self.n_rows) if self.profile is Profile.EXACT else self.n_rows


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """The k largest logits of one row, descending (ties: the lower id first), and the mass of all others.

    `ids` int32 [k], `logits` float32 [k]. `tail_log_mass` is the log-sum-exp of logit / temperature over every id that
    is not in `ids`; -inf when there is none. It is 0, and means nothing, where the job's temperature is 0.
    """

    ids: NDArray[np.int32]
    logits: NDArray[np.float32]
    tail_log_mass: float


@dataclass(frozen=True, slots=True, eq=False)
class JobResult:
    """`hidden` float32 [n, row_width], or in a last span that ran to the end `rows`, one for each of the job's outputs.

    `compute_s`: how long llama.cpp computed; jobs that were computed together share it.
    """

    hidden: NDArray[np.float32] | None
    rows: tuple[TopK, ...] | None
    compute_s: float


@dataclass(frozen=True, slots=True)
class SliceShape:
    """What the door must know of the loaded slice. `n_ctx` is in positions; `takes_hidden`: rows can be injected;
    `exact_obstacle`: why it cannot compute in `EXACT`, None when it can; `needs_tokens`: also beside hidden states."""

    span: Span
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx: int
    max_rows: int
    takes_hidden: bool
    exact_obstacle: str | None = None
    row_streams: int = 1
    needs_tokens: bool = False

    @property
    def row_width(self) -> int:
        """Floats of one position's hidden state."""
        return self.row_streams * self.n_embd

    @property
    def is_first(self) -> bool:
        return self.span.start == 0

    @property
    def is_last(self) -> bool:
        return self.span.stop == self.n_layers


def check_job(job: Job, shape: SliceShape) -> None:
    """Raises EngineInputError unless the job's input, exit, outputs and profile fit the slice."""
    n_rows = _check_input(job, shape)
    if job.profile is Profile.EXACT and shape.exact_obstacle is not None:
        raise EngineInputError(shape.exact_obstacle)
    limit = min(EXACT_MAX_ROWS, shape.max_rows) if job.profile is Profile.EXACT else shape.max_rows
    if not 1 <= n_rows <= limit:
        raise EngineInputError(f"a step has {n_rows} rows; this engine takes 1 to {limit} at a time ({job.profile})")
    if job.is_checkpoint and (job.is_window or n_rows < EXACT_MIN_ROWS):
        raise EngineInputError("a checkpoint stands behind a draft or a lone row, whose state may have to go again")
    if not shape.span.start < job.stop_layer <= shape.span.stop:
        raise EngineInputError(f"layer {job.stop_layer} is not an exit of the layers {shape.span}")
    if job.outputs:
        _check_outputs(job, shape, n_rows)


def check_position(job: Job, n_held: int, n_ctx: int) -> None:
    """Raises EngineInputError unless the job continues the `n_held` positions its slot holds, within the context."""
    start = n_held if job.truncate_to is None else job.truncate_to
    if not 0 <= start <= n_held:
        raise EngineInputError(f"a step truncates to position {start}, but only {n_held} are held")
    if job.pos0 != start:
        raise EngineInputError(f"a step starts at position {job.pos0} where {start} was expected")
    if job.pos0 + job.n_rows > n_ctx:
        raise EngineInputError(f"{job.pos0 + job.n_rows} positions do not fit the context of {n_ctx}")


def _check_input(job: Job, shape: SliceShape) -> int:
    """Rows of the step."""
    if shape.needs_tokens:
        if job.tokens is None or (job.hidden is None and not shape.is_first):
            raise EngineInputError("a step of this model holds the token ids of its rows, behind the first span too")
    elif (job.tokens is None) == (job.hidden is None):
        raise EngineInputError("a step holds either token ids or hidden states, not both and not neither")
    if job.tokens is not None:
        _check_tokens(job.tokens, job.hidden is not None, shape)
    if job.hidden is None:
        assert job.tokens is not None
        return len(job.tokens)
    _check_hidden(job.hidden, shape)
    if job.tokens is not None and len(job.tokens) != len(job.hidden):
        raise EngineInputError(f"{len(job.tokens)} token ids came with {len(job.hidden)} hidden states")
    return len(job.hidden)


def _check_tokens(tokens: NDArray[np.int32], is_beside_hidden: bool, shape: SliceShape) -> None:
    if not is_beside_hidden and not shape.is_first:
        raise EngineInputError(f"the layers {shape.span} take hidden states, not token ids")
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        raise EngineInputError("token ids must be one row of int32")
    if not len(tokens):
        return
    # Beside hidden states a middle span may be given ids of the model's vocabulary, which it has cut away.
    if tokens.min() < 0 or (not is_beside_hidden and tokens.max() >= shape.n_vocab):
        raise EngineInputError(f"a token id is outside the vocabulary of {shape.n_vocab}")


def _check_hidden(hidden: NDArray[np.float32], shape: SliceShape) -> None:
    if not shape.takes_hidden:
        raise EngineInputError("hidden states cannot enter a model of this architecture")
    if not isinstance(hidden, np.ndarray) or hidden.dtype != np.float32 or hidden.ndim != 2:
        raise EngineInputError("hidden states must be rows of float32")
    if hidden.shape[1] != shape.row_width:
        raise EngineInputError(f"hidden states are {hidden.shape[1]} wide; this model's are {shape.row_width}")
    if len(hidden) and not is_within(hidden, MAX_ACTIVATION):
        raise EngineInputError(f"a hidden state is not a number or above {MAX_ACTIVATION:g}")


def _check_outputs(job: Job, shape: SliceShape, n_rows: int) -> None:
    if job.stop_layer != shape.n_layers:
        raise EngineInputError(f"logits were asked for at layer {job.stop_layer} of {shape.n_layers}")
    if len(job.outputs) > MAX_OUTPUTS:
        raise EngineInputError(f"logits of {len(job.outputs)} rows were asked for; {MAX_OUTPUTS} is the most")
    previous = -1
    for row in job.outputs:
        if not previous < row < n_rows:
            raise EngineInputError(f"the output rows {job.outputs} must rise and be among the step's {n_rows}")
        previous = row
    if job.top_k < 1:
        raise EngineInputError("at least one logit of a row must be asked for")
    if not math.isfinite(job.temperature):
        raise EngineInputError("a temperature must be a finite number")
