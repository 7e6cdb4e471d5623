"""Sees a change to another model through: what is asked for is heard, what could be served instead is looked at, and
what is decided is done while the old layers are served on.

The rule this file keeps: it looks and waits, `routing/change` decides. Others are told before the second look that this
peer is about to go, so that of two who would go at once at least one sees the other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

from meshswarm.errors import ArtifactError, MeshswarmError, OutOfMemoryError
from meshswarm.routing.change import Change, Wishes, choose_change, may_leave
from meshswarm.routing.choice import Choice, Limits
from meshswarm.routing.demand import Offer
from meshswarm.routing.rebalance import Own
from meshswarm.routing.view import View
from meshswarm.serving.hearsay import Hearsay
from meshswarm.serving.layers import choose_layers, known_model, limits_of, memory_model
from meshswarm.serving.offers import offers_of
from meshswarm.serving.reach import Reach
from meshswarm.serving.serving import Serving
from meshswarm.serving.settings import Surroundings
from meshswarm.stage.engine.devices import list_devices
from meshswarm.stage.engine.memory import Room

Look = Callable[[], Awaitable[tuple[View, Own]]]
"""Who serves this peer's own model, as the swarm says at that very moment."""


class Changer:
    """`clock`: Unix time in seconds."""

    def __init__(
        self, serving: Serving, around: Surroundings, hearsay: Hearsay, clock: Callable[[], float], rng: random.Random
    ) -> None:
        self._serving = serving
        self._around = around
        self._hearsay = hearsay
        self._clock = clock
        self._rng = rng
        self._wishes = Wishes()

    async def decide(self, view: View, own: Own, look: Look) -> Change | None:
        """What to go over to, None to stay. Where there is something, others have been told that this peer is about to
        go; whoever does not in the end takes that back. Raises MeshswarmError."""
        now = self._clock()
        self._wishes.hear(self._hearsay.demand(), now)
        wanted = self._wishes.lasting(now) - {self._serving.model.model_id}
        if not wanted or not may_leave(view, own, now):
            return None
        change = choose_change(view, self._serving.model.name, own, await self._offers(wanted), self._rng, now)
        if change is None:
            return None
        await self._serving.announce_going(True)
        await asyncio.sleep(change.wait_s)
        view, own = await look()
        change = choose_change(view, self._serving.model.name, own, await self._offers(wanted), self._rng, now)
        if change is None:
            await self._serving.announce_going(False)
        return change

    async def _offers(self, wanted: frozenset[bytes]) -> list[Offer]:
        """The wanted models that can be had now."""
        limits = self._instead(await self._limits())
        found = await offers_of(self._serving.settings, self._around, self._hearsay, limits, only=wanted)
        reach = Reach(self._around.home.root)
        return [offer for offer in found if not await reach.obstacle(offer)]

    async def carry_out(self, change: Change) -> bool:
        """Serve that model instead, whether that came to be; if not, others may count on this peer again. Raises
        MeshswarmError where it cannot be had or nothing of it fits."""
        try:
            is_done = await self._carry_out(change)
        except MeshswarmError:
            await self._serving.announce_going(False)
            raise
        if not is_done:
            await self._serving.announce_going(False)
        return is_done

    async def _carry_out(self, change: Change) -> bool:
        settings = replace(self._serving.settings, model=change.offer.ref, because="")
        info = await known_model(settings, self._around)
        if info.model_id != change.offer.model_id:
            raise ArtifactError(f"{change.offer.ref} is another model by now than the one that is asked for")
        model = await asyncio.to_thread(memory_model, settings, self._around, info)
        others = [
            record
            for record in await self._around.dht.coverage(info.model_id, info.n_layers, fresh=True)
            if record.peer != self._around.identity.peer_id
        ]
        limits = await self._limits()

        def choose(limits: Limits) -> Choice:
            return choose_layers(settings, model, limits, others, info.name)

        try:
            choice, beside = choose(self._beside(limits)), True
        except OutOfMemoryError:
            choice, beside = choose(self._instead(limits)), False
        return await self._serving.change_model(settings, info, choice, beside=beside)

    async def _limits(self) -> Limits:
        devices = await asyncio.to_thread(list_devices)
        return await asyncio.to_thread(limits_of, self._serving.settings, devices)

    def _beside(self, limits: Limits) -> Limits:
        """What there is for another slice beside the one that is loaded."""
        allowed = None if limits.allowed is None else limits.allowed - self._serving.taken_bytes
        return replace(limits, allowed=allowed)

    def _instead(self, limits: Limits) -> Limits:
        """What there is once that one is given up."""
        room = Room(limits.room.free + self._serving.taken_bytes, limits.room.total)
        return replace(limits, room=room)
