"""What publishers say of models, found in the swarm: by name, by id, and where else the files can be had.

The rule this file keeps: what is pinned here is not asked again; a name that nobody published stays what the cards say;
and a publisher that changed is an error that a person sees, never a model that he gets. A source out of a manifest is a
stranger's URL: it is asked at public addresses only, and what it gives is checked like any peer's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from meshswarm.artifacts.manifest_exchange import Holder, fetch_manifest_named, fetch_manifest_of
from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.manifests.manifest import SignedManifest
from meshswarm.artifacts.manifests.trust import ManifestChangedError, Manifests
from meshswarm.artifacts.names import NAME_PATTERN, clean_name
from meshswarm.artifacts.sources.references import is_remote
from meshswarm.artifacts.store.store import Store
from meshswarm.dht.node import Dht
from meshswarm.errors import MeshswarmError
from meshswarm.net.endpoint import Endpoint

MAX_MODELS_ASKED = 4
MAX_SOURCES_USED = 3


class Published:
    """The manifests this peer has, and those of the swarm behind them."""

    def __init__(self, endpoint: Endpoint, dht: Dht, store: Store, manifests: Manifests) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._store = store
        self._manifests = manifests

    async def named(self, ref: str, cards: Iterable[ModelCard] = ()) -> SignedManifest | None:
        """The manifest that the name stands for: the pinned one; else what those say who hold the model that `cards`
        give the name, or where no card does, peers near here; the name is its publisher's from then on. None where
        nobody published it, and where cards give the name to several models: nobody is trusted because he came first.

        Raises ManifestChangedError where it is claimed by another publisher than before, by several, or for another
        model than the card's.
        """
        name = clean_name(ref.removesuffix(".gguf"))
        if not NAME_PATTERN.fullmatch(name):
            return None
        pin = await asyncio.to_thread(self._manifests.pin, name)
        if pin is not None and pin.signed is not None:
            return pin.signed
        models = list({card.model_id for card in cards})[:MAX_MODELS_ASKED]
        if pin is None and len(models) > 1:
            return None
        model_id = models[0] if models else None
        holders = [holder for each in models for holder in await self._holders(each)] if models else self._near()
        if not holders:
            return None
        try:
            return await fetch_manifest_named(
                self._endpoint, self._manifests, self._store, name, holders, model_id=model_id
            )
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
        holders = await self._holders(model_id) or self._near()
        with contextlib.suppress(MeshswarmError):
            return await fetch_manifest_of(self._endpoint, self._manifests, self._store, model_id, holders)
        return None

    async def model_of_source(self, ref: str) -> bytes | None:
        """The id of the model that `ref` gave here before, or by the word of a publisher whose name for it was accepted
        here. Others' word would be worth nothing: whoever claims a famous file could have his own fetched for it."""
        return await asyncio.to_thread(self._model_of_source, ref)

    def _model_of_source(self, ref: str) -> bytes | None:
        seen = self._manifests.source(ref)
        trusted = [pin.signed.manifest for pin in self._manifests.pins() if pin.signed is not None]
        told = (
            each.model_id for each in trusted if any(ref in (said, said.partition("@")[0]) for said in each.sources)
        )
        return seen or next(told, None)

    async def sources(self, model_id: bytes) -> tuple[str, ...]:
        """Where on the web the model can be had, as its manifest says: servers and hubs, which give parts of files."""
        signed = await self.of(model_id)
        return () if signed is None else tuple(filter(is_remote, signed.manifest.sources))[:MAX_SOURCES_USED]

    async def _holders(self, model_id: bytes) -> list[Holder]:
        records = await self._dht.holders(model_id)
        return [(record.peer, record.addresses) for record in records if record.peer != self._endpoint.peer_id]

    def _near(self) -> list[Holder]:
        return list(self._dht.known_peers())
