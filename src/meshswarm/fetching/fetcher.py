"""Fetching what is missing of a model: from all who hold it at once, and from the web.

The rule this file keeps: what arrives is checked piece by piece before it counts, and noted when it is on disk, so that
a fetch that is cut off at any moment goes on from there. One model is fetched once at a time: whoever wants more of it
waits, sees how far it is, and finds the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from meshswarm.artifacts.store.changed import parts_left, read_piece
from meshswarm.artifacts.store.store import Store
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.torrent import Torrent
from meshswarm.dht.node import Dht
from meshswarm.errors import ArtifactError, MeshswarmError
from meshswarm.fetching.fetch import Fetch, Wanted
from meshswarm.fetching.plan import FetchProgress, missing_pieces
from meshswarm.fetching.rates import Pacer
from meshswarm.fetching.room import Room
from meshswarm.fetching.scout import Outlaws, Scout
from meshswarm.fetching.shelf import Shelf
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

ProgressOf = Callable[[FetchProgress], None]
Warn = Callable[[str], None]

SETTLE_S = 30.0
"""How long pieces that were taken from this disk may take to be written."""


class Fetcher:
    """`fetch` what is wanted. `warn` gets sentences for a person; `room`: what a person allows on disk;
    `shares`: files stay open for others; `down_bytes_s`: the most that comes from the web, 0 for no limit."""

    def __init__(
        self,
        endpoint: Endpoint,
        dht: Dht,
        swarm: Swarm,
        store: Store,
        shelf: Shelf,
        *,
        warn: Warn,
        room: Room,
        shares: bool = True,
        down_bytes_s: int = 0,
    ) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._swarm = swarm
        self._store = store
        self._shelf = shelf
        self._warn = warn
        self._room = room
        self._shares = shares
        self._pacer = Pacer(down_bytes_s)
        self._outlaws = Outlaws()
        self._locks: dict[bytes, asyncio.Lock] = {}
        self._listeners: dict[bytes, list[ProgressOf]] = {}

    @property
    def fetching(self) -> list[bytes]:
        """Ids of the models that are being fetched."""
        return [model_id for model_id, lock in self._locks.items() if lock.locked()]

    def is_fetching(self, model_id: bytes) -> bool:
        """Whether more of this model is coming."""
        lock = self._locks.get(model_id)
        return lock is not None and lock.locked()

    def scout(self, model_id: bytes, contents: Sequence[Content]) -> Scout:
        """Who looks for holders of a model."""
        return Scout(self._endpoint, self._dht, self._swarm, self._outlaws, model_id, contents)

    async def missing(self, wanted: Wanted) -> tuple[frozenset[int], ...]:
        """The pieces of each file that would have to be fetched. The model's header must be known."""
        files = await asyncio.to_thread(self._store.files, wanted.model_id)
        held = await asyncio.to_thread(self._store.ranges, wanted.model_id)
        return tuple(
            missing_pieces(Content(*file), ranges, have)
            for file, ranges, have in zip(files, wanted.files, held, strict=True)
        )

    async def fetch(self, wanted: Wanted, progress: ProgressOf | None = None) -> None:
        """All of `wanted` is on disk when this returns. The model's header must be known.

        Raises ArtifactError, saying why, when it cannot be had now; what has come stays.
        """
        model_id = wanted.model_id
        listeners = self._listeners.setdefault(model_id, [])
        if progress is not None:
            listeners.append(progress)
        try:
            async with self._locks.setdefault(model_id, asyncio.Lock()):
                while any(missing := await self.missing(wanted)):
                    generation = self._shelf.generation
                    try:
                        async with self._room.made(wanted):
                            await self._fetch(wanted, missing)
                    except ArtifactError:
                        if self._shelf.generation == generation:
                            raise  # else the session was replaced meanwhile: on with the new one
        finally:
            if progress is not None:
                listeners.remove(progress)

    async def _fetch(self, wanted: Wanted, missing: Sequence[frozenset[int]]) -> None:
        model_id = wanted.model_id
        contents = [Content(*file) for file in await asyncio.to_thread(self._store.files, model_id)]
        scout = self.scout(model_id, contents)
        try:
            await scout.look(0)
            if not scout.n_holders:
                info = await asyncio.to_thread(self._store.describe, model_id, wanted.name)
                with contextlib.suppress(MeshswarmError):
                    await scout.count_servers(info.n_layers)
            await self._piece_layers(scout, model_id, contents)
            torrents = await self._shelf.open(model_id)
            missing = [pieces - torrent.have() for pieces, torrent in zip(missing, torrents, strict=True)]
            await self._from_headers(model_id, contents, torrents)
            await self._from_changed_files(model_id, contents, torrents, missing)
            await Fetch(self, wanted, contents, torrents, missing, scout).run()
        finally:
            await scout.close()
            if not self._shares:
                await self._shelf.close(model_id)

    async def _from_headers(self, model_id: bytes, contents: Sequence[Content], torrents: Sequence[Torrent]) -> None:
        """The pieces that lie in the proved headers are here already; others may want them of this peer too."""
        header = await asyncio.to_thread(self._store.header, model_id)
        for part, content, torrent in zip(header.files, contents, torrents, strict=True):
            for piece in sorted(content.pieces_within([range(part.data_offset)]) - torrent.have()):
                place = content.piece_range(piece)
                await torrent.add_piece(piece, part.raw[place.start : place.stop])

    async def _from_changed_files(
        self,
        model_id: bytes,
        contents: Sequence[Content],
        torrents: Sequence[Torrent],
        missing: Sequence[frozenset[int]],
    ) -> None:
        """What is still right in files that were imported and changed since need not come from anybody."""
        left = await asyncio.to_thread(parts_left, self._store, model_id)
        for (path, ranges), content, torrent, wanted in zip(left, contents, torrents, missing, strict=False):
            for piece in sorted((content.pieces_within(ranges) & wanted) - torrent.have()):
                place = content.piece_range(piece)
                data = await asyncio.to_thread(read_piece, path, place)
                if len(data) == len(place):
                    await torrent.add_piece(piece, data)
            if ranges:
                await torrent.settle(SETTLE_S)  # until it is written: what is here is asked of nobody

    async def _piece_layers(self, scout: Scout, model_id: bytes, contents: Sequence[Content]) -> None:
        """See that pieces can be checked, before any is asked for."""
        for file in range(len(contents)):
            if await asyncio.to_thread(self._store.piece_layer, model_id, file) is None:
                layer = await scout.piece_layer(file)
                await asyncio.to_thread(self._store.save_piece_layer, model_id, file, layer)

    # -- for a fetch that runs

    @property
    def torrent_port(self) -> int:
        """Where others may take pieces from this peer; 0 for nowhere."""
        return self._shelf.torrent_port if self._shares else 0

    def tell(self, model_id: bytes, progress: FetchProgress) -> None:
        """Whoever waits for this model sees how far it is."""
        for listener in list(self._listeners.get(model_id, ())):
            listener(progress)

    async def pace(self, n_bytes: int) -> None:
        """Wait until so many more bytes may come from the web."""
        await asyncio.sleep(self._pacer.wait_s(n_bytes, asyncio.get_running_loop().time()))

    def warn(self, sentence: str) -> None:
        self._warn(sentence)

    async def note(self, wanted: Wanted, contents: Sequence[Content], torrents: Sequence[Torrent]) -> None:
        """Keep in mind what is on the disk, and have the rest written."""
        ranges = [content.ranges_of(torrent.have()) for content, torrent in zip(contents, torrents, strict=True)]
        for torrent in torrents:
            torrent.flush()
        await asyncio.to_thread(self._store.note_ranges, wanted.model_id, wanted.name, ranges)
