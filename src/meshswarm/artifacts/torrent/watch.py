"""Whether a file that is served was touched by somebody else, from its stamps alone.

The rule this file keeps: while we write a file its date says nothing, but its inode still does, and it never gets
shorter; once two looks in a row were alike, any other stamp means that somebody else was there.
"""

from __future__ import annotations

from meshswarm.artifacts.files import FileStamp


class FileWatch:
    """`is_settled`: nobody writes the file from the start, so its first stamp counts at once."""

    def __init__(self, *, is_settled: bool) -> None:
        self._is_settled = is_settled
        self._stamp: FileStamp | None = None
        self._last: FileStamp | None = None
        self._inode: int | None = None
        self._size = 0

    def start_again(self, stamp: FileStamp | None) -> None:
        """The file was hashed just now; with `stamp` where nobody here writes to it."""
        self._stamp = stamp
        self._last = None
        self._inode = None if stamp is None else stamp.inode
        self._size = 0

    def unsettle(self) -> None:
        """We begin to write."""
        self._stamp = self._last = None

    def is_changed(self, stamp: FileStamp | None, *, is_busy: bool, has_some: bool) -> bool:
        """One look. `is_busy`: we may be writing; `has_some`: something should be in the file."""
        if stamp is None:
            return has_some
        if stamp.size < self._size or (self._inode is not None and stamp.inode != self._inode):
            return True
        self._inode, self._size = stamp.inode, stamp.size
        if is_busy:
            self.unsettle()
            return False
        if self._stamp is not None:
            return stamp != self._stamp
        if self._is_settled or self._last == stamp:
            self._stamp = stamp
        self._last = stamp
        return False
