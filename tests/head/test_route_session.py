"""A route's streams over real sockets, to spans that answer as a test says: what opens, what breaks, what is left."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, PeerUnreachableError, RemoteProtocolError
from meshswarm.head.route_session import RouteSession
from meshswarm.head.session import HeadSession, State
from meshswarm.head.session_actions import Hop, Terms
from meshswarm.identity import Identity
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.ledger.store import ReceiptStore, ReceiptWriter
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.stream import Stream
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.messages import (
    MAX_FRAME_BYTES,
    SESSION_STREAM,
    Cancel,
    Close,
    FullRow,
    Message,
    Open,
    Opened,
    ReceiptOffer,
    Result,
    Row,
)
from meshswarm.stage.sessions.wire import decode, encode

Answers = Callable[[Message], list[Message]]


def willing(message: Message) -> list[Message]:
    match message:
        case Open():
            return [Opened("cpu", 512, bytes(32))]
        case Close():
            return [ReceiptOffer(b"not worth a signature")]
        case _:
            return []


@dataclass
class ScriptedSpan:
    """A peer that answers a session's messages by `answers`, and notes what came and whether its streams ended."""

    endpoint: Endpoint
    answers: Answers = willing
    heard: list[Message] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.endpoint.handle_stream(SESSION_STREAM, self.accept, max_frame_bytes=MAX_FRAME_BYTES)

    def accept(self, stream: Stream) -> None:
        def on_frame(frame: bytes) -> None:
            message = decode(frame)
            self.heard.append(message)
            for answer in self.answers(message):
                stream.send(encode(answer))

        self.streams.append(stream)
        stream.receive_with(on_frame, lambda error: self.ended.set())


@dataclass
class Scene:
    """A head and two spans of thirty layers."""

    head: Endpoint
    identity: Identity
    spans: tuple[ScriptedSpan, ScriptedSpan]
    bookkeeper: Bookkeeper

    def session(self) -> RouteSession:
        hops = tuple(
            Hop(span.endpoint.peer_id, (span.endpoint.address,), layers)
            for span, layers in zip(self.spans, (Span(0, 15), Span(15, 30)), strict=True)
        )
        terms = Terms(bytes(32), 30, 4, 64, Profile.FAST, 0.0, 1, 60_000)
        core = HeadSession(os.urandom(16), self.head.peer_id, (), hops, terms)
        return RouteSession(self.head, self.identity, core, self.bookkeeper)


@dataclass
class Heard:
    """A listener that notes what it is told."""

    rows: list[int] = field(default_factory=list)
    errors: list[MeshswarmError] = field(default_factory=list)

    def on_rows(self, seq: int, rows: tuple[Row, ...]) -> None:
        self.rows.append(seq)

    def on_full_row(self, seq: int, row: int, logits: bytes) -> None:
        pass

    def on_broken(self, error: MeshswarmError) -> None:
        self.errors.append(error)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    swarm = Swarm(f"test-{secrets.token_hex(8)}")
    identities = [Identity.generate() for _ in range(3)]
    head, *others = [await Endpoint.bind(each, Address("127.0.0.1", 0), swarm=swarm) for each in identities]
    writer = ReceiptWriter(ReceiptStore(tmp_path / "ledger.sqlite"), lambda error: None)
    first, second = (ScriptedSpan(endpoint) for endpoint in others)
    yield Scene(head, identities[0], (first, second), Bookkeeper(identities[0], writer, swarm.swarm_id))
    for endpoint in (head, *others):
        await endpoint.close()
    writer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_closing_begins_at_once_and_ends_when_every_receipt_is_in(scene: Scene) -> None:
    session = scene.session()
    await session.open()
    session.close()
    assert session.core.state is State.CLOSING
    async with asyncio.timeout(10):
        await session.ended()
    for span in scene.spans:
        await span.ended.wait()
        assert [type(message) for message in span.heard] == [Open, Close]


async def test_a_span_lost_while_another_is_dialled_leaves_no_session_behind(scene: Scene) -> None:
    session = scene.session()
    dial = scene.head.dial

    async def dial_and_lose_the_first(peer: object, addresses: object) -> Connection:
        connection = await dial(peer, addresses)  # type: ignore[arg-type]
        if connection.peer_id == scene.spans[0].endpoint.peer_id:
            connection.close("lost")
        return connection

    session._endpoint = SimpleNamespace(dial=dial_and_lose_the_first)  # type: ignore[assignment]
    with pytest.raises(PeerUnreachableError) as caught:
        await session.open()
    assert caught.value.peer == str(scene.spans[0].endpoint.peer_id)
    assert session.core.deadline is None
    await scene.head.connection(scene.spans[1].endpoint.peer_id).measure_rtt()  # type: ignore[union-attr]
    assert not any(isinstance(message, Open) for message in scene.spans[1].heard)


async def test_a_route_that_breaks_before_anybody_listens_says_so_to_whoever_comes(scene: Scene) -> None:
    session = scene.session()
    await session.open()
    await scene.spans[1].endpoint.close()
    await until(lambda: session.core.state is State.ENDED)
    listener = Heard()
    session.listen(listener)
    (error,) = listener.errors
    assert scene.spans[1].endpoint.peer_id.short in str(error)


async def test_a_caller_that_gives_up_in_the_moment_of_opening_leaves_no_session_behind(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    session = scene.session()
    scene.spans[1].answers = lambda message: []
    opening = asyncio.create_task(session.open())
    await until(lambda: session.core.numclass(0) != "")
    opening.cancel()  # and in the same turn of the loop, before the task hears of it:
    session._on_frame(1, encode(Opened("cpu", 512, bytes(32))))
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert session.core.state is State.ENDED
    for span in scene.spans:
        await span.ended.wait()
        assert isinstance(span.heard[-1], Cancel)
    assert not caplog.records


async def test_a_full_row_of_no_whole_number_of_logits_is_the_span_s_fault(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    row = Row(bytes(4), bytes(4), 0.0)
    session = scene.session()
    await session.open()
    listener = Heard()
    session.listen(listener)
    session.push([1])
    stream = scene.spans[1].streams[0]
    stream.send(encode(Result(0, (row,), None)))
    stream.send(encode(FullRow(0, b"123")))
    await until(lambda: bool(listener.errors))
    assert listener.rows == [0]
    assert isinstance(listener.errors[0], PeerUnreachableError | RemoteProtocolError)
    assert "logits" in str(listener.errors[0])
    assert not caplog.records


async def test_a_nearer_deadline_is_kept_although_a_later_one_was_armed_before(scene: Scene) -> None:
    """A span that stays silent after CLOSE must not hold the end until the opening's timer happens to fire."""
    for span in scene.spans:
        span.answers = lambda message: willing(message) if isinstance(message, Open) else []
    session = scene.session()
    await session.open()
    session.close()
    assert session._timer is not None
    assert session._timer.when() == session.core.deadline
    session.cancel()
