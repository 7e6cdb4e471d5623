"""The engine as its callers use it: on the event loop, several sessions at once, unbreakable from outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.stage.chain import job
from tests.stage.conftest import Cut

from meshswarm.errors import ArtifactError, ConfigError
from meshswarm.span import Span
from meshswarm.stage.engine.engine import EngineError, EngineInputError, Job, JobResult, SpanEngine
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.engine.tap import native_available

N_LAYERS, N_CTX = 4, 200
IDS = np.random.default_rng(5).integers(0, 32, N_CTX).astype(np.int32)
SIZES = {"n_ctx": N_CTX, "n_slots": 3, "n_threads": 1}


@pytest_asyncio.fixture
async def engine(tiny: Path) -> AsyncIterator[SpanEngine]:
    """The whole tiny model."""
    running = SpanEngine.load(tiny, Span(0, N_LAYERS), N_LAYERS, **SIZES)
    running.start(asyncio.get_running_loop())
    yield running
    await running.stop()


@pytest_asyncio.fixture
async def middle(tiny: Path, cut: Cut) -> AsyncIterator[SpanEngine]:
    """The layers 1:3."""
    running = SpanEngine.load(cut(tiny, Span(1, 3)), Span(1, 3), N_LAYERS, **SIZES)
    running.start(asyncio.get_running_loop())
    yield running
    await running.stop()


def taken(engine: SpanEngine) -> int:
    slot = engine.acquire_slot()
    assert slot is not None
    return slot


def ids_job(slot: int, start: int, stop: int, **changes: object) -> Job:
    """The tokens IDS[start:stop] at their positions; the last row's logits wanted."""
    changes.setdefault("outputs", (stop - start - 1,))
    return job(slot, start, N_LAYERS, tokens=IDS[start:stop], **changes)


async def outcomes(engine: SpanEngine, *jobs: Job) -> list[JobResult | Exception]:
    """Submit all at once; what they ended with, in order of arrival."""
    arrived: asyncio.Queue[JobResult | Exception] = asyncio.Queue()
    for each in jobs:
        engine.submit(each, arrived.put_nowait)
    assert arrived.empty(), "an answer came before submit returned"
    return [await arrived.get() for _ in jobs]


async def test_it_says_what_it_is(engine: SpanEngine, middle: SpanEngine) -> None:
    assert (engine.n_embd, engine.n_vocab) == (64, 32)
    assert engine.is_first and engine.is_last
    assert not middle.is_first and not middle.is_last
    assert engine.numclass == middle.numclass
    assert engine.speed.us_per_layer > 0 and engine.speed.prefill_us_per_row_layer > 0


@pytest.mark.parametrize("part", ["_next_turn", "_note_turn", "_answer"])
async def test_a_thread_that_breaks_leaves_nobody_waiting_and_takes_no_more_sessions(
    engine: SpanEngine, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    slots = [taken(engine) for _ in range(2)]
    await engine.run(ids_job(slots[0], 0, 3))
    thread: Any = engine._thread
    broken, usual = threading.Event(), getattr(thread, part)

    def breaks(*arguments: Any) -> Any:
        if not broken.is_set():
            broken.set()
            raise ZeroDivisionError("float division by zero")
        return usual(*arguments)

    monkeypatch.setattr(thread, part, breaks)
    jobs = [ids_job(slots[0], 3, 4), ids_job(slots[1], 0, 2), ids_job(slots[0], 4, 5)]
    async with asyncio.timeout(20):
        found = await outcomes(engine, *jobs)
        assert any("computes no more" in str(outcome) for outcome in found)
        with pytest.raises(EngineError, match="computes no more: ZeroDivisionError"):
            await engine.run(ids_job(slots[1], 2, 3))
        copied: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        engine.copy_slot(slots[0], slots[1], 1, copied.set_result)
        assert isinstance(await copied, EngineError)
    assert engine.n_free_slots == 0 and engine.acquire_slot() is None
    engine.release_slot(slots[0])


async def test_slots_are_given_out_lowest_first_until_none_is_left(engine: SpanEngine) -> None:
    assert [engine.acquire_slot() for _ in range(4)] == [0, 1, 2, None]
    assert engine.n_free_slots == 0
    engine.release_slot(1)
    assert engine.acquire_slot() == 1


async def test_a_slot_that_is_not_taken_cannot_be_released(engine: SpanEngine) -> None:
    for slot in (0, 3, -1):
        with pytest.raises(ValueError, match=f"slot {slot} is not taken"):
            engine.release_slot(slot)


@pytest.mark.parametrize("slot", [0, 3, -1])
async def test_a_job_for_a_slot_nobody_took_is_refused(engine: SpanEngine, slot: int) -> None:
    with pytest.raises(EngineInputError, match=f"no session in slot {slot}"):
        await engine.run(ids_job(slot, 0, 3))


async def test_every_bad_input_is_refused_and_the_session_goes_on(middle: SpanEngine) -> None:
    slot = taken(middle)
    rows = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    good = job(slot, 0, 3, hidden=rows)
    expected = await middle.run(good)
    nan = rows.copy()
    nan[2, 5] = np.nan
    bad = [
        replace(good, hidden=nan, pos0=3),
        replace(good, hidden=rows[:, :60], pos0=3),
        replace(good, hidden=rows.astype(np.float64), pos0=3),
        replace(good, hidden=None, tokens=IDS[:3], pos0=3),
        replace(good, hidden=np.zeros((N_CTX - 2, 64), np.float32), pos0=3),
        replace(good, pos0=2),
        replace(good, pos0=4),
        replace(good, pos0=4, truncate_to=4),
        replace(good, pos0=3, stop_layer=4),
        replace(good, pos0=3, outputs=(0,)),
    ]
    for outcome in await outcomes(middle, *bad):
        assert isinstance(outcome, EngineInputError), outcome
    again = await middle.run(replace(good, truncate_to=0))
    assert expected.hidden is not None and again.hidden is not None
    assert np.array_equal(again.hidden, expected.hidden)


async def test_token_ids_outside_the_vocabulary_are_refused(engine: SpanEngine) -> None:
    slot = taken(engine)
    for token in (-1, 32, 2**31 - 1):
        with pytest.raises(EngineInputError, match="outside the vocabulary of 32"):
            await engine.run(job(slot, 0, N_LAYERS, tokens=np.array([token], np.int32)))


async def test_steps_of_one_session_may_be_sent_ahead(engine: SpanEngine) -> None:
    one, other = taken(engine), taken(engine)
    for start in range(0, 12, 4):
        await engine.run(ids_job(one, start, start + 4))
    ahead = await outcomes(engine, *(ids_job(other, start, start + 4) for start in range(0, 12, 4)))
    assert all(isinstance(outcome, JobResult) for outcome in ahead)
    assert np.array_equal(engine.full_row(one, 0), engine.full_row(other, 0))


async def test_steps_behind_a_refused_one_are_refused_too(engine: SpanEngine) -> None:
    slot = taken(engine)
    results = await outcomes(engine, ids_job(slot, 0, 4), ids_job(slot, 5, 8), ids_job(slot, 8, 9), ids_job(slot, 4, 9))
    assert [type(outcome) for outcome in results] == [JobResult, EngineInputError, EngineInputError, JobResult]


async def test_sessions_that_are_ready_together_are_computed_together(engine: SpanEngine) -> None:
    slots = [taken(engine) for _ in range(3)]
    for slot in slots:
        await engine.run(ids_job(slot, 0, 8))
    await asyncio.sleep(0.2)  # sessions that are away so much longer than a turn takes gain nothing by going apart
    blocker = ids_job(slots[0], 8, 100)  # long enough that the steps are all there when it is done
    results = await outcomes(engine, blocker, *(ids_job(slot, 8, 9) for slot in slots[1:]))
    _, one, other = results
    assert isinstance(one, JobResult) and isinstance(other, JobResult)
    assert one.compute_s == other.compute_s


async def test_a_released_slot_forgets_its_session(engine: SpanEngine) -> None:
    slot = taken(engine)
    await engine.run(ids_job(slot, 0, 40))
    first = await engine.run(ids_job(slot, 40, 41))
    engine.release_slot(slot)
    assert taken(engine) == slot
    with pytest.raises(EngineInputError, match="keeps no logits"):
        engine.full_row(slot, 0)
    with pytest.raises(EngineInputError, match="position 41 where 0 was expected"):
        await engine.run(ids_job(slot, 41, 42))
    await engine.run(ids_job(slot, 0, 40))
    again = await engine.run(ids_job(slot, 40, 41))
    assert first.rows is not None and again.rows is not None
    assert np.array_equal(first.rows[0].logits, again.rows[0].logits)


async def test_the_waiting_steps_of_a_released_slot_fail(engine: SpanEngine) -> None:
    slot, other = taken(engine), taken(engine)
    ended: asyncio.Queue[JobResult | Exception] = asyncio.Queue()
    for start in range(0, 120, 40):
        engine.submit(ids_job(slot, start, start + 40), ended.put_nowait)
    engine.release_slot(slot)
    results = [await ended.get() for _ in range(3)]
    assert any(isinstance(result, EngineError) and "session was ended" in str(result) for result in results)
    assert isinstance(await engine.run(ids_job(other, 0, 2)), JobResult)


async def test_sequences_are_given_out_in_the_order_of_first_jobs_not_of_opening(engine: SpanEngine) -> None:
    """So that the sessions of a route are neighbours on all its spans, whoever was quicker at opening."""
    slots = [taken(engine) for _ in range(3)]
    for slot in reversed(slots):
        await engine.run(ids_job(slot, 0, 3 + slot))
    assert engine._thread is not None
    assert engine._thread._sequence_of == {2: 0, 1: 1, 0: 2}
    for slot in slots:
        full = engine.full_row(slot, 0).copy()
        engine.release_slot(slot)
        assert taken(engine) == slot
        await engine.run(ids_job(slot, 0, 3 + slot))
        assert np.array_equal(engine.full_row(slot, 0), full)


async def copied(engine: SpanEngine, source: int, target: int, n_positions: int) -> Exception | None:
    done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    engine.copy_slot(source, target, n_positions, done.set_result)
    return await done


async def test_a_session_may_begin_as_a_copy_of_anothers_beginning(engine: SpanEngine) -> None:
    source, target, straight = (taken(engine) for _ in range(3))
    await engine.run(ids_job(source, 0, 20))
    await engine.run(ids_job(straight, 0, 12))
    assert await copied(engine, source, target, 12) is None
    for slot in (target, straight):
        await engine.run(ids_job(slot, 12, 15))
    assert np.array_equal(engine.full_row(target, 0), engine.full_row(straight, 0))
    assert isinstance(await engine.run(ids_job(source, 20, 22)), JobResult)


async def test_jobs_may_be_submitted_behind_a_copy_at_once(engine: SpanEngine) -> None:
    source, target = taken(engine), taken(engine)
    await engine.run(ids_job(source, 0, 20))
    told: list[Exception | None] = []
    engine.copy_slot(source, target, 20, told.append)
    assert isinstance(await engine.run(ids_job(target, 20, 21)), JobResult)
    assert told == [None]


async def test_what_is_not_there_cannot_be_copied(engine: SpanEngine) -> None:
    source, target = taken(engine), taken(engine)
    assert isinstance(await copied(engine, source, target, 5), EngineInputError)
    await engine.run(ids_job(source, 0, 4))
    assert isinstance(await copied(engine, source, target, 5), EngineInputError)
    assert isinstance(await engine.run(ids_job(target, 0, 2)), JobResult), "it is still empty"


async def test_a_heavier_session_gets_more_of_the_turns(engine: SpanEngine) -> None:
    """Two prompts at once, of chunks that are computed alone; one has three times the other's weight."""
    light, heavy, blocker = (taken(engine) for _ in range(3))
    engine.set_weight(heavy, 3.0)
    order: asyncio.Queue[int] = asyncio.Queue()

    def submit(slot: int, start: int) -> None:
        engine.submit(ids_job(slot, start, start + 20, outputs=()), lambda _: order.put_nowait(slot))

    engine.submit(ids_job(blocker, 0, 150, outputs=()), lambda _: None)
    for start in range(0, 160, 20):
        submit(light, start)
        submit(heavy, start)
    assert [await order.get() for _ in range(8)].count(heavy) == 6


async def test_a_draft_may_be_taken_back_by_the_next_step(engine: SpanEngine) -> None:
    drafting, straight = taken(engine), taken(engine)
    for slot in (drafting, straight):
        await engine.run(ids_job(slot, 0, 10))
    await engine.run(ids_job(drafting, 10, 15, is_window=True, outputs=(0, 1, 2, 3, 4)))
    await engine.run(ids_job(straight, 10, 12))
    for slot, truncate_to in ((drafting, 12), (straight, None)):
        await engine.run(ids_job(slot, 12, 15, truncate_to=truncate_to))
    assert np.array_equal(engine.full_row(drafting, 0), engine.full_row(straight, 0))


async def test_full_rows_are_kept_until_the_next_step(engine: SpanEngine) -> None:
    slot = taken(engine)
    result = await engine.run(ids_job(slot, 0, 5, outputs=(1, 4), top_k=32))
    assert result.rows is not None
    for index, top in enumerate(result.rows):
        assert np.array_equal(engine.full_row(slot, index)[top.ids], top.logits)
    for index in (2, -1):
        with pytest.raises(EngineInputError, match="keeps no logits"):
            engine.full_row(slot, index)
    await engine.run(ids_job(slot, 5, 6, outputs=()))
    with pytest.raises(EngineInputError, match="keeps no logits"):
        engine.full_row(slot, 0)


async def test_a_handler_that_fails_does_not_take_the_others_along(engine: SpanEngine) -> None:
    slot = taken(engine)
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

    def fail(outcome: JobResult | Exception) -> None:
        raise KeyError("of the handler")

    engine.submit(ids_job(slot, 0, 4), fail)
    await engine.run(ids_job(slot, 4, 6))
    assert [type(error) for error in reported] == [KeyError]


async def test_a_cancelled_wait_leaves_the_engine_running(engine: SpanEngine) -> None:
    slot = taken(engine)
    waiting = asyncio.create_task(engine.run(ids_job(slot, 0, 100)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert isinstance(await engine.run(ids_job(slot, 100, 102)), JobResult)


async def test_both_profiles_answer_and_say_what_they_cost(engine: SpanEngine) -> None:
    slots = [taken(engine), taken(engine)]
    for slot, profile in zip(slots, Profile, strict=True):
        result = await engine.run(ids_job(slot, 0, 1, profile=profile))
        assert result.compute_s > 0
        assert result.hidden is None and result.rows is not None and len(result.rows) == 1


async def test_stopping_fails_what_waits_and_ends_the_thread(tiny: Path) -> None:
    engine = SpanEngine.load(tiny, Span(0, N_LAYERS), N_LAYERS, **SIZES)
    engine.start(asyncio.get_running_loop())
    slot = taken(engine)
    ended: asyncio.Queue[JobResult | Exception] = asyncio.Queue()
    for start in range(0, 160, 40):
        engine.submit(ids_job(slot, start, start + 40), ended.put_nowait)
    await engine.stop()
    results = [await ended.get() for _ in range(4)]
    assert isinstance(results[-1], EngineError)
    assert "engine 0:4" not in {thread.name for thread in threading.enumerate()}
    await engine.stop()
    assert engine.acquire_slot() is None
    with pytest.raises(EngineError, match="stopped"):
        await engine.run(ids_job(slot, 0, 4))


@pytest.mark.skipif(not native_available(), reason="built without a compiler: a running computation is waited for")
async def test_stopping_cuts_a_long_computation_short(smollm2: Path) -> None:
    engine = SpanEngine.load(smollm2, Span(0, 30), 30, n_ctx=512, n_slots=1, n_threads=1)
    engine.start(asyncio.get_running_loop())
    slot = taken(engine)
    waiting = asyncio.create_task(engine.run(job(slot, 0, 30, tokens=np.arange(500, dtype=np.int32))))
    await asyncio.sleep(0.05)
    await engine.stop()
    with pytest.raises(EngineError, match="stopped while it computed"):
        await waiting


async def test_an_engine_that_never_started_can_be_stopped(tiny: Path) -> None:
    engine = SpanEngine.load(tiny, Span(0, N_LAYERS), N_LAYERS, **SIZES)
    await engine.stop()


@pytest.mark.parametrize("sizes", [{"n_ctx": 0}, {"n_slots": 0}, {"n_slots": 257}, {"n_threads": 0}, {"max_rows": 1}])
def test_sizes_that_cannot_be_are_refused(tiny: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="an engine cannot have"):
        SpanEngine.load(tiny, Span(0, N_LAYERS), N_LAYERS, **(SIZES | sizes))


def test_a_file_that_is_not_the_span_is_refused(tiny: Path, cut: Cut) -> None:
    with pytest.raises(EngineError, match="has 2 layers: it is not the layers 0:3 of 4"):
        SpanEngine.load(cut(tiny, Span(1, 3)), Span(0, 3), N_LAYERS, **SIZES)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.gguf").write_bytes(bytes(range(256)) * 64)
    with pytest.raises(ArtifactError, match=r"noise\.gguf"):
        SpanEngine.load(tmp_path / "noise.gguf", Span(0, 2), N_LAYERS, **SIZES)


async def test_the_smallest_engine_works(tiny: Path) -> None:
    engine = SpanEngine.load(tiny, Span(0, N_LAYERS), N_LAYERS, n_ctx=1, n_slots=1, n_threads=1, max_rows=2)
    engine.start(asyncio.get_running_loop())
    slot = taken(engine)
    assert isinstance(await engine.run(ids_job(slot, 0, 1, profile=Profile.EXACT)), JobResult)
    with pytest.raises(EngineInputError, match="2 positions do not fit the context of 1"):
        await engine.run(ids_job(slot, 1, 2))
    await engine.stop()


async def test_its_own_heads_work_goes_on_while_strangers_wait(engine: SpanEngine) -> None:
    own, strangers = taken(engine), taken(engine)
    engine.own(own)
    engine.set_share(0.0)
    held = asyncio.ensure_future(engine.run(ids_job(strangers, 0, 4)))
    for start in range(0, 12, 4):
        await engine.run(ids_job(own, start, start + 4))
    assert not held.done()
    engine.set_share(1.0)
    first = await held
    alone = await engine.run(ids_job(taken(engine), 0, 4))
    assert first.rows is not None and alone.rows is not None
    assert np.array_equal(first.rows[0].logits, alone.rows[0].logits)


async def test_a_slot_is_its_own_heads_until_it_is_released(engine: SpanEngine) -> None:
    slot = taken(engine)
    engine.own(slot)
    engine.release_slot(slot)
    assert taken(engine) == slot
    engine.set_share(0.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await engine.run(ids_job(slot, 0, 4))


async def test_work_held_back_ends_with_its_session_and_with_the_engine(engine: SpanEngine) -> None:
    released, stopped = taken(engine), taken(engine)
    engine.set_share(0.0)
    held = [asyncio.ensure_future(engine.run(ids_job(slot, 0, 4))) for slot in (released, stopped)]
    await asyncio.sleep(0.05)
    engine.release_slot(released)
    with pytest.raises(EngineError, match="ended"):
        await held[0]
    await engine.stop()
    with pytest.raises(EngineError, match="stopped"):
        await held[1]


async def test_strangers_still_get_their_share(engine: SpanEngine) -> None:
    engine.set_share(0.25)
    slot = taken(engine)
    for start in range(0, 40, 4):
        await engine.run(ids_job(slot, start, start + 4))


async def test_threads_change_under_way_without_changing_exact_bits(
    engine: SpanEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def observe(_watch: object, n_rows: int, step_s: float, _now: float) -> int:
        assert n_rows >= 2 and step_s > 0
        asked.append(2 if len(asked) % 2 == 0 else 1)
        return asked[-1]

    jobs = [(start, start + 1) for start in range(6)]
    before, after = taken(engine), taken(engine)
    expected = [await engine.run(ids_job(before, *rows, profile=Profile.EXACT)) for rows in jobs]
    monkeypatch.setattr("meshswarm.stage.engine.threads.ThreadWatch.observe", observe)
    seen = [await engine.run(ids_job(after, *rows, profile=Profile.EXACT)) for rows in jobs]
    assert asked == [2, 1] * 3
    for one, other in zip(expected, seen, strict=True):
        assert one.rows is not None and other.rows is not None
        assert np.array_equal(one.rows[0].logits, other.rows[0].logits)
