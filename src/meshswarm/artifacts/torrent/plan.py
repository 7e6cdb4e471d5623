"""Which pieces are wanted, here, on the disk, or in doubt: what is asked of libtorrent follows from it.

The rule this file keeps: a piece is reported as here only once its bytes are on the disk. A piece that came wrong is
in doubt: it is not asked of all peers again, but of one at a time, so that a liar can be told from the honest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

STALL_BYTES = 16 * 1024
"""Less than this within a fetch's patience is nothing: whoever trickles bytes holds nobody up for ever."""


@dataclass(slots=True, eq=False)
class Want:
    """Pieces that somebody waits for."""

    pieces: frozenset[int]
    priority: int
    missing: set[int]
    unflushed: set[int] = field(default_factory=set)
    """Verified, but perhaps not on the disk."""

    @property
    def has_come(self) -> bool:
        return not self.missing

    @property
    def is_done(self) -> bool:
        return not self.missing and not self.unflushed


class PiecePlan:
    """The pieces of one torrent."""

    def __init__(self, n_pieces: int, on_disk: Iterable[int] = ()) -> None:
        self.n_pieces = n_pieces
        self.on_disk = set(on_disk)
        self.unflushed: set[int] = set()
        self.doubtful: set[int] = set()
        self.wants: list[Want] = []
        self._asked: dict[int, int] = {}
        self._n_flushes_due = 0
        self._flushing: set[int] | None = None
        self.is_broken = False
        """Writing failed: whatever is unflushed may never reach the disk, though libtorrent says it flushed."""

    def want(self, pieces: Iterable[int], priority: int) -> Want:
        """Raises IndexError for a piece the file has not."""
        wanted = frozenset(pieces)
        if any(not 0 <= index < self.n_pieces for index in wanted):
            raise IndexError(f"the file has the pieces 0 to {self.n_pieces - 1}")
        missing = wanted - self.on_disk
        want = Want(wanted, priority, set(missing - self.unflushed), set(missing & self.unflushed))
        self.wants.append(want)
        return want

    def drop(self, want: Want) -> None:
        self.wants.remove(want)

    def is_here(self, index: int) -> bool:
        return index in self.on_disk or index in self.unflushed

    def missing(self) -> set[int]:
        """Wanted, and neither here nor coming."""
        return set().union(*(want.missing for want in self.wants))

    def priorities(self) -> list[tuple[int, int]]:
        """(piece, priority) of each piece that is to be asked for otherwise than was said last."""
        due: dict[int, int] = {}
        for want in self.wants:
            for index in want.missing - self.doubtful:
                due[index] = max(due.get(index, 0), want.priority)
        changes = [(index, priority) for index, priority in due.items() if self._asked.get(index) != priority]
        changes += [(index, 0) for index in self._asked.keys() - due.keys() if not self.is_here(index)]
        self._asked = due
        return changes

    def attached_anew(self) -> None:
        """libtorrent knows of no priority any more, and owes no flush."""
        self._asked = {}
        self.is_broken = False
        self.flush_lost()

    # -- what happens

    def verified(self, index: int) -> None:
        if self.is_here(index) or not 0 <= index < self.n_pieces:
            return
        self.unflushed.add(index)
        self.doubtful.discard(index)
        for want in self.wants:
            if index in want.missing:
                want.missing.remove(index)
                want.unflushed.add(index)

    def failed(self, index: int) -> bool:
        """A piece came wrong; True where it is in doubt from now on."""
        if self.is_here(index) or index in self.doubtful or not 0 <= index < self.n_pieces:
            return False
        self.doubtful.add(index)
        return True

    def flush_asked(self) -> None:
        self._n_flushes_due += 1
        self._flushing = set(self.unflushed)

    def finished(self) -> None:
        """libtorrent flushes by itself: one answer more will come, which may be older than ours."""
        self._n_flushes_due += 1

    @property
    def is_flushing(self) -> bool:
        return self._flushing is not None

    def flushed(self) -> bool:
        """An answer; True where pieces are now known to be on the disk that were not before.

        Answers look alike, so only the last of all that are due stands for what was asked last.
        """
        self._n_flushes_due = max(0, self._n_flushes_due - 1)
        if self._n_flushes_due or self._flushing is None or self.is_broken:
            return False
        return self._reached_disk(self._flushing)

    def all_flushed(self) -> None:
        """Everything that was verified is on the disk, and no flush is on its way any more."""
        self.flush_lost()
        self._reached_disk(set(self.unflushed))

    def flush_lost(self) -> None:
        """No answer came: whatever is due is forgotten, to be asked for again."""
        self._n_flushes_due = 0
        self._flushing = None

    def _reached_disk(self, pieces: set[int]) -> bool:
        self._flushing = None
        pieces = pieces & self.unflushed
        self.unflushed -= pieces
        self.on_disk |= pieces
        for want in self.wants:
            want.unflushed -= pieces
        return bool(pieces)

    def found(self, on_disk: Iterable[int]) -> None:
        """The file was looked at: these pieces are right, no others."""
        self.on_disk = set(on_disk)
        self.unflushed = set()
        self.doubtful -= self.on_disk
        for want in self.wants:
            want.missing = set(want.pieces - self.on_disk)
            want.unflushed = set()
        self.attached_anew()


@dataclass(slots=True)
class Stall:
    """Tells when nothing has come for too long. Times in seconds on any clock."""

    patience_s: float
    since: float
    bytes_then: int = 0

    def came(self, n_bytes: int, now: float) -> None:
        """`n_bytes`: received in all, by any way."""
        if n_bytes >= self.bytes_then + STALL_BYTES or n_bytes < self.bytes_then:
            self.moved(n_bytes, now)

    def moved(self, n_bytes: int, now: float) -> None:
        self.bytes_then, self.since = n_bytes, now

    def is_over(self, now: float) -> bool:
        return now - self.since >= self.patience_s
