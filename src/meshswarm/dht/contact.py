"""A contact: another peer's key and where it says it can be reached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from meshswarm.config import Address
from meshswarm.dht import wire
from meshswarm.dht.keys import node_id
from meshswarm.dht.wire import MAX_ADDRESSES, WireError
from meshswarm.identity import PeerId


@dataclass(frozen=True, slots=True)
class Contact:
    """`addresses` are hints, best first: a dial proves the key, whatever answers there."""

    peer: PeerId
    addresses: tuple[Address, ...]
    node_id: bytes = field(init=False, repr=False, compare=False)
    """Its place in the table's space, 20 bytes."""
    place: int = field(init=False, repr=False, compare=False)
    """The same as a number."""
    _packed: list[object] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        identity = node_id(self.peer)
        object.__setattr__(self, "node_id", identity)
        object.__setattr__(self, "place", int.from_bytes(identity))

    def pack(self) -> list[object]:
        """For msgpack; made once, because it is said again and again."""
        if self._packed is None:
            object.__setattr__(self, "_packed", [self.peer.key, wire.pack_addresses(self.addresses)])
        assert self._packed is not None
        return self._packed

    @classmethod
    def unpack(cls, value: object) -> Contact:
        """Raises WireError, also for a contact without any address: it would be of no use to anybody."""
        try:
            return _unpacked(*_frozen(value))
        except (TypeError, ValueError):
            return _unpack(value)


def _frozen(value: Any) -> tuple[object, tuple[tuple[object, object], ...]]:
    """A contact as msgpack gave it, in a form that can be looked up. Raises ValueError or TypeError for many others."""
    key, places = value
    return key, tuple([(host, port) for host, port in places])


@lru_cache(maxsize=16384)
def _unpacked(key: object, places: tuple[tuple[object, object], ...]) -> Contact:
    """The same contact comes in answer after answer."""
    return _unpack([key, [[host, port] for host, port in places]])


def _unpack(value: object) -> Contact:
    pair = wire.array(value, "a contact", at_least=2, at_most=2)
    contact = Contact(wire.peer_id(pair[0], "a contact"), wire.addresses(pair[1], "a contact's addresses"))
    if not contact.addresses:
        raise WireError(f"the contact {contact.peer.short} has no address")
    return contact


def merge_addresses(*sources: Iterable[Address]) -> tuple[Address, ...]:
    """All addresses of `sources`, the first ones first, each once, as many as a contact may have."""
    merged = dict.fromkeys(address for source in sources for address in source)
    return tuple(merged)[:MAX_ADDRESSES]
