"""What one torrent knows of its pieces, its members and its file, and what libtorrent tells it.

The rule this file keeps: events only change what is known and wake whoever waits. What takes time is done by `upkeep`,
under `lifecycle`, so that nobody fetches while the torrent is taken out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Iterable, Iterator
from pathlib import Path

from meshswarm.artifacts.torrent import alerts
from meshswarm.artifacts.torrent.attachment import Attachment, Surroundings
from meshswarm.artifacts.torrent.blame import Blame
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.plan import PiecePlan
from meshswarm.artifacts.torrent.watch import FileWatch
from meshswarm.errors import ArtifactError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TorrentState:
    """`failure`: why the torrent is of no use any more. `fault`: what failed last, while it may be tried again."""

    def __init__(
        self,
        around: Surroundings,
        content: Content,
        path: Path,
        layer: bytes | None,
        on_disk: Iterable[int],
        is_seed: bool,
    ) -> None:
        self.around = around
        self.content = content
        self.path = path
        self.layer = layer
        self.is_seed = is_seed
        self.plan = PiecePlan(content.n_pieces, on_disk)
        self.blame = Blame()
        self.watch = FileWatch(is_settled=is_seed)
        self.attachment = Attachment(around, content, path, layer, self.plan, self._heard, is_seed)
        self.lifecycle = asyncio.Lock()
        self.status = alerts.Status(0, 0, 0, 0, 0, 0, False, None)
        self.received_alone = 0
        self.failure: ArtifactError | None = None
        self.fault: ArtifactError | None = None
        self.n_faults = 0
        self.n_moves = 0
        """Pieces that came, right or wrong."""
        self.is_suspect = False
        self.must_rejoin = False
        self.is_saved = True
        self.work = asyncio.Event()
        self.doubts = asyncio.Event()
        self._waiters: set[asyncio.Event] = set()

    @property
    def received_bytes(self) -> int:
        """Payload from peers, right or wrong, since the torrent was put in last."""
        return self.status.received_bytes + self.received_alone

    def check(self) -> None:
        """Raises `failure`, if there is one."""
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def news(self) -> Iterator[asyncio.Event]:
        """Set whenever something happens that a fetch or an addition waits for."""
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            yield event
        finally:
            self._waiters.discard(event)

    def wake(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    def fail(self, error: ArtifactError) -> None:
        self.failure = self.failure or error
        self.wake()

    def failed_for_now(self, error: ArtifactError) -> None:
        """Whoever waits now hears of it; the next fetch tries again."""
        self.fault = error
        self.n_faults += 1
        self.wake()

    def suspect(self) -> None:
        """The file may not be what it was."""
        self.is_suspect = True
        self.work.set()

    # -- what libtorrent tells

    def _heard(self, event: alerts.Event) -> None:
        match event:
            case alerts.PieceVerified(piece):
                self._piece_came(piece)
            case alerts.PieceFailed(piece):
                self._piece_failed(piece)
            case alerts.Finished():
                self.plan.finished()
            case alerts.Flushed():
                if self.plan.flushed():
                    self.is_saved = False
                    self.wake()
            case alerts.FileFault(code, reason):
                self._disk_failed(code, reason)
            case alerts.PeerJoined(host, port):
                self.blame.joined((host, port))
            case alerts.PeerLeft(host, port, reason):
                self.blame.left((host, port), reason)
            case alerts.PeerBanned(host, port):
                if (host, port) in self.blame.trusted:
                    self.must_rejoin = True
                    self.work.set()
            case alerts.Status():
                self._told(event)
            case alerts.Dropped():
                self.plan.flush_lost()
                self.attachment.ask_for_pieces()
            case _:
                pass

    def _piece_came(self, piece: int) -> None:
        self.plan.verified(piece)
        self.n_moves += 1
        self.is_saved = False
        if any(want.has_come for want in self.plan.wants):
            self.wake()

    def _piece_failed(self, piece: int) -> None:
        self.n_moves += 1
        if self.is_seed or piece in self.plan.on_disk:
            self.suspect()  # it was to be served, and is not what it was
            return
        if self.plan.failed(piece):
            self.attachment.ask()
        self.doubts.set()
        self.wake()

    def _told(self, status: alerts.Status) -> None:
        self.status = status
        if status.pieces is not None:
            for piece in status.pieces:
                self.plan.verified(piece)
            self.wake()

    def _disk_failed(self, code: int, reason: str) -> None:
        if self.is_seed:
            self.suspect()
            return
        self.plan.is_broken = True
        if code in _NO_ROOM:
            unwritten = frozenset().union(*(want.missing | want.unflushed for want in self.plan.wants))
            missing = self.content.bytes_of(unwritten)
            words = f"the disk is full: {missing} bytes more are to go to {self.path} ({reason}). Free some room"
        else:
            words = f"{self.path} cannot be written or read: {reason}. Mend that"
            self.is_suspect = True
        self.failed_for_now(ArtifactError(f"{words} and fetch again: what has come is kept"))
        self.work.set()
