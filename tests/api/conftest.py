"""A real HTTP server over a small deterministic generator: the API is tested by itself, from the socket inwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import httpx
import pytest

from meshswarm.api.app import create_app
from meshswarm.api.reply import Pace
from meshswarm.api.server import ApiServer
from meshswarm.config import Address
from meshswarm.errors import UnknownModelError
from meshswarm.head.request import (
    Event,
    Finished,
    GenerationRequest,
    ModelListing,
    RouteSummary,
    Started,
    TextDelta,
    Timings,
    Usage,
)
from meshswarm.span import Span

ROUTE = RouteSummary((("peerone", "0:10"), ("peertwo", "10:30")), "llama.cpp/cpu/avx2", "f32")
READY = ModelListing("small", "smallid", 1_750_000_000, 2048, 30, (Span(0, 30),), 2, True)
BROKEN = ModelListing("broken", "brokenid", 1_750_000_001, 4096, 30, (Span(0, 10), Span(20, 30)), 1, False)


@dataclass
class ScriptedGenerator:
    """Answers every request with `pieces`, one token each, and writes down what happened to it.

    `before_start` and `before_piece[n]` run where a real head would wait for the swarm: they may sleep or raise.
    """

    pieces: list[str] = field(default_factory=lambda: ["Hello", ", ", "wörld", " 🐝"])
    before_start: Callable[[], Awaitable[None]] | None = None
    before_piece: dict[int, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    listings: list[ModelListing] = field(default_factory=lambda: [READY, BROKEN])
    requests: list[GenerationRequest] = field(default_factory=list)
    open_answers: int = 0
    pieces_sent: int = 0
    n_asked: int = 0  # times the models were wanted from the swarm, not from what is known
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        self.open_answers += 1
        try:
            if request.model not in (None, "small"):
                raise UnknownModelError(f"there is no model {request.model!r}")
            if self.before_start is not None:
                await self.before_start()
            yield Started("r1", "small", 1_760_000_000, 7, ROUTE)
            limit = len(self.pieces) if request.max_tokens is None else min(request.max_tokens, len(self.pieces))
            for index, piece in enumerate(self.pieces[:limit]):
                if index in self.before_piece:
                    await self.before_piece[index]()
                self.pieces_sent += 1
                yield TextDelta(piece, (index,))
            reason = "stop" if limit == len(self.pieces) else "length"
            yield Finished(reason, Usage(7, limit, 2, 1, 3), Timings(5, 10.0, limit, 40.0, 4, 1, 3), "fp_0123")
        finally:
            self.open_answers -= 1
            self.closed.set()

    async def models(self, *, ask: bool = True) -> list[ModelListing]:
        self.n_asked += ask
        return self.listings


@pytest.fixture
def generator() -> ScriptedGenerator:
    return ScriptedGenerator()


@pytest.fixture
async def server(generator: ScriptedGenerator) -> AsyncIterator[ApiServer]:
    server = ApiServer.bind(Address("127.0.0.1", 0), api_key=None)
    await server.start(generator)
    yield server
    await server.stop()


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    """A bare HTTP client of `server`, for what OpenAI's own would not send or would hide."""
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        yield client


@pytest.fixture
async def hasty_client(generator: ScriptedGenerator) -> AsyncIterator[httpx.AsyncClient]:
    """The application without a socket, at a pace that a test can wait for."""
    app = create_app(generator, pace=Pace(commit_s=0.05, ping_s=0.05, stall_s=5.0))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(base_url="http://localhost", transport=transport) as client:
        yield client
