"""Peers that move by themselves: the product's own `Mover` over layers that take time to load and are only imagined.

The rule this file keeps: what a peer knows comes from its own table and its own gossip, and what it decides from
`routing/rebalance`; only the memory of the machine and the loading of the slice are made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.simulation.peers import Peer

from meshswarm.dht.records import CoverageRecord
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.view import MOBILE, STANDBY
from meshswarm.serving import ServingSettings, moving
from meshswarm.serving.moving import Mover
from meshswarm.span import Span
from meshswarm.stage.families.cuts import LegalCuts


@dataclass(frozen=True, slots=True)
class Machine:
    """What fits, and how long it takes to load."""

    cuts: LegalCuts
    most_layers: int
    load_s: float

    @property
    def n_layers(self) -> int:
        return self.cuts.n_layers


class ImaginedServing:
    """`serving.Serving` as a `Mover` sees it: records and moves, without an engine."""

    is_mobile = True
    is_changing = False
    taken_bytes = 0

    def __init__(self, peer: Peer, record: CoverageRecord, machine: Machine) -> None:
        self.peer = peer
        self.moves: list[tuple[float, Span, Span]] = []
        self._record = replace(record, roles=("server", MOBILE))
        self._machine = machine
        self.model = SimpleNamespace(n_layers=machine.n_layers)

    def record(self) -> CoverageRecord:
        return self._record

    def facts(self) -> dict[str, Any]:
        return {}

    async def announce(self) -> None:
        await self._tell()

    async def go_over(self, span: Span, *, beside: bool) -> bool:
        """As the real one: say where to, load, take, say it."""
        before = self._record.span
        await self._tell(next_span=span)
        if not beside:
            await self._tell(loaded=False)
        await asyncio.sleep(self._machine.load_s)
        self._record = replace(self._record, span=span, next_span=None, loaded=True)
        self.moves.append((self.peer.network.loop.now_s, before, span))
        await self._tell()
        return True

    async def stand_by(self, is_spare: bool, reason: str) -> None:
        role = STANDBY if is_spare else "server"
        if role not in self._record.roles:
            await self._tell(roles=(role, MOBILE))

    async def restore(self) -> None:
        """Nothing is ever given up here that could not be loaded."""

    async def _tell(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        if self.peer.gossip is not None:
            self.peer.gossip.publish(self._report())
        await self.peer.serve(self._record)

    def _report(self) -> LoadReport:
        return LoadReport(
            self.peer.peer_id,
            model_id=self._record.model_id,
            span=self._record.span,
            free_kv_tokens=self._record.free_kv_tokens,
            us_per_layer=self._record.us_per_layer,
            role=STANDBY if STANDBY in self._record.roles else "server",
            n_layers=self._machine.n_layers,
        )


class ImaginedMover(Mover):
    """A `Mover` that need not look at a machine to know its memory."""

    def __init__(self, serving: ImaginedServing, machine: Machine, rng: random.Random) -> None:
        peer = serving.peer
        assert peer.gossip is not None
        around: Any = SimpleNamespace(dht=peer.dht, report=lambda event: None)
        super().__init__(
            serving,  # type: ignore[arg-type]
            ServingSettings("imagined", is_mobile=True),
            around,
            peer.gossip,
            clock=peer.network.loop.unix_s,
            rng=rng,
        )
        self._machine = machine

    async def _memory(self) -> Any:
        return self._machine, None


@contextlib.contextmanager
def imagined_memory() -> Iterator[None]:
    """Within the block a span fits where its machine has room for so many layers, also beside the old ones."""

    def has_room(machine: Machine, span: Span, limits: object, *, taken: int, beside: bool) -> bool:
        return len(span) <= machine.most_layers

    with mock.patch.object(moving, "has_room", has_room):
        yield


def know_kin(peers: Sequence[Peer], n_layers: int) -> None:
    """What a first reading of the table tells each of `peers` about the others, whom it then gossips with."""
    records = [peer.record for peer in peers if peer.record is not None]
    for peer in peers:
        assert peer.gossip is not None
        peer.gossip.survey(records[0].model_id, n_layers, records)
