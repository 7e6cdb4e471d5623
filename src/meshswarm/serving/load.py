"""Tells gossip what is true of this peer from moment to moment, and whom it may gossip with.

The rule this file keeps: it reads and passes on; when and to whom it is said, gossip decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import MeshswarmError
from meshswarm.identity import PeerId
from meshswarm.routing.gossip.node import GossipNode
from meshswarm.routing.gossip.report import MAX_QUEUE_S, LoadReport
from meshswarm.routing.view import STANDBY
from meshswarm.serving.layers import SERVER
from meshswarm.serving.serving import Serving
from meshswarm.serving.settings import Report
from meshswarm.stage.sessions.server import SpanServer

CLIENT = "client"
"""The role of a peer without layers that seeds nothing either: it asks."""
SEEDER = "seeder"
"""The role of a peer whose files others fetch, and whose layers, if it has any, others can serve without it."""
LOOK_S = 0.5  # how often this peer's own load is looked at
FIRST_MEETING_S = 1.0
MEETING_S = 20.0  # how often gossip is told of others


def role_of(record: CoverageRecord | None, *, seeds: bool) -> str:
    """What a peer is there for: `record` is of the layers it serves or is about to, None where it has none; `seeds`:
    others fetch files of models from it. A standby that seeds is a seeder: that is what it does meanwhile."""
    if record is None:
        return SEEDER if seeds else CLIENT
    if STANDBY in record.roles:
        return SEEDER if seeds else STANDBY
    return SERVER


def load_report(
    peer: PeerId, record: CoverageRecord | None, n_layers: int, n_at_work: int, *, draining: bool
) -> LoadReport:
    """What a peer says of itself; `record`: of the layers it serves, as the public may know them, None when it serves
    none. A step waits about half a turn of those that are at work already."""
    role = role_of(record, seeds=False)
    if record is None or not record.loaded:
        return LoadReport(peer, sessions=n_at_work, draining=draining, role=role)
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
        role=role,
    )


class LoadTeller:
    """`serving()`: what is served here, or None. `in_use()`: peers that this head's sessions go through. `seeds()`:
    whether files are seeded from here. `is_to_serve`: it has no layers only because they are not loaded yet."""

    def __init__(
        self,
        peer: PeerId,
        gossip: GossipNode,
        dht: Dht,
        spans: SpanServer,
        serving: Callable[[], Serving | None],
        in_use: Callable[[], frozenset[PeerId]],
        seeds: Callable[[], bool] = lambda: False,
        report: Report = lambda event: None,
        *,
        is_to_serve: bool = False,
    ) -> None:
        self._peer = peer
        self._gossip = gossip
        self._dht = dht
        self._spans = spans
        self._serving = serving
        self._in_use = in_use
        self._seeds = seeds
        self._report = report
        self._is_to_serve = is_to_serve
        self._role = self.role

    @property
    def role(self) -> str:
        """What this peer is there for now."""
        serving = self._serving()
        if serving is None and self._is_to_serve:
            return SERVER
        return role_of(None if serving is None else serving.record(), seeds=self._seeds())

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_on())
            group.create_task(self._meet_on())

    def facts(self) -> dict[str, str]:
        """For the status: the role, and why, as far as the layers here do not say it."""
        reasons = {CLIENT: "it asks, and serves nothing", SEEDER: "others fetch model files from it"}
        return {"role": self.role, **({"role_reason": reasons[self.role]} if self.role in reasons else {})}

    def _say_role(self) -> None:
        """To whoever sits here, once: the layers' own changes of role are said where they are decided."""
        before, self._role = self._role, self.role
        if self._role in (before, SERVER) or SEEDER not in (self._role, before):
            return
        if self._role == SEEDER:
            message = "Others can fetch model files from here: this peer is a seeder now."
        else:
            message = f"Nobody fetches model files from here any more: this peer is a {self._role} again."
        self._report({"event": "role", "role": self._role, "message": message})

    def tell(self) -> None:
        """Says what is true now."""
        self._say_role()
        serving = self._serving()
        record = None if serving is None else serving.public_record()
        n_layers = 0 if serving is None else serving.model.n_layers
        n_at_work = len(self._spans.sessions) - self._spans.n_parked
        report = load_report(self._peer, record, n_layers, n_at_work, draining=self._spans.draining)
        self._gossip.publish(replace(report, role=self.role))

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
