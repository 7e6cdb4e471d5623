"""A span's server against peers that break the rules: real sockets, a real engine, and a session that stays unharmed.

Every hostile case runs beside an honest session on the same server, which must give the same rows as before.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from dataclasses import replace

import numpy as np
import pytest
from tests.stage.staged import HEAD, N_CTX, PREVIOUS, PROVIDER, SPAN, STRANGER, Stage, honest_rows, reply, step

from meshswarm.config import Address
from meshswarm.errors import MeshswarmError
from meshswarm.identity import Identity
from meshswarm.ledger.receipt import Outcome
from meshswarm.net.stream import Stream
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.messages import (
    SESSION_STREAM,
    Cancel,
    Close,
    Dtype,
    Failed,
    FullRow,
    FullRowRequest,
    Opened,
    Park,
    ReceiptAck,
    ReceiptOffer,
    RefusalReason,
    Refused,
    Result,
    Returns,
    Step,
    Waiting,
)
from meshswarm.stage.sessions.wire import encode


async def test_a_session_from_open_to_a_receipt_signed_by_both(stage: Stage) -> None:
    opening = stage.opening()
    session, hop = await stage.open(opening), await stage.hop(opening)
    hop.send(encode(step(0, 0, stage.rows(5), 5)))
    first = await reply(session)
    hop.send(encode(step(1, 5, stage.rows(1, seed=1))))
    second = await reply(session)
    assert isinstance(first, Result)
    assert isinstance(second, Result)
    session.send(encode(FullRowRequest(1)))
    full = await reply(session)
    assert isinstance(full, FullRow)
    logits = np.frombuffer(full.logits, "<f4")
    ids = np.frombuffer(second.rows[0].ids, "<i4")
    assert len(logits) == stage.engine.n_vocab
    assert np.array_equal(logits[ids], np.frombuffer(second.rows[0].logits, "<f4"))
    counted = stage.server.sessions[HEAD.peer_id, opening.session].core.counters
    claim = await offered(session)
    acknowledgement = stage.countersign(claim, opening, counted)
    assert acknowledgement is not None
    session.send(encode(ReceiptAck(acknowledgement)))
    await stage.until(lambda: not stage.server.sessions)
    await stage.until(lambda: [kept.outcome for kept in stage.receipts.newest()] == [Outcome.AGREED])
    assert (counted.prefill_rows, counted.decode_rows) == (5, 1)
    assert stage.engine.n_free_slots == 2


async def offered(session: Stream) -> bytes:
    """The span's claim after a CLOSE."""
    session.send(encode(Close()))
    offer = await reply(session)
    assert isinstance(offer, ReceiptOffer)
    return offer.receipt


async def test_a_claim_about_another_session_is_not_worth_a_signature(stage: Stage) -> None:
    opening = stage.opening()
    claim = await offered(await stage.open(opening))
    counters = stage.server.sessions[HEAD.peer_id, opening.session].core.counters
    assert stage.countersign(claim, stage.opening(), counters) is None
    assert stage.countersign(claim, opening, counters) is not None


async def test_an_acknowledgement_that_is_none_leaves_the_receipt_half_signed(stage: Stage) -> None:
    session = await stage.open(stage.opening())
    await offered(session)
    session.send(encode(ReceiptAck(b"nonsense")))
    assert isinstance(await reply(session), Failed)
    await stage.until(lambda: [kept.outcome for kept in stage.receipts.newest()] == [Outcome.HALF_SIGNED])


BAD_STEPS = {
    "NaN": (lambda stage: encode(step(0, 0, np.full(stage.engine.n_embd, np.nan, "<f4").tobytes())), "not a f"),
    "infinite": (lambda stage: encode(step(0, 0, np.full(stage.engine.n_embd, np.inf, "<f4").tobytes())), "not a f"),
    "wrong width": (lambda stage: encode(step(0, 0, bytes(4))), "carries 4 bytes"),
    "wrong position": (lambda stage: encode(step(0, 7, stage.rows(1))), "starts at position 7"),
    "beyond the context": (lambda stage: encode(step(0, 0, stage.rows(101), 101)), "beyond the 100 reserved"),
    "tokens": (lambda stage: encode(Step(0, 0, 1, None, 0, bytes(4), Dtype.F32, None, None)), "no hidden states"),
    "wrong hash": (
        lambda stage: encode(replace(step(0, 0, stage.rows(1)), running_hash=bytes(32))), "not the ones their sender"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_STEPS)
async def test_a_bad_step_ends_its_session_with_a_reason_and_no_other(stage: Stage, name: str) -> None:
    make, complaint = BAD_STEPS[name]
    before = await honest_rows(stage)
    opening = stage.opening()
    session, hop = await stage.open(opening), await stage.hop(opening)
    hop.send(make(stage))
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert complaint in failed.message
    assert failed.blamed == PREVIOUS.peer_id
    assert (HEAD.peer_id, opening.session) not in stage.server.sessions
    assert await honest_rows(stage) == before


@pytest.mark.parametrize("frame", [b"", b"\xff" * 100, b"\x91\x63", encode(Cancel()), encode(Close())])
async def test_garbage_instead_of_an_open_costs_the_stream_only(stage: Stage, frame: bytes) -> None:
    stream = await stage.stream(STRANGER, SESSION_STREAM)
    stream.send(frame)
    with pytest.raises(MeshswarmError):
        await stream.receive(timeout_s=10)
    assert not stage.server.sessions
    assert len(await honest_rows(stage)) == 3


async def test_garbage_in_the_middle_of_a_hop_ends_that_session_only(stage: Stage) -> None:
    opening = stage.opening()
    session, hop = await stage.open(opening), await stage.hop(opening)
    hop.send(encode(step(0, 0, stage.rows(1))))
    assert isinstance(await reply(session), Result)
    hop.send(b"\xc1 garbage")
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert failed.blamed == PREVIOUS.peer_id
    assert len(await honest_rows(stage)) == 3


async def test_a_stranger_cannot_send_rows_into_a_session_it_has_no_part_in(stage: Stage) -> None:
    opening = stage.opening()
    session = await stage.open(opening)
    intruder = await stage.hop(opening, STRANGER)
    intruder.send(encode(step(0, 0, stage.rows(1))))
    with pytest.raises(MeshswarmError):
        await intruder.receive(timeout_s=10)
    hop = await stage.hop(opening)
    hop.send(encode(step(0, 0, stage.rows(1))))
    assert isinstance(await reply(session), Result), "the session of the honest peers goes on"


async def test_a_session_cannot_be_opened_in_another_heads_name(stage: Stage) -> None:
    stream = await stage.stream(STRANGER, SESSION_STREAM)
    stream.send(encode(stage.opening(), HEAD))
    with pytest.raises(MeshswarmError):
        await stream.receive(timeout_s=10)
    assert not stage.server.sessions


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_id": bytes(32)}, RefusalReason.UNKNOWN_SPAN),
        ({"span": Span(10, 20)}, RefusalReason.UNKNOWN_SPAN),
        ({"span": Span(20, 29)}, RefusalReason.UNSUPPORTED),
        ({"returns": Returns.NEXT}, RefusalReason.UNSUPPORTED),
        ({"previous": None}, RefusalReason.UNSUPPORTED),
        ({"n_ctx": N_CTX + 1}, RefusalReason.CONTEXT),
        ({"top_k": 0}, RefusalReason.UNSUPPORTED),
    ],
)
async def test_terms_that_cannot_be_served_are_refused_with_a_reason(
    stage: Stage, change: dict[str, object], reason: RefusalReason
) -> None:
    stream = await stage.stream(HEAD, SESSION_STREAM)
    stream.send(encode(replace(stage.opening(), **change), HEAD))  # type: ignore[arg-type]
    refused = await reply(stream)
    assert isinstance(refused, Refused)
    assert refused.reason is reason
    assert stage.engine.n_free_slots == 2


async def test_a_model_without_an_exact_profile_refuses_it_and_serves_the_fast_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.engine, "exact_obstacle", "this model has no exact profile")
    stream = await stage.stream(HEAD, SESSION_STREAM)
    stream.send(encode(replace(stage.opening(), profile=Profile.EXACT), HEAD))
    refused = await reply(stream)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.message) == (RefusalReason.UNSUPPORTED, "this model has no exact profile")
    await stage.open(stage.opening())


async def test_when_all_slots_are_taken_the_next_session_is_told_when_to_come_back(stage: Stage) -> None:
    for _ in range(2):
        await stage.open(stage.opening())
    stream = await stage.stream(HEAD, SESSION_STREAM)
    stream.send(encode(stage.opening(), HEAD))
    refused = await reply(stream)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUSY
    assert refused.retry_after_ms > 0


async def test_a_head_that_vanishes_gives_its_slots_back(stage: Stage) -> None:
    await stage.open(stage.opening())
    await stage.open(stage.opening())
    assert stage.engine.n_free_slots == 0
    await stage.endpoints[HEAD].close()
    for _ in itertools.repeat(None, 100):
        if stage.engine.n_free_slots == 2:
            break
        await asyncio.sleep(0.05)
    assert stage.engine.n_free_slots == 2
    assert not stage.server.sessions


async def test_an_unreachable_next_span_is_a_refusal_that_names_it(stage: Stage) -> None:
    gone = Identity.from_seed(b"\5" * 32).peer_id
    stage.server.serve(replace(stage.server.served, n_layers=40))  # type: ignore[arg-type, type-var]
    opening = replace(
        stage.opening(), n_layers=40, returns=Returns.NEXT, next=gone, next_addresses=(Address("127.0.0.1", 9),)
    )
    stream = await stage.stream(HEAD, SESSION_STREAM)
    stream.send(encode(opening, HEAD))
    refused = await reply(stream)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.NEXT_UNREACHABLE
    assert gone.short in refused.message
    assert stage.engine.n_free_slots == 2


async def test_a_draining_server_refuses_new_sessions_and_ends_old_ones_with_a_reason(stage: Stage) -> None:
    session = await stage.open(stage.opening())
    await stage.server.drain(0.05)
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert "shutting down" in failed.message
    stream = await stage.stream(HEAD, SESSION_STREAM)
    stream.send(encode(stage.opening(), HEAD))
    refused = await reply(stream)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.DRAINING


async def test_a_peer_that_leaves_waits_for_sessions_as_long_as_they_compute_and_no_longer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshswarm.stage.sessions.server.DRAIN_LOOK_S", 0.05)
    opening = stage.opening()
    session, hop = await stage.open(opening), await stage.hop(opening)
    leaving = asyncio.create_task(stage.server.drain(3600, idle_s=2.0))
    for number in range(12):  # 3 s
        hop.send(encode(step(number, number, stage.rows(1, seed=number))))
        assert isinstance(await reply(session), Result)
        await asyncio.sleep(0.25)
    failed = await reply(session)
    assert isinstance(failed, Failed) and "shutting down" in failed.message
    async with asyncio.timeout(60):
        await leaving
    assert stage.server.n_at_work_for(PROVIDER.peer_id) == 0


async def test_rows_that_come_before_the_session_stands_end_it_with_a_reason(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.server.serve(replace(stage.server.served, n_layers=40))  # type: ignore[arg-type, type-var]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        opening = replace(
            stage.opening(), n_layers=40, returns=Returns.NEXT, next=Identity.generate().peer_id,
            next_addresses=(Address(*silent.getsockname()),),
        )  # fmt: skip
        session = await stage.stream(HEAD, SESSION_STREAM)
        session.send(encode(opening, HEAD))
        await session.connection.measure_rtt()
        hop = await stage.hop(opening)
        hop.send(encode(step(0, 0, stage.rows(1))))
        failed = await reply(session)
    assert isinstance(failed, Failed)
    assert "before the session was open" in failed.message
    assert stage.engine.n_free_slots == 2
    assert not caplog.records


async def test_a_session_lives_no_longer_than_the_server_allows(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshswarm.stage.sessions.served_session.MAX_SESSION_S", 0.05)
    session = await stage.open(replace(stage.opening(), deadline_ms=2**40))
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert "deadline" in failed.message


async def test_a_head_that_never_answers_a_receipt_is_not_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshswarm.stage.sessions.served_session.ACKNOWLEDGE_S", 0.05)
    session = await stage.open(stage.opening())
    session.send(encode(Close()))
    assert isinstance(await reply(session), ReceiptOffer)
    with pytest.raises(MeshswarmError):
        await session.receive(timeout_s=10)
    assert not stage.server.sessions


# -- in line


async def full(stage: Stage) -> list[Stream]:
    return [await stage.open(stage.opening()) for _ in range(2)]


async def in_line(stage: Stage, max_wait_ms: int = 60_000, identity: Identity = HEAD) -> Stream:
    stream = await stage.stream(identity, SESSION_STREAM)
    opening = replace(stage.opening(), max_wait_ms=max_wait_ms, head=identity.peer_id)
    stream.send(encode(opening, identity))
    return stream


async def test_a_session_waits_in_line_and_is_let_in_when_there_is_room(stage: Stage) -> None:
    running = await full(stage)
    first, second = await in_line(stage), await in_line(stage)
    told = await reply(first)
    assert isinstance(told, Waiting)
    assert told.place == 1
    assert told.estimate_ms > 0
    told = await reply(second)
    assert isinstance(told, Waiting)
    assert told.place == 2
    assert stage.server.n_free_slots == 0
    running[0].send(encode(Cancel()))
    assert isinstance(await reply(first), Opened)
    told = await reply(second)
    assert isinstance(told, Waiting)
    assert told.place == 1
    running[1].send(encode(Close()))
    assert isinstance(await reply(second), Opened)


async def test_many_who_leave_the_line_in_one_datagram_trouble_nobody(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Each one's leaving tells the others their new place, and some of them are gone without our having been told."""
    await full(stage)
    waiting = [await in_line(stage, identity=STRANGER) for _ in range(8)]
    staying = await in_line(stage)
    await stage.until(lambda: stage.server.n_waiting == 9)
    for stream in waiting:
        stream.reset()
    await stage.until(lambda: stage.server.n_waiting == 1)
    places = [await reply(staying)]
    while not (isinstance(places[-1], Waiting) and places[-1].place == 1):
        places.append(await reply(staying))
    assert not caplog.records


async def test_two_sessions_of_one_name_do_not_wait_for_room(stage: Stage) -> None:
    """The second one would push the first out of the book, and nobody would ever give its room back."""
    running = await full(stage)
    opening = replace(stage.opening(), max_wait_ms=60_000)
    first, twin = await stage.stream(HEAD, SESSION_STREAM), await stage.stream(HEAD, SESSION_STREAM)
    first.send(encode(opening, HEAD))
    assert isinstance(await reply(first), Waiting)
    twin.send(encode(opening, HEAD))
    with pytest.raises(MeshswarmError):
        await twin.receive(timeout_s=10)
    for stream in running:
        stream.send(encode(Cancel()))
    assert isinstance(await reply(first), Opened)
    first.send(encode(Cancel()))
    await stage.until(lambda: stage.engine.n_free_slots == 2)


async def test_a_stream_whose_open_was_refused_takes_no_other(stage: Stage) -> None:
    """It is closed on this side: a session there could not say anything to its head."""
    stream = await stage.stream(HEAD, SESSION_STREAM)
    stream.send(encode(replace(stage.opening(), n_ctx=N_CTX + 1), HEAD))
    stream.send(encode(stage.opening(), HEAD))
    assert isinstance(await reply(stream), Refused)
    await stream.connection.measure_rtt()
    assert not stage.server.sessions
    assert stage.engine.n_free_slots == 2


async def test_a_newcomer_does_not_overtake_the_line(stage: Stage) -> None:
    running = await full(stage)
    waiting = await in_line(stage)
    assert isinstance(await reply(waiting), Waiting)
    newcomer = await stage.stream(HEAD, SESSION_STREAM)
    newcomer.send(encode(stage.opening(), HEAD))
    refused = await reply(newcomer)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUSY
    assert "1 other waits" in refused.message
    running[0].send(encode(Cancel()))
    assert isinstance(await reply(waiting), Opened)


async def test_an_answer_that_completes_lets_the_next_session_in(stage: Stage) -> None:
    running = await full(stage)
    waiting = await in_line(stage)
    assert isinstance(await reply(waiting), Waiting)
    running[0].send(encode(Park()))
    assert isinstance(await reply(waiting), Opened)
    assert isinstance(await reply(running[0]), ReceiptOffer)


async def test_one_head_cannot_keep_another_out_by_asking_more_often(stage: Stage) -> None:
    running = await full(stage)
    for place in (1, 2, 3):
        told = await reply(await in_line(stage))
        assert isinstance(told, Waiting)
        assert told.place == place
    other = await in_line(stage, identity=STRANGER)
    told = await reply(other)
    assert isinstance(told, Waiting)
    assert told.place == 1, "the first head has two sessions running already"
    running[0].send(encode(Cancel()))
    assert isinstance(await reply(other), Opened)


async def test_waiting_ends_with_a_refusal_when_the_head_wanted_no_longer(stage: Stage) -> None:
    await full(stage)
    stream = await in_line(stage, max_wait_ms=50)
    assert isinstance(await reply(stream), Waiting)
    refused = await reply(stream)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUSY
    assert "other" not in refused.message, "nobody else waits"
    assert refused.retry_after_ms > 0
    assert stage.server.n_waiting == 0


@pytest.mark.parametrize("frame", [encode(Cancel()), encode(Close()), b"garbage"])
async def test_whoever_leaves_the_line_is_forgotten(stage: Stage, frame: bytes) -> None:
    running = await full(stage)
    stream, behind = await in_line(stage), await in_line(stage)
    assert isinstance(await reply(stream), Waiting)
    assert isinstance(await reply(behind), Waiting)
    stream.send(frame)
    told = await reply(behind)
    assert isinstance(told, Waiting)
    assert told.place == 1
    running[0].send(encode(Cancel()))
    assert isinstance(await reply(behind), Opened)


async def test_a_head_that_vanishes_leaves_the_line(stage: Stage) -> None:
    await full(stage)
    stream = await in_line(stage, identity=STRANGER)
    assert isinstance(await reply(stream), Waiting)
    await stage.endpoints[STRANGER].close()
    await stage.until(lambda: stage.server.n_waiting == 0)


async def test_a_peer_that_leaves_sends_the_line_elsewhere(stage: Stage) -> None:
    await full(stage)
    stream = await in_line(stage)
    assert isinstance(await reply(stream), Waiting)
    await stage.server.drain(0.01)
    refused = await reply(stream)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.DRAINING


async def test_an_owner_who_wants_the_machine_sends_strangers_out_of_the_line(stage: Stage) -> None:
    await full(stage)
    stream = await in_line(stage)
    assert isinstance(await reply(stream), Waiting)
    stage.server.rest("busy")
    refused = await reply(stream)
    assert isinstance(refused, Refused)
    assert "busy" in refused.message
    stage.server.resume()


async def test_the_line_has_an_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshswarm.stage.sessions.waiting_room.MAX_WAITING_PER_HEAD", 1)
    await full(stage)
    assert isinstance(await reply(await in_line(stage)), Waiting)
    refused = await reply(await in_line(stage))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUSY


async def test_while_it_rests_strangers_are_asked_to_come_back_and_its_own_head_is_served(stage: Stage) -> None:
    stage.server.rest("the machine runs on battery")
    stream = await stage.stream(HEAD, SESSION_STREAM)
    stream.send(encode(stage.opening(), HEAD))
    refused = await reply(stream)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.BUSY and refused.retry_after_ms > 0
    assert "battery" in refused.message
    own = stage.server.endpoint.peer_id
    assert stage.server.refusal(replace(stage.opening(), head=own), own) is None
    stage.server.resume()
    await stage.open(stage.opening())


async def test_a_stranger_who_waits_too_long_for_the_owner_is_told_why(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshswarm.stage.sessions.server.REST_PATIENCE_S", 0.3)
    opening = stage.opening()
    session, hop = await stage.open(opening), await stage.hop(opening)
    stage.engine.set_share(0.0)
    stage.server.rest("other programs use 80 % of the processors")
    hop.send(encode(step(0, 0, stage.rows(5), 5)))
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert "makes room for its owner: other programs use 80 %" in failed.message
    await stage.until(lambda: stage.engine.n_free_slots == 2)
    stage.server.resume()
    stage.engine.set_share(1.0)
    await honest_rows(stage)


async def test_work_held_back_for_a_while_is_done_afterwards(stage: Stage) -> None:
    expected = await honest_rows(stage)
    opening = stage.opening()
    session, hop = await stage.open(opening), await stage.hop(opening)
    stage.engine.set_share(0.0)
    stage.server.rest("the machine runs on battery")
    for seq in range(3):
        hop.send(encode(step(seq, seq, stage.rows(1, seed=seq))))
    with pytest.raises(MeshswarmError):
        await session.receive(timeout_s=0.3)
    stage.server.resume()
    stage.engine.set_share(1.0)
    results = [await reply(session) for _ in range(3)]
    assert [result.rows[0].logits for result in results if isinstance(result, Result)] == expected


async def test_a_span_of_whole_models_only_takes_no_part_of_one(stage: Stage) -> None:
    assert stage.server.served is not None
    stage.server.serve(replace(stage.server.served, is_whole_only=True))
    await stage.open(stage.opening())
    part = replace(stage.opening(), span=Span(SPAN.start, SPAN.stop - 1), returns=Returns.NEXT, next=HEAD.peer_id)
    refused = stage.server.refusal(part, HEAD.peer_id)
    assert refused is not None and refused.reason is RefusalReason.UNKNOWN_SPAN
    assert "not computed here" in refused.message
