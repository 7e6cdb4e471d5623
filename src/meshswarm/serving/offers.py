"""What a peer could serve: the models on its disk, those of the catalogue, and those that its swarm serves.

The rule this file keeps: it gathers, and fetches nothing; of a model that is not here, what it says is what others say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.manifests.catalogue import CatalogueEntry
from meshswarm.artifacts.manifests.trust import Manifests
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.routing.choice import Limits
from meshswarm.routing.demand import Fit, Offer
from meshswarm.routing.view import ENOUGH_HOLDERS, View
from meshswarm.serving.hearsay import Hearsay
from meshswarm.serving.layers import memory_model
from meshswarm.serving.reach import is_fetched
from meshswarm.serving.settings import ServingSettings, Surroundings
from meshswarm.stage.families.cuts import LegalCuts
from meshswarm.stage.sizes.memory import PROCESS_BYTES, MemoryModel

MAX_LOOKED_AT = 32  # models
MAX_WELL_HELD = 8
SLACK_PERCENT = 105
"""What is published of a model's size is rounded."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A model that somebody here says he serves."""

    card: ModelCard
    view: View


async def offers_of(
    settings: ServingSettings,
    around: Surroundings,
    hearsay: Hearsay,
    limits: Limits,
    *,
    only: Collection[bytes] | None = None,
) -> list[Offer]:
    """All that could be served here within `limits`, with who serves it and how often it is asked for; `only`: of these
    models."""
    seen = await _seen(around, hearsay, only)
    offers = await asyncio.to_thread(_offers, settings, around, limits, seen)
    return [offer for offer in offers if only is None or offer.model_id in only]


async def _seen(around: Surroundings, hearsay: Hearsay, only: Collection[bytes] | None) -> Mapping[bytes, _Seen]:
    cards = [card for card, _ in await around.dht.models(fresh=True)]
    cards = [card for card in cards if only is None or card.model_id in only]
    found, demand = {}, hearsay.demand()
    for card in worth_looking_at(cards, hearsay):
        records = await around.dht.coverage(card.model_id, card.n_layers)
        others = [record for record in records if record.peer != around.identity.peer_id]
        cuts = _anywhere(card.n_layers)
        view = View.of(cuts, others, gone=around.dht.unreachable(), demand=demand.get(card.model_id, 0.0))
        found[card.model_id] = _Seen(card, view)
    return found


def worth_looking_at(cards: Sequence[ModelCard], hearsay: Hearsay) -> list[ModelCard]:
    """Whose holders to ask the table for, of models with most holders first. Whoever wants to may name hundreds, so it
    is `MAX_LOOKED_AT`; and of those that several peers call well held only the `MAX_WELL_HELD` most asked for."""
    lacking: list[ModelCard] = []
    asked_for: dict[ModelCard, float] = {}
    for card in cards:
        told = hearsay.told(card.model_id, card.n_layers)
        if told is None or min(told.holders) < ENOUGH_HOLDERS:
            lacking.append(card)
        else:
            asked_for[card] = told.requests_per_s
    most_asked = sorted(asked_for, key=lambda card: -asked_for[card])[:MAX_WELL_HELD]
    return [*lacking[: MAX_LOOKED_AT - len(most_asked)], *most_asked]


def _offers(
    settings: ServingSettings, around: Surroundings, limits: Limits, seen: Mapping[bytes, _Seen]
) -> list[Offer]:
    """Blocks."""
    entries = Manifests(around.home.root).catalogue()
    infos = {info.model_id: info for info in around.store.models()}
    listed = [entry for entry in entries if entry.model_id not in infos]
    offers = [_stored(settings, around, info, entries, limits, seen) for info in infos.values()]
    offers += [offer for entry in listed for offer in _listed(around, entry, limits, seen)]
    if around.library is not None:
        known = infos.keys() | {entry.model_id for entry in listed}
        offers += [_foreign(each, limits) for each in seen.values() if each.card.model_id not in known]
    return offers


def _stored(
    settings: ServingSettings,
    around: Surroundings,
    info: ModelInfo,
    entries: Collection[CatalogueEntry],
    limits: Limits,
    seen: Mapping[bytes, _Seen],
) -> Offer:
    """A model on this disk, or one whose header is here."""
    model = memory_model(settings, around, info)
    entry = next((entry for entry in entries if entry.model_id == info.model_id), None)
    return Offer(
        ref=info.id_text if entry is None else entry.ref,
        name=info.name,
        model_id=info.model_id,
        n_bytes=sum(info.file_lengths),
        is_verified=entry is not None and entry.is_verified,
        fit=fit_of(model, limits),
        view=_view(seen, info.model_id, model.cuts),
    )


def _listed(around: Surroundings, entry: CatalogueEntry, limits: Limits, seen: Mapping[bytes, _Seen]) -> list[Offer]:
    """A model of the catalogue that is not here: whether a part of it fits is seen when it is. Where others serve it,
    its layers come from them, or else all of it from where it comes from."""
    view = None if entry.model_id is None else _view(seen, entry.model_id, _anywhere(entry.n_layers))
    memory_bytes = entry.memory_bytes if entry.is_verified else entry.memory_bytes * SLACK_PERCENT // 100
    whole = Offer(
        ref=entry.ref,
        name=entry.name,
        model_id=entry.model_id,
        n_bytes=entry.n_bytes,
        is_verified=entry.is_verified,
        fit=_guessed_fit(memory_bytes, entry.n_layers, limits),
        view=view,
        to_fetch=0 if is_fetched(entry.ref) else entry.n_bytes,
        warning=entry.warning,
    )
    if entry.model_id is None or not whole.is_served or around.library is None:
        return [whole]
    layers = replace(whole, ref=model_id_text(entry.model_id), to_fetch=_to_fetch(entry.n_bytes, limits))
    return [layers, whole]


def _foreign(seen: _Seen, limits: Limits) -> Offer:
    """A model that only peers have. Its size is what they say, until its header is here."""
    card, n_bytes = seen.card, sum(seen.card.file_lengths)
    return Offer(
        ref=model_id_text(card.model_id),
        name=card.name,
        model_id=card.model_id,
        n_bytes=n_bytes,
        is_verified=False,
        fit=_guessed_fit(n_bytes * SLACK_PERCENT // 100 + PROCESS_BYTES, card.n_layers, limits),
        view=seen.view,
        to_fetch=_to_fetch(n_bytes, limits),
        warning=f"{card.name} is unverified: peers of this swarm serve it, and nothing else is known of it here",
    )


def _guessed_fit(memory_bytes: int, n_layers: int, limits: Limits) -> Fit:
    """How much of a model fits that takes so much whole, as far as can be said without its header."""
    if memory_bytes <= most(limits):
        return Fit.WHOLE
    one_layer = max(0, memory_bytes - PROCESS_BYTES) // n_layers + PROCESS_BYTES
    return Fit.PART if one_layer <= most(limits) else Fit.NOTHING


def _to_fetch(n_bytes: int, limits: Limits) -> int:
    """At most so much of a model comes over the network where peers send layers: what memory can hold."""
    return min(n_bytes, most(limits))


def fit_of(model: MemoryModel, limits: Limits) -> Fit:
    """How much of a model whose header is here this machine has room for."""
    if model.span(model.whole).total <= most(limits, limits.gpu_bytes):
        return Fit.WHOLE
    if model.cuts.refusal is not None:
        return Fit.NOTHING
    return Fit(min(model.span(span).total for span in model.smallest_spans) <= most(limits))


def most(limits: Limits, gpu_bytes: int = 0) -> int:
    """Bytes that may be taken."""
    free = limits.room.free + gpu_bytes
    return free if limits.allowed is None else min(free, limits.allowed)


def _view(seen: Mapping[bytes, _Seen], model_id: bytes, cuts: LegalCuts) -> View | None:
    """Who serves it; None where nobody does, or where its card lies about its layers."""
    found = seen.get(model_id)
    if found is None or found.card.n_layers != cuts.n_layers:
        return None
    return replace(found.view, cuts=cuts, memo={})


def _anywhere(n_layers: int) -> LegalCuts:
    return LegalCuts(n_layers, tuple(range(n_layers)), None)
