"""What an asker has already, in a few bytes each, so that nobody sends it again: records, and contacts.

The same records and contacts come from every peer that is asked, at every reading. The rule this file keeps: the marks
are made with a salt that the asker draws for each lookup, so that nobody can make a record that looks like another to
everybody; and what an asker says that it has is only ever left out of its own answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from meshswarm.dht import wire
from meshswarm.dht.contact import Contact

SALT_BYTES = 8
MARK_BYTES = 4
MAX_MARKS = 1024
MAX_CONTACT_MARKS = 256


@dataclass(frozen=True, slots=True)
class Have:
    """`marks` of what an asker has, made with `salt`; both empty where it has nothing."""

    salt: bytes = b""
    marks: frozenset[bytes] = frozenset()

    def mark(self, what: bytes) -> bytes | None:
        """Its mark, when the asker has it as far as `MARK_BYTES` can tell."""
        made = mark(what, self.salt) if self.marks else b""
        return made if made in self.marks else None


NOTHING = Have()


class Marker:
    """Marks with one `salt`, each thing once."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._made: dict[bytes, bytes] = {}
        self._contacts: dict[bytes, Contact] = {}

    def have(self, records: Iterable[bytes], contacts: Iterable[Contact] = ()) -> Have:
        """Of more than there is room for some are not told of."""
        marks: set[bytes] = set()
        for contact in contacts:
            if len(marks) == MAX_CONTACT_MARKS:
                break
            made = self._mark(what_of(contact))
            self._contacts[made] = contact
            marks.add(made)
        for record in records:
            if len(marks) == MAX_MARKS:
                break
            marks.add(self._mark(record))
        return Have(self._salt, frozenset(marks)) if marks else NOTHING

    def contacts(self, marks: Iterable[bytes]) -> list[Contact]:
        """The contacts that were told of by these marks; marks of nothing are passed over."""
        return [self._contacts[each] for each in marks if each in self._contacts]

    def _mark(self, what: bytes) -> bytes:
        if what not in self._made:
            self._made[what] = mark(what, self._salt)
        return self._made[what]


def what_of(contact: Contact) -> bytes:
    """What is marked of a contact: who it is, and where it was reached last. At another address it is news."""
    return contact.peer.key + wire.pack(wire.pack_addresses(contact.addresses[:1]))


def mark(what: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(what, digest_size=MARK_BYTES, key=salt).digest()
