"""Finding a route and opening it: the cheapest one first, the next-best whenever a peer refuses or is gone.

The rule this file keeps: a peer that refused or vanished is not asked again for the same request, and nobody is told
"no" on the word of remembered records alone: they are asked for afresh before giving up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshswarm.artifacts.card import ModelCard
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
from meshswarm.routing.planner import Route, plan_routes
from meshswarm.routing.prompt_time import Pace
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.proving.wire_proofs import F32_WIRE, Wire
from meshswarm.stage.sessions.messages import SESSION_ID_BYTES

ROUTE_ATTEMPTS = 8
MAX_LINKS = 256  # routes whose links are remembered
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
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        dht: Dht,
        bookkeeper: Bookkeeper,
        own_records: Callable[[], Sequence[CoverageRecord]],
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._dht = dht
        self._bookkeeper = bookkeeper
        self._own_records = own_records
        self._busy_until: dict[PeerId, float] = {}
        self._links: dict[tuple[PeerId, ...], LinkSpeed] = {}
        self._sessions: weakref.WeakSet[RouteSession] = weakref.WeakSet()

    async def coverage(self, card: ModelCard, *, fresh: bool = False) -> list[CoverageRecord]:
        """Who serves layers of the model, this peer included."""
        found = await self._dht.coverage(card.model_id, card.n_layers, fresh=fresh)
        own = [record for record in self._own_records() if record.model_id == card.model_id]
        return [*own, *(record for record in found if record.peer != self._endpoint.peer_id)]

    async def open(
        self, needs: Needs, records: Sequence[CoverageRecord], on_in_line: OnInLine = lambda where: None
    ) -> RouteSession:
        """The cheapest route that opens. Where peers that are full stand in the way of every route, it waits at the
        cheapest of them, and `on_in_line` hears where. Raises what the last attempt failed with, or NoRouteError."""
        avoid: frozenset[PeerId] = frozenset()  # what this request learned
        full: frozenset[PeerId] = frozenset()  # of those, the ones that only lack room
        resting = self._dht.unreachable() - {self._endpoint.peer_id}  # what was learned before: gone round at first
        failure: MeshswarmError | None = None
        is_fresh = False
        for _ in range(ROUTE_ATTEMPTS):
            try:
                route = self._plan(needs, records, avoid | resting)
            except NoRouteError as error:
                if not is_fresh:
                    records, is_fresh = await self.coverage(needs.card, fresh=True), True
                elif resting:  # a peer that was gone a moment ago may be back: better one more try than a no
                    resting = frozenset()
                else:
                    failure = failure or error
                    break
                continue
            session = self._session(needs, route, records)
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
        route = self._plan(needs, records, avoid - full)
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
        session = self._run(source.core.hops, replace(terms, max_wait_ms=0), source.core.route, origin)
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

    def _plan(self, needs: Needs, records: Sequence[CoverageRecord], avoid: frozenset[PeerId]) -> Route:
        """The cheapest route with room for the whole answer, or else for the prompt and a beginning; last of all
        through peers that said they were full, since they may have room again."""
        beginning = needs.n_prompt + 1
        whole = needs.n_prompt + (needs.max_tokens or 1)
        for n_ctx in dict.fromkeys((whole, beginning)):
            with contextlib.suppress(NoRouteError):
                return self._cheapest(needs.card.n_layers, records, avoid, n_ctx, 1)
        return self._cheapest(needs.card.n_layers, records, avoid, beginning, 0)

    def _cheapest(
        self, n_layers: int, records: Sequence[CoverageRecord], avoid: frozenset[PeerId], n_ctx: int, kv_tokens: int
    ) -> Route:
        now = asyncio.get_running_loop().time()
        self._busy_until = {peer: until for peer, until in self._busy_until.items() if until > now}
        return plan_routes(
            n_layers,
            records,
            head=self._endpoint.peer_id,
            rtt_s=lambda _, peer: self._dht.rtt_s(peer),
            avoid=avoid,
            limit=1,
            n_ctx=n_ctx,
            kv_tokens=kv_tokens,
            queue_s={peer: until - now for peer, until in self._busy_until.items()},
            sessions=Counter(hop.peer for each in self._sessions if each.is_at_work for hop in each.core.hops),
        )[0]

    def _session(
        self, needs: Needs, route: Route, records: Sequence[CoverageRecord], *, max_wait_s: float = 0.0
    ) -> RouteSession:
        used = {hop.peer: record for hop in route.hops for record in records if record.peer == hop.peer}
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
        return self._run(hops, terms, [_pace(used[hop.peer], len(hop.span)) for hop in hops], None)

    def _run(self, hops: tuple[Hop, ...], terms: Terms, paces: Sequence[Pace], origin: Origin | None) -> RouteSession:
        addresses = tuple(address for address in self._endpoint.addresses if address.is_dialable)
        session = os.urandom(SESSION_ID_BYTES)
        head, link = self._endpoint.peer_id, self._link(hops)
        core = HeadSession(session, head, addresses, hops, terms, route=paces, link=link, origin=origin)
        running = RouteSession(self._endpoint, self._identity, core, self._bookkeeper)
        self._sessions.add(running)
        return running

    def _link(self, hops: tuple[Hop, ...]) -> LinkSpeed:
        """What is known of the links between these peers; those asked for least lately are forgotten."""
        peers = tuple(hop.peer for hop in hops)
        link = self._links[peers] = self._links.pop(peers, LinkSpeed())
        if len(self._links) > MAX_LINKS:
            del self._links[next(iter(self._links))]
        return link


def _pace(record: CoverageRecord, n_layers: int) -> Pace:
    """How fast the peer says it is. A step reads all weights once, which is about what a lone row costs."""
    return Pace(record.prefill_us_per_row_layer * n_layers / 1e6, record.us_per_layer * n_layers / 1e6)
