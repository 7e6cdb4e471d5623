"""Asks from time to time whether this peer should serve other layers, and sees the move through.

The rule this file keeps: it looks and waits, `routing/rebalance` decides. What is to be done is asked twice, the second
time with what the swarm says at that very moment. In a large swarm the records of a model are not asked for in every
round, which would cost thousands of questions: gossip tells what changes meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace

from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import MeshswarmError
from meshswarm.identity import PeerId
from meshswarm.routing.choice import Limits, has_room
from meshswarm.routing.rebalance import ROUND_S, Move, Own, Stay, propose
from meshswarm.routing.restraint import Claims, Moves
from meshswarm.routing.view import GOING, View
from meshswarm.serving.changing import Changer
from meshswarm.serving.hearsay import SILENCE, Hearsay
from meshswarm.serving.layers import limits_of, memory_model
from meshswarm.serving.reading import read_after_s
from meshswarm.serving.serving import Serving
from meshswarm.serving.settings import ServingSettings, Surroundings
from meshswarm.span import Span
from meshswarm.stage.engine.devices import list_devices
from meshswarm.stage.sizes.memory import MemoryModel

LOOK_S = 1.0  # how often it is seen whether a peer has gone
START_SPREAD_S = 1.0  # not everybody asks at the same moment
NEWS_READ_S = 30.0  # when somebody is missed: no oftener than that
LOADING_S = 900.0  # who is on the way to layers for longer is not waited for any more
MANY = 64  # holders: of more it is worked out beside the loop
FAILED_S = 120.0  # after a move that came to nothing
STEADY_ROUNDS = 2  # so often must a peer be spare, or needed, before it says so


class Mover:
    """The duty of a peer that may move. `clock`: Unix time in seconds, which rounds are counted by."""

    def __init__(
        self,
        serving: Serving,
        settings: ServingSettings,
        around: Surroundings,
        hearsay: Hearsay = SILENCE,
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._serving = serving
        self._settings = settings
        self._around = around
        self._hearsay = hearsay
        self._clock = clock
        self._rng = rng or random.Random()
        self._moves = Moves(clock())
        self._claims = Claims()
        self._not_before_s = float("-inf")
        self._model: MemoryModel | None = None
        self._changer = Changer(serving, around, hearsay, clock, self._rng) if settings.changes_model else None
        self._records: list[CoverageRecord] = []
        self._coming: dict[tuple[PeerId, Span], float] = {}  # since when others are on the way to layers
        self._read_s = float("-inf")
        self._read_without: frozenset[PeerId] = frozenset()  # who was missed already when they were read
        self._standing: tuple[bool, int] = (False, 0)  # what it would be, and for how many rounds

    async def run(self) -> None:
        """Until cancelled."""
        round_done, missed = -1, self._missed()
        while True:
            await asyncio.sleep(LOOK_S + self._rng.uniform(0, START_SPREAD_S))
            a_round = int(self._clock() // ROUND_S)
            if a_round != round_done or self._missed() != missed:
                round_done, missed = a_round, self._missed()
                await self.think()

    def _missed(self) -> frozenset[PeerId]:
        """Peers that cannot be counted on any more."""
        return self._hearsay.gone() | self._hearsay.draining() | self._around.dht.unreachable()

    async def think(self) -> None:
        """One round: stay, or move."""
        if self._serving.is_changing:
            return
        try:
            await self._serving.restore()
            view, own = await self._look(fresh=False)
            decision = await self._decide(view, own)
            if isinstance(decision, Stay):
                await self._stand_by(decision)
                if self._changer is not None and self._clock() >= self._not_before_s:
                    await self._consider_change(self._changer, view, own)
                return
            if self._clock() < self._not_before_s:
                return
            await asyncio.sleep(decision.wait_s)
            decision = await self._decide(*await self._look(fresh=True))
            if isinstance(decision, Move):
                await self._move(decision)
        except MeshswarmError as error:  # the next round comes
            self._around.report({"event": "warning", "message": f"Layers could not be exchanged: {error}"})

    async def _move(self, move: Move) -> None:
        self._around.report({"event": "moving", "layers": str(move.span), "message": move.reason})
        self._moves.moved(self._clock())
        self._not_before_s = self._moves.last_s + FAILED_S
        is_done = await self._serving.go_over(move.span, beside=move.is_beside)
        if is_done:
            self._not_before_s = float("-inf")
        self._around.report({"event": "moved", **self._serving.facts(), "done": is_done})

    async def _consider_change(self, changer: Changer, view: View, own: Own) -> None:
        """Go over to another model, where that is wanted more."""
        change = await changer.decide(view, own, lambda: self._look(fresh=True))
        if change is None:
            return
        self._around.report({"event": "moving", "model": change.offer.name, "message": change.reason})
        self._moves.moved(self._clock())
        self._not_before_s = self._moves.last_s + FAILED_S
        if is_done := await changer.carry_out(change):
            self._not_before_s = float("-inf")
            self._forget()
        self._around.report({"event": "moved", **self._serving.facts(), "done": is_done})

    def _forget(self) -> None:
        """All that was known of the model that was served before."""
        self._model, self._records, self._coming, self._claims = None, [], {}, Claims()
        self._read_s, self._standing = float("-inf"), (False, 0)

    async def _stand_by(self, decision: Stay) -> None:
        is_spare, n_rounds = self._standing
        self._standing = decision.is_spare, n_rounds + 1 if decision.is_spare == is_spare else 1
        if self._standing[1] >= STEADY_ROUNDS:
            await self._serving.stand_by(decision.is_spare, _role_in_words(self._serving, decision.is_spare))

    async def _decide(self, view: View, own: Own) -> Move | Stay:
        now = self._clock()
        if len(view.holders) <= MANY:
            return propose(view, own, self._rng, now)
        return await asyncio.to_thread(propose, view, own, self._rng, now)

    async def _look(self, *, fresh: bool) -> tuple[View, Own]:
        """Who serves the model, and what only this peer knows."""
        model, limits = await self._memory()
        await self._read(model.n_layers, fresh=fresh)
        own = self._serving.record()
        here = replace(own, roles=tuple(role for role in own.roles if role != GOING))
        view = View.of(
            model.cuts,
            [here, *self._believed(record for record in self._records if record.peer != own.peer)],
            loads=[report for report in self._hearsay.loads().values() if report.peer != own.peer],
            gone=(self._hearsay.gone() | self._around.dht.unreachable()) - {own.peer},
            leaving=self._hearsay.draining() - {own.peer},
            demand=self._hearsay.demand().get(own.model_id, 0.0),
        )
        now, taken = self._clock(), self._serving.taken_bytes
        self._claims.see(view, now)
        return view, Own(
            own.peer,
            fits=lambda span: has_room(model, span, limits, taken=taken, beside=False),
            fits_beside=lambda span: has_room(model, span, limits, taken=taken, beside=True),
            moved_s=self._moves.last_s,
            n_moves=self._moves.n_lately(now),
            trusted=self._claims.trusted(now),
            is_pinned=not self._serving.is_mobile,
        )

    async def _read(self, n_layers: int, *, fresh: bool) -> None:
        """Ask the table who serves what, where that is due."""
        now, missed = self._clock(), self._missed()
        n_known = len(self._around.dht.known_peers())
        after_s = read_after_s(n_known)
        if any(record.peer in missed - self._read_without for record in self._records):
            after_s = min(after_s, NEWS_READ_S)
        if fresh or now - self._read_s >= after_s:
            model_id = self._serving.record().model_id
            self._records = await self._around.dht.coverage(model_id, n_layers, fresh=fresh)
            self._read_s, self._read_without = now, missed

    def _believed(self, records: Iterable[CoverageRecord]) -> list[CoverageRecord]:
        """The records without what peers say for too long that they are loading: who never comes, or lies, keeps
        nobody else from a gap."""
        now, seen, believed = self._clock(), self._coming, []
        self._coming = {}
        for record in records:
            coming = record.next_span or (None if record.loaded else record.span)
            if coming is not None:
                since = self._coming[record.peer, coming] = seen.get((record.peer, coming), now)
                if now - since > LOADING_S:
                    if record.loaded:
                        believed.append(replace(record, next_span=None))
                    continue
            believed.append(record)
        return believed

    async def _memory(self) -> tuple[MemoryModel, Limits]:
        if self._model is None:
            model = await asyncio.to_thread(memory_model, self._settings, self._around, self._serving.model)
            self._model = model.under(replace(model.load, n_ctx=self._serving.record().n_ctx))
        devices = await asyncio.to_thread(list_devices)
        return self._model, await asyncio.to_thread(limits_of, self._settings, devices)


def duties_of(
    serving: Serving, settings: ServingSettings, around: Surroundings, hearsay: Hearsay = SILENCE
) -> list[Coroutine[None, None, None]]:
    """All that a peer with layers has to do as long as it lives."""
    return [*serving.duties(), *([Mover(serving, settings, around, hearsay).run()] if serving.is_mobile else [])]


def _role_in_words(serving: Serving, is_spare: bool) -> str:
    span = serving.record().span
    if is_spare and len(span) == serving.model.n_layers:
        return "Others can serve every layer without this peer: it stands by, loaded and answering."
    if is_spare:
        return (
            f"Others can serve the layers {span} without this peer: it stands by, loaded and answering, and goes first "
            "where a holder is missing."
        )
    return f"The layers {span} need this peer: it is a server again."
