"""A span server on real sockets and a real engine, with those who use and attack it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from meshswarm.config import Address
from meshswarm.identity import Identity
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.ledger.store import ReceiptStore, ReceiptWriter
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.stream import Stream
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.activation_log import ActivationLog, LogLimits
from meshswarm.stage.sessions.messages import (
    HOP_STREAM,
    MAX_FRAME_BYTES,
    SESSION_STREAM,
    Cancel,
    Counters,
    Dtype,
    Flag,
    Hop,
    Message,
    Open,
    Opened,
    Result,
    Returns,
    Step,
)
from meshswarm.stage.sessions.sent_rows import SentRows
from meshswarm.stage.sessions.server import SpanServer
from meshswarm.stage.sessions.terms import Served
from meshswarm.stage.sessions.wire import decode, encode

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


async def opened_pair(stage: Stage) -> tuple[Stream, Stream]:
    opening = stage.opening()
    return await stage.open(opening), await stage.hop(opening)


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
