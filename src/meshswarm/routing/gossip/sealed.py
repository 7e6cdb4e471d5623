"""The envelope of everything that gossip passes on: who signed it, for which swarm, with which number.

The rule this file keeps: the exact bytes that were signed travel on and are never encoded again. Every payload begins
with its version, its author and its swarm's id, so a word said in one swarm means nothing in another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from meshswarm.dht import wire
from meshswarm.dht.signed import SCOPE_BYTES
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId

VERSION = 1
SIGNATURE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Sealed:
    """A signed word of `author`. `fields`: what its payload holds beyond version, author, scope and number. `wire` is
    the whole of it; everything else was read from there."""

    author: PeerId
    scope: bytes
    number: int
    fields: tuple[Any, ...]
    wire: bytes = field(repr=False)

    def is_signed(self, purpose: str) -> bool:
        """True when the author signed exactly these bytes for `purpose`."""
        return _is_signed(self.wire, self.author, purpose)


def seal(identity: Identity, purpose: str, scope: bytes, number: int, fields: list[object]) -> bytes:
    """The wire form of a new word of this peer."""
    payload = wire.pack([VERSION, identity.peer_id.key, scope, number, *fields])
    return wire.pack([payload, identity.sign(purpose, payload)])


def unseal(data: bytes, *, max_bytes: int, at_least: int, what: str) -> Sealed:
    """Reads the envelope; `at_least`: how many fields there must be. The signature is checked later, when all that
    costs less has been. Raises WireError."""
    payload, _ = _split(data, max_bytes, what)
    read = wire.array(wire.unpack_array(payload, max_bytes, what), what, at_least=4 + at_least)
    wire.integer(read[0], f"version of {what}", low=VERSION, high=VERSION)
    return Sealed(
        author=wire.peer_id(read[1], f"author of {what}"),
        scope=wire.binary(read[2], f"scope of {what}", size=SCOPE_BYTES),
        number=wire.integer(read[3], f"number of {what}"),
        fields=tuple(read[4:]),
        wire=data,
    )


def _split(data: bytes, max_bytes: int, what: str) -> tuple[bytes, bytes]:
    outer = wire.array(wire.unpack_array(data, max_bytes, what), what, at_least=2, at_most=2)
    payload = wire.binary(outer[0], f"payload of {what}", at_most=max_bytes)
    return payload, wire.binary(outer[1], f"signature of {what}", size=SIGNATURE_BYTES)


@lru_cache(maxsize=8192)
def _is_signed(data: bytes, author: PeerId, purpose: str) -> bool:
    """The same word comes by several neighbours: its signature is checked once."""
    try:
        payload, signature = _split(data, len(data), "a word")
    except WireError:
        return False
    return author.verify(purpose, payload, signature)
