"""What each sender keeps of the rows it sent: replayed when the receiver is lost, recomputed when it is audited.

The rules this file keeps: rows come back bit for bit, with the chunk boundaries they were sent with; memory and disk
stay within their caps; what a cap pushes out is a *suffix*, so that the kept rows are always the positions from 0 on,
and `evicted` tells recovery to replay tokens from there; rows are wiped when the audit window after CLOSE is over.

Sans-IO: `append` and `truncate_to` are the hot path and only touch memory; `now` is an argument. The disk is written by
a `SpillBatch`, off the event loop: `spill` below is that shell.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from meshswarm.errors import LocalError
from meshswarm.stage.sessions.spill import SpillError, SpillFile, SpillRecord, WipedError

MIB = 1 << 20
BATCH_BYTES = 8 * MIB  # one write off the loop; the rest waits for the next


class Retention(StrEnum):
    """Where a session's rows may be kept. Privacy modes that forbid a log say `NONE`."""

    NONE = "none"
    MEMORY = "memory"
    DISK = "disk"  # memory first, the oldest rows move to an encrypted file


class EvictedError(LocalError):
    """The rows asked for are not kept any more: recovery replays tokens, and their audit is off."""


@dataclass(frozen=True, slots=True)
class LogLimits:
    """Caps in bytes. `memory` and `total` (memory and disk) hold for all sessions together."""

    memory_bytes: int = 64 * MIB
    session_bytes: int = 1024 * MIB
    total_bytes: int = 4096 * MIB
    audit_window_s: float = 120.0


@dataclass(frozen=True, slots=True)
class LoggedRows:
    """Rows `pos0 ... pos0 + n_rows - 1` as they were sent, in wire dtype.

    `sent_rows`: how many rows were computed and sent together, before any were truncated or left out here; whoever
    replays them for identical bits must compute as many at a time.
    """

    seq: int
    pos0: int
    n_rows: int
    sent_rows: int
    payload: bytes = field(repr=False)


@dataclass(slots=True, eq=False)
class _Chunk:
    hop: HopLog
    seq: int
    pos0: int
    n_rows: int
    sent_rows: int
    row_bytes: int
    data: bytes | SpillRecord
    dropped: bool = False

    @property
    def end(self) -> int:
        return self.pos0 + self.n_rows


@dataclass(frozen=True, slots=True)
class _Piece:
    """What to read of one chunk: rows `first` up to `end`, counted from the chunk's first row."""

    seq: int
    pos0: int
    sent_rows: int
    row_bytes: int
    data: bytes | SpillRecord
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Rows to read back, taken from the log at one moment: what happens to the log later changes nothing here."""

    pieces: tuple[_Piece, ...] = field(repr=False)
    spill: SpillFile | None

    @property
    def on_disk(self) -> bool:
        """True when `load` has to read from the disk, which blocks."""
        return any(isinstance(piece.data, SpillRecord) for piece in self.pieces)

    def load(self) -> list[LoggedRows]:
        """The rows, in order. Raises SpillError when the disk lost them or they were wiped meanwhile."""
        return [self._load(piece) for piece in self.pieces]

    def _load(self, piece: _Piece) -> LoggedRows:
        data = piece.data
        if isinstance(data, SpillRecord):
            assert self.spill is not None
            data = self.spill.read(data)
        wanted = data[piece.first * piece.row_bytes : piece.end * piece.row_bytes]
        return LoggedRows(piece.seq, piece.pos0 + piece.first, piece.end - piece.first, piece.sent_rows, wanted)


class HopLog:
    """The rows one sender sent to one receiver in one session. Made by `ActivationLog.open`."""

    def __init__(self, log: ActivationLog, retention: Retention, spill: SpillFile | None, end: int) -> None:
        self.retention = retention
        self.end = end  # the position after the last row sent
        self.kept_to = 0  # rows [0, kept_to) can be read back
        self.memory_bytes = 0
        self.disk_bytes = 0
        self.closed_s: float | None = None
        self._log = log
        self._spill = spill
        self._chunks: list[_Chunk] = []
        self._last_seq = -1

    @property
    def evicted(self) -> bool:
        """True when some of the rows sent, from `kept_to` on, are not kept."""
        return self.kept_to < self.end

    def append(self, seq: int, pos0: int, n_rows: int, payload: bytes) -> bool:
        """Keep rows that were just sent; False when they are not kept. `payload` is not copied: bytes, never changed.

        Raises ValueError when they do not follow what was sent before.
        """
        if seq <= self._last_seq or pos0 != self.end or n_rows < 1 or len(payload) % n_rows:
            raise ValueError(f"step {seq} ({n_rows} rows at {pos0}) does not follow {self._last_seq} at {self.end}")
        if self.closed_s is not None:
            raise ValueError("the session is closed")
        self._last_seq = seq
        complete = not self.evicted
        self.end += n_rows
        if not complete or self.retention is Retention.NONE or not self._log._has_room(self, len(payload)):
            return False
        chunk = _Chunk(self, seq, pos0, n_rows, n_rows, len(payload) // n_rows, payload)
        self._chunks.append(chunk)
        self.kept_to = self.end
        self._log._added(chunk, len(payload))
        return True

    def truncate_to(self, position: int) -> None:
        """Drop the rows from `position` on, as the receiver does."""
        if not 0 <= position <= self.end:
            raise ValueError(f"cannot truncate to {position}: {self.end} positions were sent")
        self.end = position
        self.kept_to = min(self.kept_to, position)
        while self._chunks and self._chunks[-1].pos0 >= position:
            self._drop(self._chunks.pop())
        if self._chunks and self._chunks[-1].end > position:
            self._shorten(self._chunks[-1], position)

    def replay(self, start: int, stop: int) -> Replay:
        """Rows `[start, stop)`. Raises EvictedError when they are not all kept."""
        if not 0 <= start < stop <= self.kept_to:
            raise EvictedError(f"rows {start} to {stop} are not in the activation log, which holds {self.kept_to}")
        pieces = tuple(
            _Piece(
                chunk.seq,
                chunk.pos0,
                chunk.sent_rows,
                chunk.row_bytes,
                chunk.data,
                first=max(start - chunk.pos0, 0),
                end=min(stop - chunk.pos0, chunk.n_rows),
            )
            for chunk in self._chunks
            if chunk.end > start and chunk.pos0 < stop
        )
        return Replay(pieces, self._spill)

    def close(self, now: float) -> None:
        """The session ended: the rows stay for the audit window, unless room is needed before."""
        if self.closed_s is None:
            self.closed_s = now
            self._log._closed(self)

    def wipe(self) -> None:
        """Forget all rows now and keep none from here on. Disk space is given back by the next `SpillBatch`."""
        self.retention = Retention.NONE
        for chunk in self._chunks:
            self._drop(chunk)
        self._chunks.clear()
        self.kept_to = 0
        self._log._wiped(self, self._spill)
        self._spill = None

    def _drop(self, chunk: _Chunk) -> None:
        chunk.dropped = True
        if isinstance(chunk.data, bytes):
            self._log._memory_freed(self, len(chunk.data))
            self._log._resident.pop(chunk, None)
        chunk.data = b""

    def _shorten(self, chunk: _Chunk, position: int) -> None:
        chunk.n_rows = position - chunk.pos0
        if isinstance(chunk.data, bytes):
            kept = chunk.data[: chunk.n_rows * chunk.row_bytes]
            self._log._memory_freed(self, len(chunk.data) - len(kept))
            chunk.data = kept


@dataclass(slots=True)
class SpillBatch:
    """Disk work: rows to write and wiped files to give back. `run` blocks; hand the batch to `spill_done` after it."""

    writes: list[tuple[_Chunk, bytes, SpillFile]]
    wipes: list[SpillFile]
    written: list[tuple[_Chunk, SpillRecord]] = field(default_factory=list)
    failure: SpillError | None = None

    def run(self) -> None:
        for spill in self.wipes:
            spill.wipe()
        for chunk, payload, spill in self.writes:
            try:
                self.written.append((chunk, spill.write(payload)))
            except WipedError:
                continue
            except SpillError as error:
                self.failure = error
                return


class ActivationLog:
    """All of a peer's hop logs under common caps. `spill_folder` None: nothing goes to disk."""

    def __init__(self, limits: LogLimits, spill_folder: Path | None) -> None:
        self.limits = limits
        self.memory_bytes = 0
        self.disk_bytes = 0
        self.spill_failure: SpillError | None = None
        """Why rows stay in memory: the disk failed. Tried again once a wiped file gave room back."""
        self._folder = spill_folder
        self._open: set[HopLog] = set()
        self._in_audit_window: deque[HopLog] = deque()  # oldest first
        self._resident: dict[_Chunk, SpillFile] = {}  # what could go to disk, oldest first
        self._to_wipe: list[SpillFile] = []
        self._running: SpillBatch | None = None

    def open(self, retention: Retention, n_copied: int = 0) -> HopLog:
        """A log for one hop of one session. A session that began as a copy of `n_copied` positions has none of their
        rows to send again, so it keeps none at all: what is kept begins at position 0."""
        on_disk = retention is Retention.DISK and self._folder is not None
        hop = HopLog(
            self, retention, SpillFile(self._folder) if on_disk and self._folder is not None else None, n_copied
        )
        self._open.add(hop)
        return hop

    # -- time

    @property
    def next_expiry(self) -> float | None:
        """When `expire` has something to do next, on the clock that `now` values come from."""
        if not self._in_audit_window:
            return None
        closed_s = self._in_audit_window[0].closed_s
        assert closed_s is not None
        return closed_s + self.limits.audit_window_s

    def expire(self, now: float) -> None:
        """Wipe what is older than the audit window."""
        while (due := self.next_expiry) is not None and due <= now:
            self._in_audit_window[0].wipe()

    def wipe_all(self) -> None:
        """Forget everything, the disk's part included. Blocks: for the end of the process."""
        for hop in [*self._open, *self._in_audit_window]:
            hop.wipe()
        for spill in self._to_wipe:
            spill.wipe()
        self._to_wipe.clear()

    # -- disk work

    def spill_pending(self) -> SpillBatch | None:
        """Disk work that is due, one batch at a time; None when there is none or one is under way.

        Rows go to disk, the oldest first, when memory is more than half full, until it is a quarter full.
        """
        if self._running is not None:
            return None
        writes = []
        if self.spill_failure is None and self.memory_bytes > self.limits.memory_bytes // 2:
            excess = min(BATCH_BYTES, self.memory_bytes - self.limits.memory_bytes // 4)
            for chunk, spill in self._resident.items():
                if excess <= 0:
                    break
                assert isinstance(chunk.data, bytes)
                writes.append((chunk, chunk.data, spill))
                excess -= len(chunk.data)
        if not writes and not self._to_wipe:
            return None
        self._running = SpillBatch(writes, self._to_wipe)
        self._to_wipe = []
        return self._running

    def spill_done(self, batch: SpillBatch) -> None:
        """Take note of a batch that has run: what is on disk leaves memory."""
        assert batch is self._running
        self._running = None
        if batch.failure is not None or batch.wipes:  # room given back is a reason to try again
            self.spill_failure = batch.failure
        for chunk, record in batch.written:
            hop = chunk.hop
            if hop._spill is not None:  # what was written in vain, for rows dropped meanwhile, takes room all the same
                hop.disk_bytes += record.length
                self.disk_bytes += record.length
            if not chunk.dropped:
                assert isinstance(chunk.data, bytes)
                self._memory_freed(hop, len(chunk.data))
                chunk.data = record
                del self._resident[chunk]

    # -- what hop logs report

    def _has_room(self, hop: HopLog, n_bytes: int) -> bool:
        """Room for more rows of `hop`, made by wiping closed sessions, the oldest first, if need be."""
        limits = self.limits
        if hop.memory_bytes + hop.disk_bytes + n_bytes > limits.session_bytes:
            return False
        while (
            self.memory_bytes + n_bytes > limits.memory_bytes
            or self.memory_bytes + self.disk_bytes + n_bytes > limits.total_bytes
        ):
            if not self._in_audit_window:
                return False
            self._in_audit_window[0].wipe()
        return True

    def _added(self, chunk: _Chunk, n_bytes: int) -> None:
        chunk.hop.memory_bytes += n_bytes
        self.memory_bytes += n_bytes
        if chunk.hop._spill is not None:
            self._resident[chunk] = chunk.hop._spill

    def _memory_freed(self, hop: HopLog, n_bytes: int) -> None:
        hop.memory_bytes -= n_bytes
        self.memory_bytes -= n_bytes

    def _closed(self, hop: HopLog) -> None:
        if hop in self._open:
            self._open.remove(hop)
            self._in_audit_window.append(hop)

    def _wiped(self, hop: HopLog, spill: SpillFile | None) -> None:
        self._open.discard(hop)
        if hop in self._in_audit_window:
            self._in_audit_window.remove(hop)
        self.disk_bytes -= hop.disk_bytes
        hop.disk_bytes = 0
        if spill is not None:
            spill.forget_key()
            self._to_wipe.append(spill)


async def spill(log: ActivationLog) -> None:
    """Do all disk work that is due, off the event loop. Call it after appends and wipes, one call at a time."""
    while (batch := log.spill_pending()) is not None:
        await asyncio.to_thread(batch.run)
        log.spill_done(batch)
