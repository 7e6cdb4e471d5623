"""Finding a route and opening it: the cheapest one first, the next-best whenever a peer refuses or is gone.

Routes are planned a few at a time, so that the next-best is there when it is needed. What a session sees of its route
is learned from (`routing/measured.py`), and prices the next.

The rule this file keeps: a peer that refused or vanished is not asked again for the same request, and nobody is told
"no" on the word of remembered records alone: they are asked for afresh before giving up. Planning over many peers does
not hold up the event loop.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.config import Address
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import (
    MeshswarmError,
    NoRouteError,
    PeerUnreachableError,
    RefusedError,
    RemoteError,
    RemoteProtocolError,
)
from meshswarm.head.link_speed import LinkSpeed
from meshswarm.head.route_session import OnInLine, RouteSession
from meshswarm.head.session import HeadSession
from meshswarm.head.session_actions import Hop, Origin, Terms
from meshswarm.identity import Identity, PeerId
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.net.endpoint import Endpoint
from meshswarm.routing.cost import turn_us, unmeasured
from meshswarm.routing.gossip.news import QUIET, News
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.gossip.told import Told
from meshswarm.routing.loads import dated, queues, with_loads
from meshswarm.routing.measured import MeasuredSpeed, MeasuredSpeeds, Share
from meshswarm.routing.planner import Planning, Route, Situation, repriced
from meshswarm.routing.probing import MAX_PROBES, worth_probing
from meshswarm.routing.prompt_time import Pace, pace
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.proving.wire_proofs import F32_WIRE, Wire
from meshswarm.stage.sessions.messages import SESSION_ID_BYTES

ROUTE_ATTEMPTS = 8
MAX_LINKS = 256  # routes whose links are remembered
ALTERNATIVES = 4  # routes planned at once
PROBE_TIMEOUT_S = 2.0
MAX_SURVEYED = 64
MAX_ASKED = 16  # strangers, for one request
MAX_RTTS = 4096  # peers whose measured distance is remembered when they are not connected any more
USUAL_ANSWER = 128  # tokens an answer is taken to have when nobody says
MANY = 64  # records that are planned over in a thread
SESSION_DEADLINE_S = 3600


@dataclass(frozen=True, slots=True)
class Needs:
    """What a request wants of a route. `max_tokens` None: as many as the route's context has room for. `max_wait_s`:
    how long it may stand in line where no route has room, 0 is not at all."""

    card: ModelCard
    n_prompt: int
    max_tokens: int | None
    profile: Profile
    temperature: float
    top_k: int
    wire: Wire = F32_WIRE
    max_wait_s: float = 0.0


class Routes:
    """Opens routes for one head.

    `own_records` tells what this peer serves itself: its own layers are used before the DHT has heard of them.
    `news`: what is heard of peers from minute to minute.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        dht: Dht,
        bookkeeper: Bookkeeper,
        own_records: Callable[[], Sequence[CoverageRecord]],
        *,
        news: News = QUIET,
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._dht = dht
        self._bookkeeper = bookkeeper
        self._own_records = own_records
        self._news = news
        self._measured = MeasuredSpeeds(endpoint.peer_id)
        self._rtts: dict[PeerId, float] = {}
        self._busy_until: dict[PeerId, float] = {}
        self._links: dict[tuple[PeerId, ...], LinkSpeed] = {}
        self._sessions: weakref.WeakKeyDictionary[RouteSession, tuple[CoverageRecord, ...]] = (
            weakref.WeakKeyDictionary()
        )  # with the records of their hops

    async def coverage(self, card: ModelCard, *, fresh: bool = False, ask: bool = True) -> list[CoverageRecord]:
        """Who serves layers of the model, this peer included. Without `ask`: as far as is known here."""
        found = await self._dht.coverage(card.model_id, card.n_layers, fresh=fresh, ask=ask)
        own = [record for record in self._own_records() if record.model_id == card.model_id]
        return [*own, *(record for record in found if record.peer != self._endpoint.peer_id)]

    def told(self, card: ModelCard) -> Told | None:
        """What others say together of who holds layers of the model, without asking anybody."""
        return self._news.told(card.model_id, card.n_layers)

    async def living(self, card: ModelCard, *, ask: bool = True) -> list[CoverageRecord]:
        """Who serves layers of the model now: without those that have gone or are leaving."""
        away = (self._news.gone() | self._news.draining()) - {self._endpoint.peer_id}
        return [record for record in await self.coverage(card, ask=ask) if record.peer not in away]

    async def open(
        self, needs: Needs, records: Sequence[CoverageRecord], on_in_line: OnInLine = lambda where: None
    ) -> RouteSession:
        """The cheapest route that opens. Where peers that are full stand in the way of every route, it waits at the
        cheapest of them, and `on_in_line` hears where. Raises what the last attempt failed with, or NoRouteError."""
        avoid: frozenset[PeerId] = frozenset()  # what this request learned
        full: frozenset[PeerId] = frozenset()  # of those, the ones that only lack room
        resting = frozenset(self.away())  # what was learned before: gone round at first
        failure: MeshswarmError | None = None
        is_fresh = False
        planned: deque[Route] = deque()
        for _ in range(ROUTE_ATTEMPTS):
            planned = deque(route for route in planned if avoid.isdisjoint(hop.peer for hop in route.hops))
            try:
                if not planned:
                    planned.extend(await self._plan(needs, records, avoid | resting))
            except NoRouteError as error:
                if not is_fresh:
                    records, is_fresh = await self.coverage(needs.card, fresh=True), True
                elif resting:  # a peer that was gone a moment ago may be back: better one more try than a no
                    resting = frozenset()
                else:
                    failure = failure or error
                    break
                continue
            session = self._session(needs, planned.popleft(), records)
            try:
                await session.open()
                return session
            except RemoteError as error:
                if error.peer is None:
                    raise
                failure = error
                learned = self.note(error)
                avoid |= learned
                full |= learned if isinstance(error, RefusedError) and error.retry_after_s else frozenset()
        assert failure is not None
        if not full or not needs.max_wait_s:
            raise failure from None
        route = (await self._plan(needs, records, avoid - full))[0]
        session = self._session(needs, route, records, max_wait_s=needs.max_wait_s)
        await session.open(on_in_line)
        return session

    async def copy(self, source: RouteSession, n_positions: int, needs: Needs) -> RouteSession:
        """A new session over the same spans that begins with the first `n_positions` of `source`, which is parked.
        Raises RemoteError where the spans have no room beside it, or cannot copy."""
        terms = replace(
            source.core.terms, temperature=needs.temperature, top_k=needs.top_k, deadline_ms=SESSION_DEADLINE_S * 1000
        )
        origin = Origin(source.core.session, source.history.beginning(n_positions))
        session = self._run(
            source.core.hops, replace(terms, max_wait_ms=0), source.core.route, origin, self._sessions[source]
        )
        await session.open()
        return session

    def note(self, error: RemoteError) -> frozenset[PeerId]:
        """Remember for later requests too who is gone, who breaks the rules and who is busy. Returns whom to go round,
        nobody when the error names no peer."""
        if error.peer is None:
            return frozenset()
        peer = PeerId.parse(error.peer)
        if isinstance(error, PeerUnreachableError | RemoteProtocolError):
            self._dht.report_unreachable(peer)
        elif isinstance(error, RefusedError) and error.retry_after_s:
            self._busy_until[peer] = asyncio.get_running_loop().time() + error.retry_after_s
        return frozenset({peer})

    # -- planning

    def situation(
        self,
        model_id: bytes,
        records: Sequence[CoverageRecord],
        avoid: frozenset[PeerId] = frozenset(),
        *,
        n_ctx: int = 1,
        kv_tokens: int = 0,
    ) -> Situation:
        """What this head knows now of the peers of `records`, as `current` gave them."""
        rtts = {record.peer: self._rtt_s(record.peer) for record in records}
        return Situation(
            self._endpoint.peer_id,
            lambda _, peer: rtts.get(peer),
            avoid=avoid,
            n_ctx=n_ctx,
            kv_tokens=kv_tokens,
            queue_s=self._waits(records),
            sessions=self._sessions_at(),
            measured_us={peer: speed.us_per_layer for peer, speed in self.measured(model_id, records).items()},
        )

    def _waits(self, records: Iterable[CoverageRecord]) -> dict[PeerId, float]:
        """How long a step or a session is expected to wait at each peer that said so."""
        now = asyncio.get_running_loop().time()
        self._busy_until = {peer: until for peer, until in self._busy_until.items() if until > now}
        waits = queues(records, self._loads())
        for peer, until in self._busy_until.items():
            waits[peer] = max(waits.get(peer, 0.0), until - now)
        return waits

    def away(self) -> dict[PeerId, str]:
        """Peers that are no use now, as far as is known here, and why."""
        why = dict.fromkeys(self._dht.unreachable(), "did not answer lately")
        why |= dict.fromkeys(self._news.gone(), "has gone")
        why |= dict.fromkeys(self._news.draining(), "is leaving and takes no new sessions")
        why.pop(self._endpoint.peer_id, None)
        return why

    def asked(self, model_id: bytes) -> None:
        """A client of this head wants an answer of this model."""
        self._news.asked(model_id)

    def current(self, records: Iterable[CoverageRecord]) -> list[CoverageRecord]:
        """The records, with what their peers said since."""
        return with_loads(records, self._loads())

    def _loads(self) -> dict[PeerId, LoadReport]:
        """Others' reports: of itself this peer knows better."""
        return {peer: load for peer, load in self._news.loads().items() if peer != self._endpoint.peer_id}

    def reported_ms(self, records: Iterable[CoverageRecord]) -> dict[PeerId, int]:
        """When each peer whose report counts said it, by its own clock."""
        return dated(records, self._loads())

    def measured(self, model_id: bytes, records: Iterable[CoverageRecord]) -> dict[PeerId, MeasuredSpeed]:
        """What this head's own sessions have shown of the speed of others."""
        claims = {record.peer: float(record.us_per_layer) for record in records}
        return self._measured.of(model_id, claims, asyncio.get_running_loop().time())

    async def survey(self, records: Sequence[CoverageRecord], peers: Sequence[PeerId] | None = None) -> None:
        """Measure the round trips to `peers`, or to those of `records` that neither side has measured, the fastest
        `MAX_SURVEYED` of them. Who does not answer is remembered as gone."""
        by_peer = {record.peer: record for record in records}
        if peers is None:
            unknown = unmeasured(records, self._endpoint.peer_id, lambda _, peer: self._rtt_s(peer))
            fastest = sorted(unknown - set(self.away()), key=lambda peer: (by_peer[peer].us_per_layer, peer))
            peers = fastest[:MAX_SURVEYED]
        for at in range(0, len(peers), MAX_PROBES):
            probes = (self._probe(peer, by_peer[peer].addresses) for peer in peers[at : at + MAX_PROBES])
            await asyncio.gather(*probes)

    async def _probe(self, peer: PeerId, addresses: tuple[Address, ...]) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                connection = await self._endpoint.dial(peer, addresses)
                rtt_s = await connection.measure_rtt()
        except (MeshswarmError, TimeoutError):
            self._dht.report_unreachable(peer)
            return
        self._rtts[peer] = rtt_s
        if len(self._rtts) > MAX_RTTS:
            del self._rtts[next(iter(self._rtts))]

    def _rtt_s(self, peer: PeerId) -> float | None:
        known = self._dht.rtt_s(peer)
        return self._rtts.get(peer) if known is None else known

    def in_use(self) -> frozenset[PeerId]:
        """The peers that sessions of this head go through now."""
        return frozenset(self._sessions_at())

    def _sessions_at(self, apart_from: RouteSession | None = None) -> Counter[PeerId]:
        """How many sessions of this head are at work at each peer."""
        return Counter(
            hop.peer for each in self._sessions if each.is_at_work and each is not apart_from for hop in each.core.hops
        )

    async def _plan(self, needs: Needs, records: Sequence[CoverageRecord], avoid: frozenset[PeerId]) -> list[Route]:
        """The best routes with room for the whole answer, or else for the prompt and a beginning; last of all through
        peers that said they were full, since they may have room again. Whoever may turn out to be near is asked first.
        """
        records = self.current(records)
        beginning = needs.n_prompt + 1
        whole = needs.n_prompt + (needs.max_tokens or 1)
        wishes = [*((n_ctx, 1) for n_ctx in dict.fromkeys((whole, beginning))), (beginning, 0)]
        for n_ctx, kv_tokens in wishes:
            try:
                return await self._best(needs, records, avoid, n_ctx, kv_tokens)
            except NoRouteError as error:
                failure = error
        raise failure

    async def _best(
        self, needs: Needs, records: Sequence[CoverageRecord], avoid: frozenset[PeerId], n_ctx: int, kv_tokens: int
    ) -> list[Route]:
        n_layers, model_id = needs.card.n_layers, needs.card.model_id
        n_tokens = needs.max_tokens or USUAL_ANSWER
        asked: set[PeerId] = set()
        while True:
            now = self.situation(model_id, records, avoid, n_ctx=n_ctx, kv_tokens=kv_tokens)

            def plan(now: Situation = now) -> tuple[Planning, list[PeerId]]:
                planning = Planning.of(n_layers, records, now, ALTERNATIVES)
                return planning, worth_probing(planning, records, now, n_tokens)

            planning, strangers = await asyncio.to_thread(plan) if len(records) > MANY else plan()
            unasked = [peer for peer in strangers if peer not in asked]
            if not unasked or len(asked) >= MAX_ASKED:
                return planning.routes
            asked.update(unasked)
            await self.survey(records, unasked)
            avoid |= (asked & self._dht.unreachable()) - {self._endpoint.peer_id}

    def _session(
        self, needs: Needs, route: Route, records: Sequence[CoverageRecord], *, max_wait_s: float = 0.0
    ) -> RouteSession:
        by_span = {(record.peer, record.span): record for record in records}
        used = {hop.peer: by_span[hop.peer, hop.span] for hop in route.hops}
        card = needs.card
        family = FAMILIES.get(card.architecture)
        terms = Terms(
            model_id=card.model_id,
            n_layers=card.n_layers,
            row_width=card.n_embd if family is None else family.row_width(card.n_embd),
            n_ctx=min(record.n_ctx for record in used.values()),  # all there is: another turn may need it
            profile=needs.profile,
            temperature=needs.temperature,
            top_k=needs.top_k,
            deadline_ms=SESSION_DEADLINE_S * 1000,
            dtype=needs.wire.over(len(route.hops) - 1),
            max_wait_ms=int(max_wait_s * 1000),
        )
        hops = tuple(Hop(hop.peer, hop.addresses, Span(hop.span.start, hop.stop)) for hop in route.hops)
        paces = [pace(used[hop.peer], len(hop.span)) for hop in hops]
        return self._run(hops, terms, paces, None, tuple(used[hop.peer] for hop in hops))

    def _run(
        self,
        hops: tuple[Hop, ...],
        terms: Terms,
        paces: Sequence[Pace],
        origin: Origin | None,
        records: tuple[CoverageRecord, ...],
    ) -> RouteSession:
        addresses = tuple(address for address in self._endpoint.addresses if address.is_dialable)
        session = os.urandom(SESSION_ID_BYTES)
        head, link = self._endpoint.peer_id, self._link(hops)
        core = HeadSession(session, head, addresses, hops, terms, route=paces, link=link, origin=origin)
        running = RouteSession(self._endpoint, self._identity, core, self._bookkeeper, self._learn)
        self._sessions[running] = records
        return running

    # -- learning

    def _learn(self, session: RouteSession) -> None:
        """What the session's steps took is compared with what the way takes: the rest is its peers' speed."""
        usual = session.core.step_times.take()
        if usual is None:
            return
        n_rows, seconds = usual
        core, records = session.core, self._sessions[session]
        others = self._sessions_at(apart_from=session)
        now = Situation(
            self._endpoint.peer_id, lambda _, peer: self._rtt_s(peer), queue_s=queues(records, self._loads())
        )
        priced = repriced(core.terms.n_layers, records, now)
        shares = [
            Share(
                record.peer,
                float(record.us_per_layer),
                len(hop.span),
                turn_us(record, n_rows + others[record.peer]) / turn_us(record, 1),
            )
            for hop, record in zip(core.hops, records, strict=True)
        ]
        waited_s = priced.network_s + priced.queue_s
        self._measured.note(core.terms.model_id, shares, seconds - waited_s, asyncio.get_running_loop().time())

    def link_byte_s(self, peers: tuple[PeerId, ...]) -> float:
        """Seconds that a byte of rows takes from one of these peers to the next, as far as prompts have told."""
        link = self._links.get(peers)
        return 0.0 if link is None else link.byte_s

    def _link(self, hops: tuple[Hop, ...]) -> LinkSpeed:
        """What is known of the links between these peers; those asked for least lately are forgotten."""
        peers = tuple(hop.peer for hop in hops)
        link = self._links[peers] = self._links.pop(peers, LinkSpeed())
        if len(self._links) > MAX_LINKS:
            del self._links[next(iter(self._links))]
        return link
