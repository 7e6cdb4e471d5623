"""Which swarm a peer belongs to, and what only its members can compute.

A public swarm has a name that anybody may know; a private one has a 32-byte key, or several while its key is being
changed: the first is used, all are understood. Every secret of a swarm comes out of such a root through HKDF (RFC
5869), each for one purpose. What says *where* things are (the swarm's id, its DHT keys) follows the lineage, which is
the first key the swarm ever had, so that a change of key moves nothing; what says *who may* (tags, seals, what is
announced outside) follows the keys of today. The rule this file keeps: a root never leaves it, and nothing here tells
an outsider which swarm a peer is in.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from meshswarm.errors import ConfigError
from meshswarm.identity import PeerId

SWARM_KEY_BYTES = 32
DHT_KEY_BYTES = 20  # Kademlia's 160 bits
MAX_SWARM_KEYS = 4  # one in use and three that are running out
SEAL_BYTES = 28  # how much longer sealed data is
DAY_S = 86_400
EDGE_S = 2 * 3600  # so near to midnight (UTC), a clock that is hours off may be in another day
_MAX_NAME_BYTES = 64
_NONCE_BYTES = 12


class Role(StrEnum):
    """Who speaks in a HELLO: part of every tag and signature, so that one side's cannot be sent back to it."""

    CLIENT = "client"
    SERVER = "server"


class _Secrets:
    """What comes out of one root and belongs to the keys of today."""

    def __init__(self, root: bytes) -> None:
        self.auth = _derive(root, "auth")
        self.rendezvous = _derive(root, "rendezvous")
        self.lan = _derive(root, "lan")
        self.seal_nonce = _derive(root, "seal-nonce")
        self.cipher = ChaCha20Poly1305(_derive(root, "seal"))
        self.artifacts = _derive(root, "artifacts")


class Swarm:
    """The swarm `name`; private when it has a `key`.

    Raises ConfigError for a name that is empty, unprintable or above 64 bytes, and for a key that is not 32 bytes.
    The object stays the same while a peer runs: `renew` changes its keys and whom it admits, and tells who asked to be.
    """

    def __init__(self, name: str, key: bytes | None = None) -> None:
        if not name or not name.isprintable() or len(name.encode()) > _MAX_NAME_BYTES:
            raise ConfigError(f"a swarm's name is 1 to {_MAX_NAME_BYTES} printable bytes; {name[:80]!r} is not")
        self.name = name
        self.is_private = key is not None
        root = _checked(key) if key is not None else _public_root(name)
        self._follow(root)
        self._secrets = [_Secrets(root)]
        self._expelled: frozenset[PeerId] = frozenset()
        self._holders: frozenset[PeerId] | None = None
        self._first_older = 1
        self._on_change: list[Callable[[], None]] = []

    @classmethod
    def of_keys(cls, name: str, keys: Sequence[bytes], *, lineage: bytes | None = None) -> Swarm:
        """A private swarm of one to four `keys`, the one in use first. `lineage`: the first key it ever had; without
        it, the last of `keys` counts as that."""
        if not 1 <= len(keys) <= MAX_SWARM_KEYS:
            raise ConfigError(f"a private swarm has 1 to {MAX_SWARM_KEYS} keys, not {len(keys)}")
        swarm = cls(name, lineage or keys[-1])
        swarm._secrets = [_Secrets(_checked(key)) for key in keys]
        return swarm

    def __repr__(self) -> str:
        return f"Swarm({self.name!r}, {'private' if self.is_private else 'public'})"

    # -- change while a peer runs

    def renew(
        self,
        keys: Sequence[bytes],
        *,
        expelled: Collection[PeerId] = (),
        holders: Collection[PeerId] | None = None,
        is_behind: bool = False,
    ) -> None:
        """From now on these keys, the newest first. Nobody of `expelled` is admitted; and who knows an older key alone
        is admitted only as one of `holders`, unless that is None. `is_behind`: all of these keys are older ones."""
        if not self.is_private:
            raise ConfigError(f"the swarm {self.name!r} is public and has no keys")
        if not 1 <= len(keys) <= MAX_SWARM_KEYS:
            raise ConfigError(f"a private swarm has 1 to {MAX_SWARM_KEYS} keys, not {len(keys)}")
        self._secrets = [_Secrets(_checked(key)) for key in keys]
        self._expelled = frozenset(expelled)
        self._holders = None if holders is None else frozenset(holders)
        self._first_older = 0 if is_behind else 1
        for callback in list(self._on_change):
            callback()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every `renew`."""
        self._on_change.append(callback)

    # -- who may

    def admits(self, peer: PeerId) -> bool:
        """False for a peer that the swarm's owner has expelled."""
        return peer not in self._expelled

    def tag(self, role: Role, fields: bytes) -> bytes:
        """32 bytes that prove membership over exactly these HELLO `fields`, spoken by `role`."""
        return _tag(self._secrets[0], role, fields)

    def older_tags(self, role: Role, fields: bytes) -> list[bytes]:
        """The same under each key that is running out: for a member that has not heard of the new one yet."""
        return [_tag(secrets, role, fields) for secrets in self._secrets[1:]]

    def has_tag(self, role: Role, fields: bytes, tag: bytes) -> bool:
        """True when `tag` is right under any key; takes the same time either way."""
        return self._newest_of(role, fields, [tag]) is not None

    def admits_tags(self, peer: PeerId, role: Role, fields: bytes, tags: Sequence[bytes]) -> bool:
        """True when one of `tags` proves that `peer` is a member, and the owner has not expelled it. Takes the same
        time whichever of it is wrong."""
        newest = self._newest_of(role, fields, tags)
        is_holder = self._holders is None or peer in self._holders
        return newest is not None and (newest < self._first_older or is_holder) and self.admits(peer)

    def _newest_of(self, role: Role, fields: bytes, tags: Sequence[bytes]) -> int | None:
        """The place of the newest key under which one of `tags` is right."""
        newest = None
        for place, secrets in reversed(list(enumerate(self._secrets))):
            right = _tag(secrets, role, fields)
            matches = [hmac.compare_digest(right, tag) for tag in tags]
            newest = place if any(matches) else newest
        return newest

    # -- where things are, and who can read them

    def dht_key(self, topic: bytes) -> bytes:
        """The 20-byte DHT key of `topic` in this swarm; without the swarm's key it cannot be found or guessed. It
        stays the same when the swarm's key changes."""
        return hmac.digest(self._dht_key, topic, "sha256")[:DHT_KEY_BYTES]

    def seal(self, key: bytes, data: bytes) -> bytes:
        """`data` as it is kept and sent under the DHT key `key`: readable by members alone, and nowhere but there.

        `SEAL_BYTES` longer; the same for the same data, so that copies can be compared (the nonce is an HMAC of what
        is sealed, as in RFC 5297). In a public swarm it is `data`.
        """
        if not self.is_private:
            return data
        secrets = self._secrets[0]
        nonce = hmac.digest(secrets.seal_nonce, _framed(key) + data, "sha256")[:_NONCE_BYTES]
        return nonce + secrets.cipher.encrypt(nonce, data, _framed(key))

    def unseal(self, key: bytes, data: bytes) -> bytes | None:
        """What was sealed under `key` with any key of this swarm; None when it was not."""
        if not self.is_private:
            return data
        for secrets in self._secrets:
            try:
                return secrets.cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _framed(key))
            except (InvalidTag, ValueError):
                continue
        return None

    def artifact_secret(self) -> bytes | None:
        """32 bytes that members make the certificates from under which they exchange pieces of models; None in a public
        swarm, where pieces go in the clear. It is that of the newest key: who was expelled never learns it."""
        return self._secrets[0].artifacts if self.is_private else None

    # -- what is said outside of the swarm

    def rendezvous_hashes(self, now_s: float) -> list[bytes]:
        """20-byte hashes under which members meet on BitTorrent's mainline DHT, best first; `now_s` is Unix time.

        They change every day (UTC); near midnight the next or last day's belong to them. While a key runs out that
        every holder of may still use, so do those of that key.
        """
        return [
            hmac.digest(secrets.rendezvous, day.to_bytes(8), "sha256")[:20]
            for secrets in self._shown()
            for day in _days(now_s)
        ]

    def lan_name(self, now_s: float) -> str:
        """What announcements on the local network are made from: 26 characters of base32, that of a public swarm
        always the same, a private one's another every day (UTC)."""
        day = int(now_s) // DAY_S if self.is_private else 0
        digest = hmac.digest(self._shown()[-1].lan, day.to_bytes(8), "sha256")[:16]
        return base64.b32encode(digest).decode().rstrip("=").lower()

    def _shown(self) -> list[_Secrets]:
        """The secrets that announcements are made of, newest first. After an expulsion an older key is the former
        member's too: what is announced with it would tell him where the swarm is."""
        return self._secrets if self._holders is None else self._secrets[:1]

    def _follow(self, lineage: bytes) -> None:
        self._dht_key = _derive(lineage, "dht")
        self.swarm_id = _derive(lineage, "id")[:16]
        """16 bytes that name the swarm in signed records without giving its key away; they outlive its keys."""


def key_id(key: bytes) -> bytes:
    """16 bytes that name a swarm's key without giving it away."""
    return _derive(_checked(key), "key-id")[:16]


def _checked(key: bytes) -> bytes:
    if len(key) != SWARM_KEY_BYTES:
        raise ConfigError(f"a swarm key is {SWARM_KEY_BYTES} bytes, not {len(key)}")
    return key


def _public_root(name: str) -> bytes:
    return hashlib.sha256(b"meshswarm/public-swarm/1\0" + name.encode()).digest()


def _derive(root: bytes, purpose: str) -> bytes:
    info = f"meshswarm/swarm/1/{purpose}".encode()
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(root)


def _tag(secrets: _Secrets, role: Role, fields: bytes) -> bytes:
    return hmac.digest(secrets.auth, f"meshswarm/hello-tag/1/{role}".encode() + b"\0" + fields, "sha256")


def _days(now_s: float) -> list[int]:
    """The day of `now_s` (UTC, counted from 1970), and the one beside it when that is near."""
    day, into_s = divmod(max(0, int(now_s)), DAY_S)
    days = [day]
    if into_s < EDGE_S and day > 0:
        days.append(day - 1)
    if into_s >= DAY_S - EDGE_S:
        days.append(day + 1)
    return days


def _framed(key: bytes) -> bytes:
    return len(key).to_bytes(4) + key
