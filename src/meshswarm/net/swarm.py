"""Which swarm a peer belongs to, and what only its members can compute.

A public swarm has a name that anybody may know; a private one has a 32-byte key. Every secret of a swarm comes out of
that one root through HKDF (RFC 5869), each for one purpose. The rule this file keeps: the root itself never leaves it,
and nothing here tells an outsider which swarm a peer is in.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from meshswarm.errors import ConfigError

SWARM_KEY_BYTES = 32
DHT_KEY_BYTES = 20  # Kademlia's 160 bits
_MAX_NAME_BYTES = 64


class Role(StrEnum):
    """Who speaks in a HELLO: part of every tag and signature, so that one side's cannot be sent back to it."""

    CLIENT = "client"
    SERVER = "server"


class Swarm:
    """The swarm `name`; private when it has a `key`.

    Raises ConfigError for a name that is empty, unprintable or above 64 bytes, and for a key that is not 32 bytes.
    """

    def __init__(self, name: str, key: bytes | None = None) -> None:
        if not name or not name.isprintable() or len(name.encode()) > _MAX_NAME_BYTES:
            raise ConfigError(f"a swarm's name is 1 to {_MAX_NAME_BYTES} printable bytes; {name[:80]!r} is not")
        if key is not None and len(key) != SWARM_KEY_BYTES:
            raise ConfigError(f"a swarm key is {SWARM_KEY_BYTES} bytes, not {len(key)}")
        self.name = name
        self.is_private = key is not None
        root = key if key is not None else hashlib.sha256(b"meshswarm/public-swarm/1\0" + name.encode()).digest()
        self._auth_key = _derive(root, "auth")
        self._dht_key = _derive(root, "dht")
        self.swarm_id = _derive(root, "id")[:16]
        """16 bytes that name the swarm in signed records without giving its key away."""

    def __repr__(self) -> str:
        return f"Swarm({self.name!r}, {'private' if self.is_private else 'public'})"

    def tag(self, role: Role, fields: bytes) -> bytes:
        """32 bytes that prove membership over exactly these HELLO `fields`, spoken by `role`."""
        return hmac.digest(self._auth_key, f"meshswarm/hello-tag/1/{role}".encode() + b"\0" + fields, "sha256")

    def has_tag(self, role: Role, fields: bytes, tag: bytes) -> bool:
        """True when `tag` is the right one; takes the same time either way."""
        return hmac.compare_digest(self.tag(role, fields), tag)

    def dht_key(self, topic: bytes) -> bytes:
        """The 20-byte DHT key of `topic` in this swarm; without the swarm's key it cannot be found or guessed."""
        return hmac.digest(self._dht_key, topic, "sha256")[:DHT_KEY_BYTES]


def _derive(root: bytes, purpose: str) -> bytes:
    info = f"meshswarm/swarm/1/{purpose}".encode()
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(root)
