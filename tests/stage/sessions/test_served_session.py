"""A session on a real engine, over real sockets: its rows, its windows, its turns, its end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.stage.staged import HEAD, STRANGER, Stage, honest_rows, opened_pair, reply, step

from meshswarm.errors import MeshswarmError
from meshswarm.ledger.receipt import Outcome
from meshswarm.net.stream import Stream
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.messages import (
    SESSION_STREAM,
    Cancel,
    Close,
    Dtype,
    Failed,
    Flag,
    Fork,
    FullRow,
    FullRowRequest,
    Message,
    Open,
    Park,
    ReceiptAck,
    ReceiptOffer,
    RefusalReason,
    Refused,
    Result,
    Resume,
)
from meshswarm.stage.sessions.rows_codec import decode_rows, encode_rows
from meshswarm.stage.sessions.wire import encode


async def parked(stage: Stage) -> tuple[Open, Stream, Stream]:
    """A session that holds five rows and is parked: its opening, its stream, its hop."""
    opening = stage.opening()
    session, hop = await stage.open(opening), await stage.hop(opening)
    hop.send(encode(step(0, 0, stage.rows(5), 5)))
    assert isinstance(await reply(session), Result)
    session.send(encode(Park()))
    await stage.until(lambda: stage.server.sessions[HEAD.peer_id, opening.session].core.is_parked)
    return opening, session, hop


NEXT_TURN = Resume(0.0, 4, 60_000)


async def test_the_next_turn_goes_on_where_the_first_one_ended(stage: Stage) -> None:
    opening = stage.opening()
    session, hop = await stage.open(opening), await stage.hop(opening)
    hop.send(encode(step(0, 0, stage.rows(5), 5)))
    await reply(session)
    hop.send(encode(step(1, 5, stage.rows(1, seed=1))))
    expected = await reply(session)
    assert isinstance(expected, Result)
    session.send(encode(Cancel()))
    _, session, hop = await parked(stage)
    session.send(encode(NEXT_TURN))
    hop.send(encode(replace(step(1, 5, stage.rows(1, seed=1)), turn=1)))
    result = await reply(session)
    assert isinstance(result, Result)
    assert result.rows == expected.rows


async def test_rows_of_the_next_turn_wait_for_the_word_that_it_began(stage: Stage) -> None:
    """They come from the previous span, the word comes from the head: which is first is chance."""
    opening, session, hop = await parked(stage)
    core = stage.server.sessions[HEAD.peer_id, opening.session].core
    hop.send(encode(replace(step(1, 5, stage.rows(1)), turn=1)))
    await stage.until(lambda: bool(core._waiting))
    assert core.length == 5
    session.send(encode(replace(NEXT_TURN, top_k=2)))
    result = await reply(session)
    assert isinstance(result, Result)
    assert len(result.rows[0].ids) == 4 * 2, "the new turn's own terms hold"


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        ("rows without a new turn", "a turn that is over"),
        ("park twice", "parked already"),
        ("resume twice", "not parked"),
    ],
)
async def test_turns_out_of_order_end_the_session_with_a_reason(stage: Stage, act: str, complaint: str) -> None:
    _, session, hop = await parked(stage)
    match act:
        case "rows without a new turn":
            hop.send(encode(step(1, 5, stage.rows(1))))
        case "park twice":
            session.send(encode(Park()))
        case _:
            session.send(encode(NEXT_TURN))
            session.send(encode(NEXT_TURN))
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert complaint in failed.message
    assert stage.engine.n_free_slots == 2


@pytest.mark.parametrize("ahead", [{"seq": 1, "pos0": 5}, {"turn": 9}])
async def test_a_step_that_waits_for_what_never_comes_holds_no_room(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, ahead: dict[str, int]
) -> None:
    monkeypatch.setattr("meshswarm.stage.sessions.served_session.MAX_IDLE_S", 0.2)
    session, hop = await opened_pair(stage)
    hop.send(encode(replace(step(0, 0, stage.rows(1)), **ahead)))  # type: ignore[arg-type]
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert "no row came" in failed.message
    assert stage.engine.n_free_slots == 2


async def test_a_next_turn_without_logits_is_the_heads_fault(stage: Stage) -> None:
    _, session, _ = await parked(stage)
    session.send(encode(replace(NEXT_TURN, top_k=0)))
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert failed.blamed == HEAD.peer_id


@pytest.mark.parametrize("late", [Park(), Close(), FullRowRequest(0), NEXT_TURN, Cancel()])
async def test_what_a_head_sent_before_it_knew_of_the_end_does_nothing(
    stage: Stage, late: Message, caplog: pytest.LogCaptureFixture
) -> None:
    opening = stage.opening()
    session, hop = await stage.open(opening), await stage.hop(opening)
    hop.send(encode(step(0, 0, stage.rows(2), 2)))
    assert isinstance(await reply(session), Result)
    stage.server.sessions[HEAD.peer_id, opening.session].fail("it had to end", None)
    session.send(encode(late))
    assert isinstance(await reply(session), Failed)
    await session.connection.measure_rtt()
    assert len(await honest_rows(stage)) == 3
    await stage.until(lambda: stage.engine.n_free_slots == 2)
    assert not stage.receipts.newest(), "a session that failed has no receipt"
    assert not caplog.records


async def test_a_session_cannot_be_parked_while_rows_are_under_way(stage: Stage) -> None:
    opening = stage.opening()
    session, hop = await stage.open(opening), await stage.hop(opening)
    hop.send(encode(step(1, 5, stage.rows(1))))  # waits for step 0, which never comes
    await stage.until(lambda: stage.server.sessions[HEAD.peer_id, opening.session].core._waiting != {})
    session.send(encode(Park()))
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert "rows under way" in failed.message


async def test_a_parked_session_gives_its_room_up_at_once_with_a_receipt(stage: Stage) -> None:
    opening, session, _ = await parked(stage)
    await stage.open(stage.opening())
    assert stage.engine.n_free_slots == 0
    assert stage.server.n_free_slots == 1, "whoever asks may have its room"
    counted = stage.server.sessions[HEAD.peer_id, opening.session].core.counters
    await stage.open(stage.opening())
    offer = await reply(session)
    assert isinstance(offer, ReceiptOffer)
    acknowledgement = stage.countersign(offer.receipt, opening, counted)
    assert acknowledgement is not None
    session.send(encode(ReceiptAck(acknowledgement)))
    await stage.until(lambda: [kept.outcome for kept in stage.receipts.newest()] == [Outcome.AGREED])
    assert len(stage.server.sessions) == 2


async def test_the_longest_parked_session_goes_first(stage: Stage) -> None:
    first, *_ = await parked(stage)
    second, *_ = await parked(stage)
    await stage.open(stage.opening())
    left = {
        session for _, session in stage.server.sessions if stage.server.sessions[HEAD.peer_id, session].slot is not None
    }
    assert first.session not in left
    assert second.session in left


async def test_what_was_under_way_to_a_session_that_gave_its_room_up_harms_nothing(stage: Stage) -> None:
    before = await honest_rows(stage)
    _, session, hop = await parked(stage)
    await parked(stage)
    await stage.open(stage.opening())
    session.send(encode(NEXT_TURN))
    hop.send(encode(replace(step(1, 5, stage.rows(1)), turn=1)))
    session.send(encode(FullRowRequest(0)))
    session.send(encode(Close()))
    assert isinstance(await reply(session), ReceiptOffer)
    session.send(encode(Cancel()))
    with pytest.raises(MeshswarmError):
        await session.receive(timeout_s=10)
    assert await honest_rows(stage) == before


async def test_a_parked_session_is_not_kept_for_ever(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshswarm.stage.sessions.served_session.MAX_PARKED_S", 0.05)
    _, session, _ = await parked(stage)
    assert isinstance(await reply(session), ReceiptOffer)
    assert stage.engine.n_free_slots == 2


async def test_a_session_that_is_open_and_not_used_is_ended(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshswarm.stage.sessions.served_session.MAX_IDLE_S", 0.2)
    session = await stage.open(stage.opening())
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert "no row came for" in failed.message
    assert stage.engine.n_free_slots == 2


async def test_a_parked_session_does_not_hold_a_peer_that_leaves(stage: Stage) -> None:
    _, session, _ = await parked(stage)
    draining = asyncio.create_task(stage.server.drain(60))
    assert isinstance(await reply(session), ReceiptOffer)
    session.send(encode(Cancel()))
    async with asyncio.timeout(10):
        await draining


async def test_a_copy_goes_on_from_the_middle_and_leaves_the_original_alone(stage: Stage) -> None:
    opening, session, hop = await parked(stage)
    copy_opening = replace(stage.opening(), fork=Fork(opening.session, 3))
    copy = await stage.open(copy_opening)
    copy_hop = await stage.hop(copy_opening)
    copy_hop.send(encode(step(0, 3, stage.rows(1, seed=1))))
    copied = await reply(copy)
    session.send(encode(NEXT_TURN))
    hop.send(encode(replace(step(1, 5, stage.rows(1, seed=1)), turn=1)))
    went_on = await reply(session)
    session.send(encode(Cancel()))
    assert isinstance(copied, Result)
    assert isinstance(went_on, Result)
    assert copied.rows != went_on.rows
    _, session, hop = await parked(stage)
    session.send(encode(NEXT_TURN))
    hop.send(encode(replace(step(1, 3, stage.rows(1, seed=1)), truncate_to=3, turn=1)))
    cut = await reply(session)
    assert isinstance(cut, Result)
    assert copied.rows == cut.rows, "as if the original had been cut there"
    running = stage.server.sessions[HEAD.peer_id, copy_opening.session].core
    assert running.counters.prefill_rows == 0, "what was copied was not computed"


@pytest.mark.parametrize("case", ["unknown", "too long", "other profile", "not parked", "nothing", "a stranger's"])
async def test_a_copy_that_cannot_be_is_refused_and_the_original_unharmed(stage: Stage, case: str) -> None:
    opening, session, hop = await parked(stage)
    fork, change, who = Fork(opening.session, 5), {}, HEAD
    match case:
        case "unknown":
            fork = Fork(bytes(16), 5)
        case "too long":
            fork = Fork(opening.session, 6)
        case "nothing":
            fork = Fork(opening.session, 0)
        case "other profile":
            change = {"profile": Profile.EXACT}
        case "a stranger's":
            who = STRANGER
        case _:
            session.send(encode(NEXT_TURN))
            await stage.until(lambda: stage.server.n_parked == 0)
    stream = await stage.stream(who, SESSION_STREAM)
    stream.send(encode(replace(stage.opening(), head=who.peer_id, fork=fork, **change), who))  # type: ignore[arg-type]
    refused = await reply(stream)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.UNSUPPORTED
    assert stage.engine.n_free_slots == 1
    if case != "not parked":
        session.send(encode(NEXT_TURN))
    hop.send(encode(replace(step(1, 5, stage.rows(1)), turn=1)))
    assert isinstance(await reply(session), Result)


async def test_a_copy_takes_nobodys_room(stage: Stage) -> None:
    opening, _, _ = await parked(stage)
    await parked(stage)
    stream = await stage.stream(HEAD, SESSION_STREAM)
    stream.send(encode(replace(stage.opening(), fork=Fork(opening.session, 5), max_wait_ms=60_000), HEAD))
    refused = await reply(stream)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUSY
    assert stage.server.n_parked == 2


async def test_an_owner_who_wants_the_machine_ends_what_strangers_have_parked(stage: Stage) -> None:
    _, session, _ = await parked(stage)
    stage.server.rest("busy")
    assert isinstance(await reply(session), ReceiptOffer)
    stage.server.resume()


async def test_a_session_beyond_its_own_reservation_ends_although_the_slot_has_room(stage: Stage) -> None:
    opening = replace(stage.opening(), n_ctx=10)
    session, hop = await stage.open(opening), await stage.hop(opening)
    hop.send(encode(step(0, 0, stage.rows(8), 8)))
    assert isinstance(await reply(session), Result)
    hop.send(encode(step(1, 8, stage.rows(3), 3)))
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert "beyond the 10 reserved" in failed.message


@pytest.mark.parametrize("dtype", [Dtype.F16, Dtype.Q8])
async def test_rows_come_in_the_dtype_that_was_agreed(stage: Stage, dtype: Dtype) -> None:
    opening = replace(stage.opening(), dtype=dtype)
    session, hop = await stage.open(opening), await stage.hop(opening)
    rows = np.frombuffer(stage.rows(3), "<f4").reshape(3, -1)
    packed = encode_rows(rows, dtype)
    hop.send(encode(replace(step(0, 0, packed, 3), dtype=dtype)))
    result = await reply(session)
    assert isinstance(result, Result)
    exact_session, exact_hop = await opened_pair(stage)
    received = decode_rows(packed, dtype, *rows.shape)
    exact_hop.send(encode(step(0, 0, received.tobytes(), 3)))
    expected = await reply(exact_session)
    assert isinstance(expected, Result)
    assert result.rows == expected.rows, "computed on what the dtype carries, nothing else"
    hop.send(encode(step(1, 3, stage.rows(1))))
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert f"in {dtype} were expected" in failed.message


async def test_a_window_of_several_rows_and_the_step_that_takes_some_back(stage: Stage) -> None:
    session, hop = await opened_pair(stage)
    hop.send(encode(step(0, 0, stage.rows(5), 5)))
    await reply(session)
    window = replace(step(1, 5, stage.rows(4, seed=1), 4, Flag.EMIT | Flag.DRAFT), n_outputs=4)
    hop.send(encode(window))
    result = await reply(session)
    assert isinstance(result, Result)
    assert len(result.rows) == 4
    session.send(encode(FullRowRequest(1, 2)))
    full_row = await reply(session)
    assert isinstance(full_row, FullRow)
    assert full_row.row == 2
    ids = np.frombuffer(result.rows[2].ids, "<i4")
    assert np.array_equal(np.frombuffer(full_row.logits, "<f4")[ids], np.frombuffer(result.rows[2].logits, "<f4"))
    hop.send(encode(replace(step(2, 7, stage.rows(1, seed=2)), truncate_to=7)))
    assert isinstance(await reply(session), Result)
    (running,) = stage.server.sessions.values()
    assert (running.core.counters.drafted_rows, running.core.counters.accepted_rows) == (3, 1)


async def test_a_row_that_no_result_has_ends_the_session(stage: Stage) -> None:
    session, hop = await opened_pair(stage)
    hop.send(encode(step(0, 0, stage.rows(1))))
    assert isinstance(await reply(session), Result)
    session.send(encode(FullRowRequest(0, 1)))
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert "row 1 of step 0" in failed.message
