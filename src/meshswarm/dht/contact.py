"""A contact: another peer's key and where it says it can be reached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from meshswarm.config import Address
from meshswarm.dht import wire
from meshswarm.dht.keys import node_id
from meshswarm.dht.wire import MAX_ADDRESSES, WireError
from meshswarm.identity import KEY_BYTES, PeerId


@dataclass(frozen=True, slots=True)
class Contact:
    """`addresses` are hints, best first: a dial proves the key, whatever answers there."""

    peer: PeerId
    addresses: tuple[Address, ...]

    @property
    def node_id(self) -> bytes:
        """Its place in the table's space, 20 bytes."""
        return node_id(self.peer)

    def pack(self) -> list[object]:
        return [self.peer.key, wire.pack_addresses(self.addresses)]

    @classmethod
    def unpack(cls, value: object) -> Contact:
        """Raises WireError, also for a contact without any address: it would be of no use to anybody."""
        pair = wire.array(value, "a contact", at_least=2, at_most=2)
        key = wire.binary(pair[0], "a contact", size=KEY_BYTES)
        return _contact(key, wire.addresses(pair[1], "a contact's addresses"))


@lru_cache(maxsize=16384)
def _contact(key: bytes, addresses: tuple[Address, ...]) -> Contact:
    """The same contact comes in answer after answer."""
    contact = Contact(PeerId(key), addresses)
    if not addresses:
        raise WireError(f"the contact {contact.peer.short} has no address")
    return contact


def merge_addresses(*sources: Iterable[Address]) -> tuple[Address, ...]:
    """All addresses of `sources`, the first ones first, each once, as many as a contact may have."""
    merged = dict.fromkeys(address for source in sources for address in source)
    return tuple(merged)[:MAX_ADDRESSES]
