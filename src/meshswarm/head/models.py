"""Which models this head can talk about: the ones on its disk and the ones the swarm's cards name.

The rule this file keeps: a name is a convenience and may be shared; the id decides. A name that several models share
means the one on this disk; else the one its publisher has pinned; else the one it has meant here before; else the only
one that can be used, for which peers that were reached speak in most networks. When that leaves more than one, the
answer is their ids, never a guess. How many say a thing decides nothing: keys cost nothing. The disk is read in
threads: it may be slow, or at the other end of a network.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from meshswarm.artifacts.gguf.tokenizer import token_list_mark
from meshswarm.artifacts.header_exchange import fetch_header
from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.names import clean_name, matches
from meshswarm.artifacts.store.store import Store
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import RequestError, UnknownModelError
from meshswarm.head.names import RememberedNames
from meshswarm.head.namesakes import Judgement, Namesakes
from meshswarm.head.naming import Candidate
from meshswarm.head.request import ModelListing
from meshswarm.head.template import ChatTemplate
from meshswarm.head.vocabulary import Vocabulary
from meshswarm.identity import PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.routing.gossip.told import Told
from meshswarm.span import Span, missing_layers
from meshswarm.stage.engine.profile import exact_obstacle

MAX_FOREIGN = 32
LOOKED_UP = 8  # of the models that are listed; each costs a lookup
JUDGED_S = 60.0  # for so long it is remembered which of several models by one name can be used
MAX_JUDGED = 64


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


@dataclass(slots=True)
class _Known:
    """What is known of one model. `own`: its card by its file on this disk. `told`: what others say of it, and who."""

    own: ModelCard | None = None
    told: dict[ModelCard, set[PeerId]] = field(default_factory=dict)

    @property
    def holders(self) -> frozenset[PeerId]:
        return frozenset().union(*self.told.values())

    def named(self, ref: str) -> Candidate | None:
        """As those describe it who give it the name `ref`; of several descriptions the one that most give."""
        if self.own is not None:
            return Candidate(self.own, self.holders) if matches(ref, self.own.name, self.own.encoding) else None
        fitting = [card for card in self.told if matches(ref, card.name, card.encoding)]
        if not fitting:
            return None
        return Candidate(self._most(fitting), frozenset().union(*(self.told[card] for card in fitting)))

    def shown(self, met: Callable[[PeerId], bytes | None]) -> ModelCard:
        """As it is listed: what its holders in most networks say, as far as they were met, counts first."""
        return self.own or self._most(self.told, met)

    def _most(self, cards: Iterable[ModelCard], met: Callable[[PeerId], bytes | None] = lambda peer: None) -> ModelCard:
        return max(cards, key=lambda card: (_networks(self.told[card], met), len(self.told[card]), repr(card)))


class ModelDirectory:
    """Resolves what a client calls a model, and keeps each model's `Voice` once it was needed.

    `names`: what names have meant here before. `pinned(name)`: the model that a name belongs to by the word of its
    publisher, None where nobody has given it; it may block.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        store: Store,
        dht: Dht,
        cache: Path,
        names: RememberedNames | None = None,
        pinned: Callable[[str], bytes | None] = lambda name: None,
    ) -> None:
        self._endpoint = endpoint
        self._store = store
        self._dht = dht
        self._cache = cache
        self._names = names
        self._pinned = pinned
        self._voices: dict[bytes, Voice] = {}
        self._loading: dict[bytes, asyncio.Lock] = {}
        self._created = int(time.time())
        self._namesakes = Namesakes(endpoint, dht, self._prove)
        self._judging = asyncio.Lock()
        self._judged: OrderedDict[tuple[str, frozenset[bytes]], tuple[float, Judgement]] = OrderedDict()
        self.preferred: bytes | None = None  # what a request without a model gets: the model served here, if any

    async def cards(self, *, ask: bool = True) -> dict[bytes, tuple[ModelCard, int]]:
        """Every model known, by id, with the number of its holders (0: only on this disk).

        Strangers' cards are claims: a header that was checked here outranks them.
        """
        known = await self._known(ask=ask)
        return {each: (at.shown(self._dht.met_in), len(at.holders)) for each, at in known.items()}

    async def _known(self, *, ask: bool = True) -> dict[bytes, _Known]:
        known: dict[bytes, _Known] = {}
        for signed in await self._dht.cards(ask=ask):
            card = signed.card
            voice = self._voices.get(card.model_id)
            card = card if voice is None else replace(voice.card, name=card.name)
            known.setdefault(card.model_id, _Known()).told.setdefault(card, set()).add(signed.author)
        for info in await asyncio.to_thread(self._store.models):
            known.setdefault(info.model_id, _Known()).own = ModelCard.of(info)
            self._dht.learn_layers(info.model_id, info.n_layers)
        return known

    def _in_order(self, known: Iterable[_Known]) -> list[_Known]:
        """Those that are held in most networks first, as far as their holders were met: whoever wants to may say in
        hundreds of names that he holds hundreds of models."""

        def speaks(at: _Known) -> tuple[int, int, str, bytes]:
            card = at.shown(self._dht.met_in)
            return -_networks(at.holders, self._dht.met_in), -len(at.holders), card.name, card.model_id

        return sorted(known, key=speaks)

    async def _worth_listing(self, *, ask: bool) -> list[tuple[ModelCard, int]]:
        """Those on this disk, and `MAX_FOREIGN` of the others: each costs a lookup."""
        known = await self._known(ask=ask)
        held = [at for at in known.values() if at.own is not None]
        others = self._in_order(at for at in known.values() if at.own is None)
        return [(at.shown(self._dht.met_in), len(at.holders)) for at in [*held, *others[:MAX_FOREIGN]]]

    async def resolve(self, ref: str | None) -> ModelCard:
        """The model a client means. Raises UnknownModelError (with the names there are) or RequestError."""
        known = await self._known()
        if ref is None:
            return await self._default(known)
        for model_id, at in known.items():
            if ref == model_id_text(model_id):
                return at.shown(self._dht.met_in)
        named = {model_id: candidate for model_id, at in known.items() if (candidate := at.named(ref)) is not None}
        held = [model_id for model_id in named if known[model_id].own is not None]
        if len(held) == 1:
            return named[held[0]].card
        meant = await self._meant(ref, named)
        if meant is not None:
            return meant
        if len(named) == 1:
            return next(iter(named.values())).card
        if named:
            return await self._one_of(ref, [named[model_id] for model_id in held or named])
        names = ", ".join(sorted({at.shown(self._dht.met_in).name for at in known.values()})) or "none yet"
        raise UnknownModelError(
            f"there is no model {ref[:100]!r}; the models are: {names}", param="model", code="model_not_found"
        )

    async def answered(self, ref: str | None, model_id: bytes) -> None:
        """A client that asked for `ref` has got an answer of the model `model_id`, whose header was proved."""
        if ref is not None and ref != model_id_text(model_id) and self._names is not None:
            await asyncio.to_thread(self._names.keep, ref, model_id, time.time())

    async def _meant(self, ref: str, named: Mapping[bytes, Candidate]) -> ModelCard | None:
        """The model that `ref` belongs to by its publisher's word, or has meant here before. Raises RequestError where
        that one cannot be had and others go by the name now: which is meant is not to be guessed."""
        pinned = await asyncio.to_thread(self._pinned, clean_name(ref.removesuffix(".gguf")))
        used = None if self._names is None else await asyncio.to_thread(self._names.get, ref, time.time())
        model_id = pinned or used
        if model_id is None:
            return None
        card = named[model_id].card if model_id in named else None
        if await asyncio.to_thread(self._store.has_header, model_id):
            name = clean_name(ref) if card is None else card.name
            card = ModelCard.of(await asyncio.to_thread(self._store.describe, model_id, name))
        others = [candidate.card for each, candidate in named.items() if each != model_id]
        if card is not None and (not others or pinned or await self._is_served(card)):
            return card
        whose = "belongs by its publisher's word to" if pinned else "has meant here"
        also = f"; others are offered by that name: {_ids(others)}" if others else ""
        raise UnknownModelError(
            f"the name {ref[:100]!r} {whose} the model {model_id_text(model_id)}, which nobody is known to serve now"
            f"{also}; ask for a model by its id",
            param="model",
            code="model_not_found",
        )

    async def _is_served(self, card: ModelCard) -> bool:
        return any(record.loaded for record in await self._dht.coverage(card.model_id, card.n_layers))

    async def _one_of(self, ref: str, candidates: Sequence[Candidate]) -> ModelCard:
        """The one of several models that can be used, as far as it can be told. Raises RequestError."""
        judgement = await self._judge(ref, candidates)
        for found in (judgement.usable, judgement.alive):
            if len(found) == 1:
                return found[0]
            if found:
                break
        raise RequestError(
            f"the name {ref[:100]!r} belongs to more than one model; use an id: "
            f"{_ids(each.card for each in candidates)}",
            param="model",
        )

    async def _judge(self, ref: str, candidates: Sequence[Candidate]) -> Judgement:
        """Remembered for a while: it takes dials and lookups."""
        asked = ref, frozenset(each.card.model_id for each in candidates)
        async with self._judging:
            at, judgement = self._judged.get(asked, (float("-inf"), Judgement((), ())))
            if time.monotonic() - at > JUDGED_S:
                judgement = await self._namesakes.judge(candidates)
                self._judged[asked] = (time.monotonic(), judgement)
                if len(self._judged) > MAX_JUDGED:
                    self._judged.popitem(last=False)
        return judgement

    async def _default(self, known: dict[bytes, _Known]) -> ModelCard:
        """The model served here; else one that was used before, or lies here, and is whole; else of all others the one
        that most speaks for."""
        if self.preferred in known:
            return known[self.preferred].shown(self._dht.met_in)
        recent = [] if self._names is None else await asyncio.to_thread(self._names.recent, time.time())
        own = sorted((card for at in known.values() if (card := at.own) is not None), key=lambda card: card.name)
        near = [known[each].shown(self._dht.met_in) for each in recent if each in known] + own
        for card in near[:MAX_FOREIGN]:
            records = await self._dht.coverage(card.model_id, card.n_layers)
            if not missing_layers({record.span for record in records if record.loaded}, card.n_layers):
                return card
        others = self._in_order(at for at in known.values() if at.own is None)
        candidates = [Candidate(at.shown(self._dht.met_in), at.holders) for at in others]
        found: list[ModelCard] = []
        if len(candidates) + len(near) > 1:
            judgement = await self._judge("", candidates)
            found = sorted(judgement.usable or judgement.alive, key=lambda card: (card.name, card.model_id))
        for card in [*found, *near, *(each.card for each in candidates)]:
            return card
        raise UnknownModelError("no model is known here yet", param="model", code="model_not_found")

    async def _prove(self, card: ModelCard, records: Sequence[CoverageRecord]) -> ModelCard:
        """The card by the model's own header, which is fetched when it is not here."""
        await self._have_header(card.model_id, records)
        proved = ModelCard.of(await asyncio.to_thread(self._store.describe, card.model_id, card.name))
        self._dht.learn_layers(proved.model_id, proved.n_layers)
        return proved

    async def _have_header(self, model_id: bytes, records: Sequence[CoverageRecord]) -> None:
        if not await asyncio.to_thread(self._store.has_header, model_id):
            holders = [(r.peer, r.addresses) for r in records if r.peer != self._endpoint.peer_id]
            await fetch_header(self._endpoint, self._store, model_id, holders)

    async def listings(
        self,
        coverage: Callable[[ModelCard], Awaitable[list[CoverageRecord]]],
        *,
        ask: bool = True,
        told: Callable[[ModelCard], Told | None] = lambda card: None,
    ) -> list[ModelListing]:
        """What `/v1/models` shows: every model that somebody serves or that lies on this disk. `coverage`: who serves
        layers of a model. Without `ask`: as far as is known here, so `coverage` must not ask either. `told`: what
        others say together of a model; where that is the whole of it, all but the first few are not looked up."""
        listings = []
        for place, (card, holders) in enumerate(await self._worth_listing(ask=ask)):
            heard = told(card) if place >= LOOKED_UP or not ask else None
            if heard is not None and heard.is_whole:
                records, covered = [], heard.covered
            else:
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

    async def refresh(self, ready: Sequence[str], told: Callable[[ModelCard], Told | None]) -> None:
        """Asks again which models there are, and who serves one of those that are `ready` by their ids, the one served
        here first, so that they stay known. Where none is, who serves the first that would be listed."""
        cards = [card for card, _ in await self._worth_listing(ask=True)]
        known = [card for card in cards if model_id_text(card.model_id) in ready] or cards
        for card in sorted(known, key=lambda card: card.model_id != self.preferred)[:1]:
            heard = told(card)
            if heard is None or not heard.is_whole:
                await self._dht.coverage(card.model_id, card.n_layers)

    async def voice(self, card: ModelCard, records: Sequence[CoverageRecord]) -> Voice:
        """The model's vocabulary and template; its header is fetched from a holder when it is not on this disk."""
        async with self._loading.setdefault(card.model_id, asyncio.Lock()):
            voice = self._voices.get(card.model_id)
            if voice is None:
                await self._have_header(card.model_id, records)
                voice = await asyncio.to_thread(self._load, card)
                self._dht.learn_layers(card.model_id, voice.card.n_layers)
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


def _networks(peers: Iterable[PeerId], met: Callable[[PeerId], bytes | None]) -> int:
    """In how many networks `peers` were met."""
    return len({met(peer) for peer in peers} - {None})


def _ids(cards: Iterable[ModelCard]) -> str:
    return ", ".join(model_id_text(card.model_id) for card in cards)
