"""What a publisher can give of models that it has nothing of: the hashes that their pieces are checked by.

The rule this file keeps: only models that this peer itself published, and whose header and piece layers it proved once,
are told of; and it says plainly that it has no pieces.
"""

from __future__ import annotations

import asyncio
import contextlib

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.manifests.trust import Manifests
from meshswarm.artifacts.store.store import Store
from meshswarm.artifacts.torrent.content import Content
from meshswarm.dht.holders import HolderRecord
from meshswarm.dht.node import Dht
from meshswarm.errors import MeshswarmError
from meshswarm.fetching.exchange import Bits, Held
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint

LOOK_S = 3.0
MAX_PUBLISHED = 64
"""Models. Of each the piece layers are in memory, 32 bytes a piece."""


class Hashes:
    """What strangers are told of: the models that are `held`, and behind them those that were only published."""

    def __init__(
        self, endpoint: Endpoint, identity: Identity, dht: Dht, store: Store, manifests: Manifests, held: Held
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._dht = dht
        self._store = store
        self._manifests = manifests
        self._held = held
        self._known: dict[bytes, tuple[tuple[Content, ...], tuple[bytes, ...]]] = {}

    @property
    def torrent_port(self) -> int:
        return self._held.torrent_port

    def contents(self, model_id: bytes) -> tuple[Content, ...] | None:
        known = self._known.get(model_id)
        return self._held.contents(model_id) or (None if known is None else known[0])

    def pieces(self, model_id: bytes) -> tuple[Bits, ...]:
        if self._held.contents(model_id) is not None:
            return self._held.pieces(model_id)
        return tuple(frozenset() for _ in self._known[model_id][0])

    def piece_layer(self, model_id: bytes, file: int) -> bytes:
        if self._held.contents(model_id) is not None:
            return self._held.piece_layer(model_id, file)
        return self._known[model_id][1][file]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """See what was published here and is not held, and announce it."""
        for model_id in await asyncio.to_thread(self._published):
            if model_id in self._known or self._held.contents(model_id) is not None:
                continue
            found = await asyncio.to_thread(self._read, model_id)
            if found is not None:
                self._known[model_id] = found
                with contextlib.suppress(MeshswarmError):
                    await self._announce(model_id)
        for model_id in [each for each in self._known if self._held.contents(each) is not None]:
            del self._known[model_id]  # whoever holds it announces it otherwise

    def _published(self) -> list[bytes]:
        pins = self._manifests.pins()
        own = [pin.signed for pin in pins if pin.publisher == self._identity.peer_id and pin.signed is not None]
        return [signed.manifest.model_id for signed in own][:MAX_PUBLISHED]

    def _read(self, model_id: bytes) -> tuple[tuple[Content, ...], tuple[bytes, ...]] | None:
        """The model's files and their piece layers; None where a part of that is not here."""
        if not self._store.has_header(model_id):
            return None
        contents = self._store.contents(model_id)
        layers = [self._store.piece_layer(model_id, file) for file in range(len(contents))]
        known = tuple(layer for layer in layers if layer is not None)
        return (contents, known) if len(known) == len(contents) else None

    async def _announce(self, model_id: bytes) -> None:
        signed = await asyncio.to_thread(self._manifests.by_id, model_id)
        if signed is None:
            return
        info = await asyncio.to_thread(self._store.describe, model_id, signed.manifest.name)
        where = tuple(self._endpoint.addresses)
        await self._dht.publish_card(ModelCard.of(info).sign(self._identity))
        await self._dht.say_holding(HolderRecord(self._identity.peer_id, where, model_id, torrent_port=0))
