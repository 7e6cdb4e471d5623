"""A tiny random model, served over real sockets by real engines: whole by one peer, in two parts by two others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.stage.tiny_models import N_VOCAB, write_tiny

from meshswarm.artifacts.gguf.check import check_hyperparameters, read_header
from meshswarm.config import Address
from meshswarm.errors import MeshswarmError
from meshswarm.head.route_session import RouteSession
from meshswarm.head.session import HeadSession
from meshswarm.head.session_actions import Hop, Origin, Terms
from meshswarm.identity import Identity
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.ledger.store import ReceiptStore, ReceiptWriter
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.sessions.activation_log import ActivationLog, LogLimits
from meshswarm.stage.sessions.messages import MAX_TOP_K, Dtype, Row
from meshswarm.stage.sessions.sent_rows import SentRows
from meshswarm.stage.sessions.server import SpanServer
from meshswarm.stage.sessions.terms import Served
from meshswarm.stage.slices.slicing import write_slice
from meshswarm.tasks import Tasks

N_CTX = 255
LOOPBACK = Address("127.0.0.1", 0)


@dataclass
class Talk:
    """A route that is asked and waited for, push by push."""

    session: RouteSession
    rows: asyncio.Queue[tuple[Row, ...] | MeshswarmError] = field(default_factory=asyncio.Queue)

    async def push(self, tokens: Sequence[int], **options: int) -> list[np.ndarray]:
        """The logits of the rows that come back, each float32 [N_VOCAB]."""
        self.session.listen(self)
        self.session.push(list(tokens), **options)
        async with asyncio.timeout(30):
            rows = await self.rows.get()
        if isinstance(rows, MeshswarmError):
            raise rows
        return [_logits(row) for row in rows]

    def on_rows(self, seq: int, rows: tuple[Row, ...]) -> None:
        self.rows.put_nowait(rows)

    def on_full_row(self, seq: int, row: int, logits: bytes) -> None:
        raise AssertionError("nobody asked")

    def on_broken(self, error: MeshswarmError) -> None:
        self.rows.put_nowait(error)


def _logits(row: Row) -> np.ndarray:
    logits = np.empty(N_VOCAB, np.float32)
    logits[np.frombuffer(row.ids, "<i4")] = np.frombuffer(row.logits, "<f4")
    return logits


@dataclass
class Model:
    """A tiny model, served whole by one peer and in two parts by two others."""

    architecture: str
    n_layers: int
    n_embd: int
    head: Endpoint
    identity: Identity
    books: Bookkeeper
    receipts: ReceiptStore
    whole: tuple[Hop, ...]
    parts: tuple[Hop, ...]
    servers: list[SpanServer]  # the whole model's, then the parts'
    tasks: Tasks

    @property
    def rollback(self) -> Rollback:
        return FAMILIES[self.architecture].rollback

    async def open(
        self,
        hops: tuple[Hop, ...],
        *,
        dtype: Dtype = Dtype.F32,
        profile: Profile = Profile.EXACT,
        origin: Origin | None = None,
        n_ctx: int = N_CTX,
    ) -> Talk:
        width = FAMILIES[self.architecture].row_width(self.n_embd)
        terms = Terms(bytes(32), self.n_layers, width, n_ctx, profile, 0.0, min(N_VOCAB, MAX_TOP_K), 60_000, dtype)
        core = HeadSession(os.urandom(16), self.head.peer_id, (), hops, terms, origin=origin)
        session = RouteSession(self.head, self.identity, core, self.books)
        await session.open()
        return Talk(session)


@contextlib.asynccontextmanager
async def tiny_swarm(name: str, tmp_path: Path) -> AsyncIterator[Model]:
    """`name` of `TINY`, served."""
    path = write_tiny(name, tmp_path / "model.gguf")
    header = read_header(path)
    shape = check_hyperparameters(header)
    starts = legal_cuts(header).starts
    cut = starts[len(starts) // 2]
    swarm = Swarm(f"test-{secrets.token_hex(8)}")
    identity = Identity.generate()
    head = await Endpoint.bind(identity, LOOPBACK, swarm=swarm)
    receipts = ReceiptStore(tmp_path / "head.sqlite")
    writers = [ReceiptWriter(receipts, lambda error: None)]
    endpoints, engines, servers, hops = [head], [], [], []
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group, lambda error: pytest.fail(repr(error)))
        for span in (Span(0, shape.n_layers), Span(0, cut), Span(cut, shape.n_layers)):
            slice_path = path
            if len(span) < shape.n_layers:
                slice_path = tmp_path / f"{span.start}-{span.stop}.gguf"
                write_slice(path, header, span, slice_path)
            engine = SpanEngine.load(slice_path, span, shape.n_layers, n_ctx=N_CTX, n_slots=2, n_threads=1)
            engine.start(asyncio.get_running_loop())
            provider = Identity.generate()
            endpoint = await Endpoint.bind(provider, LOOPBACK, swarm=swarm)
            store = ReceiptStore(tmp_path / f"{span.start}-{span.stop}.sqlite")
            writers.append(ReceiptWriter(store, lambda error: None))
            sent = SentRows(ActivationLog(LogLimits(), None), tasks)
            server = SpanServer(endpoint, tasks, Bookkeeper(provider, writers[-1], swarm.swarm_id), sent)
            server.serve(Served(bytes(32), shape.n_layers, span, bytes(32), engine, N_CTX, window=512))
            endpoints.append(endpoint)
            engines.append(engine)
            servers.append(server)
            hops.append(Hop(endpoint.peer_id, (endpoint.address,), span))
        books = Bookkeeper(identity, writers[0], swarm.swarm_id)
        yield Model(
            shape.architecture, shape.n_layers, shape.n_embd, head, identity, books, receipts,
            (hops[0],), (hops[1], hops[2]), servers, tasks,
        )  # fmt: skip
        for endpoint in endpoints:
            await endpoint.close()
        for engine in engines:
            await engine.stop()
        for writer in writers:
            writer.close()
