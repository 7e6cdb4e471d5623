"""Fetching what is missing of a model: from all who hold it at once, and from the web.

The rule this file keeps: what arrives is checked piece by piece before it counts, and noted when it is on disk, so that
a fetch that is cut off at any moment goes on from there. One model is fetched once at a time: whoever wants more of it
waits, sees how far it is, and finds the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.ranges import Ranges, merged
from meshswarm.artifacts.sources.http_source import HttpSource
from meshswarm.artifacts.sources.web_pieces import WebPieces
from meshswarm.artifacts.store import Store
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.torrent import Torrent
from meshswarm.dht.node import Dht
from meshswarm.errors import ArtifactError, MeshswarmError
from meshswarm.fetching.plan import Averages, FetchProgress, Portions, missing_pieces
from meshswarm.fetching.rates import Pacer
from meshswarm.fetching.scout import Outlaws, Scout
from meshswarm.fetching.shelf import Shelf
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

LOOK_S = 3.0
"""How often it is seen who else holds the model by now."""
TELL_S = 0.5
PATIENCE_S = 20.0
"""How long nothing may come from anybody before peers are looked for anew."""
WEB_PATIENCE_S = 5.0
"""The same while a server on the web can have what peers do not send."""
MAX_ROUNDS_IN_VAIN = 3
SAVE_S = 2.0
FILES_AT_ONCE = 4

ProgressOf = Callable[[FetchProgress], None]
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which bytes of a model are wanted: ranges of each file. `name`: what the model is called. `web`: the same files
    on servers, several of each."""

    model_id: bytes
    name: str
    files: tuple[Ranges, ...]
    web: tuple[tuple[HttpSource, ...], ...] = ()

    @classmethod
    def of(cls, model_id: bytes, name: str, files: Iterable[Iterable[range]]) -> Wanted:
        return cls(model_id, name, tuple(merged(ranges) for ranges in files))


class Fetcher:
    """`fetch` what is wanted. `warn` gets sentences for a person; `make_room(n_bytes, model_id)` blocks, and raises
    ArtifactError when the disk has no room for so much more of a model; `shares`: files stay open for others;
    `down_bytes_s`: the most that comes from the web, 0 for no limit."""

    def __init__(
        self,
        endpoint: Endpoint,
        dht: Dht,
        swarm: Swarm,
        store: Store,
        shelf: Shelf,
        *,
        warn: Warn,
        make_room: Callable[[int, bytes], None] = lambda n_bytes, model_id: None,
        shares: bool = True,
        down_bytes_s: int = 0,
    ) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._swarm = swarm
        self._store = store
        self._shelf = shelf
        self._warn = warn
        self._make_room = make_room
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
        n_bytes = sum(content.bytes_of(pieces) for content, pieces in zip(contents, missing, strict=True))
        await asyncio.to_thread(self._make_room, n_bytes, model_id)
        scout = self.scout(model_id, contents)
        await scout.look(0)
        await self._piece_layers(scout, model_id, contents)
        torrents = await self._shelf.open(model_id)
        try:
            await self._from_headers(model_id, contents, torrents)
            await _Fetch(self, wanted, contents, torrents, missing, scout).run()
        finally:
            if not self._shares:
                await self._shelf.close(model_id)

    async def _from_headers(self, model_id: bytes, contents: Sequence[Content], torrents: Sequence[Torrent]) -> None:
        """The pieces that lie in the proved headers are here already; others may want them of this peer too."""
        header = await asyncio.to_thread(self._store.header, model_id)
        for part, content, torrent in zip(header.files, contents, torrents, strict=True):
            for piece in sorted(content.pieces_within([range(part.data_offset)]) - torrent.have()):
                place = content.piece_range(piece)
                await torrent.add_piece(piece, part.raw[place.start : place.stop])

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


class _Fetch:
    """One fetch of one model, from its first connection to its last byte."""

    def __init__(
        self,
        fetcher: Fetcher,
        wanted: Wanted,
        contents: Sequence[Content],
        torrents: Sequence[Torrent],
        missing: Sequence[frozenset[int]],
        scout: Scout,
    ) -> None:
        self._fetcher = fetcher
        self._wanted = wanted
        self._contents = contents
        self._torrents = torrents
        self._scout = scout
        self._rate = Averages()
        web = wanted.web or tuple(() for _ in contents)
        self._web = [list(sources) for sources in web]
        self._missing = [pieces - torrent.have() for pieces, torrent in zip(missing, torrents, strict=True)]
        self._portions = [
            Portions(content, pieces, available=None, has_web=bool(sources))
            for content, pieces, sources in zip(contents, self._missing, self._web, strict=True)
        ]
        self._feeders: list[WebPieces] = []
        self._files = asyncio.Semaphore(FILES_AT_ONCE)

    async def run(self) -> None:
        """Raises ArtifactError. What came is noted, whatever happens."""
        helpers = [asyncio.ensure_future(self._every(period, work)) for period, work in self._duties()]
        try:
            self._scout.join(self._torrents)
            self._learn()
            async with asyncio.TaskGroup() as group:
                for file, portions in enumerate(self._portions):
                    if not portions.is_done:
                        group.create_task(self._file(file))
            for torrent, pieces in zip(self._torrents, self._missing, strict=True):
                await torrent.fetch(pieces, patience_s=PATIENCE_S)  # what came from the web may not be on disk yet
        except BaseExceptionGroup as group_error:
            known = [error for error in _leaves(group_error) if isinstance(error, MeshswarmError)]
            if not known:
                raise
            raise known[0] from None
        finally:
            for helper in helpers:
                helper.cancel()
            for source in {source for sources in self._wanted.web for source in sources}:
                await source.close()
            await asyncio.gather(*helpers, return_exceptions=True)
            await asyncio.shield(self._save())
            self._tell()

    def _duties(self) -> list[tuple[float, Callable[[], Awaitable[None]]]]:
        return [(LOOK_S, self._look), (TELL_S, self._tell_on), (SAVE_S, self._save)]

    async def _every(self, period_s: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(period_s)
            with contextlib.suppress(MeshswarmError):
                await work()

    # -- what goes on beside

    async def _look(self) -> None:
        await self._scout.look(self._fetcher.torrent_port)
        self._scout.join(self._torrents)
        self._learn()
        self._judge()

    def _learn(self) -> None:
        for file, portions in enumerate(self._portions):
            portions.known_available(self._scout.available(file))

    async def _tell_on(self) -> None:
        self._tell()

    async def _save(self) -> None:
        await self._fetcher.note(self._wanted, self._contents, self._torrents)

    def _tell(self) -> None:
        total = sum(content.bytes_of(each) for content, each in zip(self._contents, self._missing, strict=True))
        here = total - sum(
            content.bytes_of(portions.not_come(torrent.missing()))
            for content, portions, torrent in zip(self._contents, self._portions, self._torrents, strict=True)
        )
        n_peers = max(torrent.progress().n_peers for torrent in self._torrents)
        rate = self._rate.observe(asyncio.get_running_loop().time(), here)
        from_web = sum(feeder.n_bytes for feeder in self._feeders)
        self._fetcher.tell(self._wanted.model_id, FetchProgress(here, total, rate, n_peers, from_web))

    def _judge(self) -> None:
        for peer in self._scout.blame(self._torrents):
            self._fetcher.warn(f"Peer {peer.short} sent wrong pieces of {self._wanted.name}: it is not asked any more.")

    # -- one file

    async def _file(self, file: int) -> None:
        """All missing pieces of one file. Raises ArtifactError."""
        async with self._files:
            feeding = asyncio.ensure_future(self._from_web(file))
            try:
                await self._from_peers(file)
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    async def _from_web(self, file: int) -> None:
        """What the servers of a file give, one server at a time, as long as there is anything for them to give."""
        torrent, portions = self._torrents[file], self._portions[file]

        async def add_piece(index: int, data: bytes) -> bool:
            is_good = await torrent.add_piece(index, data)
            if is_good:
                portions.done([index])
            return is_good

        while self._web[file]:
            if portions.for_web():
                source = self._web[file][0]
                feeder = WebPieces(
                    source, self._contents[file], wanted=portions.for_web, add_piece=add_piece, limit=self._fetcher.pace
                )
                self._feeders.append(feeder)
                try:
                    dropped = (await feeder.run()).dropped
                except MeshswarmError as error:
                    dropped = str(error)
                if dropped is not None:
                    self._web[file].remove(source)
                    self._fetcher.warn(f"{self._wanted.name}: {dropped}")
            await asyncio.sleep(TELL_S)  # peers may give something back
        portions.lose_web()

    async def _from_peers(self, file: int) -> None:
        torrent, portions, n_vain = self._torrents[file], self._portions[file], 0
        while not portions.is_done:
            portion = portions.for_peers()
            if not portion and self._web[file]:
                await asyncio.sleep(TELL_S)  # the web has the rest in hand
                continue
            before = torrent.have()
            error = ArtifactError("nobody who can be asked has it")
            if portion:
                try:
                    await torrent.fetch(portion, patience_s=WEB_PATIENCE_S if self._web[file] else PATIENCE_S)
                except ArtifactError as failure:
                    error = failure
                finally:
                    portions.done(torrent.have().intersection(portion))
                    portions.give_back(portion)
            n_vain = 0 if torrent.have() - before else n_vain + 1
            if n_vain and not self._web[file] and (n_vain >= MAX_ROUNDS_IN_VAIN or not await self._can_go_on()):
                raise await self._why(error)

    async def _can_go_on(self) -> bool:
        """Whether there is anybody left to ask."""
        self._scout.join_again()
        await self._look()
        return self._scout.n_holders > 0

    async def _why(self, error: ArtifactError) -> ArtifactError:
        """What to tell a person of a fetch that came to nothing."""
        left = sum(
            content.bytes_of(portions.left) for content, portions in zip(self._contents, self._portions, strict=True)
        )
        reasons = [str(error)]
        if not self._scout.n_holders:
            reasons.append(self._scout.why_nobody())
        hidden = await self._scout.unreachable()
        if hidden:
            names = ", ".join(peer.short for peer in hidden[:3])
            reasons.append(
                f"{len(hidden)} of those who hold it cannot be reached over TCP ({names}): they may be behind a "
                "translator or a firewall, which pieces do not pass yet"
            )
        return ArtifactError(
            f"{left / 1e6:.0f} MB of {self._wanted.name} ({model_id_text(self._wanted.model_id)[:12]}) could not be "
            f"fetched; what came is kept: {'; '.join(reasons)}"
        )


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
