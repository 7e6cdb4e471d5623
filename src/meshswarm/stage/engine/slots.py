"""What each slot holds, and how it goes back to an earlier position.

The rule this file keeps: after `settle` or `give_up` a slot holds exactly the positions it says, or computes them again
before the next ones. A family with `Rollback.KV` drops the positions behind: exact anywhere. One with `Rollback.STATE`
has layers with a running state, which holds no positions one could drop. There the state is saved before rows that may
have to go, a draft or the dummy row of `EXACT`, and the inputs of these rows are kept. To go back is to restore the
state, and to compute the rows that stay once more, in front of the next job and in one graph run with it. At
checkpoints the state is saved too, and kept while the session goes on, for as long as it says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshswarm.stage.engine.jobs import EngineError, EngineInputError, Job, check_position
from meshswarm.stage.engine.llama import LlamaSpan
from meshswarm.stage.families.family import Rollback

MAX_LEAD_ROWS = 16
"""Rows computed again in front of a draft; with more, the state is saved anew behind them."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Inputs of consecutive positions, as a job has them."""

    tokens: NDArray[np.int32] | None
    hidden: NDArray[np.float32] | None

    def __len__(self) -> int:
        rows = self.tokens if self.hidden is None else self.hidden
        assert rows is not None
        return len(rows)

    def first(self, n_rows: int) -> Rows:
        tokens = None if self.tokens is None else self.tokens[:n_rows]
        return Rows(tokens, None if self.hidden is None else self.hidden[:n_rows])

    def last(self) -> Rows:
        tokens = None if self.tokens is None else self.tokens[-1:]
        return Rows(tokens, None if self.hidden is None else self.hidden[-1:])

    def followed_by(self, other: Rows) -> Rows:
        """Raises EngineInputError when one has token ids where the other has none."""
        if (self.tokens is None, self.hidden is None) != (other.tokens is None, other.hidden is None):
            raise EngineInputError("a session of this model has either token ids or hidden states in all its steps")
        tokens = None if self.tokens is None or other.tokens is None else np.concatenate([self.tokens, other.tokens])
        hidden = None if self.hidden is None or other.hidden is None else np.concatenate([self.hidden, other.hidden])
        return Rows(tokens, hidden)


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """The state before position `position`, and the inputs from there on. `is_left`: the slot's own state is another
    than after those inputs, so the saved one has to be restored."""

    position: int
    state: NDArray[np.uint8]
    inputs: Rows
    is_left: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Checkpoint:
    """The state before position `position`."""

    position: int
    state: NDArray[np.uint8]


class Slots:
    """The positions of every slot. `n_held[slot]`: how many it holds, as its session sees it. `n_checkpoints`: so many
    each slot may have, none in a family that needs none; `copies_checkpoints`: other slots may begin there."""

    def __init__(
        self,
        llama: LlamaSpan,
        rollback: Rollback,
        n_slots: int,
        n_ctx: int,
        *,
        n_checkpoints: int = 0,
        copies_checkpoints: bool = True,
    ) -> None:
        self.n_held = [0] * n_slots
        self.rollback = rollback
        self._llama = llama
        self._n_ctx = n_ctx
        self._saved: dict[int, _Saved] = {}
        self.n_checkpoints = n_checkpoints if rollback is Rollback.STATE else 0
        self._copies_checkpoints = copies_checkpoints
        self._checkpoints: list[list[_Checkpoint]] = [[] for _ in range(n_slots)]  # by rising position

    def admit(self, job: Job) -> Rows | None:
        """Truncate the slot as the job says. Returns the rows to compute again in front of the job's, if any.

        Raises EngineInputError when the job does not continue what the slot holds, or where it cannot go back to.
        """
        slot, start = job.slot, job.pos0
        check_position(job, self.n_held[slot], self._n_ctx)
        saved = self._saved.get(slot)
        if start == 0:
            if self.n_held[slot] or saved is not None:
                self.clear(slot)
            return None
        if self.rollback is Rollback.KV:
            if start < self.n_held[slot]:
                self._drop(slot, start)
            return None
        if start == self.n_held[slot] and (saved is None or not saved.is_left):
            return None
        if saved is None or start < saved.position:
            checkpoint = self._checkpoint(slot, start)
            if checkpoint is None:
                raise EngineInputError(f"this model cannot go back from position {self.n_held[slot]} to {start}")
            saved = _Saved(start, checkpoint.state, Rows(job.tokens, job.hidden).first(0), is_left=True)
        self._checkpoints[slot] = [kept for kept in self._checkpoints[slot] if kept.position <= start]
        lead = saved.inputs.first(start - saved.position)
        if len(lead):
            lead.followed_by(Rows(job.tokens, job.hidden))
        self._saved[slot] = replace(saved, inputs=lead, is_left=True)
        self.n_held[slot] = start
        return lead if len(lead) else None

    def prepare(self, job: Job, *, may_leave: bool) -> None:
        """Bring the slot's state to where computing starts: at the lead's first row, or the job's. `may_leave`: the
        rows to come may have to go again."""
        if self.rollback is Rollback.KV:
            return
        slot = job.slot
        saved = self._saved.get(slot)
        if saved is not None and saved.is_left:
            self._restore(slot, saved)
        elif may_leave:
            saved = None
        if not may_leave:
            return
        if saved is None:
            saved = _Saved(job.pos0, self._llama.save_state(slot), Rows(job.tokens, job.hidden).first(0), is_left=False)
        self._saved[slot] = saved

    def settle(self, job: Job, n_dummies: int) -> None:
        """The job's rows were computed: the slot holds its positions, without the dummy row's."""
        slot = job.slot
        self.n_held[slot] = job.pos0 + job.n_rows
        if self.rollback is Rollback.KV:
            if n_dummies:
                self._drop(slot, self.n_held[slot])
            return
        if job.checkpoints is not None:
            self._keep_checkpoints(job)
        saved = self._saved.pop(slot, None)
        if n_dummies or job.is_window:
            assert saved is not None, "the state was not saved before rows that may have to go"
            own = Rows(job.tokens, job.hidden)
            inputs = saved.inputs.followed_by(own) if len(saved.inputs) else own
            self._saved[slot] = replace(saved, inputs=inputs, is_left=n_dummies > 0)

    def _keep_checkpoints(self, job: Job) -> None:
        assert job.checkpoints is not None
        kept = [checkpoint for checkpoint in self._checkpoints[job.slot] if checkpoint.position in job.checkpoints]
        if job.is_checkpoint:
            kept.append(_Checkpoint(self.n_held[job.slot], self._llama.save_state(job.slot)))
        self._checkpoints[job.slot] = kept

    def give_up(self, job: Job) -> None:
        """The job failed: the slot holds what was before its rows; nothing, where its state cannot go back."""
        slot = job.slot
        if self.rollback is Rollback.KV:
            self._drop(slot, job.pos0)
            return
        saved = self._saved.get(slot)
        if saved is None:
            self.clear(slot)
        else:
            self._saved[slot] = replace(saved, inputs=saved.inputs.first(job.pos0 - saved.position), is_left=True)
            self.n_held[slot] = job.pos0

    def copy(self, source: int, target: int, n_positions: int) -> None:
        """The empty slot `target` gets the first `n_positions` of `source`, without its checkpoints. Raises
        EngineInputError where it cannot."""
        if not 0 < n_positions <= self.n_held[source]:
            raise EngineInputError(f"{n_positions} positions were to be copied, but {self.n_held[source]} are held")
        saved = self._saved.get(source)
        is_all = n_positions == self.n_held[source]
        if self.rollback is Rollback.STATE and not is_all and (saved is None or n_positions < saved.position):
            self._copy_checkpoint(source, target, n_positions)
            return
        if saved is not None:
            # The source goes back first: a saved state put into another slot than its own, behind copied positions,
            # gave other bits (deepseek4, measured with llama-cpp-python 0.3.36).
            self._restore(source, saved)
            saved = self._saved[source] = replace(saved, is_left=True)
        self._llama.copy(source, target)
        self.n_held[target] = self.n_held[source]
        if self.rollback is Rollback.KV:
            if not is_all:
                self._drop(target, n_positions)
            return
        if saved is not None:
            inputs = saved.inputs.first(n_positions - saved.position)
            self._saved[target] = replace(saved, inputs=inputs)
            self.n_held[target] = n_positions

    def _copy_checkpoint(self, source: int, target: int, n_positions: int) -> None:
        checkpoint = self._checkpoint(source, n_positions)
        if checkpoint is None or not self._copies_checkpoints:
            raise EngineInputError(f"this model cannot give its first {n_positions} positions to another session")
        # As above, the state is put into its own slot, and there alone: the positions behind it stay.
        now = self._llama.save_state(source)
        self._put_state(source, checkpoint.state, n_positions)
        self._llama.copy(source, target)
        self._put_state(source, now, self.n_held[source])
        if not self._llama.remove(target, n_positions):
            raise EngineError(f"this model cannot go back to position {n_positions}")
        self.n_held[target] = n_positions

    def _checkpoint(self, slot: int, position: int) -> _Checkpoint | None:
        return next((kept for kept in self._checkpoints[slot] if kept.position == position), None)

    def clear(self, slot: int) -> None:
        """Forget everything of a slot."""
        self._llama.remove(slot, 0)
        self._saved.pop(slot, None)
        self._checkpoints[slot].clear()
        self.n_held[slot] = 0

    def can_fill(self, slot: int) -> bool:
        """Whether a row or two can be computed behind the slot's positions and be dropped again."""
        return self.rollback is Rollback.KV and self.n_held[slot] < self._n_ctx

    def remove_fill(self, slot: int) -> None:
        """Forget a row computed behind the slot's positions for the sake of its neighbours."""
        self._drop(slot, self.n_held[slot])

    def _restore(self, slot: int, saved: _Saved) -> None:
        if saved.position == 0:
            self._llama.remove(slot, 0)
            return
        self._put_state(slot, saved.state, saved.position)
        if not self._llama.remove(slot, saved.position):
            raise EngineError(f"this model cannot go back to position {saved.position}")

    def _put_state(self, slot: int, state: NDArray[np.uint8], position: int) -> None:
        if not self._llama.restore_state(slot, state):
            raise EngineError(f"llama.cpp did not take back the state it had at position {position}")

    def _drop(self, slot: int, position: int) -> None:
        """Raises EngineError where the model's memory cannot."""
        if not self._llama.remove(slot, position):
            raise EngineError(f"this model cannot go back to position {position}")
        self.n_held[slot] = position
