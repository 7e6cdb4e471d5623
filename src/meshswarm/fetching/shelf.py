"""The model files that are open for pieces to come and go: which, in what state, in one torrent session.

The rule this file keeps: a file is open once, however many want it; what strangers are told of it is what the session
says is here; and the session starts when the first file needs it, so that a peer without any opens no port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from meshswarm.artifacts.merkle import piece_layer
from meshswarm.artifacts.store.store import Store
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.session import TorrentSession
from meshswarm.artifacts.torrent.torrent import Torrent
from meshswarm.errors import ArtifactError
from meshswarm.fetching.exchange import Bits


@dataclass(slots=True)
class Shared:
    """A model whose files are open."""

    contents: tuple[Content, ...]
    layers: tuple[bytes, ...]
    torrents: tuple[Torrent, ...] = field(default=())


class Shelf:
    """`open` a model, ask what is here of it, `close` it. `start`: makes the session."""

    def __init__(self, store: Store, start: Callable[[], Awaitable[TorrentSession]]) -> None:
        self._store = store
        self._start = start
        self._session: TorrentSession | None = None
        self._starting = asyncio.Lock()
        self._opening: dict[bytes, asyncio.Lock] = {}  # by model
        self._shared: dict[bytes, Shared] = {}
        self._limits = (0, 0)
        self.generation = 0
        """Rises with every new session after a change of keys."""

    # -- what strangers may be told

    @property
    def torrent_port(self) -> int:
        """Where pieces are given away: TCP; 0 while the session has not been needed."""
        return 0 if self._session is None else self._session.port

    def contents(self, model_id: bytes) -> tuple[Content, ...] | None:
        """The files of a model that is open here; None: it is not."""
        shared = self._shared.get(model_id)
        return None if shared is None else shared.contents

    def pieces(self, model_id: bytes) -> tuple[Bits, ...]:
        """What is here of each file of an open model."""
        shared = self._shared[model_id]
        return tuple(
            None if len(have) == content.n_pieces else have
            for content, have in zip(shared.contents, (torrent.have() for torrent in shared.torrents), strict=True)
        )

    def piece_layer(self, model_id: bytes, file: int) -> bytes:
        """The hashes of the pieces of an open model's file."""
        return self._shared[model_id].layers[file]

    # -- for this peer

    @property
    def open_models(self) -> list[bytes]:
        """Ids of the models that are open."""
        return list(self._shared)

    def torrents(self, model_id: bytes) -> tuple[Torrent, ...]:
        """Those of an open model's files, in order; none when it is not open."""
        shared = self._shared.get(model_id)
        return () if shared is None else shared.torrents

    @property
    def sent_bytes(self) -> int:
        """Payload given to others since the files were opened."""
        return sum(
            {
                torrent.content.root: torrent.sent_bytes for each in self._shared.values() for torrent in each.torrents
            }.values()
        )

    def limit(self, down_bytes_s: int, up_bytes_s: int) -> None:
        """Bytes a second for all files together; 0: as many as there are."""
        self._limits = down_bytes_s, up_bytes_s
        if self._session is not None:
            self._session.limit(*self._limits)

    async def open(self, model_id: bytes) -> tuple[Torrent, ...]:
        """The torrents of a model's files, open until `close`. Their piece layers must be in the store, or the whole
        files. Raises ArtifactError."""
        async with self._opening.setdefault(model_id, asyncio.Lock()):
            shared = self._shared.get(model_id)
            if shared is None or any(torrent.failure is not None for torrent in shared.torrents):
                shared = await self._open(model_id)
                self._shared[model_id] = shared
            return shared.torrents

    async def close(self, model_id: bytes) -> None:
        """Give and take nothing more of this model. Files that another open model shares stay open."""
        async with self._opening.setdefault(model_id, asyncio.Lock()):
            shared = self._shared.pop(model_id, None)
            if shared is None or self._session is None:
                return
            used = {content.root for other in self._shared.values() for content in other.contents}
            for content in {content.root: content for content in shared.contents if content.root not in used}.values():
                await self._session.remove(content)

    async def renew(self) -> None:
        """Close everything; what is opened from now on is in a new session."""
        async with self._starting:
            self.generation += 1
            await self.stop()

    async def stop(self) -> None:
        """End the session; what it has is kept in mind for the next start."""
        session, self._session = self._session, None
        self._shared.clear()
        if session is not None:
            await session.close()

    async def session(self) -> TorrentSession:
        """The session, started if it was not needed before."""
        async with self._starting:
            if self._session is None:
                self._session = await self._start()
                self._session.limit(*self._limits)
            return self._session

    async def _open(self, model_id: bytes) -> Shared:
        store = self._store
        contents = tuple(Content(length, root) for length, root in await asyncio.to_thread(store.files, model_id))
        paths = await asyncio.to_thread(store.paths, model_id)
        layers = [
            await self._layer(model_id, file, content, None if paths is None else paths[file])
            for file, content in enumerate(contents)
        ]
        session = await self.session()
        held = () if paths is not None else await asyncio.to_thread(store.ranges, model_id)
        opened: dict[bytes, Torrent] = {
            content.root: torrent
            for shared in self._shared.values()
            for content, torrent in zip(shared.contents, shared.torrents, strict=True)
            if torrent.failure is None
        }
        torrents = []
        for file, content in enumerate(contents):
            torrent = opened.get(content.root)
            if torrent is None and paths is not None:
                torrent = await session.seed(content, paths[file], layers[file])
            elif torrent is None:
                path = await asyncio.to_thread(store.piece_file, model_id, file)
                torrent = await session.open(content, path, layers[file], have=held[file])
            assert torrent is not None
            opened[content.root] = torrent
            torrents.append(torrent)
        return Shared(contents, tuple(layers), tuple(torrents))

    async def _layer(self, model_id: bytes, file: int, content: Content, path: Path | None) -> bytes:
        """The hashes of a file's pieces; of a whole file they are worked out where they were not kept."""
        kept = await asyncio.to_thread(self._store.piece_layer, model_id, file)
        if kept is not None:
            return kept
        if path is None:
            raise ArtifactError("the hashes of a model's pieces are not here, so none of them can be checked")
        _, layer = await asyncio.to_thread(piece_layer, path, content.piece_length)
        await asyncio.to_thread(self._store.save_piece_layer, model_id, file, layer)
        return layer
