"""One file in the swarm: fetched piece by piece, served from where it lies, watched while it is served.

The rule this file keeps: a fetch ends when its pieces are verified and on the disk, or with an error that says what
was tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from meshswarm.artifacts.files import FileStamp
from meshswarm.artifacts.torrent.attachment import Surroundings
from meshswarm.artifacts.torrent.blame import Blame, Member
from meshswarm.artifacts.torrent.checking import expected_hash, piece_hash
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.plan import Stall, Want
from meshswarm.artifacts.torrent.settings import address_literal
from meshswarm.artifacts.torrent.state import TorrentState
from meshswarm.artifacts.torrent.upkeep import Upkeep
from meshswarm.errors import ArtifactError, ConfigError

PATIENCE_S = 30.0
DEFAULT_PRIORITY = 4
_TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class TorrentProgress:
    """Of what is fetched now, how much is here; how fast payload goes, and with how many peers."""

    have_bytes: int
    wanted_bytes: int
    down_bytes_s: int
    up_bytes_s: int
    n_peers: int


Progress = Callable[[TorrentProgress], None]


class Torrent:
    """Made by a `TorrentSession`. Methods raise ArtifactError once the torrent has failed or left the session."""

    def __init__(
        self,
        around: Surroundings,
        content: Content,
        path: Path,
        layer: bytes | None,
        on_disk: Iterable[int],
        *,
        is_seed: bool,
        lock: IO[str] | None = None,
    ) -> None:
        self.content = content
        self.path = path
        self._state = TorrentState(around, content, path, layer, on_disk, is_seed)
        self._upkeep = Upkeep(self._state)
        self._lock = lock

    # -- what callers do

    def connect(self, host: str, port: int) -> None:
        """Take part with the peer at this address. Nothing happens when it is blamed. Raises ConfigError."""
        member = (address_literal(host), port)
        if not 0 < port <= 65_535:
            raise ConfigError(f"{port} is no port that a peer could listen on")
        if self._state.blame.add(member):
            self._state.around.blame_changed()
            self._state.attachment.connect(member)
            self._state.doubts.set()

    async def fetch(
        self,
        pieces: Iterable[int],
        *,
        progress: Progress | None = None,
        patience_s: float = PATIENCE_S,
        priority: int = DEFAULT_PRIORITY,
    ) -> None:
        """Until all `pieces` are verified and on the disk. `priority`: 1 to 7, what is more urgent comes first.

        Raises ArtifactError when the disk is full or fails, the torrent ends, or nothing comes for `patience_s`.
        What has come stays, also when this is cancelled.
        """
        self._state.check()
        try:
            want = self._state.plan.want(pieces, priority)
        except IndexError as error:
            raise ArtifactError(str(error)) from None
        try:
            if not want.is_done:
                await self._fetch(want, progress, patience_s)
            if progress is not None:
                progress(self._progress([want]))
        finally:
            self._state.plan.drop(want)
            self._state.attachment.ask()

    async def add_piece(self, index: int, data: bytes) -> bool:
        """Bytes of a piece from elsewhere. False when they are not the piece's; True once they are taken.

        Raises ArtifactError when the disk refuses them.
        """
        self._state.check()
        if not 0 <= index < self.content.n_pieces or len(data) != len(self.content.piece_range(index)):
            return False
        if self._state.plan.is_here(index):
            return True
        expected = expected_hash(self.content, self._state.layer, index)
        if expected is not None and await asyncio.to_thread(piece_hash, self.content, data) != expected:
            return False
        return await self._upkeep.add(index, data, is_proved=expected is not None)

    def have(self) -> frozenset[int]:
        """The pieces that are verified and on the disk."""
        return frozenset(self._state.plan.on_disk)

    def missing(self) -> frozenset[int]:
        """The pieces that fetches wait for and that have not come."""
        return frozenset(self._state.plan.missing())

    def flush(self) -> None:
        """Have what came written: a moment later `have` tells it."""
        if self._state.plan.unflushed:
            self._state.attachment.flush()

    async def settle(self, patience_s: float = 2.0) -> None:
        """Until what came is written and `have` tells it, or for so long."""
        state = self._state
        with contextlib.suppress(TimeoutError), state.news() as news:
            async with asyncio.timeout(patience_s):
                while state.plan.unflushed and state.failure is None:
                    self.flush()
                    news.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_TICK_S):
                            await news.wait()

    def progress(self) -> TorrentProgress:
        return self._progress(self._state.plan.wants)

    @property
    def failure(self) -> ArtifactError | None:
        """Why this torrent is of no use any more: it left the session, or its file changed."""
        return self._state.failure

    @property
    def is_fetching(self) -> bool:
        return bool(self._state.plan.wants)

    @property
    def received_bytes(self) -> int:
        """Payload from peers, right or wrong, since the torrent was put in last."""
        return self._state.received_bytes

    @property
    def sent_bytes(self) -> int:
        return self._state.status.sent_bytes

    @property
    def blamed(self) -> set[Member]:
        """Peers that sent wrong bytes when they were asked alone, by the address they were dialled at."""
        return self._state.blame.liars

    async def recheck(self) -> None:
        """Hash all that should be here. Raises ArtifactError when a file that is seeded has changed."""
        n_looks = self._upkeep.n_looks
        with self._state.news() as news:
            self._state.suspect()
            while self._upkeep.n_looks == n_looks:
                self._state.check()
                news.clear()
                await news.wait()
        self._state.check()

    # -- what the session does

    @property
    def blame(self) -> Blame:
        return self._state.blame

    async def start(self) -> None:
        async with self._state.lifecycle:
            await self._upkeep.attach()

    async def run(self) -> None:
        """The work in the background, until cancelled."""
        await self._upkeep.run()

    def fail(self, error: ArtifactError) -> None:
        """Of no use from now on, for this reason: fetches end with it."""
        self._state.fail(error)

    async def stop(self, reason: str) -> None:
        """Out of the session, what has come noted. Fetches end with an error."""
        self.fail(ArtifactError(reason))
        async with self._state.lifecycle:
            await self._upkeep.leave()
        await self.save()
        self.let_go()

    def let_go(self) -> None:
        """Other processes may fetch the content from now on."""
        if self._lock is not None:
            self._lock.close()

    def looked_at(self, stamp: FileStamp | None) -> None:
        """What the file system says of the file now; None where there is none."""
        state = self._state
        if state.failure is not None or state.lifecycle.locked():
            return
        is_busy = bool(state.plan.wants or state.plan.unflushed)
        on_disk = state.plan.on_disk
        is_cut = is_busy and on_disk and stamp is not None and stamp.size < self.content.piece_range(max(on_disk)).stop
        if state.watch.is_changed(stamp, is_busy=is_busy, has_some=bool(on_disk)) or is_cut:
            state.suspect()

    async def save(self) -> None:
        """Note what is on the disk, where that changed."""
        state = self._state
        if state.is_saved or state.is_seed:
            return
        state.is_saved = True
        try:
            await asyncio.to_thread(state.around.notes.write, self.content, self.path, self.have())
        except ArtifactError:
            state.is_saved = False  # a full disk; without the note the file is hashed again

    # -- fetching

    async def _fetch(self, want: Want, progress: Progress | None, patience_s: float) -> None:
        state = self._state
        async with state.lifecycle:  # a repair that goes on has the pieces in flux
            state.check()
            await self._upkeep.attach()
        state.watch.unsettle()
        n_faults, n_moves = state.n_faults, state.n_moves
        stall = Stall(patience_s, time.monotonic(), state.received_bytes)
        state.attachment.ask()
        for member in state.blame.trusted:
            state.attachment.connect(member)
        with state.news() as news:
            while not want.is_done:
                state.check()
                if state.fault is not None and state.n_faults != n_faults:
                    raise state.fault
                now = time.monotonic()
                if state.n_moves != n_moves:
                    n_moves = state.n_moves
                    stall.moved(state.received_bytes, now)
                stall.came(state.received_bytes, now)
                if want.has_come:
                    state.attachment.flush()
                elif stall.is_over(now):
                    raise self._stalled(want, patience_s)
                if progress is not None:
                    progress(self._progress([want]))
                news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await news.wait()

    def _stalled(self, want: Want, patience_s: float) -> ArtifactError:
        return ArtifactError(
            f"{len(want.missing)} of {len(want.pieces)} pieces of {self.path.name} did not come: nothing for "
            f"{patience_s:g} s. Peers asked: {self.blame.account()}. What has come is kept: try again, or name "
            "another source"
        )

    def _progress(self, wants: Iterable[Want]) -> TorrentProgress:
        wanted: frozenset[int] = frozenset().union(*(want.pieces for want in wants))
        missing: set[int] = set().union(*(want.missing for want in wants))
        status = self._state.status
        total = self.content.bytes_of(wanted)
        have = total - self.content.bytes_of(missing)
        return TorrentProgress(have, total, status.down_bytes_s, status.up_bytes_s, status.n_peers)
