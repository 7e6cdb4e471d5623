"""A peer that goes over to other layers: two slices at once, and each session on the one it began on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.stage.staged import HEAD, N_CTX, SPAN, Stage, honest_rows, reply, step

from meshswarm.net.stream import Stream
from meshswarm.span import Span
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.sessions.messages import (
    SESSION_STREAM,
    Cancel,
    Failed,
    Open,
    Opened,
    Park,
    ReceiptOffer,
    RefusalReason,
    Refused,
    Result,
    Waiting,
)
from meshswarm.stage.sessions.terms import Served
from meshswarm.stage.sessions.wire import encode

NEW = Span(25, 30)


@dataclass
class Moving:
    """A stage whose server has the layers 25:30 beside its 20:30."""

    stage: Stage
    old: Served
    new: Served

    def opening(self, span: Span) -> Open:
        return replace(self.stage.opening(), span=span)

    async def ask(self, opening: Open) -> Stream:
        stream = await self.stage.stream(HEAD, SESSION_STREAM)
        stream.send(encode(opening, HEAD))
        return stream

    async def refusal(self, span: Span) -> Refused:
        refused = await reply(await self.ask(self.opening(span)))
        assert isinstance(refused, Refused)
        return refused


@pytest.fixture
async def moving(stage: Stage, cut: Callable[..., Path], smollm2: Path) -> AsyncIterator[Moving]:
    engine = SpanEngine.load(cut(smollm2, NEW), NEW, 30, n_ctx=N_CTX, n_slots=1, n_threads=1, max_rows=64)
    engine.start(asyncio.get_running_loop())
    old = stage.server.served
    assert old is not None
    new = Served(old.model_id, 30, NEW, bytes(32), engine, N_CTX, window=256)
    stage.server.serve(new, beside=True)
    yield Moving(stage, old, new)
    await engine.stop()


async def test_each_session_runs_on_the_slice_that_it_asked_for(moving: Moving) -> None:
    stage = moving.stage
    before = await honest_rows(stage)
    older, newer = moving.opening(SPAN), moving.opening(NEW)
    await stage.open(older)
    session, hop = await stage.open(newer), await stage.hop(newer)
    assert stage.engine.n_free_slots == 1
    assert moving.new.engine.n_free_slots == stage.server.n_free_slots == 0
    hop.send(encode(step(0, 0, stage.rows(1))))
    of_new = await reply(session)
    assert isinstance(of_new, Result)
    assert of_new.rows[0].logits != before[0], "other layers give other rows"
    assert await honest_rows(stage) == before
    session.send(encode(Cancel()))
    await stage.until(lambda: moving.new.engine.n_free_slots == 1)


async def test_sessions_on_the_old_slice_end_in_peace_and_new_ones_go_elsewhere(moving: Moving) -> None:
    stage, opening = moving.stage, moving.opening(SPAN)
    session, hop = await stage.open(opening), await stage.hop(opening)
    retiring = asyncio.create_task(stage.server.retire(moving.old, 10))
    await asyncio.sleep(0)
    assert (await moving.refusal(SPAN)).reason is RefusalReason.DRAINING
    await stage.open(moving.opening(NEW))
    hop.send(encode(step(0, 0, stage.rows(1))))
    assert isinstance(await reply(session), Result)
    assert not retiring.done()
    session.send(encode(Cancel()))
    await retiring
    assert (await moving.refusal(SPAN)).reason is RefusalReason.UNKNOWN_SPAN
    assert len(stage.server.sessions) == 1, "the session on the new slice was left alone"


async def test_what_does_not_end_in_time_is_told_why_and_what_is_parked_gives_way_at_once(moving: Moving) -> None:
    stage = moving.stage
    openings = [moving.opening(SPAN), moving.opening(SPAN)]
    overdue, parked = [await stage.open(opening) for opening in openings]
    parked.send(encode(Park()))
    await stage.until(lambda: stage.server.n_parked == 1)
    retiring = asyncio.create_task(stage.server.retire(moving.old, 0.2))
    assert isinstance(await reply(parked), ReceiptOffer)
    failed = await reply(overdue)
    assert isinstance(failed, Failed)
    assert failed.message == "this peer serves other layers now"
    await retiring


async def test_a_slice_that_cannot_be_emptied_is_opened_again(moving: Moving) -> None:
    stage = moving.stage
    stage.server.serve(moving.old)
    session = await stage.open(moving.opening(SPAN))
    assert not await stage.server.empty(moving.old, 0.05)
    assert stage.server.n_free_slots == 0
    assert (await moving.refusal(SPAN)).reason is RefusalReason.DRAINING
    stage.server.reopen()
    assert stage.server.n_free_slots == 1
    await stage.open(moving.opening(SPAN))
    session.send(encode(Cancel()))


async def test_who_waits_for_one_slice_keeps_nobody_from_the_other(moving: Moving) -> None:
    stage = moving.stage
    older, newer = moving.opening(SPAN), moving.opening(NEW)
    for _ in range(2):
        await stage.open(moving.opening(SPAN))
    running = await stage.open(newer)
    for opening in (older, moving.opening(NEW)):
        waiting = await moving.ask(replace(opening, max_wait_ms=20_000))
        assert isinstance(await reply(waiting), Waiting)
    running.send(encode(Cancel()))
    answer = await reply(waiting)
    while isinstance(answer, Waiting):
        answer = await reply(waiting)
    assert isinstance(answer, Opened)
    assert stage.server.n_waiting == 1
