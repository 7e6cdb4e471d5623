"""What `--auto` serves: a model that others here serve and this peer has or can get, else one of its own.

The rule this file keeps: `routing/demand` decides; a model that cannot be had, or turns out not to fit, is passed over
for the next, and whoever sits here is told before anything is fetched what, how much, and whether anybody ran it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from meshswarm.artifacts import sources
from meshswarm.artifacts.manifests.catalogue import CATALOGUE
from meshswarm.errors import MeshswarmError, OutOfMemoryError
from meshswarm.routing.choice import Limits
from meshswarm.routing.demand import Fit, Offer, Pick, larger, pick
from meshswarm.serving.hearsay import SILENCE, Hearsay
from meshswarm.serving.layers import known_model, limits_of, memory_model
from meshswarm.serving.offers import fit_of, most, offers_of
from meshswarm.serving.reach import KEEP_FREE_BYTES, Reach
from meshswarm.serving.serving import Serving
from meshswarm.serving.settings import ServingSettings, Surroundings
from meshswarm.stage.engine.devices import list_devices
from meshswarm.stage.engine.memory import in_words

DEMAND_WAIT_S = 2.0  # in which a peer that has just come hears what is asked for


class AutoChoice:
    """Models to serve, the best first. `next` names one, with why; `load` serves it, or else the next."""

    def __init__(
        self, settings: ServingSettings, around: Surroundings, hearsay: Hearsay = SILENCE, reach: Reach | None = None
    ) -> None:
        self._settings = settings
        self._around = around
        self._hearsay = hearsay
        self._reach = reach or Reach(around.home.root)
        self._passed_over: set[str] = set()
        self._error: MeshswarmError | None = None

    async def next(self) -> ServingSettings:
        """The settings with the model that is to be served, whose header is here. Raises OutOfMemoryError where none
        fits, and what went wrong last where none is left."""
        devices = await asyncio.to_thread(list_devices)
        limits = await asyncio.to_thread(limits_of, self._settings, devices)
        offers = await offers_of(self._settings, self._around, self._hearsay, limits)
        if sum(offer.is_served and offer.fit is not Fit.NOTHING for offer in offers) > 1 and not self._hearsay.demand():
            await asyncio.sleep(DEMAND_WAIT_S)  # several could be joined, and what is asked for decides
            offers = await offers_of(self._settings, self._around, self._hearsay, limits)
        while True:
            offers = [offer for offer in offers if offer.ref not in self._passed_over]
            picked = pick(offers)
            if picked is None:
                raise self._error or _nothing_fits(limits)
            obstacle = await self._reach.obstacle(picked.offer)
            if not obstacle and await self._is_had(picked, limits):
                await self._say_larger(picked.offer, offers)
                return self._chosen(picked)
            if obstacle and picked.offer.is_served:
                self._say(f"{picked.offer.name} is passed over: {obstacle}.")
            self._passed_over.add(picked.offer.ref)

    async def load(self, chosen: ServingSettings) -> Serving:
        """Serve what was chosen, or the next that can be had. Raises MeshswarmError."""
        while True:
            try:
                return await Serving.load(chosen, self._around)
            except MeshswarmError as error:
                self._pass_over(chosen.model, error)
                chosen = await self.next()

    async def _say_larger(self, chosen: Offer, offers: Sequence[Offer]) -> None:
        """That a better model could be had, to who serves alone: a person may start what a peer does not by itself."""
        room = await self._reach.free_bytes() - KEEP_FREE_BYTES
        better = larger([offer for offer in offers if offer.to_fetch <= room], chosen)
        if better is not None and not chosen.is_served:
            size = in_words(better.to_fetch)
            self._say(f"A larger model would fit, {size} to fetch and never run here: --model {better.ref}")

    def _chosen(self, picked: Pick) -> ServingSettings:
        changes_model = self._settings.changes_model and self._settings.is_mobile
        because, ref = picked.because, picked.offer.ref
        return replace(self._settings, model=ref, because=because, is_auto=False, changes_model=changes_model)

    async def _is_had(self, picked: Pick, limits: Limits) -> bool:
        """Whether the model is known here now, fetched where it comes from outside the swarm, and a part of it fits."""
        offer = picked.offer
        if offer.to_fetch:
            self._say(fetching_in_words(picked))
        settings = replace(self._settings, model=offer.ref)
        try:
            info = await known_model(settings, self._around)
            model = await asyncio.to_thread(memory_model, settings, self._around, info)
            if fit_of(model, limits) is Fit.NOTHING:
                raise OutOfMemoryError(f"no part of {info.name} fits into {in_words(most(limits))} of memory")
        except MeshswarmError as error:
            self._pass_over(offer.ref, error)
            return False
        return True

    def _pass_over(self, ref: str, error: MeshswarmError) -> None:
        self._passed_over.add(ref)
        self._error = error
        self._say(f"{ref} is passed over: {error}")

    def _say(self, sentence: str) -> None:
        self._around.report({"event": "notice", "message": sentence})


def fetching_in_words(picked: Pick) -> str:
    """What is about to be fetched, why, and what is not known of it."""
    offer = picked.offer
    upto = "up to " if offer.is_served else ""
    origin = f"from {offer.ref}" if sources.is_source(offer.ref) else "from the peers that serve it"
    warning = f" {offer.warning[0].upper()}{offer.warning[1:]}." if offer.warning else ""
    return f"Fetching {offer.name}, {upto}{in_words(offer.to_fetch)}, {origin}: {picked.because}.{warning}"


def _nothing_fits(limits: Limits) -> OutOfMemoryError:
    least = min(entry.memory_bytes for entry in CATALOGUE)
    return OutOfMemoryError(
        f"no part of any model known here fits into {in_words(most(limits))} of memory; the smallest of the "
        f"catalogue takes {in_words(least)} whole, and less in parts, with fewer --sessions or a shorter --ctx"
    )
