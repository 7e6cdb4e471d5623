"""Handing a swarm's key to one member, so that nobody else can read it, whatever carries or keeps the bytes.

The receiver sends the public half of an X25519 key made for this one question; the giver answers with one of its own
and the swarm's keys, encrypted under what both halves make (RFC 7748, HKDF of RFC 5869, ChaCha20-Poly1305 of RFC 8439),
bound to both PeerIds. The rule this file keeps: every half is used once, so a recorded answer stays closed for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from meshswarm.identity import PeerId
from meshswarm.net.swarm import MAX_SWARM_KEYS, SWARM_KEY_BYTES

HALF_BYTES = 32
MAX_PARCEL_BYTES = HALF_BYTES + MAX_SWARM_KEYS * SWARM_KEY_BYTES + 16
_NONCE = bytes(12)  # each derived key encrypts one message


class Receiver:
    """The side that wants keys: `own` asks `giver` with `half`, and opens the one answer."""

    def __init__(self, own: PeerId, giver: PeerId) -> None:
        self._private = X25519PrivateKey.generate()
        self._own = own
        self._giver = giver
        self.half = self._private.public_key().public_bytes_raw()

    def open(self, parcel: bytes) -> list[bytes]:
        """The keys in `parcel`. Raises ValueError when it was not made for this question."""
        theirs, sealed = parcel[:HALF_BYTES], parcel[HALF_BYTES:]
        cipher = _cipher(self._private, theirs, self._giver, self._own, self.half, theirs)
        try:
            joined = cipher.decrypt(_NONCE, sealed, None)
        except InvalidTag:
            raise ValueError("the keys were not sealed for this peer and question") from None
        if len(joined) % SWARM_KEY_BYTES:
            raise ValueError("the sealed keys have the wrong length")
        return [joined[at : at + SWARM_KEY_BYTES] for at in range(0, len(joined), SWARM_KEY_BYTES)][:MAX_SWARM_KEYS]


def parcel_of(keys: Sequence[bytes], giver: PeerId, receiver: PeerId, half: bytes) -> bytes:
    """`keys`, for the peer `receiver` that asked with `half`. Raises ValueError for a half that is none."""
    private = X25519PrivateKey.generate()
    ours = private.public_key().public_bytes_raw()
    return ours + _cipher(private, half, giver, receiver, half, ours).encrypt(_NONCE, b"".join(keys), None)


def _cipher(
    private: X25519PrivateKey, theirs: bytes, giver: PeerId, receiver: PeerId, asked: bytes, answered: bytes
) -> ChaCha20Poly1305:
    shared = private.exchange(X25519PublicKey.from_public_bytes(theirs))  # ValueError for a point of low order
    info = b"meshswarm/swarm-handover/1\0" + giver.key + receiver.key + asked + answered
    return ChaCha20Poly1305(HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(shared))
