"""One request end to end: model, tokens, route, session, answer.

The rule this file keeps: whatever happens to a request (an error, a client that goes away, a peer that dies), its
session ends on every span, and a peer that refused or vanished is not asked again for the same request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from meshswarm.artifacts.card import ModelCard
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.config import Address
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import MeshswarmError, NoRouteError, PeerUnreachableError, RemoteError, RequestError
from meshswarm.head.answer import Answer, Limits
from meshswarm.head.models import ModelDirectory, Voice
from meshswarm.head.request import Event, GenerationRequest, ModelListing, RouteSummary, Started
from meshswarm.head.route_session import RouteSession
from meshswarm.head.sampler import Sampler, SamplingParams
from meshswarm.head.session import HeadSession, Hop, State, Terms
from meshswarm.head.text_stream import TextStream
from meshswarm.identity import Identity, PeerId
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.net.endpoint import Endpoint
from meshswarm.routing.planner import Route, plan_routes
from meshswarm.stage.messages import SESSION_ID_BYTES, Opened
from meshswarm.stage.span import Span

ROUTE_ATTEMPTS = 8
SESSION_DEADLINE_S = 3600


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request whose model, tokens and limits are settled."""

    card: ModelCard
    voice: Voice
    prompt: list[int]
    sampler: Sampler
    records: list[CoverageRecord]


class Head:
    """Runs requests over the swarm. `tasks` waits for the receipts of sessions whose answers are complete.

    `own_records` tells what this peer serves itself: its own layers are used before the DHT has heard of them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        dht: Dht,
        directory: ModelDirectory,
        bookkeeper: Bookkeeper,
        tasks: asyncio.TaskGroup,
        own_records: Callable[[], Sequence[CoverageRecord]],
    ) -> None:
        self.directory = directory
        self._endpoint = endpoint
        self._identity = identity
        self._dht = dht
        self._bookkeeper = bookkeeper
        self._tasks = tasks
        self._own_records = own_records

    async def models(self) -> list[ModelListing]:
        return await self.directory.listings(self._own_records)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of one answer. Closing the iterator cancels the work on every span."""
        prepared = await self._prepare(request)
        session, route = await self._open_route(prepared, request)
        try:
            summary = RouteSummary(tuple((str(hop.peer), str(hop.span)) for hop in session.core.hops), _numclass(route))
            yield Started(
                request_id=secrets.token_hex(12),
                model=prepared.card.name,
                created=int(time.time()),
                prompt_tokens=len(prepared.prompt),
                route=summary,
            )
            answer = Answer(
                prompt=prepared.prompt,
                route=session,
                vocabulary=prepared.voice.vocabulary,
                sampler=prepared.sampler,
                text=TextStream(request.stop),
                limits=Limits(request.max_tokens, session.core.terms.n_ctx, request.ignore_eos, bool(request.stop)),
                fingerprint=_fingerprint(prepared.card, summary),
            )
            session.listen(answer)
            answer.start()
            async with contextlib.aclosing(answer.events()) as events:
                async for event in events:
                    yield event
            session.close()
            self._tasks.create_task(session.ended())
        finally:
            if session.core.state in (State.OPENING, State.READY):
                session.cancel()

    # -- before the route

    async def _prepare(self, request: GenerationRequest) -> _Prepared:
        card = await self.directory.resolve(request.model)
        records = await self._coverage(card, fresh=False)
        voice = await self.directory.voice(card, records)
        if voice.card.n_layers != card.n_layers:  # the swarm's card told another story than the model itself
            records = await self._coverage(voice.card, fresh=False)
        card = replace(voice.card, name=card.name)
        prompt = await asyncio.to_thread(_tokenise, request, voice)
        if not prompt:
            raise RequestError("the prompt is empty", param="messages" if request.messages else "prompt")
        limit = max((record.n_ctx for record in records), default=card.n_ctx)
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but {card.name} is served here with a context of {limit}",
                param="messages" if request.messages else "prompt",
                code="context_length_exceeded",
            )
        sampler = Sampler(_without_suppressed(request.sampling, voice), voice.vocabulary.n_vocab, prompt)
        return _Prepared(card, voice, prompt, sampler, records)

    async def _coverage(self, card: ModelCard, *, fresh: bool) -> list[CoverageRecord]:
        found = await self._dht.coverage(card.model_id, card.n_layers, fresh=fresh)
        own = [record for record in self._own_records() if record.model_id == card.model_id]
        return [*own, *(record for record in found if record.peer != self._endpoint.peer_id)]

    # -- the route

    async def _open_route(
        self, prepared: _Prepared, request: GenerationRequest
    ) -> tuple[RouteSession, tuple[Opened, ...]]:
        """The cheapest route that opens; the next-best whenever a peer refuses or does not answer."""
        avoid = self._dht.unreachable() - {self._endpoint.peer_id}
        failure: MeshswarmError | None = None
        records = prepared.records
        for attempt in range(ROUTE_ATTEMPTS):
            try:
                route = self._plan(prepared, request, records, avoid)
            except NoRouteError as error:
                if attempt == 0:  # what was remembered may be stale: look again before saying no
                    records = await self._coverage(prepared.card, fresh=True)
                    route = self._plan(prepared, request, records, avoid)
                else:
                    raise failure or error from None
            session = self._session(prepared, request, route, records)
            try:
                return session, await session.open()
            except RemoteError as error:
                if error.peer is None:
                    raise
                failure = error
                peer = PeerId.parse(error.peer)
                avoid |= {peer}
                if isinstance(error, PeerUnreachableError):
                    self._dht.report_unreachable(peer)
        assert failure is not None
        raise failure

    def _plan(
        self,
        prepared: _Prepared,
        request: GenerationRequest,
        records: Sequence[CoverageRecord],
        avoid: frozenset[PeerId],
    ) -> Route:
        """The cheapest route with room for the whole answer, or else for the prompt and a beginning."""
        n_prompt = len(prepared.prompt)
        wanted = n_prompt + (request.max_tokens or 1)
        for n_ctx in (wanted, n_prompt + 1):
            try:
                return plan_routes(
                    prepared.card.n_layers,
                    records,
                    head=self._endpoint.peer_id,
                    rtt_s=self._rtt_s,
                    avoid=avoid,
                    limit=1,
                    n_ctx=n_ctx,
                )[0]
            except NoRouteError:
                if n_ctx == n_prompt + 1:
                    raise
        raise AssertionError

    def _rtt_s(self, one: PeerId, other: PeerId) -> float | None:
        if self._endpoint.peer_id not in (one, other):
            return None
        connection = self._endpoint.connection(other if one == self._endpoint.peer_id else one)
        return None if connection is None else connection.rtt_s

    def _session(
        self, prepared: _Prepared, request: GenerationRequest, route: Route, records: Sequence[CoverageRecord]
    ) -> RouteSession:
        smallest = min(record.n_ctx for record in records if any(hop.peer == record.peer for hop in route.hops))
        n_ctx = smallest if request.max_tokens is None else min(smallest, len(prepared.prompt) + request.max_tokens)
        terms = Terms(
            model_id=prepared.card.model_id,
            n_layers=prepared.card.n_layers,
            n_embd=prepared.card.n_embd,
            n_ctx=n_ctx,
            profile=request.profile,
            temperature=request.sampling.tail_temperature,
            top_k=prepared.sampler.k_needed,
            deadline_ms=SESSION_DEADLINE_S * 1000,
        )
        hops = tuple(Hop(hop.peer, hop.addresses, Span(hop.span.start, hop.stop)) for hop in route.hops)
        core = HeadSession(os.urandom(SESSION_ID_BYTES), self._endpoint.peer_id, self._addresses(), hops, terms)
        return RouteSession(self._endpoint, self._identity, core, self._bookkeeper)

    def _addresses(self) -> tuple[Address, ...]:
        return tuple(self._endpoint.addresses)


def _tokenise(request: GenerationRequest, voice: Voice) -> list[int]:
    if request.messages is not None:
        return voice.template.tokens(request.messages, voice.vocabulary)
    if isinstance(request.prompt, str):
        return voice.vocabulary.encode_prompt(request.prompt)
    tokens = list(request.prompt or ())
    voice.vocabulary.check(tokens)
    return tokens


def _without_suppressed(sampling: SamplingParams, voice: Voice) -> SamplingParams:
    """Tokens that the model's makers never want to see are forbidden, whatever the client asks for."""
    suppressed = voice.vocabulary.suppressed
    if not suppressed:
        return sampling
    return replace(sampling, logit_bias=(*sampling.logit_bias, *((token, -math.inf) for token in suppressed)))


def _numclass(opened: Sequence[Opened]) -> str:
    """The numclass of the route: one name when all spans agree, all of them in order otherwise."""
    names = list(dict.fromkeys(each.numclass for each in opened))
    return "+".join(names)


def _fingerprint(card: ModelCard, route: RouteSummary) -> str:
    """Changes when the weights, the cuts or what the layers are computed with change: then answers may differ."""
    cuts = ",".join(span for _, span in route.hops)
    text = f"{model_id_text(card.model_id)} {route.numclass} {cuts}"
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:16]
