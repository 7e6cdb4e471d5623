"""What publishers say of models, found in the swarm: by name, by id, and where else the files can be had.

The rule this file keeps: what is pinned here is not asked again; a name that nobody published stays what the cards say;
and a publisher that changed is an error that a person sees, never a model that he gets. A source out of a manifest is a
stranger's URL: it is asked at public addresses only, and what it gives is checked like any peer's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from meshswarm.artifacts.card import ModelCard
from meshswarm.artifacts.manifest import SignedManifest
from meshswarm.artifacts.manifest_exchange import MAX_ASKED, Holder, fetch_manifest_named, fetch_manifest_of
from meshswarm.artifacts.manifests import ManifestChangedError, Manifests
from meshswarm.artifacts.names import NAME_PATTERN, clean_name
from meshswarm.artifacts.sources.references import is_remote
from meshswarm.artifacts.store import Store
from meshswarm.config import Address
from meshswarm.dht.node import Dht
from meshswarm.errors import MeshswarmError
from meshswarm.identity import PeerId
from meshswarm.net.endpoint import Endpoint

MAX_MODELS_ASKED = 4
"""Of the models that cards give one name to, so many have their holders asked."""
MAX_SOURCES_USED = 3


class Published:
    """The manifests this peer has, and those of the swarm behind them."""

    def __init__(self, endpoint: Endpoint, dht: Dht, store: Store, manifests: Manifests) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._store = store
        self._manifests = manifests

    async def named(self, ref: str, cards: Iterable[ModelCard] = ()) -> SignedManifest | None:
        """The manifest that the name stands for: the pinned one, else what is found with the holders of the models that
        `cards` give that name, and with peers near here; the name is its publisher's from then on. None where nobody
        published it.

        Raises ManifestChangedError where it is claimed by another publisher than before, or by several.
        """
        name = clean_name(ref.removesuffix(".gguf"))
        if not NAME_PATTERN.fullmatch(name):
            return None
        known = await asyncio.to_thread(self._manifests.by_name, name)
        if known is not None:
            return known
        models = list(dict.fromkeys(card.model_id for card in cards))[:MAX_MODELS_ASKED]
        holders = await self._holders(models)
        if not holders:
            return None
        try:
            return await fetch_manifest_named(self._endpoint, self._manifests, self._store, name, holders)
        except ManifestChangedError:
            raise
        except MeshswarmError:
            return None

    async def of(self, model_id: bytes) -> SignedManifest | None:
        """What is said of a model, by whomever; None where nobody who was asked knows of it."""
        header = None
        if await asyncio.to_thread(self._store.has_header, model_id):
            header = await asyncio.to_thread(self._store.header, model_id)
        known = await asyncio.to_thread(self._manifests.by_id, model_id, header=header)
        if known is not None:
            return known
        holders = await self._holders([model_id])
        with contextlib.suppress(MeshswarmError):
            return await fetch_manifest_of(self._endpoint, self._manifests, self._store, model_id, holders)
        return None

    async def model_of_source(self, ref: str) -> bytes | None:
        """The id of the model that `ref` gave when it was last fetched or read here."""
        return await asyncio.to_thread(self._manifests.source, ref)

    async def sources(self, model_id: bytes, *own: str) -> tuple[str, ...]:
        """Where on the web the model can be had: `own`, which a person named, before those of its manifest."""
        signed = await self.of(model_id)
        said = () if signed is None else signed.manifest.sources
        return tuple(dict.fromkeys((*own, *filter(is_remote, said))))[: MAX_SOURCES_USED + len(own)]

    async def _holders(self, model_ids: Sequence[bytes]) -> list[Holder]:
        """Who may have manifests of these models: those that hold them, and then whoever is near."""
        found: dict[PeerId, tuple[Address, ...]] = {}
        for model_id in model_ids:
            for record in await self._dht.holders(model_id):
                found.setdefault(record.peer, record.addresses)
        found.pop(self._endpoint.peer_id, None)
        for peer, addresses in self._dht.known_peers():
            if len(found) >= MAX_ASKED:
                break
            found.setdefault(peer, addresses)
        return list(found.items())
