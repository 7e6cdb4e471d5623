"""Gossip over real connections: the core's asks become requests, what comes back becomes its events.

The rule this file keeps: it carries bytes and the time, and decides nothing. A neighbour that fails, refuses or breaks
the protocol ends its own question and no other; who asks too much is told to wait before anything is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from meshswarm.config import Address
from meshswarm.dht.limits import RateLimit
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import MeshswarmError, PeerUnreachableError, RefusedError, RemoteProtocolError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.routing.gossip.ask import Ask
from meshswarm.routing.gossip.core import Gossip
from meshswarm.routing.gossip.messages import KINDS, MAX_MESSAGE_BYTES, OutdatedError
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.gossip.summary import Holding, Summary
from meshswarm.routing.gossip.told import Told

logger = logging.getLogger(__name__)

QUESTIONS_PER_S = 12.0  # of one peer; each 512 bytes beyond the first count as one more
QUESTIONS_BURST = 80.0
LEAVE_TIMEOUT_S = 1.0
MAX_OUTDATED = 64
_SHORTEST_WAIT_S = 0.005


class GossipNode:
    """One peer's gossip. Answers from its making on; `run` it for what it has to say itself.

    `clock`: any clock that only rises. `started_ms`: Unix time now, in ms. `known`: whom this peer knows in other ways
    than by gossip, as by its table: words about anybody else come after all others.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        swarm: Swarm,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        started_ms: int | None = None,
        known: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        rng = rng or random.SystemRandom()
        self._endpoint = endpoint
        self._clock = clock
        self._limit = RateLimit(per_s=QUESTIONS_PER_S, burst=QUESTIONS_BURST)
        self._wake = asyncio.Event()
        self._core = Gossip(
            identity,
            swarm.swarm_id,
            rng=rng,
            now=clock(),
            started_ms=int(time.time() * 1000) if started_ms is None else started_ms,
            secret=rng.randbytes(16),
            admits=swarm.admits,
            known=known,
        )
        self._outdated: set[PeerId] = set()  # who speaks an older gossip
        for kind in KINDS:
            endpoint.handle_request(
                kind,
                self._answerer(kind),
                max_request_bytes=MAX_MESSAGE_BYTES,
                max_reply_bytes=MAX_MESSAGE_BYTES,
            )
        swarm.on_change(self._core.expel)
        self._forget_wish = endpoint.on_connection(self._connected)
        for connection in endpoint.connections:
            self._connected(connection)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                try:
                    self._core.tick(self._clock())
                except Exception:
                    logger.exception("gossip failed by a mistake of this peer")
                for ask in self._core.take_asks():
                    group.create_task(self._ask(ask))
                wait_s = max(_SHORTEST_WAIT_S, self._core.next_at - self._clock())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()

    async def leave(self) -> None:
        """Tell the neighbours that this peer leaves; they tell the others. Takes a second at most."""
        self._forget_wish()
        self._core.leave(self._clock())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await asyncio.gather(*(self._ask(ask) for ask in self._core.take_asks()))

    # -- saying

    def publish(self, report: LoadReport) -> None:
        """What is true of this peer now; call it whenever that changes. It goes out within half a second, and again
        every few; number, time and demand are set here."""
        self._core.publish(report)
        if report.draining:
            self._wake.set()

    def asked(self, model_id: bytes) -> None:
        """A client of this peer asked for a model."""
        self._core.asked(model_id, self._clock())

    def met(self, peers: Iterable[tuple[PeerId, tuple[Address, ...]]]) -> None:
        """Peers that may become neighbours."""
        for peer, addresses in peers:
            self._core.met(peer, addresses)

    def survey(self, model_id: bytes, n_layers: int, records: Iterable[CoverageRecord]) -> None:
        """Who serves layers of a model, by the DHT: whom to gossip with, and what summaries are made of."""
        chosen = [record for record in records if record.model_id == model_id and record.loaded]
        for record in chosen:
            self._core.met(record.peer, record.addresses, is_kin=True)
        holdings = (Holding(record.peer, record.span, record.us_per_layer) for record in chosen)
        self._core.survey(model_id, n_layers, holdings)

    def uses(self, peers: Iterable[PeerId]) -> None:
        """Peers that sessions of this head go through now."""
        self._core.neighbours.routes = frozenset(peers) - {self._core.own}

    # -- asking

    def gone(self) -> frozenset[PeerId]:
        """Peers that are dead or have left."""
        return self._core.gone(self._clock())

    def draining(self) -> frozenset[PeerId]:
        """Peers that take nothing new, because they are about to leave."""
        return self._core.draining(self._clock())

    def loads(self) -> Mapping[PeerId, LoadReport]:
        """Fresh reports of peers that are not gone."""
        return self._core.reports(self._clock())

    def coverage(self, model_id: bytes) -> Sequence[Summary]:
        """What a few peers that know most of a model say of it."""
        return self._core.coverage(model_id, self._clock())

    def told(self, model_id: bytes, n_layers: int) -> Told | None:
        """What those say together of who holds a model: good for a list, and for where to look; None where too few
        speak of it. At once; nobody is asked."""
        return self._core.told(model_id, n_layers, self._clock())

    def demand(self) -> Mapping[bytes, float]:
        """Requests a second by model, as far as is known here."""
        return self._core.demand(self._clock())

    @property
    def n_neighbours(self) -> int:
        return len(self._core.neighbours.active)

    @property
    def n_watchers(self) -> int:
        return len(self._core.vigil.watchers.chosen)

    # -- for a person

    def as_json(self) -> dict[str, Any]:
        """For the status: with how many this peer gossips, how many watch it, and what it knows of others."""
        return {
            "neighbours": self.n_neighbours,
            "watchers": self.n_watchers,
            "reports": len(self.loads()),
            "draining": len(self.draining()),
            "gone": len(self.gone()),
            "outdated": len(self._outdated),
        }

    def facts(self, peer: PeerId) -> dict[str, Any]:
        """How a peer fares, as far as is known here."""
        gone, report = peer in self.gone(), self.loads().get(peer)
        if gone or report is None:
            return {"liveness": "gone" if gone else "unknown", "load": None}
        load = {
            "role": report.role,
            "sessions": report.sessions,
            "queue_ms": round(report.queue_s * 1000, 1),
            "free_kv_tokens": report.free_kv_tokens,
        }
        return {"liveness": "draining" if report.draining else "alive", "load": load}

    # -- inside

    def _answerer(self, kind: str) -> Callable[[PeerId, bytes], Awaitable[bytes]]:
        async def answer(peer: PeerId, question: bytes) -> bytes:
            now = self._clock()
            wait_s = self._limit.take(peer, 1 + len(question) // 512, now)
            if wait_s > 0:
                raise RefusedError(f"too much gossip from {peer.short}", peer=str(peer), retry_after_s=round(wait_s, 1))
            try:
                reply = self._core.answer(kind, peer, question, now)
            except OutdatedError:
                self._note_outdated(peer)
                raise
            self._wake_if_due()
            return reply

        return answer

    async def _ask(self, ask: Ask) -> None:
        try:
            async with asyncio.timeout(ask.timeout_s):
                connection = self._endpoint.connection(ask.peer)
                if connection is None and ask.dials:
                    connection = await self._endpoint.dial(ask.peer, ask.addresses, timeout_s=ask.timeout_s)
                if connection is None:
                    raise PeerUnreachableError(f"no connection to peer {ask.peer.short}", peer=str(ask.peer))
                reply = await connection.request(
                    ask.kind, ask.payload, timeout_s=ask.timeout_s, max_reply_bytes=MAX_MESSAGE_BYTES
                )
            self._core.took(ask, reply, self._clock())
        except (RefusedError, RemoteProtocolError) as error:
            if isinstance(error, OutdatedError):
                self._note_outdated(ask.peer)
            self._core.refused(ask, self._clock())
        except (MeshswarmError, TimeoutError):
            self._core.failed(ask, self._clock())
        except Exception:  # gossip goes on: a peer without it looks dead, and sees nobody die
            logger.exception("an answer of peer %s was not handled", ask.peer.short)
            self._core.refused(ask, self._clock())
        self._wake_if_due()

    def _note_outdated(self, peer: PeerId) -> None:
        if peer not in self._outdated and len(self._outdated) < MAX_OUTDATED:
            self._outdated.add(peer)
            logger.info("peer %s speaks an older gossip: it needs a newer meshswarm to hear and be heard", peer.short)

    def _connected(self, connection: Connection) -> None:
        peer = connection.peer_id
        if peer == self._core.own:
            return
        self._core.connected(peer, connection.remote_address, self._clock())
        connection.on_lost(lambda _error: self._lost(peer))

    def _lost(self, peer: PeerId) -> None:
        if self._endpoint.connection(peer) is None:
            self._core.lost(peer, self._clock())
            self._wake.set()

    def _wake_if_due(self) -> None:
        if self._core.has_asks or self._core.next_at < self._clock() + 0.1:
            self._wake.set()
