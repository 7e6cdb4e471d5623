"""One file in the swarm: fetched piece by piece, served from where it lies, watched while it is served.

The rule this file keeps: a fetch ends when its pieces are verified and on the disk, or with an error that says what
was tried. Whoever sends wrong bytes is found by asking alone (`blame`), whatever libtorrent thinks of whom.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from meshswarm.artifacts.files import FileStamp
from meshswarm.artifacts.torrent import alerts
from meshswarm.artifacts.torrent.alone import Answer
from meshswarm.artifacts.torrent.attachment import Attachment, Surroundings
from meshswarm.artifacts.torrent.blame import Blame, Member, Question
from meshswarm.artifacts.torrent.checking import expected_hash, good_pieces, piece_hash
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.plan import PiecePlan, Stall, Want
from meshswarm.artifacts.torrent.settings import address_literal
from meshswarm.artifacts.torrent.watch import FileWatch
from meshswarm.errors import ArtifactError, ConfigError

PATIENCE_S = 30.0
DEFAULT_PRIORITY = 4
_TICK_S = 0.25
_REJOIN_EVERY_S = 2.0
_ADD_TIMEOUT_S = 30.0
_ADD_TRIES = 4
_IDLE_S = 1.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        self.failure: ArtifactError | None = None
        self._around = around
        self._layer = layer
        self._is_seed = is_seed
        self._lock = lock
        self._plan = PiecePlan(content.n_pieces, on_disk)
        self._blame = Blame()
        self._attachment = Attachment(around, content, path, layer, self._plan, self._heard, is_seed)
        self._watch = FileWatch(is_settled=is_seed)
        self._status = alerts.Status(0, 0, 0, 0, 0, 0, False, None)
        self._lifecycle = asyncio.Lock()
        self._waiters: set[asyncio.Event] = set()
        self._work = asyncio.Event()
        self._doubts = asyncio.Event()
        self._is_suspect = False
        self._must_rejoin = False
        self._rejoined_at = float("-inf")
        self._fault: ArtifactError | None = None
        self._n_faults = 0
        self._n_looks = 0
        self._n_moves = 0  # pieces that came, and failed: counts on whenever something happens
        self._received_alone = 0
        self._is_saved = True

    # -- what callers do

    def connect(self, host: str, port: int) -> None:
        """Take part with the peer at this address. Nothing happens when it is blamed. Raises ConfigError."""
        member = (address_literal(host), port)
        if not 0 < port <= 65_535:
            raise ConfigError(f"{port} is no port that a peer could listen on")
        if self._blame.add(member):
            self._around.blame_changed()
            self._attachment.connect(member)
            self._doubts.set()

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
        self._check()
        try:
            want = self._plan.want(pieces, priority)
        except IndexError as error:
            raise ArtifactError(str(error)) from None
        news = asyncio.Event()
        self._waiters.add(news)
        try:
            if not want.is_done:
                await self._fetch(want, news, progress, patience_s)
            if progress is not None:
                progress(self._progress([want]))
        finally:
            self._waiters.discard(news)
            self._plan.drop(want)
            self._attachment.ask()

    async def add_piece(self, index: int, data: bytes) -> bool:
        """Bytes of a piece from elsewhere. False when they are not the piece's; True once they are taken.

        Raises ArtifactError when the disk refuses them.
        """
        self._check()
        if not 0 <= index < self.content.n_pieces or len(data) != len(self.content.piece_range(index)):
            return False
        if self._plan.is_here(index):
            return True
        expected = expected_hash(self.content, self._layer, index)
        if expected is not None and await asyncio.to_thread(piece_hash, self.content, data) != expected:
            return False
        return await self._add(index, data, is_proved=expected is not None)

    def have(self) -> frozenset[int]:
        """The pieces that are verified and on the disk."""
        return frozenset(self._plan.on_disk)

    def missing(self) -> frozenset[int]:
        """The pieces that fetches wait for and that have not come."""
        return frozenset(self._plan.missing())

    def progress(self) -> TorrentProgress:
        return self._progress(self._plan.wants)

    @property
    def received_bytes(self) -> int:
        """Payload from peers, right or wrong, since the torrent was put in last."""
        return self._status.received_bytes + self._received_alone

    @property
    def sent_bytes(self) -> int:
        return self._status.sent_bytes

    @property
    def blamed(self) -> set[Member]:
        """Peers that sent wrong bytes when they were asked alone, by the address they were dialled at."""
        return self._blame.liars

    async def recheck(self) -> None:
        """Hash all that should be here. Raises ArtifactError when a file that is seeded has changed."""
        self._check()
        n_looks = self._n_looks
        news = asyncio.Event()
        self._waiters.add(news)
        try:
            self._suspect()
            while self._n_looks == n_looks:
                self._check()
                news.clear()
                await news.wait()
        finally:
            self._waiters.discard(news)
        self._check()

    # -- what the session does

    async def start(self) -> None:
        async with self._lifecycle:
            await self._attachment.attach(self._blame.trusted)

    async def run(self) -> None:
        """The work in the background, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep())
            group.create_task(self._clear_doubts())

    async def stop(self, reason: str) -> None:
        """Out of the session, what has come noted. Fetches end with an error."""
        self.fail(ArtifactError(reason))
        async with self._lifecycle:
            await self._leave()
        await self.save()
        self.let_go()

    def let_go(self) -> None:
        """Other processes may fetch the content from now on."""
        if self._lock is not None:
            self._lock.close()

    def fail(self, error: ArtifactError) -> None:
        self.failure = self.failure or error
        self._wake()

    def looked_at(self, stamp: FileStamp | None) -> None:
        """What the file system says of the file now; None where there is none."""
        if self.failure is not None or self._lifecycle.locked():
            return
        is_busy = bool(self._plan.wants or self._plan.unflushed)
        has_some = bool(self._plan.on_disk)
        if self._watch.is_changed(stamp, is_busy=is_busy, has_some=has_some):
            self._suspect()

    async def save(self) -> None:
        """Note what is on the disk, where that changed."""
        if self._is_saved or self._is_seed:
            return
        self._is_saved = True
        try:
            await asyncio.to_thread(self._around.notes.write, self.content, self.path, self.have())
        except ArtifactError:
            self._is_saved = False  # a full disk; without the note the file is hashed again

    def flush(self) -> None:
        """Have what came written, so that a kill loses little."""
        if self._plan.unflushed:
            self._attachment.flush()

    @property
    def is_fetching(self) -> bool:
        return bool(self._plan.wants)

    @property
    def blame(self) -> Blame:
        return self._blame

    # -- fetching

    async def _fetch(self, want: Want, news: asyncio.Event, progress: Progress | None, patience_s: float) -> None:
        async with self._lifecycle:  # a repair that goes on has the pieces in flux
            self._check()
            if self._plan.is_broken:
                await self._repair()
            if not self._attachment.is_attached:
                await self._attachment.attach(self._blame.trusted)
        self._watch.unsettle()
        n_faults, n_moves = self._n_faults, self._n_moves
        stall = Stall(patience_s, time.monotonic(), self.received_bytes)
        self._attachment.ask()
        for member in self._blame.trusted:
            self._attachment.connect(member)
        while not want.is_done:
            self._check()
            if self._fault is not None and self._n_faults != n_faults:
                raise self._fault
            now = time.monotonic()
            if self._n_moves != n_moves:
                n_moves = self._n_moves
                stall.moved(self.received_bytes, now)
            stall.came(self.received_bytes, now)
            if want.has_come:
                self._attachment.flush()
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
            f"{patience_s:g} s. Peers asked: {self._blame.account()}. What has come is kept: try again, or name "
            "another source"
        )

    def _progress(self, wants: Iterable[Want]) -> TorrentProgress:
        wanted = frozenset().union(*(want.pieces for want in wants))
        missing = set().union(*(want.missing for want in wants))
        status = self._status
        total = self.content.bytes_of(wanted)
        have = total - self.content.bytes_of(missing)
        return TorrentProgress(have, total, status.down_bytes_s, status.up_bytes_s, status.n_peers)

    async def _add(self, index: int, data: bytes, *, is_proved: bool) -> bool:
        """Give libtorrent a piece until it has it. `is_proved`: its refusal is another's wrong block in between."""
        if self._plan.is_broken and self._fault is not None:
            raise self._fault
        want = self._plan.want([index], 0)
        news = asyncio.Event()
        self._waiters.add(news)
        n_faults = self._n_faults
        try:
            for _ in range(_ADD_TRIES if is_proved else 1):
                async with self._lifecycle:
                    self._check()
                    self._attachment.add_piece(index, data)
                n_moves = self._n_moves
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ADD_TIMEOUT_S / _ADD_TRIES):
                        while not want.has_come and self._n_moves == n_moves and self._n_faults == n_faults:
                            news.clear()
                            await news.wait()
                            if want.has_come:
                                break
                if want.has_come:
                    return True
                self._check()
                if self._fault is not None and self._n_faults != n_faults:
                    raise self._fault
            return False
        finally:
            self._waiters.discard(news)
            self._plan.drop(want)

    # -- what libtorrent tells

    def _heard(self, event: alerts.Event) -> None:
        match event:
            case alerts.PieceVerified(piece):
                self._plan.verified(piece)
                self._n_moves += 1
                self._is_saved = False
                if any(want.has_come for want in self._plan.wants):
                    self._wake()
            case alerts.PieceFailed(piece):
                self._piece_failed(piece)
            case alerts.Finished():
                self._plan.finished()
            case alerts.Flushed():
                if self._plan.flushed():
                    self._is_saved = False
                    self._wake()
            case alerts.FileFault(code, reason):
                self._disk_failed(code, reason)
            case alerts.PeerJoined(host, port):
                self._blame.joined((host, port))
            case alerts.PeerLeft(host, port, reason):
                self._blame.left((host, port), reason)
            case alerts.PeerBanned(host, port):
                if (host, port) in self._blame.trusted:
                    self._must_rejoin = True
                    self._work.set()
            case alerts.Status():
                self._told(event)
            case alerts.Dropped():
                self._plan.flush_lost()
                self._attachment.ask_for_pieces()
            case _:
                pass

    def _told(self, status: alerts.Status) -> None:
        self._status = status
        for piece in status.pieces or ():
            self._plan.verified(piece)
        if status.pieces is not None:
            self._wake()

    def _piece_failed(self, piece: int) -> None:
        self._n_moves += 1
        if self._is_seed or piece in self._plan.on_disk:
            self._suspect()  # it was to be served, and is not what it was
            return
        if self._plan.failed(piece):
            self._attachment.ask()
        self._doubts.set()
        self._wake()

    def _disk_failed(self, code: int, reason: str) -> None:
        if self._is_seed:
            self._suspect()
            return
        self._plan.is_broken = True
        if code in _NO_ROOM:
            unwritten = frozenset().union(*(want.missing | want.unflushed for want in self._plan.wants))
            missing = self.content.bytes_of(unwritten)
            words = f"the disk is full: {missing} bytes more are to go to {self.path} ({reason}). Free some room"
        else:
            words = f"{self.path} cannot be written or read: {reason}. Mend that"
            self._is_suspect = True
        self._failed_for_now(ArtifactError(f"{words} and fetch again: what has come is kept"))
        self._work.set()

    def _failed_for_now(self, error: ArtifactError) -> None:
        """Whoever waits now hears of it; the next fetch tries again."""
        self._fault = error
        self._n_faults += 1
        self._wake()

    def _suspect(self) -> None:
        self._is_suspect = True
        self._work.set()

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    # -- work in the background

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S):
                    await self._work.wait()
            self._work.clear()
            async with self._lifecycle:
                try:
                    await self._mend()
                except ArtifactError as error:
                    self._failed_for_now(error)

    async def _mend(self) -> None:
        if self.failure is not None:
            await self._leave()
        elif self._is_suspect:
            await self._look_again()
            self._n_looks += 1
            self._wake()
        elif self._plan.is_broken:
            await self._repair()
        elif self._must_rejoin and time.monotonic() - self._rejoined_at >= _REJOIN_EVERY_S:
            await self._rejoin()

    async def _leave(self) -> None:
        """Out of the session; what is not surely on the disk is looked at."""
        is_flushed = await self._attachment.detach()
        if is_flushed and not self._plan.is_broken:
            self._plan.all_flushed()
            return
        unflushed = set(self._plan.unflushed)
        good = await asyncio.to_thread(good_pieces, self.path, self.content, self._layer, unflushed)
        self._plan.found(self._plan.on_disk | good)

    async def _rejoin(self) -> None:
        """All connections anew, without the liars and with those libtorrent banned beside them."""
        self._must_rejoin = False
        self._rejoined_at = time.monotonic()
        await self._leave()
        await self._attachment.attach(self._blame.trusted)

    async def _repair(self) -> None:
        """After the disk failed: out, keep what is really there, in again. Fetches that failed ask for nothing more."""
        await self._leave()
        self._is_saved = False
        await self._attachment.attach(self._blame.trusted)

    async def _look_again(self) -> None:
        """The file may have been changed by others: hash what should be in it, and serve no more than is."""
        self._is_suspect = False
        await self._attachment.detach()
        on_disk = set(self._plan.on_disk)
        before = on_disk | self._plan.unflushed
        try:
            stamp = await asyncio.to_thread(FileStamp.of, self.path)
            good = await asyncio.to_thread(good_pieces, self.path, self.content, self._layer, before)
            is_longer = stamp.size > self.content.length
        except ArtifactError:
            stamp, good, is_longer = None, frozenset[int](), False
        self._plan.found(good)
        lost = on_disk - good
        self._is_saved = False
        if self._is_seed and (lost or is_longer or stamp is None):
            words = "is gone" if stamp is None else "has changed"
            self.fail(
                ArtifactError(
                    f"{self.path} {words}: {len(good)} of its {len(before)} pieces are the model's. It is no longer "
                    "offered to others; put the file back, or import it again"
                )
            )
            self._around.say(str(self.failure))
            return
        if lost:
            self._around.say(f"{self.path} was changed by another program: {len(lost)} pieces are lost")
        self._watch.start_again(stamp if self._is_seed else None)
        await self._attachment.attach(self._blame.trusted)
        self._wake()

    async def _clear_doubts(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S):
                    await self._doubts.wait()
            self._doubts.clear()
            doubtful = self._plan.doubtful & self._plan.missing()
            question = self._blame.next_question(doubtful, time.monotonic())
            if question is not None and self.failure is None:
                await self._ask_alone(question)
                self._doubts.set()

    async def _ask_alone(self, question: Question) -> None:
        came: dict[int, bytes] = {}

        def on_piece(index: int, data: bytes) -> None:
            came[index] = data
            self._received_alone += len(data)

        try:
            answer = await self._around.alone.ask(self.content, self._layer, question, on_piece)
        except ArtifactError as error:
            answer = Answer(reason=str(error))
        if came:
            self._blame.gave(question.member)
        if answer.wrong is not None:
            host, port = question.member
            self._blame.lied(question.member, answer.wrong)
            self._around.say(f"the peer at {host} port {port} sends wrong pieces and is asked for no more")
            self._around.blame_changed()
            self._must_rejoin = True
            self._work.set()
        elif answer.reason:
            self._blame.silent(question.member, answer.reason, time.monotonic())
        for index, data in came.items():
            with contextlib.suppress(ArtifactError):
                await self._add(index, data, is_proved=True)
