"""The torrents of one peer: one libtorrent session, one port, one folder of notes.

The rule this file keeps: a content is one torrent, however many ask for it. In a private swarm nothing is served or
fetched outside TLS; nobody hears from this session whom it was not told to connect to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from meshswarm.artifacts.files import FileStamp
from meshswarm.artifacts.merkle import check_piece_layer
from meshswarm.artifacts.torrent.alerts import DialledIn, Dropped, Event, ListenFailed, PeerLeft
from meshswarm.artifacts.torrent.alone import Alone, sweep
from meshswarm.artifacts.torrent.attachment import Say, Surroundings
from meshswarm.artifacts.torrent.blame import hosts_to_refuse
from meshswarm.artifacts.torrent.certificates import tls_identity
from meshswarm.artifacts.torrent.content import ByteRange, Content
from meshswarm.artifacts.torrent.door import Door
from meshswarm.artifacts.torrent.engine import Engine
from meshswarm.artifacts.torrent.knocking import Knocking
from meshswarm.artifacts.torrent.resume import Notes
from meshswarm.artifacts.torrent.settings import (
    free_port,
    is_unspecified,
    listen_interface,
    rate_limits,
    session_settings,
)
from meshswarm.artifacts.torrent.torrent import Torrent
from meshswarm.errors import ArtifactError, ConfigError
from meshswarm.tasks import Tasks

LOOK_EVERY_S = 1.0
FETCHING_TICK_S = 0.5
SAVE_EVERY_S = 10.0
_LISTEN_TIMEOUT_S = 5.0
_PORT_TRIES = 8
_LOOKS_A_KNOCK = 3


class TorrentSession:
    """Made by `start`, ended by `close`."""

    def __init__(self, engine: Engine, port: int, around: Surroundings, is_private: bool) -> None:
        self.port = port
        self.is_private = is_private
        self._engine = engine
        self._around = around
        self._torrents: dict[Content, Torrent] = {}  # a root alone may be claimed with several lengths
        self._opening: dict[Content, asyncio.Lock] = {}
        self._tasks: Tasks | None = None
        self._runs: dict[Content, asyncio.Task[None]] = {}
        self._is_running = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._is_closed = False
        self._door = Door()
        self._knocking = Knocking(port) if is_private else None

    @classmethod
    async def start(
        cls,
        host: str,
        *,
        port: int = 0,
        secret: bytes | None = None,
        folder: Path,
        peer_limit: int = 200,  # places for peers dialled from here, and twice as many for those who dial in
        say: Say = lambda words: None,
    ) -> TorrentSession:
        """Listen on `host`, an IP address, at `port` or any free one.

        `secret`: of a private swarm; the port then is a TLS port, and only members get anything. `folder`: for notes
        of what is here. `say` is told what a person should know.
        Raises ConfigError when the address cannot be used.
        """
        if not port and is_unspecified(host):
            return await cls._start_on_one_port(
                host,
                secret=secret,
                folder=folder,
                peer_limit=peer_limit,
                say=say,
            )
        tls = None if secret is None else await asyncio.to_thread(tls_identity, secret)
        listen = listen_interface(host, port, is_private=tls is not None)
        refusals: list[ListenFailed] = []
        session: TorrentSession | None = None

        def heard(event: Event) -> None:
            if isinstance(event, ListenFailed):
                refusals.append(event)
            elif session is not None:
                session._heard(event)

        settings = session_settings(listen, n_connections=peer_limit)
        engine = await Engine.start(settings, heard)
        try:
            bound = await _bound_port(engine, refusals, is_private=tls is not None)
        except BaseException:
            await engine.close()
            raise
        if bound is None:
            await engine.close()
            reason = refusals[0].reason if refusals else "no answer"
            raise ConfigError(f"pieces cannot be served at {host} port {port}: {reason}")

        def blame_changed() -> None:
            if session is not None:
                session._refuse()

        around = Surroundings(
            engine=engine,
            alone=Alone(session_settings(""), tls, folder),
            notes=Notes(folder),
            tls=tls,
            say=say,
            blame_changed=blame_changed,
        )
        session = cls(engine, bound, around, tls is not None)
        await asyncio.to_thread(sweep, folder)
        session._runner = asyncio.create_task(session._run())
        await session._is_running.wait()
        return session

    @classmethod
    async def _start_on_one_port(cls, host: str, **options: Any) -> TorrentSession:
        """Any port, but the same at each of this machine's addresses: libtorrent would take another at each."""
        for is_last in (False,) * _PORT_TRIES + (True,):
            try:
                return await cls.start(host, port=await asyncio.to_thread(free_port), **options)
            except ConfigError:
                if is_last:
                    raise
        raise AssertionError("the last try raises")

    async def close(self) -> None:
        """Notes what is here and ends the session; half a second, without holding up the loop."""
        if self._is_closed:
            return
        self._is_closed = True
        for opening in list(self._opening.values()):
            async with opening:
                pass
        async with asyncio.TaskGroup() as group:
            for content in [torrent.content for torrent in self._torrents.values()]:
                group.create_task(self._remove(content, "the torrent session was closed"))
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner
        await self._around.alone.close()
        await self._engine.close()

    def limit(self, down_bytes_s: int, up_bytes_s: int) -> None:
        """The most all torrents together may take and give, bytes a second; 0: no limit. At once."""
        limits = rate_limits(down_bytes_s, up_bytes_s)
        self._engine.apply(limits)
        self._around.alone.apply(limits)

    def torrents(self) -> list[Torrent]:
        return list(self._torrents.values())

    def get(self, content: Content) -> Torrent | None:
        return self._torrents.get(content)

    async def seed(
        self, content: Content, path: Path, piece_layer: bytes, *, stamp: FileStamp | None = None
    ) -> Torrent:
        """Serve the whole file in `path`, where it lies, without a copy. Nothing is ever written to it.

        The caller has hashed the file, when it had `stamp`; each piece is hashed once more before it is first served.
        Raises ArtifactError when the layer is not the file's, or the file has another size or stamp.
        """
        path = Path(os.path.abspath(path))  # noqa: ASYNC240, PTH100 - looks at no file
        await asyncio.to_thread(check_piece_layer, content.length, content.root, content.piece_length, piece_layer)
        found = await asyncio.to_thread(FileStamp.of, path)
        if found.size != content.length or (stamp is not None and stamp != found):
            raise ArtifactError(f"{path} has changed since it was hashed; import it again")

        async def make() -> Torrent:
            torrent = Torrent(self._around, content, path, piece_layer, range(content.n_pieces), is_seed=True)
            torrent.looked_at(found)
            return torrent

        return await self._join(content, make, replaces_idle=True)

    async def open(
        self, content: Content, path: Path, piece_layer: bytes | None, *, have: Iterable[ByteRange] = ()
    ) -> Torrent:
        """Fetch the file, or pieces of it, to `path`, and serve what is there.

        `have`: byte ranges known to be right; what no note of this folder vouches for is hashed first. Without
        `piece_layer` one that was kept here is used; without any, pieces are proved by peers, and those found on the
        disk only count while the file is exactly as it was noted.
        A content that is open already stays at the path it has: look at `Torrent.path`.
        Raises ArtifactError when the layer is not the file's, or `path` is something else.
        """
        path = Path(os.path.abspath(path))  # noqa: ASYNC240, PTH100 - looks at no file
        claimed = content.pieces_within(have)

        async def make() -> Torrent:
            lock = await asyncio.to_thread(self._around.notes.lock, content)
            try:
                layer, present = await asyncio.to_thread(self._look, content, path, piece_layer, claimed)
            except BaseException:
                lock.close()
                raise
            return Torrent(self._around, content, path, layer, present, is_seed=False, lock=lock)

        return await self._join(content, make)

    async def remove(self, content: Content) -> None:
        """Neither fetch nor serve it any more. The file and what is noted of it stay."""
        torrent = self._torrents.get(content)
        if torrent is None:
            return
        reason = "the file is no longer shared here"
        torrent.fail(ArtifactError(reason))  # who waits hears of it at once
        async with self._opening.setdefault(content, asyncio.Lock()):
            if self._torrents.get(content) is torrent:  # not opened anew meanwhile
                await self._remove(content, reason)

    def _look(
        self, content: Content, path: Path, layer: bytes | None, claimed: frozenset[int]
    ) -> tuple[bytes | None, frozenset[int]]:
        notes = self._around.notes
        if layer is None:
            layer = notes.layer(content)
        else:
            check_piece_layer(content.length, content.root, content.piece_length, layer)
            notes.keep_layer(content, layer)
        present = notes.present(content, path, layer, claimed)
        path.parent.mkdir(parents=True, exist_ok=True)
        return layer, present

    async def _join(
        self, content: Content, make: Callable[[], Awaitable[Torrent]], *, replaces_idle: bool = False
    ) -> Torrent:
        """The content's torrent, made if there is none. `replaces_idle`: also if there is one that fetches nothing."""
        async with self._opening.setdefault(content, asyncio.Lock()):
            if self._is_closed:
                raise ArtifactError("the torrent session was closed")
            known = self._torrents.get(content)
            if known is not None and not _gives_way(known, replaces_idle):
                return known
            if known is not None:
                await self._remove(content, "the file is shared from another place now")
            torrent = await make()
            self._torrents[content] = torrent
            try:
                await torrent.start()
            except BaseException:
                del self._torrents[content]
                torrent.let_go()
                raise
            assert self._tasks is not None
            self._runs[content] = self._tasks.create_task(torrent.run())
            return torrent

    async def _remove(self, content: Content, reason: str) -> None:
        torrent = self._torrents.pop(content, None)
        if torrent is None:
            return
        await torrent.stop(reason)
        run = self._runs.pop(content, None)
        if run is not None:
            run.cancel()
        self._refuse()

    def _refuse(self) -> None:
        """Have nothing to do with liars, nor with who takes the places of others."""
        liars = hosts_to_refuse(torrent.blame for torrent in self._torrents.values())
        self._engine.filter_hosts({(host, host) for host in liars} | self._door.shut())

    def _heard(self, event: Event) -> None:
        match event:
            case DialledIn(host, port):
                now = asyncio.get_running_loop().time()
                if self._door.came((host, port), len(self._torrents), now):
                    self._refuse()
            case PeerLeft(host, port):
                self._door.left((host, port))
            case Dropped():
                self._door.forget()
            case _:
                pass

    # -- in the background

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._tasks = Tasks(group, self._mistake)
            self._is_running.set()
            self._tasks.create_task(self._tick())
            self._tasks.create_task(self._look_after())

    async def _tick(self) -> None:
        """Have libtorrent say how fast things go, as often as somebody waits for it."""
        while True:
            self._engine.post_updates()
            is_fetching = any(torrent.is_fetching for torrent in self._torrents.values())
            await asyncio.sleep(FETCHING_TICK_S if is_fetching else 4 * FETCHING_TICK_S)

    async def _look_after(self) -> None:
        """Look whether files were touched, and note what has come."""
        n_looks = 0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            torrents = self.torrents()
            stamps = await asyncio.to_thread(_stamps, [torrent.path for torrent in torrents])
            for torrent, stamp in zip(torrents, stamps, strict=True):
                torrent.looked_at(stamp)
            if self._door.reopen(asyncio.get_running_loop().time()):
                self._refuse()
            n_looks += 1
            if self._knocking is not None and n_looks % _LOOKS_A_KNOCK == 0:
                now = asyncio.get_running_loop().time()
                await asyncio.to_thread(self._knocking.shut_silent, self._door.inside(), now)
            if n_looks % round(SAVE_EVERY_S / LOOK_EVERY_S) == 0:
                for torrent in torrents:
                    torrent.flush()
                    await torrent.save()

    def _mistake(self, error: Exception) -> None:
        self._around.say(f"sharing a file failed: {error}")


def _gives_way(torrent: Torrent, replaces_idle: bool) -> bool:
    if torrent.failure is not None:
        return True
    return replaces_idle and not torrent.is_fetching and len(torrent.have()) < torrent.content.n_pieces


def _stamps(paths: Iterable[Path]) -> list[FileStamp | None]:
    stamps: list[FileStamp | None] = []
    for path in paths:
        try:
            stamps.append(FileStamp.of(path))
        except ArtifactError:
            stamps.append(None)
    return stamps


async def _bound_port(engine: Engine, refusals: list[ListenFailed], *, is_private: bool) -> int | None:
    """The port listened on; None when there is none."""
    deadline = asyncio.get_running_loop().time() + _LISTEN_TIMEOUT_S
    while asyncio.get_running_loop().time() < deadline:
        plain, tls = await engine.ports()
        if refusals:
            break
        if port := tls if is_private else plain:
            return port
        await asyncio.sleep(0.02)
    return None
