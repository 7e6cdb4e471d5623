"""One turn at a time on a tiny float32 model, where one row and two rows do differ in bits."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.stage.chain import job
from tests.stage.conftest import Cut

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.span import Span
from meshswarm.stage.engine.compute import SpanComputer
from meshswarm.stage.engine.jobs import EngineError, EngineInputError, Job, JobResult, SliceShape
from meshswarm.stage.engine.llama import LlamaSpan
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS, LlamaOptions
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.engine.tap import TapError, native_available
from meshswarm.stage.families.family import Family
from meshswarm.stage.families.table import FAMILIES

N_LAYERS, N_CTX, N_SLOTS = 4, 600, 4
IDS = np.random.default_rng(5).integers(0, 32, N_CTX).astype(np.int32)
WHOLE = Span(0, N_LAYERS)
MIDDLE = Span(1, 3)
Load = Callable[..., tuple[LlamaSpan, SpanComputer]]


@pytest.fixture
def load() -> Iterator[Load]:
    """`load(path, span)`: a slice and its computer, freed at the end."""
    loaded: list[SpanComputer] = []

    def load_slice(
        path: Path,
        span: Span = WHOLE,
        family: Family = FAMILIES["llama"],
        n_threads: int = 1,
        options: LlamaOptions = DEFAULT_OPTIONS,
    ) -> tuple[LlamaSpan, SpanComputer]:
        llama = LlamaSpan(path, n_cells=768, n_slots=N_SLOTS, n_threads=n_threads, max_rows=128, options=options)
        shape = SliceShape(span, N_LAYERS, llama.n_embd, llama.n_vocab, N_CTX, llama.max_rows, takes_hidden=True)
        loaded.append(SpanComputer(llama, shape, family, N_SLOTS))
        return llama, loaded[-1]

    yield load_slice
    for computer in loaded:
        computer.close()


@pytest.fixture
def whole(load: Load, tiny: Path) -> SpanComputer:
    return load(tiny)[1]


@pytest.fixture
def middle(load: Load, tiny: Path, cut: Cut) -> SpanComputer:
    return load(cut(tiny, MIDDLE), MIDDLE)[1]


def ids_job(slot: int, start: int, stop: int, profile: Profile = Profile.FAST, **changes: object) -> Job:
    """The tokens IDS[start:stop] at their positions, all logits wanted."""
    changes.setdefault("outputs", tuple(range(stop - start)))
    return job(slot, start, N_LAYERS, tokens=IDS[start:stop], profile=profile, **changes)


def logits(computer: SpanComputer, *jobs: Job) -> list[NDArray[np.float32]]:
    for outcome in computer.compute(jobs):
        assert isinstance(outcome, JobResult), outcome
    computer.keep_rows()
    return [computer.full_rows[job.slot].copy() for job in jobs]


def prefill(computer: SpanComputer, slot: int, n_rows: int, profile: Profile) -> None:
    """Fill an empty slot with IDS, in chunks."""
    computer.clear(slot)
    for start in range(0, n_rows, 40):
        (outcome,) = computer.compute([ids_job(slot, start, min(start + 40, n_rows), profile, outputs=())])
        assert isinstance(outcome, JobResult), outcome


def hidden_job(
    slot: int, pos0: int, rows: NDArray[np.float32], stop_layer: int = MIDDLE.stop, **changes: object
) -> Job:
    return job(slot, pos0, stop_layer, hidden=rows, **changes)


def hidden(computer: SpanComputer, *jobs: Job) -> list[NDArray[np.float32]]:
    results = []
    for outcome in computer.compute(jobs):
        assert isinstance(outcome, JobResult) and outcome.hidden is not None, outcome
        results.append(outcome.hidden)
    return results


def random_rows(n_rows: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(n_rows, 64)).astype(np.float32)


def test_one_row_and_two_differ_on_this_model_so_the_next_tests_can_tell(whole: SpanComputer) -> None:
    (alone,) = logits(whole, ids_job(0, 0, 1))
    (pair,) = logits(whole, ids_job(1, 0, 2))
    assert not np.array_equal(alone[0], pair[0])


def test_exact_bits_do_not_depend_on_the_row_count(whole: SpanComputer) -> None:
    (at_once,) = logits(whole, ids_job(0, 0, 12, Profile.EXACT))
    by_one = [logits(whole, ids_job(1, pos, pos + 1, Profile.EXACT))[0] for pos in range(12)]
    by_three = [logits(whole, ids_job(2, pos, pos + 3, Profile.EXACT))[0] for pos in range(0, 12, 3)]
    assert np.array_equal(np.concatenate(by_one), at_once)
    assert np.array_equal(np.concatenate(by_three), at_once)


@pytest.mark.parametrize("row", [0, 4, 11])
def test_exact_bits_do_not_depend_on_how_many_rows_are_asked_for(whole: SpanComputer, row: int) -> None:
    (all_rows,) = logits(whole, ids_job(0, 0, 12, Profile.EXACT))
    (one_row,) = logits(whole, ids_job(1, 0, 12, Profile.EXACT, outputs=(row,)))
    assert np.array_equal(one_row[0], all_rows[row])


def test_exact_bits_do_not_depend_on_company(whole: SpanComputer) -> None:
    """Neighbours far behind and far ahead, past the context size at which a lone row takes another attention kernel."""
    lengths = {0: 3, 1: 520, 2: 40}

    def steps(*slots: int) -> list[NDArray[np.float32]]:
        for slot in slots:
            prefill(whole, slot, lengths[slot], Profile.EXACT)
        jobs = [ids_job(slot, lengths[slot], lengths[slot] + 1, Profile.EXACT) for slot in slots]
        return logits(whole, *jobs)

    together = steps(0, 1, 2)
    for slot, rows in enumerate(together):
        assert np.array_equal(steps(slot)[0], rows)


def test_exact_bits_do_not_depend_on_the_number_of_threads(load: Load, tiny: Path) -> None:
    """At a context where they do for a lone row with flash attention: it is then shared out between the threads and
    summed up."""
    flash = LlamaOptions(flash_attn=True)
    rows = {}
    for profile in Profile:
        for n_threads in (1, 2):
            _, computer = load(tiny, n_threads=n_threads, options=flash)
            prefill(computer, 0, 260, profile)
            rows[profile, n_threads] = logits(computer, ids_job(0, 260, 261, profile))[0]
    assert np.array_equal(rows[Profile.EXACT, 1], rows[Profile.EXACT, 2])
    assert not np.array_equal(rows[Profile.FAST, 1], rows[Profile.FAST, 2])


def test_exact_bits_of_a_middle_span_do_not_depend_on_row_count_and_company(middle: SpanComputer) -> None:
    rows = random_rows(9)
    (at_once,) = hidden(middle, hidden_job(0, 0, rows, profile=Profile.EXACT))
    for pos in range(9):
        step = rows[pos : pos + 1]
        one, other = hidden(middle, *(hidden_job(slot, pos, step, profile=Profile.EXACT) for slot in (1, 2)))
        assert np.array_equal(one[0], at_once[pos])
        assert np.array_equal(other[0], at_once[pos])


def test_the_dummy_row_is_gone_afterwards_and_fits_behind_the_last_position(whole: SpanComputer) -> None:
    prefill(whole, 0, N_CTX - 1, Profile.EXACT)
    logits(whole, ids_job(0, N_CTX - 1, N_CTX, Profile.EXACT))
    assert whole.n_held[0] == N_CTX
    (outcome,) = whole.compute([job(0, N_CTX, N_LAYERS, tokens=IDS[:1], profile=Profile.EXACT)])
    assert isinstance(outcome, EngineInputError)


def test_slots_computed_together_get_their_own_rows(middle: SpanComputer) -> None:
    rows = [random_rows(5, seed) for seed in range(3)]
    alone = [hidden(middle, hidden_job(0, 0, each, truncate_to=0))[0] for each in rows]
    middle.clear(0)
    together = hidden(middle, *(hidden_job(slot, 0, each) for slot, each in enumerate(rows)))
    apart = hidden(
        middle, *(hidden_job(slot, 0, each, truncate_to=0) for slot, each in zip((0, 2, 3), rows, strict=True))
    )
    assert all(map(np.array_equal, together, alone))
    assert all(map(np.array_equal, apart, alone))


def test_hidden_states_enter_a_first_span_too(load: Load, tiny: Path, cut: Cut) -> None:
    """A head that keeps its tokens at home sends their embeddings."""
    _, first = load(cut(tiny, Span(0, 2)), Span(0, 2))
    header = read_header(tiny)
    tensor = header.tensors["token_embd.weight"]
    table = np.frombuffer(tiny.read_bytes(), "<f4", 32 * 64, header.data_offset + tensor.offset).reshape(32, 64)
    by_token, by_row = hidden(first, job(0, 0, 2, tokens=IDS[:6])), hidden(first, job(1, 0, 2, hidden=table[IDS[:6]]))
    assert np.array_equal(by_token[0], by_row[0])


def test_a_padded_first_span_gives_the_same_rows_without_wanting_logits(load: Load, tiny: Path, cut: Cut) -> None:
    span = Span(0, 2)
    plain, lean = load(cut(tiny, span, pads=()), span), load(cut(tiny, span), span)
    rows = [hidden(computer, job(0, 0, 2, tokens=IDS[:6]))[0] for _, computer in (plain, lean)]
    assert np.array_equal(*rows)
    assert plain[0].wanted[:6].all() and not lean[0].wanted[:6].any()


def test_an_early_exit_is_the_residual_after_that_layer(load: Load, tiny: Path, cut: Cut) -> None:
    _, wide = load(cut(tiny, Span(0, 3)), Span(0, 3))
    _, narrow = load(cut(tiny, Span(0, 2)), Span(0, 2))
    (early,) = hidden(wide, job(0, 0, 2, tokens=IDS[:6]))
    (late,) = hidden(narrow, job(0, 0, 2, tokens=IDS[:6]))
    assert np.array_equal(early, late)


def test_a_last_span_gives_hidden_states_at_an_early_exit_and_nothing_for_rows_nobody_asked_for(
    whole: SpanComputer,
) -> None:
    (early,) = whole.compute([job(0, 0, 2, tokens=IDS[:3])])
    assert isinstance(early, JobResult) and early.hidden is not None and early.rows is None
    (silent,) = whole.compute([ids_job(1, 0, 3, outputs=())])
    assert isinstance(silent, JobResult) and silent.hidden is None and silent.rows == ()


def test_the_reduced_row_is_that_of_the_full_row(whole: SpanComputer) -> None:
    (outcome,) = whole.compute([ids_job(0, 0, 5, outputs=(1, 4), top_k=7, temperature=0.5)])
    assert isinstance(outcome, JobResult) and outcome.rows is not None
    whole.keep_rows()
    for top, full in zip(outcome.rows, whole.full_rows[0], strict=True):
        assert top.ids.tolist() == np.argsort(-full, kind="stable")[:7].tolist()
        assert np.array_equal(top.logits, full[top.ids])


def test_a_truncated_slot_computes_as_if_it_had_never_gone_on(whole: SpanComputer) -> None:
    prefill(whole, 0, 20, Profile.FAST)
    prefill(whole, 1, 30, Profile.FAST)
    (straight,) = logits(whole, ids_job(0, 20, 23))
    (returned,) = logits(whole, ids_job(1, 20, 23, truncate_to=20))
    assert np.array_equal(straight, returned)
    assert whole.n_held[:2] == [23, 23]


def test_a_cleared_slot_computes_like_a_new_one(whole: SpanComputer) -> None:
    (fresh,) = logits(whole, ids_job(3, 0, 8))
    prefill(whole, 3, 300, Profile.FAST)
    whole.clear(3)
    assert 3 not in whole.full_rows
    assert np.array_equal(logits(whole, ids_job(3, 0, 8))[0], fresh)


def test_a_step_out_of_order_is_refused_alone(whole: SpanComputer) -> None:
    wrong, right = whole.compute([ids_job(0, 4, 6), ids_job(1, 0, 2)])
    assert isinstance(wrong, EngineInputError)
    assert isinstance(right, JobResult)
    assert whole.n_held[:2] == [0, 2]


@pytest.mark.parametrize("profile", Profile)
def test_a_failed_computation_leaves_the_slots_as_they_were(load: Load, tiny: Path, profile: Profile) -> None:
    """The graph of an early exit fails here, for want of the node to read; the one that runs to its end does not."""
    _, broken = load(tiny, family=replace(FAMILIES["llama"], capture_node="nowhere-{layer}"))
    _, sound = load(tiny)
    held = {0: 10, 1: 20}
    for computer in (broken, sound):
        for slot, n_held in held.items():
            prefill(computer, slot, n_held, profile)
    failed = broken.compute([job(slot, n_held, 3, tokens=IDS[:2], profile=profile) for slot, n_held in held.items()])
    assert all(isinstance(outcome, TapError) for outcome in failed)
    assert broken.n_held[:2] == [10, 20]
    jobs = [ids_job(slot, n_held, n_held + 1, profile) for slot, n_held in held.items()]
    for one, other in zip(logits(broken, *jobs), logits(sound, *jobs), strict=True):
        assert np.array_equal(one, other)


def test_a_failure_after_a_truncation_keeps_the_truncation(load: Load, tiny: Path) -> None:
    _, broken = load(tiny, family=replace(FAMILIES["llama"], capture_node="nowhere-{layer}"))
    prefill(broken, 0, 10, Profile.FAST)
    (failed,) = broken.compute([job(0, 6, 3, tokens=IDS[:2], truncate_to=6)])
    assert isinstance(failed, TapError)
    assert broken.n_held[0] == 6
    assert isinstance(broken.compute([ids_job(0, 6, 9)])[0], JobResult)


@pytest.mark.skipif(not native_available(), reason="built without a compiler")
def test_a_cancelled_computation_is_an_error(load: Load, tiny: Path) -> None:
    llama, computer = load(tiny)
    prefill(computer, 0, 10, Profile.FAST)
    llama.tap.cancel()
    (outcome,) = computer.compute([ids_job(0, 10, 13)])
    assert isinstance(outcome, EngineError) and "stopped" in str(outcome)
    assert computer.n_held[0] == 10


@pytest.mark.parametrize("last", [True, False])
def test_a_model_that_computes_no_numbers_is_an_error_not_an_answer(
    load: Load, tiny: Path, tmp_path: Path, last: bool
) -> None:
    """Weights that are not numbers, as a damaged file has them."""
    header = read_header(tiny)
    model = bytearray(tiny.read_bytes())
    struct.pack_into("<f", model, header.data_offset + header.tensors["blk.2.ffn_down.weight"].offset, float("nan"))
    (tmp_path / "nan.gguf").write_bytes(model)
    _, computer = load(tmp_path / "nan.gguf")
    (outcome,) = computer.compute([job(0, 0, 4 if last else 3, tokens=IDS[:3], outputs=(2,) if last else ())])
    assert isinstance(outcome, EngineError | TapError) and "not numbers" in str(outcome)
    assert computer.n_held[0] == 0
