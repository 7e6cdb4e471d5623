"""Tells gossip what is true of this peer from moment to moment, and whom it may gossip with.

The rule this file keeps: it reads and passes on; when and to whom it is said, gossip decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import MeshswarmError
from meshswarm.identity import PeerId
from meshswarm.routing.gossip.node import GossipNode
from meshswarm.routing.gossip.report import MAX_QUEUE_S, LoadReport
from meshswarm.serving.serving import Serving
from meshswarm.stage.sessions.server import SpanServer

LOOK_S = 0.5  # how often this peer's own load is looked at
FIRST_MEETING_S = 1.0
MEETING_S = 20.0  # how often gossip is told of others
OWN_ROLES = frozenset({"standby", "server", "seeder", "relay", "verifier"})


def load_report(
    peer: PeerId, record: CoverageRecord | None, n_layers: int, n_at_work: int, *, draining: bool
) -> LoadReport:
    """What a peer says of itself; `record`: of the layers it serves, as the public may know them, None when it serves
    none. A step waits about half a turn of those that are at work already."""
    if record is None or not record.loaded:
        return LoadReport(peer, sessions=n_at_work, draining=draining)
    turn_s = record.us_per_layer * len(record.span) / 1e6
    return LoadReport(
        peer,
        model_id=record.model_id,
        span=record.span,
        n_layers=n_layers,
        queue_s=min(round(n_at_work * turn_s / 2, 3), MAX_QUEUE_S),
        sessions=n_at_work,
        free_kv_tokens=record.free_kv_tokens,
        draining=draining,
        role=next((role for role in record.roles if role in OWN_ROLES), "server"),
    )


class LoadTeller:
    """`serving()`: what is served here, or None. `in_use()`: peers that this head's sessions go through."""

    def __init__(
        self,
        peer: PeerId,
        gossip: GossipNode,
        dht: Dht,
        spans: SpanServer,
        serving: Callable[[], Serving | None],
        in_use: Callable[[], frozenset[PeerId]],
    ) -> None:
        self._peer = peer
        self._gossip = gossip
        self._dht = dht
        self._spans = spans
        self._serving = serving
        self._in_use = in_use

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_on())
            group.create_task(self._meet_on())

    def tell(self) -> None:
        """Says what is true now."""
        serving = self._serving()
        record = None if serving is None else serving.public_record()
        n_layers = 0 if serving is None else serving.model.n_layers
        n_at_work = len(self._spans.sessions) - self._spans.n_parked
        self._gossip.publish(load_report(self._peer, record, n_layers, n_at_work, draining=self._spans.draining))

    async def _tell_on(self) -> None:
        while True:
            self.tell()
            self._gossip.uses(self._in_use())
            await asyncio.sleep(LOOK_S)

    async def _meet_on(self) -> None:
        wait_s = FIRST_MEETING_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = MEETING_S
            self._gossip.met(self._dht.known_peers())
            serving = self._serving()
            if serving is not None:
                model = serving.model
                with contextlib.suppress(MeshswarmError):
                    self._gossip.survey(model.model_id, model.n_layers, await serving.holders.read())
