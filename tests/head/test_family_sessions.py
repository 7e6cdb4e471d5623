"""Sessions of several families over real sockets and engines: what each needs travels, in every turn.

A model in two spans must give the rows that it gives as one, whatever is taken back, parked, copied or sent in another
dtype on the way: wider rows, token ids beside them, running states.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.stage.tiny_models import N_VOCAB, write_tiny

from meshswarm.artifacts.gguf import check_hyperparameters, read_header
from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, RemoteError
from meshswarm.head.route_session import RouteSession
from meshswarm.head.session import HeadSession
from meshswarm.head.session_actions import Hop, Origin, Terms
from meshswarm.identity import Identity
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.ledger.receipt import Outcome
from meshswarm.ledger.store import ReceiptStore, ReceiptWriter
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span
from meshswarm.stage.activation_log import ActivationLog, LogLimits
from meshswarm.stage.engine import SpanEngine
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.messages import MAX_TOP_K, Dtype, Row
from meshswarm.stage.profile import Profile
from meshswarm.stage.sent_rows import SentRows
from meshswarm.stage.server import Served, SpanServer
from meshswarm.stage.slicing import write_slice
from meshswarm.tasks import Tasks

N_CTX = 255
PROMPT = [(7 * n * n + 3) % N_VOCAB for n in range(40)]
FAMILIES_TO_TRY = ["llama", "deepseek4", "qwen35"]  # plain; wider rows with tokens beside them; a running state
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

    @property
    def rollback(self) -> Rollback:
        return FAMILIES[self.architecture].rollback

    async def open(
        self, hops: tuple[Hop, ...], *, dtype: Dtype = Dtype.F32, origin: Origin | None = None, n_ctx: int = N_CTX
    ) -> Talk:
        width = FAMILIES[self.architecture].row_width(self.n_embd)
        terms = Terms(
            bytes(32), self.n_layers, width, n_ctx, Profile.EXACT, 0.0, min(N_VOCAB, MAX_TOP_K), 60_000, dtype
        )
        core = HeadSession(os.urandom(16), self.head.peer_id, (), hops, terms, origin=origin)
        session = RouteSession(self.head, self.identity, core, self.books)
        await session.open()
        return Talk(session)


@pytest.fixture(params=FAMILIES_TO_TRY)
async def model(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Model]:
    path = write_tiny(request.param, tmp_path / "model.gguf")
    header = read_header(path)
    shape = check_hyperparameters(header)
    starts = legal_cuts(header).starts
    cut = starts[len(starts) // 2]
    swarm = Swarm(f"test-{secrets.token_hex(8)}")
    identity = Identity.generate()
    head = await Endpoint.bind(identity, LOOPBACK, swarm=swarm)
    receipts = ReceiptStore(tmp_path / "head.sqlite")
    writers = [ReceiptWriter(receipts, lambda error: None)]
    endpoints, engines, hops = [head], [], []
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
            hops.append(Hop(endpoint.peer_id, (endpoint.address,), span))
        books = Bookkeeper(identity, writers[0], swarm.swarm_id)
        yield Model(
            shape.architecture, shape.n_layers, shape.n_embd, head, identity, books, receipts,
            (hops[0],), (hops[1], hops[2]),
        )  # fmt: skip
        for endpoint in endpoints:
            await endpoint.close()
        for engine in engines:
            await engine.stop()
        for writer in writers:
            writer.close()


async def conversation(talk: Talk) -> list[np.ndarray]:
    """Two turns: a draft of which one token comes true, and another that nobody settles before the second turn."""
    said = await talk.push(PROMPT)
    said += await talk.push([5, 6, 7, 8], n_draft=3)
    said += (await talk.push([9, 1], truncate_to=len(PROMPT) + 2, n_draft=1))[:1]
    talk.session.park()
    talk.session.resume(0.0, N_VOCAB, 60_000)
    n_kept = talk.session.history.reusable([*PROMPT, 5, 6, 9, 3, 4], talk.session.rollback)
    assert n_kept == len(PROMPT) + 3, "all but the guess that nobody settled"
    said += await talk.push([3, 4], truncate_to=n_kept)
    return said


async def test_two_turns_with_drafts_give_the_whole_models_rows_and_the_rows_of_a_run_without_either(
    model: Model,
) -> None:
    split, whole = await model.open(model.parts), await model.open(model.whole)
    assert split.session.rollback is model.rollback
    said = await conversation(split)
    for ours, theirs in zip(said, await conversation(whole), strict=True):
        assert np.array_equal(ours, theirs)
    straight = await model.open(model.parts)
    (last,) = await straight.push([*PROMPT, 5, 6, 9, 3, 4])
    assert np.array_equal(last, said[-1])
    for talk in (split, whole, straight):
        talk.session.close()
        await talk.session.ended()
    async with asyncio.timeout(10):
        while len(kept := model.receipts.newest(10)) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert [receipt.outcome for receipt in kept] == [Outcome.AGREED] * 5, "both ends counted alike"


async def test_a_copy_goes_on_as_if_it_had_been_computed_or_is_refused_where_the_family_cannot(model: Model) -> None:
    source = await model.open(model.parts)
    await source.push(PROMPT)
    await source.push([5])
    source.session.park()
    for n_positions in (len(PROMPT) + 1, len(PROMPT)):
        origin = Origin(source.session.core.session, source.session.history.beginning(n_positions))
        try:
            copy = await model.open(model.parts, origin=origin)
        except RemoteError:
            assert model.rollback is Rollback.STATE
            continue
        fresh = await model.open(model.whole)
        (ours,) = await copy.push([3, 4])
        (theirs,) = await fresh.push([*PROMPT, 5, 3, 4] if n_positions > len(PROMPT) else [*PROMPT, 3, 4])
        assert np.array_equal(ours, theirs)
        for talk in (copy, fresh):
            talk.session.cancel()
    source.session.resume(0.0, N_VOCAB, 60_000)
    (ours,) = await source.push([3, 4])
    fresh = await model.open(model.whole)
    (theirs,) = await fresh.push([*PROMPT, 5, 3, 4])
    assert np.array_equal(ours, theirs), "the original is what it was"
    for talk in (source, fresh):
        talk.session.cancel()


@pytest.mark.parametrize("dtype", [Dtype.F16, Dtype.Q8])
async def test_another_dtype_carries_nearly_the_same_rows_and_both_ends_count_its_bytes(
    model: Model, dtype: Dtype
) -> None:
    exact, other = await model.open(model.parts), await model.open(model.parts, dtype=dtype)
    (expected,), (logits,) = await exact.push(PROMPT), await other.push(PROMPT)
    assert not np.array_equal(expected, logits), "a comparison that sees the dtype"
    assert np.corrcoef(expected, logits)[0, 1] > 0.95
    exact.session.cancel()
    other.session.close()
    await other.session.ended()
    async with asyncio.timeout(10):
        while len(kept := model.receipts.newest(10)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert [receipt.outcome for receipt in kept] == [Outcome.AGREED] * 2
