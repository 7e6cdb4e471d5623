"""Which models this head can talk about: the ones on its disk and the ones the swarm's cards name.

The rule this file keeps: a name is a convenience and may be shared; the id decides. A name that several models share
means the one on this disk; when that is none or more than one, the answer is their ids, never a guess. The disk is
read in threads: it may be slow, or at the other end of a network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from meshswarm.artifacts.card import ModelCard
from meshswarm.artifacts.header_exchange import fetch_header
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.names import matches
from meshswarm.artifacts.store import Store
from meshswarm.artifacts.tokenizer import token_list_mark
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import RequestError, UnknownModelError
from meshswarm.head.request import ModelListing
from meshswarm.head.template import ChatTemplate
from meshswarm.head.vocabulary import Vocabulary
from meshswarm.net.endpoint import Endpoint
from meshswarm.span import Span, missing_layers
from meshswarm.stage.engine.profile import exact_obstacle

MAX_FOREIGN = 32


class Voice:
    """What turns a model's text into tokens and back: its vocabulary and its chat template.

    `card` is what the model's own header says of it, whatever the swarm's cards claim. `token_list` marks the
    vocabulary (`token_list_mark`).
    """

    def __init__(
        self, card: ModelCard, vocabulary: Vocabulary, encodings: Iterable[str], token_list: bytes = b""
    ) -> None:
        self.card = card
        self.token_list = token_list
        self.vocabulary = vocabulary
        self.exact_obstacle = exact_obstacle(encodings)
        """Why the model has no exact profile; None when it has."""

    @cached_property
    def template(self) -> ChatTemplate:
        """Compiled at the first chat, so that a broken template leaves raw completions alone. Raises RequestError."""
        return ChatTemplate(self.vocabulary.chat_template)


class ModelDirectory:
    """Resolves what a client calls a model, and keeps each model's `Voice` once it was needed."""

    def __init__(self, endpoint: Endpoint, store: Store, dht: Dht, cache: Path) -> None:
        self._endpoint = endpoint
        self._store = store
        self._dht = dht
        self._cache = cache
        self._voices: dict[bytes, Voice] = {}
        self._loading: dict[bytes, asyncio.Lock] = {}
        self._created = int(time.time())
        self.preferred: bytes | None = None  # what a request without a model gets: the model served here, if any

    async def cards(self) -> dict[bytes, tuple[ModelCard, int]]:
        """Every model known, by id, with the number of its holders (0: only on this disk).

        Strangers' cards are claims: a header that was checked here outranks them.
        """
        known = {}
        for card, holders in await self._dht.models():
            voice = self._voices.get(card.model_id)
            known[card.model_id] = (card if voice is None else replace(voice.card, name=card.name), holders)
        for info in await asyncio.to_thread(self._store.models):
            _, holders = known.get(info.model_id, (None, 0))
            known[info.model_id] = (ModelCard.of(info), holders)
        return known

    async def _worth_listing(self) -> list[tuple[ModelCard, int]]:
        """Those on this disk, and of the others the `MAX_FOREIGN` with most holders: each costs a lookup, and whoever
        wants to may say that he holds hundreds."""
        known = await self.cards()
        held = {info.model_id for info in await asyncio.to_thread(self._store.models)}
        others = sorted((entry for model_id, entry in known.items() if model_id not in held), key=lambda e: -e[1])
        return [entry for model_id, entry in known.items() if model_id in held] + others[:MAX_FOREIGN]

    async def resolve(self, ref: str | None) -> ModelCard:
        """The model a client means. Raises UnknownModelError (with the names there are) or RequestError."""
        known = await self.cards()
        if ref is None:
            return self._default(known)
        named = [
            card
            for card, _ in known.values()
            if ref == model_id_text(card.model_id) or matches(ref, card.name, card.encoding)
        ]
        if len(named) == 1:
            return named[0]
        held = {info.model_id for info in await asyncio.to_thread(self._store.models)} if named else set()
        stored = [card for card in named if card.model_id in held]
        if len(stored) == 1:
            return stored[0]
        if named:
            ids = ", ".join(model_id_text(card.model_id) for card in named)
            raise RequestError(f"the name {ref!r} belongs to more than one model; use an id: {ids}", param="model")
        names = ", ".join(sorted(card.name for card, _ in known.values())) or "none yet"
        raise UnknownModelError(
            f"there is no model {ref[:100]!r}; the models are: {names}", param="model", code="model_not_found"
        )

    def _default(self, known: dict[bytes, tuple[ModelCard, int]]) -> ModelCard:
        if self.preferred in known:
            return known[self.preferred][0]
        served = sorted(known.values(), key=lambda entry: (-entry[1], entry[0].name))
        if not served:
            raise UnknownModelError("no model is known here yet", param="model", code="model_not_found")
        return served[0][0]

    async def listings(self, coverage: Callable[[ModelCard], Awaitable[list[CoverageRecord]]]) -> list[ModelListing]:
        """What `/v1/models` shows: every model that somebody serves or that lies on this disk. `coverage`: who serves
        layers of a model."""
        listings = []
        for card, holders in await self._worth_listing():
            records = await coverage(card)
            covered = covered_layers([record.span for record in records if record.loaded], card.n_layers)
            listings.append(
                ModelListing(
                    id=card.name,
                    model_id=model_id_text(card.model_id),
                    created=self._created,
                    n_ctx=max((record.n_ctx for record in records), default=card.n_ctx),
                    n_layers=card.n_layers,
                    covered=covered,
                    holders=holders,
                    ready=covered == (Span(0, card.n_layers),),
                )
            )
        return sorted(listings, key=lambda listing: (listing.id, listing.model_id))

    async def voice(self, card: ModelCard, records: Sequence[CoverageRecord]) -> Voice:
        """The model's vocabulary and template; its header is fetched from a holder when it is not on this disk."""
        async with self._loading.setdefault(card.model_id, asyncio.Lock()):
            voice = self._voices.get(card.model_id)
            if voice is None:
                if not await asyncio.to_thread(self._store.has_header, card.model_id):
                    holders = [(r.peer, r.addresses) for r in records if r.peer != self._endpoint.peer_id]
                    await fetch_header(self._endpoint, self._store, card.model_id, holders)
                voice = await asyncio.to_thread(self._load, card)
                self._voices[card.model_id] = voice
        return voice

    def _load(self, card: ModelCard) -> Voice:
        proved = ModelCard.of(self._store.describe(card.model_id, card.name))
        header = self._store.header(card.model_id)
        encodings = {tensor.type.name for tensor in header.tensors.values()}
        return Voice(proved, Vocabulary.load(header, self._cache), encodings, token_list_mark(header))


def covered_layers(spans: Sequence[Span], n_layers: int) -> tuple[Span, ...]:
    """The ranges of layers that `spans` cover together, merged and in order."""
    return missing_layers(missing_layers(spans, n_layers), n_layers)
