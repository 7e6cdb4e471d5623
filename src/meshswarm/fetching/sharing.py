"""A peer's share in the swarm's files: what it fetches, what it gives, how fast, composed of the parts of this room.

The rule this file keeps: it wires and decides nothing. Where seeding is turned off nothing is announced or answered,
and files are open only while they are fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshswarm.artifacts.manifests.trust import Manifests
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.store.disk import Disk
from meshswarm.artifacts.store.store import Store
from meshswarm.artifacts.torrent.session import TorrentSession
from meshswarm.dht.node import Dht
from meshswarm.errors import ConfigError, RequestError
from meshswarm.fetching.exchange import Offer
from meshswarm.fetching.fetcher import Fetcher
from meshswarm.fetching.hashes import Hashes
from meshswarm.fetching.library import Library, Report
from meshswarm.fetching.published import Published
from meshswarm.fetching.rates import Limits, Rates
from meshswarm.fetching.room import Room
from meshswarm.fetching.seeder import Seeder
from meshswarm.fetching.shelf import Shelf
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.stage.slices.store import Slices

PULL_PATH = "/meshswarm/pull"


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """What a person chose. `disk_bytes`: what the peer's own copies may take, None: as much as there is."""

    seeds: bool = True
    limits: Limits = field(default_factory=Limits)
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What this peer computes meanwhile: whether, and how much slower than on an idle machine."""

    is_busy: Callable[[], bool] = lambda: False
    slowdown: Callable[[], float | None] = lambda: None


class Sharing:
    """`run` it beside everything else; `stop` it last. `library` gets models for this peer."""

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        dht: Dht,
        swarm: Swarm,
        store: Store,
        slices: Slices,
        home: Path,
        *,
        settings: SharingSettings,
        report: Report,
        work: Work,
    ) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._swarm = swarm
        self._store = store
        self._home = home
        self._settings = settings
        self._report = report
        self._work = work
        self._n_errands = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.shelf = Shelf(store, self._start_session)
        self._room = Room(
            Disk(home, store),
            store,
            slices,
            settings.disk_bytes,
            n_holders=self._n_holders,
            closed=self._closed,
            warn=self._warn,
        )
        self.fetcher = Fetcher(
            endpoint,
            dht,
            swarm,
            store,
            self.shelf,
            warn=self._warn,
            room=self._room,
            shares=settings.seeds,
            down_bytes_s=settings.limits.down_bytes_s,
        )
        manifests = Manifests(home)
        self.seeder: Seeder | None = None
        self._hashes: Hashes | None = None
        if settings.seeds:
            self.seeder = Seeder(
                endpoint, identity, dht, store, self.shelf, home, warn=self._warn, is_fetching=self.fetcher.is_fetching
            )
            self._hashes = Hashes(endpoint, identity, dht, store, manifests, self.shelf)
            Offer(endpoint, self._hashes)
        published = Published(endpoint, dht, store, manifests)
        self.library = Library(
            endpoint, dht, store, slices, self.shelf, self.fetcher, self._room, self.seeder, published, report
        )
        self._rates = Rates(settings.limits, self.shelf.limit, work.is_busy, work.slowdown)
        swarm.on_change(self._keys_changed)
        self._renewing: asyncio.Event = asyncio.Event()

    @property
    def is_seeding(self) -> bool:
        """Whether others can fetch anything here."""
        return self.seeder is not None and self.seeder.is_seeding

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_rates())
            group.create_task(self._renew())
            if self.seeder is not None:
                group.create_task(self.seeder.run())
            if self._hashes is not None:
                group.create_task(self._hashes.run())

    async def stop(self) -> None:
        """Give and take nothing more; what came is noted."""
        await self.shelf.stop()

    async def pull(self, body: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        """A command's errand: the whole model that `body` names. Raises MeshswarmError."""
        ref = body.get("model")
        if not isinstance(ref, str) or not 0 < len(ref) <= 4096:
            raise RequestError("a pull names a model", param="model")
        self._n_errands += 1
        self._idle.clear()
        try:
            info = await self.library.known(ref, tell)
            await self.library.have_whole(info, tell)
            return {"model_id": info.id_text, "name": info.name}
        finally:
            self._n_errands -= 1
            if not self._n_errands:
                self._idle.set()

    async def errands_done(self) -> None:
        """Until nobody waits for a pull."""
        await self._idle.wait()

    def as_json(self) -> dict[str, Any]:
        """For the status."""
        return {
            "seeding": [] if self.seeder is None else self.seeder.as_json(),
            "fetching": [model_id_text(model_id) for model_id in self.fetcher.fetching],
            "torrent_port": self.shelf.torrent_port or None,
            "up_limit_bytes_s": self._rates.up_bytes_s or None,
            "sent_bytes": self.shelf.sent_bytes,
        }

    async def _start_session(self) -> TorrentSession:
        """On TCP at the number after that of the port for peers, or at any that is free: libtorrent takes the UDP port
        of the same number as well."""
        listen = self._endpoint.address
        wanted = dict.fromkeys((listen.port + 1 if listen.port < 65_535 else 0, 0))
        for port in wanted:
            try:
                return await TorrentSession.start(
                    listen.host,
                    port=port,
                    secret=self._swarm.artifact_secret(),
                    folder=self._home / "torrents",
                    say=self._torrents_say,
                )
            except ConfigError:
                if not port:
                    raise
                self._report({"event": "port-taken", "port": port, "what": "model files"})
        raise AssertionError("port 0 was tried last")

    async def _watch_rates(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._rates.look(loop.time())
            await asyncio.sleep(Rates.PERIOD_S)

    def _keys_changed(self) -> None:
        self._renewing.set()

    async def _renew(self) -> None:
        """After a change of the swarm's key: pieces go under the new one alone, so that nobody who was expelled gets
        any. What is being fetched goes on with the new session."""
        secret = self._swarm.artifact_secret()
        while True:
            await self._renewing.wait()
            self._renewing.clear()
            if self._swarm.artifact_secret() != secret:
                secret = self._swarm.artifact_secret()
                await self.shelf.renew()
                if self.seeder is not None:
                    self.seeder.begin_again()

    async def _n_holders(self, model_id: bytes) -> int:
        """Other peers that hold a model, by what was read lately, else by asking. Raises MeshswarmError."""
        records = await self._dht.holders(model_id)
        return sum(record.peer != self._endpoint.peer_id for record in records)

    @contextlib.asynccontextmanager
    async def _closed(self, model_ids: Collection[bytes]) -> AsyncIterator[None]:
        """While this lasts the files of these models are not open here, and nobody is told that they are."""
        async with contextlib.AsyncExitStack() as stack:
            if self.seeder is not None and model_ids:
                await stack.enter_async_context(self.seeder.withdrawn(model_ids))
            for model_id in model_ids:
                await self.shelf.close(model_id)
            yield

    def _torrents_say(self, sentence: str) -> None:
        """Of a fetched file that is not there any more the seeder tells, or the fetch."""
        path, ending, _ = sentence.partition(".gguf ")
        is_fetched = bool(ending) and path.startswith(str(self._home / "pieces"))
        if not is_fetched or Path(f"{path}.gguf").exists():
            self._warn(sentence)

    def _warn(self, sentence: str) -> None:
        self._report({"event": "warning", "message": sentence})
