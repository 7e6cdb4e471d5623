"""One fetch of one model, from its first connection to its last byte: peers and the web at once.

The rule this file keeps: the fetch ends when all that was wanted is on the disk, or with an error that says what was
tried; what came meanwhile is noted either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.ranges import Ranges, merged
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.torrent import Torrent
from meshswarm.errors import ArtifactError, MeshswarmError
from meshswarm.fetching.plan import Averages, FetchProgress, Portions
from meshswarm.fetching.scout import Scout
from meshswarm.fetching.web_sources import WebModel

if TYPE_CHECKING:
    from meshswarm.artifacts.sources.http_source import HttpSource
    from meshswarm.artifacts.sources.web_pieces import WebPieces

LOOK_S, FIRST_LOOKS, LATER_LOOK_S = 2.0, 10, 15.0
"""How often it is seen who else holds the model by now: so many times, and then."""
TELL_S = 0.5
IDLE_S = 3.0
"""When a person hears that nobody gives anything."""
PATIENCE_S = 20.0
"""How long nothing may come from anybody before peers are looked for anew."""
WEB_PATIENCE_S = 5.0
"""The same while a server on the web can have what peers do not send."""
MAX_ROUNDS_IN_VAIN = 3
SAVE_S = 2.0
FILES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which bytes of a model are wanted: ranges of each file. `name`: what the model is called. `web`: the same files
    on servers. `slice_path`, `slice_bytes`: what is cut from them then, and has to fit beside them."""

    model_id: bytes
    name: str
    files: tuple[Ranges, ...]
    web: tuple[WebModel, ...] = ()
    slice_path: Path | None = None
    slice_bytes: int = 0

    @classmethod
    def of(
        cls,
        model_id: bytes,
        name: str,
        files: Iterable[Iterable[range]],
        *,
        slice_path: Path | None = None,
        slice_bytes: int = 0,
    ) -> Wanted:
        ranges = tuple(merged(each) for each in files)
        return cls(model_id, name, ranges, slice_path=slice_path, slice_bytes=slice_bytes)


class Means(Protocol):
    """What a fetch needs of whoever started it."""

    @property
    def torrent_port(self) -> int:
        """Where others may take pieces from this peer; 0 for nowhere."""

    def tell(self, model_id: bytes, progress: FetchProgress) -> None:
        """How far it is."""

    def warn(self, sentence: str) -> None:
        """For a person."""

    async def pace(self, n_bytes: int) -> None:
        """Wait until so many more bytes may come from the web."""

    async def note(self, wanted: Wanted, contents: Sequence[Content], torrents: Sequence[Torrent]) -> None:
        """Keep in mind what is on the disk."""


class Fetch:
    """`run` it once."""

    def __init__(
        self,
        means: Means,
        wanted: Wanted,
        contents: Sequence[Content],
        torrents: Sequence[Torrent],
        missing: Sequence[frozenset[int]],
        scout: Scout,
    ) -> None:
        self._means = means
        self._wanted = wanted
        self._contents = contents
        self._torrents = torrents
        self._scout = scout
        self._rate = Averages()
        wanted_pieces = [c.pieces_of(ranges) for c, ranges in zip(contents, wanted.files, strict=True)]
        self._n_wanted = _n_bytes(contents, wanted_pieces)
        self._n_had = self._n_wanted - _n_bytes(contents, missing)
        self._newest = (0, asyncio.get_running_loop().time())  # bytes that are here, and when it was less
        self._web: list[list[HttpSource]] = [[] for _ in contents]
        self._n_locating = len(wanted.web)
        self._opened: list[HttpSource] = []
        self._missing = [pieces - torrent.have() for pieces, torrent in zip(missing, torrents, strict=True)]
        self._n_began = self._n_wanted - _n_bytes(contents, self._missing)  # with what lies in headers
        self._portions = [
            Portions(content, pieces, available=None, has_web=bool(wanted.web))
            for content, pieces in zip(contents, self._missing, strict=True)
        ]
        self._feeders: list[WebPieces] = []
        self._files = asyncio.Semaphore(FILES_AT_ONCE)

    async def run(self) -> None:
        """Raises ArtifactError. What came is noted, whatever happens."""
        helpers = [asyncio.ensure_future(self._every(period, work)) for period, work in self._duties()]
        helpers.append(asyncio.ensure_future(self._look_on()))
        helpers += [asyncio.ensure_future(self._locate(model)) for model in self._wanted.web]
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
            for source in self._opened:
                await source.close()
            await asyncio.gather(*helpers, return_exceptions=True)
            await asyncio.shield(self._settle())
            self._tell()

    def _duties(self) -> list[tuple[float, Callable[[], Awaitable[None]]]]:
        return [(TELL_S, self._tell_on), (SAVE_S, self._save)]

    async def _every(self, period_s: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(period_s)
            with contextlib.suppress(MeshswarmError):
                await work()

    # -- what goes on beside

    async def _locate(self, model: WebModel) -> None:
        """Where the files are on a server or hub; one that does not answer keeps nobody waiting."""
        try:
            sources = await model.locate()
            self._opened += sources
            for servers, source in zip(self._web, sources, strict=True):
                servers.append(source)
        except (MeshswarmError, ValueError) as error:
            self._means.warn(f"{self._wanted.name}: {model.where} is not used: {error}")
        finally:
            self._n_locating -= 1

    def _has_web(self, file: int) -> bool:
        """Whether a server gives this file, or may turn out to."""
        return bool(self._web[file]) or self._n_locating > 0

    async def _look_on(self) -> None:
        """At once, now that others can be told where this peer gives what it gets; often at first, when some may have
        begun at the same time; then now and then."""
        for n_looks in itertools.count():
            with contextlib.suppress(MeshswarmError):
                await self._look()
            await asyncio.sleep(LOOK_S if n_looks < FIRST_LOOKS else LATER_LOOK_S)

    async def _look(self) -> None:
        await self._scout.look(self._means.torrent_port)
        self._scout.join(self._torrents)
        self._learn()
        self._judge()

    def _learn(self) -> None:
        for file, portions in enumerate(self._portions):
            portions.known_available(self._scout.available(file))

    async def _tell_on(self) -> None:
        self._tell()

    async def _save(self) -> None:
        await self._means.note(self._wanted, self._contents, self._torrents)

    async def _settle(self) -> None:
        """All that came counts the next time."""
        await asyncio.gather(*(torrent.settle() for torrent in self._torrents))
        await self._save()

    def _tell(self) -> None:
        now = asyncio.get_running_loop().time()
        left = [
            portions.not_come(torrent.missing())
            for portions, torrent in zip(self._portions, self._torrents, strict=True)
        ]
        here = self._n_wanted - _n_bytes(self._contents, left)
        from_web = sum(feeder.n_bytes for feeder in self._feeders)
        speeds = [torrent.progress() for torrent in self._torrents]
        is_coming = any(speed.down_bytes_s for speed in speeds)
        if here != self._newest[0] or is_coming:
            self._newest = here, now
        rate = self._rate.observe(now, here)
        n_peers = max(speed.n_peers for speed in speeds)
        has_come = is_coming or here - self._n_began > from_web  # from peers
        progress = FetchProgress(
            have_bytes=here,
            wanted_bytes=self._n_wanted,
            down_bytes_s=rate,
            n_peers=max(n_peers, 1 if rate else 0) if has_come else 0,
            from_web_bytes=from_web,
            had_bytes=self._n_had,
            waits_s=self._waits_s(now) if any(left) else None,
        )
        self._means.tell(self._wanted.model_id, progress)

    def _waits_s(self, now: float) -> float | None:
        """How long at most it is waited for somebody to give something; None while somebody does."""
        idle_s = now - self._newest[1]
        if idle_s < IDLE_S or any(map(self._has_web, range(len(self._torrents)))):
            return None
        return PATIENCE_S - idle_s % PATIENCE_S

    def _judge(self) -> None:
        for peer in self._scout.blame(self._torrents):
            self._means.warn(f"Peer {peer.short} sent wrong pieces of {self._wanted.name}: it is not asked any more.")

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
        if not self._wanted.web:
            return
        from meshswarm.artifacts.sources.web_pieces import WebPieces  # its HTTP client takes time to import

        async def add_piece(index: int, data: bytes) -> bool:
            is_good = await torrent.add_piece(index, data)
            if is_good:
                portions.done([index])
            return is_good

        while self._has_web(file):
            if self._web[file] and portions.for_web():
                source = self._web[file][0]
                feeder = WebPieces(
                    source, self._contents[file], wanted=portions.for_web, add_piece=add_piece, limit=self._means.pace
                )
                self._feeders.append(feeder)
                try:
                    dropped = (await feeder.run()).dropped
                except MeshswarmError as error:
                    dropped = str(error)
                if dropped is not None:
                    self._web[file].remove(source)
                    self._means.warn(f"{self._wanted.name}: {dropped}")
            await asyncio.sleep(TELL_S)  # peers may give something back
        portions.lose_web()

    async def _from_peers(self, file: int) -> None:
        torrent, portions, n_vain = self._torrents[file], self._portions[file], 0
        while not portions.is_done:
            portion = portions.for_peers()
            if not portion and self._has_web(file):
                await asyncio.sleep(TELL_S)  # the web has the rest in hand
                continue
            before = torrent.have()
            error = ArtifactError("nobody who can be asked has it")
            if portion:
                try:
                    await torrent.fetch(portion, patience_s=WEB_PATIENCE_S if self._has_web(file) else PATIENCE_S)
                except ArtifactError as failure:
                    error = failure
                finally:
                    portions.done(torrent.have().intersection(portion))
                    portions.give_back(portion)
            if torrent.failure is not None:  # closed, or its file is lost: no use to ask it again
                raise torrent.failure
            n_vain = 0 if torrent.have() - before else n_vain + 1
            if n_vain and not self._has_web(file) and (n_vain >= MAX_ROUNDS_IN_VAIN or not await self._can_go_on()):
                raise await self._why(error)
            if n_vain:
                await asyncio.sleep(TELL_S)

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


def _n_bytes(contents: Sequence[Content], pieces: Sequence[Collection[int]]) -> int:
    """What these pieces of each file take."""
    return sum(content.bytes_of(each) for content, each in zip(contents, pieces, strict=True))
