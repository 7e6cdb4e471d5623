"""Which records an asker has already, in a few bytes each, so that nobody sends them again.

The same records come from every peer that keeps them, at every reading. The rule this file keeps: the marks are made
with a salt that the asker draws for each lookup, so that nobody can make a record that looks like another to everybody;
what an asker says that it has is only ever left out of its own answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

SALT_BYTES = 8
MARK_BYTES = 4
MAX_MARKS = 1024


@dataclass(frozen=True, slots=True)
class Have:
    """`marks` of the records an asker has, made with `salt`; both empty where it has none."""

    salt: bytes = b""
    marks: frozenset[bytes] = frozenset()

    def __contains__(self, record: bytes) -> bool:
        """Whether the asker has these bytes, as far as `MARK_BYTES` can tell."""
        return bool(self.marks) and mark(record, self.salt) in self.marks


NOTHING = Have()


class Marker:
    """Marks records with one `salt`, each once."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._made: dict[bytes, bytes] = {}

    def have(self, records: Iterable[bytes]) -> Have:
        """Of more than `MAX_MARKS` records some are not told of."""
        marks: set[bytes] = set()
        for record in records:
            if len(marks) == MAX_MARKS:
                break
            if record not in self._made:
                self._made[record] = mark(record, self._salt)
            marks.add(self._made[record])
        return Have(self._salt, frozenset(marks)) if marks else NOTHING


def mark(record: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=MARK_BYTES, key=salt).digest()
