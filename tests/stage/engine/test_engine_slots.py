"""Going back, on models whose layers keep a running state, and beside them on models that only have K and V.

The bits to compare with are those of a slot that never went anywhere else: in `EXACT` they do not depend on how rows
were grouped, so a draft, a rejected tail and rows computed again must leave no trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.stage.chain import job
from tests.stage.tiny_models import write_tiny

from meshswarm.artifacts.gguf.check import check_hyperparameters, read_header
from meshswarm.span import Span
from meshswarm.stage.engine.attention import with_attention
from meshswarm.stage.engine.compute import SpanComputer
from meshswarm.stage.engine.devices import ON_CPU
from meshswarm.stage.engine.jobs import EngineInputError, Job, JobResult, SliceShape
from meshswarm.stage.engine.kv_layers import layer_kvs
from meshswarm.stage.engine.llama import LlamaSpan
from meshswarm.stage.engine.llama_options import LlamaOptions
from meshswarm.stage.engine.profile import EXACT_MAX_ROWS, Profile
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.families.table import FAMILIES

N_CTX, N_SLOTS, N_CHECKPOINTS = 600, 4, 2
IDS = np.random.default_rng(5).integers(0, 160, N_CTX).astype(np.int32)
WRONG = np.random.default_rng(6).integers(0, 160, N_CTX).astype(np.int32)
KEEPING_STATE = ["qwen35moe", "qwen3next", "lfm2", "granitehybrid", "nemotron_h", "deepseek4"]
PLAIN = ["mixtral", "gpt-oss"]


class Model:
    """A whole tiny model, and what its rows are when nothing ever goes back."""

    def __init__(self, name: str, path: Path) -> None:
        write_tiny(name, path)
        header = read_header(path)
        self.n_layers = check_hyperparameters(header).n_layers
        self.kvs = layer_kvs(header)
        options = with_attention(LlamaOptions(), header, n_rows=128, n_cells=768, offload=ON_CPU)
        llama = LlamaSpan(path, n_cells=768, n_slots=N_SLOTS, n_threads=1, max_rows=128, options=options)
        family = FAMILIES[llama.architecture]
        shape = SliceShape(
            Span(0, self.n_layers),
            self.n_layers,
            llama.n_embd,
            llama.n_vocab,
            N_CTX,
            llama.max_rows,
            takes_hidden=True,
            row_streams=family.row_streams,
            needs_tokens=family.needs_tokens,
        )
        self.llama = llama
        self.computer = SpanComputer(llama, shape, family, N_SLOTS, n_checkpoints=N_CHECKPOINTS)
        self.straight = self.fill(N_SLOTS - 1, 80)
        self.computer.clear(N_SLOTS - 1)

    def job(self, slot: int, start: int, stop: int, ids: NDArray[np.int32] = IDS, **changes: object) -> Job:
        changes.setdefault("outputs", tuple(range(stop - start)))
        changes.setdefault("profile", Profile.EXACT)
        return job(slot, start, self.n_layers, tokens=ids[start:stop], **changes)

    def rows(self, slot: int, start: int, stop: int, **changes: object) -> NDArray[np.float32]:
        """The logits of every row."""
        (outcome,) = self.computer.compute([self.job(slot, start, stop, **changes)])  # type: ignore[arg-type]
        assert isinstance(outcome, JobResult), outcome
        self.computer.keep_rows()
        return self.computer.full_rows[slot].copy()

    def fill(self, slot: int, stop: int, **changes: object) -> NDArray[np.float32]:
        """IDS up to `stop`, in chunks."""
        self.computer.clear(slot)
        return np.concatenate([self.rows(slot, at, min(at + 20, stop), **changes) for at in range(0, stop, 20)])

    def wander(self, slot: int, start: int, **changes: object) -> None:
        """Other positions than those of IDS: a chunk, drafts of which some are taken back, lone rows."""
        self.rows(slot, start, start + 30, ids=WRONG, **changes)
        self.rows(slot, start + 30, start + 31, ids=WRONG, **changes)
        self.rows(slot, start + 31, start + 36, ids=WRONG, is_window=True, **changes)
        self.rows(slot, start + 33, start + 37, ids=IDS, truncate_to=start + 33, is_window=True, **changes)
        self.rows(slot, start + 34, start + 35, ids=WRONG, truncate_to=start + 34, **changes)

    def draft(self, slot: int, start: int, n_right: int, n_wrong: int, **changes: object) -> NDArray[np.float32]:
        """A window whose first rows are those of IDS."""
        ids = np.concatenate([IDS[: start + n_right], WRONG[start + n_right :]])
        return self.rows(slot, start, start + n_right + n_wrong, ids=ids, is_window=True, **changes)


@pytest.fixture(scope="module", params=[*KEEPING_STATE, *PLAIN])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    loaded = Model(request.param, tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf")
    yield loaded
    loaded.computer.close()


@pytest.fixture(autouse=True)
def _empty(model: Model) -> Iterator[None]:
    yield
    for slot in range(N_SLOTS):
        model.computer.clear(slot)


def keeps_state(model: Model) -> bool:
    return model.computer.slots.rollback is Rollback.STATE


def test_a_draft_changes_what_follows_unless_it_is_taken_back(model: Model) -> None:
    """The negative control of this file."""
    model.fill(0, 20)
    model.draft(0, 20, 1, 3)
    assert not np.array_equal(model.rows(0, 24, 25)[0], model.straight[24])


@pytest.mark.parametrize("n_right", [0, 1, 2, 3])
def test_rejected_rows_leave_no_trace(model: Model, n_right: int) -> None:
    model.fill(0, 20)
    assert np.array_equal(model.draft(0, 20, n_right, 4 - n_right)[:n_right], model.straight[20 : 20 + n_right])
    at = 20 + n_right
    assert np.array_equal(model.rows(0, at, at + 5, truncate_to=at), model.straight[at : at + 5])
    assert np.array_equal(model.rows(0, at + 5, at + 6), model.straight[at + 5 : at + 6])


def test_an_accepted_draft_goes_on_without_anything_computed_again(model: Model) -> None:
    model.fill(0, 20)
    model.draft(0, 20, 4, 0)
    assert np.array_equal(model.rows(0, 24, 28), model.straight[24:28])


def test_drafts_may_follow_each_other_whatever_was_accepted(model: Model) -> None:
    model.fill(0, 20)
    at = 20
    for n_right, n_wrong in [(1, 7), (2, 6), (8, 0), (0, 3), (1, 14), (5, 10), (7, 8), (3, 12), (1, 1)]:
        got = model.draft(0, at, n_right, n_wrong, truncate_to=at)
        assert np.array_equal(got[:n_right], model.straight[at : at + n_right])
        at += n_right
    assert np.array_equal(model.rows(0, at, at + 3, truncate_to=at), model.straight[at : at + 3])


def test_a_long_chunk_may_follow_a_rejected_draft(model: Model) -> None:
    """Longer than what may be computed together with the rows that stay."""
    for n_right in (1, 9):
        model.fill(0, 20)
        model.draft(0, 20, n_right, 5)
        at = 20 + n_right
        rows = model.rows(0, at, at + EXACT_MAX_ROWS, truncate_to=at)
        assert np.array_equal(rows, model.straight[at : at + EXACT_MAX_ROWS])


def test_lone_rows_in_any_mixture_have_the_bits_of_a_chunk(model: Model) -> None:
    model.fill(0, 20)
    at = 20
    for n_rows in (1, 1, 1, 3, 1, 2, 1, 1, 7, 1):
        assert np.array_equal(model.rows(0, at, at + n_rows), model.straight[at : at + n_rows])
        at += n_rows


def test_a_lone_row_may_be_taken_back_too(model: Model) -> None:
    model.fill(0, 20)
    model.rows(0, 20, 21, ids=WRONG, is_window=True)
    assert np.array_equal(model.rows(0, 20, 23, truncate_to=20), model.straight[20:23])


def test_sessions_beside_each_other_go_back_apart(model: Model) -> None:
    for slot, length in enumerate((20, 40, 30)):
        model.fill(slot, length)
    for slot, length, n_right in ((0, 20, 2), (1, 40, 0), (2, 30, 4)):
        model.draft(slot, length, n_right, 4 - n_right)
    starts = [22, 40, 34]
    jobs = [model.job(slot, at, at + 2, truncate_to=at) for slot, at in enumerate(starts)]
    for outcome in model.computer.compute(jobs):
        assert isinstance(outcome, JobResult), outcome
    model.computer.keep_rows()
    for slot, at in enumerate(starts):
        assert np.array_equal(model.computer.full_rows[slot], model.straight[at : at + 2])


def test_in_fast_the_rows_that_stay_and_the_new_ones_are_one_chunk(model: Model) -> None:
    """What a recording of a session's chunks has to know of a family that keeps state."""
    fast: dict[str, object] = {"profile": Profile.FAST}
    model.fill(0, 20)
    model.draft(0, 20, 2, 2, **fast)
    again = model.rows(0, 22, 25, truncate_to=22, **fast)
    model.fill(1, 20)
    if keeps_state(model):
        assert np.array_equal(again, model.rows(1, 20, 25, **fast)[2:])
    else:
        model.draft(1, 20, 2, 0, **fast)
        assert np.array_equal(again, model.rows(1, 22, 25, **fast))


def test_going_back_further_than_the_draft_is_refused_where_the_state_is_gone(model: Model) -> None:
    model.fill(0, 40)
    model.draft(0, 40, 2, 2)
    (outcome,) = model.computer.compute([model.job(0, 30, 33, truncate_to=30)])
    if keeps_state(model):
        assert isinstance(outcome, EngineInputError) and "cannot go back from position 44 to 30" in str(outcome)
        assert model.computer.n_held[0] == 44
    else:
        assert isinstance(outcome, JobResult)
    assert np.array_equal(model.rows(0, 0, 3, truncate_to=0), model.straight[:3]), "the start is always there"


def test_a_window_that_was_followed_is_settled(model: Model) -> None:
    model.fill(0, 20)
    model.draft(0, 20, 4, 0)
    model.rows(0, 24, 26)
    (outcome,) = model.computer.compute([model.job(0, 22, 24, truncate_to=22)])
    assert isinstance(outcome, EngineInputError if keeps_state(model) else JobResult)


@pytest.mark.parametrize("n_rows", [1, 2, 36])
@pytest.mark.parametrize("position", [20, 40])
def test_a_session_goes_back_to_a_checkpoint_as_if_it_had_never_gone_on(
    model: Model, position: int, n_rows: int
) -> None:
    model.fill(0, 40, checkpoints=(20, 40))
    model.wander(0, 40)
    at = position
    assert np.array_equal(model.rows(0, at, at + n_rows, truncate_to=at), model.straight[at : at + n_rows])
    at += n_rows
    assert np.array_equal(model.draft(0, at, 1, 3)[:1], model.straight[at : at + 1])
    assert np.array_equal(model.rows(0, at + 1, at + 3, truncate_to=at + 1), model.straight[at + 1 : at + 3])


def test_a_checkpoint_may_be_gone_back_to_again_and_again(model: Model) -> None:
    model.fill(0, 40, checkpoints=(20, 40))
    for _ in range(3):
        model.wander(0, model.computer.n_held[0])
        assert np.array_equal(model.rows(0, 40, 43, truncate_to=40), model.straight[40:43])


def test_in_fast_too_a_checkpoint_is_where_it_was(model: Model) -> None:
    fast: dict[str, object] = {"profile": Profile.FAST}
    for slot in (0, 1):
        model.fill(slot, 40, checkpoints=(20, 40), **fast)
    model.wander(0, 40, **fast)
    for start, stop in ((40, 41), (41, 45)):
        options = {**fast, "truncate_to": start}
        assert np.array_equal(model.rows(0, start, stop, **options), model.rows(1, start, stop, **options))


def test_a_session_says_which_checkpoints_are_kept(model: Model) -> None:
    model.fill(0, 40, checkpoints=(20, 40))
    model.rows(0, 40, 60, checkpoints=(40, 60))
    (outcome,) = model.computer.compute([model.job(0, 20, 23, truncate_to=20)])
    if not keeps_state(model):
        assert isinstance(outcome, JobResult)
        return
    assert isinstance(outcome, EngineInputError)
    model.rows(0, 40, 43, truncate_to=40)
    (outcome,) = model.computer.compute([model.job(0, 60, 63, truncate_to=60)])
    assert isinstance(outcome, EngineInputError), "one behind the place that was gone back to is no more"
    assert np.array_equal(model.rows(0, 40, 42, truncate_to=40), model.straight[40:42])


def test_a_saved_state_takes_what_the_memory_plan_counts(model: Model) -> None:
    model.fill(0, 300)
    counted = sum(layer.saved_bytes() for layer in model.kvs)
    assert 0 <= model.llama.save_state(0).nbytes - counted < 1200 or not keeps_state(model)


def test_an_empty_slot_has_no_checkpoints(model: Model) -> None:
    model.fill(0, 20, checkpoints=(20,))
    model.fill(0, 40)
    (outcome,) = model.computer.compute([model.job(0, 20, 23, truncate_to=20)])
    assert isinstance(outcome, EngineInputError if keeps_state(model) else JobResult)


@pytest.mark.parametrize("is_left", [False, True])
def test_a_copy_may_begin_at_a_checkpoint(model: Model, is_left: bool) -> None:
    """Also of a session that has to compute rows again before its next ones."""
    model.fill(0, 40, checkpoints=(20, 40))
    model.rows(0, 40, 60)
    if is_left:
        model.rows(0, 60, 61)
        model.draft(0, 61, 1, 3)
        model.rows(0, 62, 63, truncate_to=62)
    held = model.computer.n_held[0]
    if not FAMILIES[model.llama.architecture].copies_checkpoints:
        with pytest.raises(EngineInputError, match="cannot give its first 20 positions"):
            model.computer.slots.copy(0, 1, 20)
        assert np.array_equal(model.rows(0, held, held + 2), model.straight[held : held + 2])
        return
    model.computer.slots.copy(0, 1, 20)
    for slot, at in ((1, 20), (0, held), (1, 22), (0, held + 2)):
        assert np.array_equal(model.rows(slot, at, at + 2), model.straight[at : at + 2])
    assert np.array_equal(model.rows(0, 40, 43, truncate_to=40), model.straight[40:43])
    (outcome,) = model.computer.compute([model.job(1, 20, 22, truncate_to=20)])
    assert isinstance(outcome, EngineInputError if keeps_state(model) else JobResult), "it has none of its own"


def test_a_copy_goes_on_like_its_source(model: Model) -> None:
    model.fill(0, 30)
    model.computer.slots.copy(0, 2, 30)
    for slot in (2, 0):
        assert np.array_equal(model.rows(slot, 30, 34), model.straight[30:34])
    assert np.array_equal(model.rows(2, 34, 35), model.straight[34:35])
    assert np.array_equal(model.rows(0, 34, 37), model.straight[34:37]), "the copy's steps are not the source's"


@pytest.mark.parametrize("n_positions", [20, 22, 24])
def test_a_copy_of_a_session_with_a_draft_may_begin_anywhere_in_it(model: Model, n_positions: int) -> None:
    model.fill(0, 20)
    model.draft(0, 20, 2, 2)
    model.computer.slots.copy(0, 1, n_positions)
    if n_positions == 24:
        assert model.computer.n_held[1] == 24
        return
    rows = model.rows(1, n_positions, n_positions + 3)
    assert np.array_equal(rows, model.straight[n_positions : n_positions + 3])
    assert np.array_equal(model.rows(0, 22, 25, truncate_to=22), model.straight[22:25])


def test_a_copy_of_a_beginning_is_made_where_it_can_be(model: Model) -> None:
    model.fill(0, 40)
    if keeps_state(model):
        with pytest.raises(EngineInputError, match="cannot give its first 25 positions"):
            model.computer.slots.copy(0, 1, 25)
        assert model.computer.n_held[:2] == [40, 0]
    else:
        model.computer.slots.copy(0, 1, 25)
        assert np.array_equal(model.rows(1, 25, 28), model.straight[25:28])


@pytest.mark.parametrize("n_positions", [0, 31, -1])
def test_more_than_there_is_cannot_be_copied(model: Model, n_positions: int) -> None:
    model.fill(0, 30)
    with pytest.raises(EngineInputError, match="were to be copied"):
        model.computer.slots.copy(0, 1, n_positions)


def fills(model: Model, slots: Sequence[int]) -> list[bool]:
    return [model.computer.slots.can_fill(slot) for slot in slots]


def test_rows_that_fill_a_gap_leave_no_trace(model: Model) -> None:
    """Only where positions can be dropped; an empty slot can be filled too, a full one cannot."""
    if keeps_state(model):
        assert not any(fills(model, range(N_SLOTS)))
        return
    for slot, length in ((0, 20), (1, 9), (3, 30)):
        model.fill(slot, length)
    assert all(fills(model, range(N_SLOTS)))
    model.computer.n_held[2] = N_CTX
    assert fills(model, [2]) == [False]
    model.computer.n_held[2] = 0
    for at in (0, 1):
        outcomes = model.computer.compute(
            [model.job(0, 20 + at, 21 + at), model.job(3, 30 + at, 31 + at)], fills=[1, 2]
        )
        assert all(isinstance(outcome, JobResult) for outcome in outcomes)
        model.computer.keep_rows()
        assert np.array_equal(model.computer.full_rows[0][0], model.straight[20 + at])
        assert np.array_equal(model.computer.full_rows[3][0], model.straight[30 + at])
    assert np.array_equal(model.rows(1, 9, 12), model.straight[9:12])
    assert np.array_equal(model.rows(2, 0, 3), model.straight[:3])
