"""What `--auto` serves: a model that others here serve and this peer has or can get, else one of its own.

The rule this file keeps: it gathers what is on the disk, in the catalogue and in the swarm; `routing/demand` decides.
Nothing is fetched before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from meshswarm.artifacts.catalogue import CATALOGUE, CatalogueEntry
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.errors import OutOfMemoryError
from meshswarm.routing.choice import Limits
from meshswarm.routing.demand import Fit, Offer, pick
from meshswarm.routing.view import View
from meshswarm.serving.hearsay import SILENCE, Hearsay
from meshswarm.serving.layers import limits_of, memory_model
from meshswarm.serving.settings import ServingSettings, Surroundings
from meshswarm.stage.engine.devices import list_devices
from meshswarm.stage.engine.memory import in_words
from meshswarm.stage.families.cuts import LegalCuts
from meshswarm.stage.sizes.memory import MemoryModel

MAX_LOOKED_AT = 32  # models, those with most holders
DEMAND_WAIT_S = 2.0  # in which a peer that has just come hears what is asked for


async def choose_model(settings: ServingSettings, around: Surroundings, hearsay: Hearsay = SILENCE) -> ServingSettings:
    """The settings with the model that is to be served, and why. Raises OutOfMemoryError where none fits."""
    devices = await asyncio.to_thread(list_devices)
    limits = await asyncio.to_thread(limits_of, settings, devices)
    offers = await asyncio.to_thread(_offers, settings, around, limits, await _views(around, hearsay.demand()))
    if sum(offer.is_served and offer.fit is not Fit.NOTHING for offer in offers) > 1 and not hearsay.demand():
        await asyncio.sleep(DEMAND_WAIT_S)  # several could be joined, and what is asked for decides
        offers = await asyncio.to_thread(_offers, settings, around, limits, await _views(around, hearsay.demand()))
    picked = pick(offers)
    if picked is None:
        least = min(entry.memory_bytes for entry in CATALOGUE)
        raise OutOfMemoryError(
            f"no part of any model known here fits into {in_words(_most(limits))} of memory; the smallest of the "
            f"catalogue takes {in_words(least)} whole, and less in parts, with fewer --sessions or a shorter --ctx"
        )
    return replace(settings, model=picked.offer.ref, because=picked.because, is_auto=False)


class _Views:
    """Who serves the models that somebody here serves, and how often they are asked for."""

    def __init__(self, records: Mapping[bytes, tuple[int, View]]) -> None:
        self._records = records

    def of(self, model_id: bytes, cuts: LegalCuts) -> View | None:
        n_layers, view = self._records.get(model_id, (0, None))
        return None if view is None or n_layers != cuts.n_layers else replace(view, cuts=cuts, memo={})


async def _views(around: Surroundings, demand: Mapping[bytes, float]) -> _Views:
    found = {}
    for card, _ in (await around.dht.models(fresh=True))[:MAX_LOOKED_AT]:  # whoever wants to may name hundreds
        records = await around.dht.coverage(card.model_id, card.n_layers)
        others = [record for record in records if record.peer != around.identity.peer_id]
        anywhere = LegalCuts(card.n_layers, tuple(range(card.n_layers)), None)
        view = View.of(anywhere, others, gone=around.dht.unreachable(), demand=demand.get(card.model_id, 0.0))
        found[card.model_id] = card.n_layers, view
    return _Views(found)


def _offers(settings: ServingSettings, around: Surroundings, limits: Limits, views: _Views) -> list[Offer]:
    """What could be served here. Blocks."""
    infos = {info.model_id: info for info in around.store.models()}
    offers = [_stored(settings, around, info, limits, views) for info in infos.values()]
    return offers + [
        _listed(entry, entry.model_id, limits, views)
        for entry in CATALOGUE
        if entry.model_id is not None and entry.model_id not in infos
    ]


def _stored(settings: ServingSettings, around: Surroundings, info: ModelInfo, limits: Limits, views: _Views) -> Offer:
    model = memory_model(settings, around, info)
    entry = next((entry for entry in CATALOGUE if entry.model_id == info.model_id), None)
    return Offer(
        ref=info.id_text if entry is None else entry.ref,
        name=info.name,
        model_id=info.model_id,
        n_bytes=sum(info.file_lengths),
        is_verified=entry is not None and entry.is_verified,
        fit=_fit(model, limits),
        view=views.of(info.model_id, model.cuts),
    )


def _fit(model: MemoryModel, limits: Limits) -> Fit:
    if model.span(model.whole).total <= _most(limits, limits.gpu_bytes):
        return Fit.WHOLE
    if model.cuts.refusal is not None:
        return Fit.NOTHING
    return Fit(min(model.span(span).total for span in model.smallest_spans) <= _most(limits))


def _listed(entry: CatalogueEntry, model_id: bytes, limits: Limits, views: _Views) -> Offer:
    """A model that is not here yet: whether a part of it fits is seen when it is."""
    fit = Fit.WHOLE if entry.memory_bytes <= _most(limits) else Fit.PART
    view = views.of(model_id, LegalCuts(entry.n_layers, tuple(range(entry.n_layers)), None))
    return Offer(entry.ref, entry.name, model_id, entry.n_bytes, entry.is_verified, fit, view)


def _most(limits: Limits, gpu_bytes: int = 0) -> int:
    free = limits.room.free + gpu_bytes
    return free if limits.allowed is None else min(free, limits.allowed)
