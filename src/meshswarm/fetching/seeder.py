"""Giving to others what this peer has: every model of the store, whole or in part, for as long as it is unchanged.

The rule this file keeps: what is announced is open, and what is not open any more is withdrawn first. A file that was
touched is closed at once and not shared again before it was checked; what is imported while the peer runs is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshswarm.artifacts.files import FileStamp
from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.ranges import Ranges
from meshswarm.artifacts.store.store import Store
from meshswarm.dht.holders import HolderRecord
from meshswarm.dht.node import Dht
from meshswarm.errors import ArtifactError, MeshswarmError
from meshswarm.fetching.plan import layers_held, whole_files
from meshswarm.fetching.shelf import Shelf
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.span import Span

LOOK_S = 3.0
"""How often the store and the files' stamps are looked at."""
MAX_SEEDED = 256
"""Models. Each is a file that is open, and a record that is said again."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What is here of one model: all of it, or the bytes `ranges` of each file. `stamps`: of its files, as they are
    while this holds."""

    model_id: bytes
    name: str
    ranges: tuple[Ranges, ...]
    is_whole: bool
    stamps: tuple[tuple[Path, FileStamp], ...] = ()


@dataclass(frozen=True, slots=True)
class Changes:
    """What has to be done when what is here has changed."""

    closed: tuple[bytes, ...]
    opened: tuple[Holding, ...]
    grown: tuple[Holding, ...]


def changes(before: Sequence[Holding], now: Sequence[Holding]) -> Changes:
    """From what is shared to what is here. A whole model whose files have other stamps is closed, and opened if it was
    found to be right; a part that has more bytes only has to be announced anew."""
    old, new = {each.model_id: each for each in before}, {each.model_id: each for each in now}
    touched = {
        model_id
        for model_id in old.keys() & new.keys()
        if old[model_id].is_whole and (not new[model_id].is_whole or old[model_id].stamps != new[model_id].stamps)
    }
    return Changes(
        closed=tuple(sorted((old.keys() - new.keys()) | touched)),
        opened=tuple(new[model_id] for model_id in sorted((new.keys() - old.keys()) | touched)),
        grown=tuple(
            new[model_id]
            for model_id in sorted((old.keys() & new.keys()) - touched)
            if (old[model_id].ranges, old[model_id].is_whole) != (new[model_id].ranges, new[model_id].is_whole)
        ),
    )


class Seeder:
    """`run` it for as long as the peer lives. `warn`: for a person; `is_fetching(model_id)`: more of it is coming."""

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        dht: Dht,
        store: Store,
        shelf: Shelf,
        home: Path,
        *,
        warn: Callable[[str], None],
        is_fetching: Callable[[bytes], bool] = lambda model_id: False,
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._dht = dht
        self._store = store
        self._shelf = shelf
        self._home = home
        self._seen: object = None
        self._watched: dict[Path, None] = {}  # every file that was shared
        self._warn = warn
        self._is_fetching = is_fetching
        self._shared: dict[bytes, Holding] = {}
        self._bad: dict[bytes, str] = {}  # models that cannot be shared, and why, told once
        self._kept_back: set[bytes] = set()
        self._closed: dict[bytes, str] = {}  # names of models that are not shared any more and were not removed
        self._looking = asyncio.Lock()
        self.looked = asyncio.Event()
        """Set once everything that was here at the start is shared."""

    @property
    def is_seeding(self) -> bool:
        """Whether anything is shared here."""
        return bool(self._shared)

    def as_json(self) -> list[dict[str, object]]:
        """What is shared, for the status."""
        return [
            {
                "model": each.name,
                "whole": each.is_whole,
                "bytes": sum(len(part) for ranges in each.ranges for part in ranges),
            }
            for each in self._shared.values()
        ]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.look()
            except MeshswarmError as error:  # a disk that fails now; the next look may succeed
                self._warn(f"Models cannot be shared now: {error}")
            self.looked.set()
            await asyncio.sleep(LOOK_S)

    def begin_again(self) -> None:
        """Nothing is open any more: the next look opens and announces everything anew."""
        self._shared.clear()
        self._seen = None

    def keep_back(self, model_id: bytes) -> None:
        """Do not share this model."""
        self._kept_back.add(model_id)

    @contextlib.asynccontextmanager
    async def withdrawn(self, model_ids: Collection[bytes]) -> AsyncIterator[None]:
        """While this lasts these models are not shared; after it what is left of them is."""
        async with self._looking:
            for model_id in self._shared.keys() & set(model_ids):
                await self._close(model_id)
            try:
                yield
            finally:
                self._seen = None

    async def look(self) -> None:
        """See what is here now, and share just that."""
        async with self._looking:
            before = list(self._shared.values())
            touched = await asyncio.to_thread(_touched, before)
            for model_id in touched:  # at once: to hash it again takes a while
                await self._close(model_id)
            parts = self._open_parts()
            state = await asyncio.to_thread(self._state, parts)
            if state == self._seen and not touched:
                return
            here = await asyncio.to_thread(self._here, parts)
            self._watched |= {path: None for holding in here for path, _ in holding.stamps}
            plan = changes(list(self._shared.values()), here)
            for model_id in plan.closed:
                await self._close(model_id)
            for holding in plan.opened:
                await self._open(holding)
            await self._tell_removed(before)
            for holding in plan.grown:
                if not self._is_fetching(holding.model_id):  # it is told once all that was wanted is here
                    self._shared[holding.model_id] = holding
                    await self._announce(holding)
            self._seen = state if not any(map(self._is_fetching, self._shelf.open_models)) else None

    async def _tell_removed(self, before: Sequence[Holding]) -> None:
        """Say of which models of `before`, or earlier, nothing is left here."""
        self._closed |= {each.model_id: each.name for each in before}
        for model_id, name in list(self._closed.items()):
            if model_id not in self._shared:
                if await asyncio.to_thread(self._is_noted, model_id):
                    continue  # not yet, perhaps
                self._warn(f"{name} was removed here; it is no longer given to others.")
            del self._closed[model_id]

    def _state(self, parts: Mapping[bytes, tuple[Ranges, ...]]) -> object:
        """What changes when anything does: nothing is read as long as that is the same. Blocks for a moment."""
        places = [self._home / "models", self._home / "partial", *self._watched]
        return [_changed_at(place) for place in places], repr(sorted(parts.items())), sorted(self._kept_back)

    def _open_parts(self) -> dict[bytes, tuple[Ranges, ...]]:
        """What is here of models that are open, as their torrents know it: their files may be written to just now."""
        parts = {}
        for model_id in self._shelf.open_models:
            shared = self._shared.get(model_id)
            if shared is not None and shared.is_whole:
                continue
            contents = self._shelf.contents(model_id) or ()
            held = zip(contents, self._shelf.torrents(model_id), strict=True)
            parts[model_id] = tuple(tuple(content.ranges_of(torrent.have())) for content, torrent in held)
        return parts

    def _here(self, parts: Mapping[bytes, tuple[Ranges, ...]]) -> list[Holding]:
        """What the store has that can be shared. Blocks: a file that was touched is hashed again."""
        found = []
        for info in self._store.models():
            with contextlib.suppress(ArtifactError):
                paths = self._store.paths(info.model_id)
                if paths is not None:
                    files = self._store.files(info.model_id)
                    stamps = tuple((path, FileStamp.of(path)) for path in paths)
                    found.append(Holding(info.model_id, info.name, whole_files(files), True, stamps))
        whole = {each.model_id for each in found}
        for model_id in self._store.parts():
            if model_id not in whole:
                with contextlib.suppress(ArtifactError):
                    ranges = parts[model_id] if model_id in parts else self._store.ranges(model_id)
                    if any(ranges):
                        found.append(Holding(model_id, self._store.name_of(model_id), ranges, False))
        return [each for each in found if each.model_id not in self._kept_back][:MAX_SEEDED]

    async def _open(self, holding: Holding) -> None:
        try:
            await self._shelf.open(holding.model_id)
        except MeshswarmError as error:
            if self._bad.get(holding.model_id) != str(error):
                self._bad[holding.model_id] = str(error)
                self._warn(f"{holding.name} is not shared with others: {error}")
            return
        self._bad.pop(holding.model_id, None)
        self._shared[holding.model_id] = holding
        await self._announce(holding)

    async def _close(self, model_id: bytes) -> None:
        self._shared.pop(model_id, None)  # all are gone where the swarm's key has changed meanwhile
        await self._dht.stop_holding(model_id)
        await self._shelf.close(model_id)

    async def _announce(self, holding: Holding) -> None:
        layers = await asyncio.to_thread(self._layers, holding)
        record = HolderRecord(
            peer=self._identity.peer_id,
            addresses=tuple(self._endpoint.addresses),
            model_id=holding.model_id,
            torrent_port=self._shelf.torrent_port,
            layers=None if holding.is_whole else layers,
            is_whole=holding.is_whole,
        )
        with contextlib.suppress(MeshswarmError):  # said again with everything else later
            info = await asyncio.to_thread(self._store.describe, holding.model_id, holding.name)
            await self._dht.publish_card(ModelCard.of(info).sign(self._identity))
            await self._dht.say_holding(record)

    def _is_noted(self, model_id: bytes) -> bool:
        """Whether the store knows of anything of this model. Blocks."""
        return self._store.noted_paths(model_id) is not None or model_id in self._store.parts()

    def _layers(self, holding: Holding) -> Span | None:
        return layers_held(self._store.header(holding.model_id), holding.ranges)


def _touched(shared: Sequence[Holding]) -> list[bytes]:
    """Models of which a file is not as it was when it was opened. Blocks for a moment."""
    return [each.model_id for each in shared if not all(_is_as_it_was(path, stamp) for path, stamp in each.stamps)]


def _is_as_it_was(path: Path, stamp: FileStamp) -> bool:
    try:
        return FileStamp.of(path) == stamp
    except ArtifactError:
        return False


def _changed_at(place: Path) -> int:
    """When a file was last written to, or one in a folder made, replaced or removed, in ns; 0 where there is none."""
    try:
        return place.stat().st_mtime_ns
    except OSError:
        return 0
