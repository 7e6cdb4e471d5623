"""A span's server against peers that break the rules: real sockets, a real engine, and a session that stays unharmed.

Every hostile case runs beside an honest session on the same server, which must give the same rows as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from meshswarm.artifacts.store import Store
from meshswarm.config import Address
from meshswarm.errors import MeshswarmError
from meshswarm.identity import Identity
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.ledger.receipt import Outcome
from meshswarm.ledger.store import ReceiptStore, ReceiptWriter
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.stream import Stream
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span
from meshswarm.stage.activation_log import ActivationLog, LogLimits
from meshswarm.stage.engine import SpanEngine
from meshswarm.stage.messages import (
    HOP_STREAM,
    MAX_FRAME_BYTES,
    SESSION_STREAM,
    Cancel,
    Close,
    Counters,
    Dtype,
    Failed,
    Flag,
    FullRow,
    FullRowRequest,
    Hop,
    Message,
    Open,
    Opened,
    ReceiptAck,
    ReceiptOffer,
    RefusalReason,
    Refused,
    Result,
    Returns,
    Step,
)
from meshswarm.stage.profile import Profile
from meshswarm.stage.sent_rows import SentRows
from meshswarm.stage.server import Served, SpanServer
from meshswarm.stage.slices import Slices
from meshswarm.stage.wire import decode, encode

SPAN = Span(20, 30)
N_CTX = 100
PROVIDER = Identity.from_seed(b"\1" * 32)
HEAD = Identity.from_seed(b"\2" * 32)
PREVIOUS = Identity.from_seed(b"\3" * 32)
STRANGER = Identity.from_seed(b"\4" * 32)


@dataclass
class Stage:
    """A provider that serves the last ten layers, and the endpoints of those who use or attack it."""

    server: SpanServer
    engine: SpanEngine
    model_id: bytes
    receipts: ReceiptStore
    endpoints: dict[Identity, Endpoint]
    head_books: Bookkeeper

    def countersign(self, claim: bytes, opening: Open, counters: Counters) -> bytes | None:
        """The head's answer to a claim about the session of `opening`."""
        engagement = self.head_books.engagement(
            opening.session, opening.model_id, opening.span, self.engine.numclass, PROVIDER.peer_id, HEAD.peer_id
        )
        return self.head_books.countersign(claim, engagement, counters)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def opening(self) -> Open:
        return Open(
            session=secrets.token_bytes(16), head=HEAD.peer_id, head_addresses=(), model_id=self.model_id, span=SPAN,
            n_layers=30, previous=PREVIOUS.peer_id, next=None, next_addresses=(), returns=Returns.LOGITS,
            dtype=Dtype.F32, n_ctx=N_CTX, profile=Profile.FAST, temperature=0.0, top_k=4, deadline_ms=60_000,
        )  # fmt: skip

    async def stream(self, identity: Identity, kind: str) -> Stream:
        endpoint = self.endpoints[identity]
        connection = await endpoint.dial(PROVIDER.peer_id, [self.server.endpoint.address])
        return connection.open_stream(kind, max_frame_bytes=MAX_FRAME_BYTES)

    async def open(self, opening: Open) -> Stream:
        """A session stream whose OPEN was accepted."""
        stream = await self.stream(HEAD, SESSION_STREAM)
        stream.send(encode(opening, HEAD))
        assert isinstance(await reply(stream), Opened)
        return stream

    async def hop(self, opening: Open, identity: Identity = PREVIOUS) -> Stream:
        stream = await self.stream(identity, HOP_STREAM)
        stream.send(encode(Hop(opening.head, opening.session)))
        return stream

    def rows(self, n_rows: int, seed: int = 0) -> bytes:
        return np.random.default_rng(seed).normal(0, 1, (n_rows, self.engine.n_embd)).astype("<f4").tobytes()


async def reply(stream: Stream) -> Message:
    return decode(await stream.receive(timeout_s=10))


def step(seq: int, pos0: int, hidden: bytes, n_rows: int = 1, flags: int = Flag.EMIT) -> Step:
    return Step(seq, pos0, n_rows, None, flags, None, Dtype.F32, hidden, None)


@pytest.fixture(scope="module")
def sliced(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    home = tmp_path_factory.mktemp("store")
    store = Store(home)
    info = store.import_file(smollm2)
    return Slices(store, home).file(info.model_id, SPAN).path, info.model_id


@contextlib.asynccontextmanager
async def staged(sliced: tuple[Path, bytes], ledger: Path) -> AsyncIterator[Stage]:
    path, model_id = sliced
    swarm = Swarm(f"test-{secrets.token_hex(8)}")
    engine = SpanEngine.load(path, SPAN, 30, n_ctx=N_CTX, n_slots=2, n_threads=1, max_rows=64)
    engine.start(asyncio.get_running_loop())
    receipts = ReceiptStore(ledger)
    writer = ReceiptWriter(receipts, lambda error: pytest.fail(str(error)))
    head_writer = ReceiptWriter(ReceiptStore(ledger.with_suffix(".head")), lambda error: pytest.fail(str(error)))
    loopback = Address("127.0.0.1", 0)
    endpoints = {
        identity: await Endpoint.bind(identity, loopback, swarm=swarm)
        for identity in (PROVIDER, HEAD, PREVIOUS, STRANGER)
    }
    async with asyncio.TaskGroup() as tasks:
        sent = SentRows(ActivationLog(LogLimits(), None), tasks)
        server = SpanServer(endpoints[PROVIDER], tasks, Bookkeeper(PROVIDER, writer, swarm.swarm_id), sent)
        server.serve(Served(model_id, 30, SPAN, bytes(32), engine, N_CTX, window=256))
        try:
            head_books = Bookkeeper(HEAD, head_writer, swarm.swarm_id)
            yield Stage(server, engine, model_id, receipts, endpoints, head_books)
        finally:
            for endpoint in endpoints.values():
                await endpoint.close()
            await engine.stop()
            writer.close()
            head_writer.close()


@pytest.fixture
async def stage(sliced: tuple[Path, bytes], tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(sliced, tmp_path / "ledger.sqlite") as running:
        yield running


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


async def honest_rows(stage: Stage) -> list[bytes]:
    """The logits of three honest steps on a session of its own."""
    opening = stage.opening()
    session, hop = await stage.open(opening), await stage.hop(opening)
    seen = []
    for seq in range(3):
        hop.send(encode(step(seq, seq, stage.rows(1, seed=seq))))
        result = await reply(session)
        assert isinstance(result, Result)
        seen.append(result.rows[0].logits)
    session.send(encode(Cancel()))
    return seen


BAD_STEPS = {
    "NaN": (lambda stage: encode(step(0, 0, np.full(stage.engine.n_embd, np.nan, "<f4").tobytes())), "not a number"),
    "infinite": (lambda stage: encode(step(0, 0, np.full(stage.engine.n_embd, np.inf, "<f4").tobytes())), "not a n"),
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
    monkeypatch.setattr("meshswarm.stage.server.MAX_SESSION_S", 0.05)
    session = await stage.open(replace(stage.opening(), deadline_ms=2**40))
    failed = await reply(session)
    assert isinstance(failed, Failed)
    assert "deadline" in failed.message


async def test_a_head_that_never_answers_a_receipt_is_not_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshswarm.stage.server.ACKNOWLEDGE_S", 0.05)
    session = await stage.open(stage.opening())
    session.send(encode(Close()))
    assert isinstance(await reply(session), ReceiptOffer)
    with pytest.raises(MeshswarmError):
        await session.receive(timeout_s=10)
    assert not stage.server.sessions
