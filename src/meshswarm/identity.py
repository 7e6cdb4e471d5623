"""Who a peer is: an Ed25519 key pair, its PeerId, and signatures that mean one thing only.

The rule this file keeps: a key never signs bare bytes. Every signature covers `meshswarm/<what>/1` plus the exact bytes
that are sent, so a signature made for one purpose is worthless for any other.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from meshswarm.errors import ConfigError

KEY_BYTES = 32
_CHECKSUM_BYTES = 2


def encode_id(raw: bytes, domain: str) -> str:
    """Text form of a 32-byte id: lower-case base32 without padding of id + 2 checksum bytes bound to `domain`."""
    checksum = hashlib.sha256(domain.encode() + raw).digest()[:_CHECKSUM_BYTES]
    return base64.b32encode(raw + checksum).decode().rstrip("=").lower()


def decode_id(text: str, domain: str, what: str) -> bytes:
    """The 32 bytes behind `encode_id`. Raises ValueError, naming `what`, for anything that is not exactly that text."""
    padded = text.upper() + "=" * (-len(text) % 8)
    try:
        raw = base64.b32decode(padded)
    except ValueError:
        raise ValueError(f"{text[:80]!r} is not a {what}: it has characters that base32 does not use") from None
    if len(raw) != KEY_BYTES + _CHECKSUM_BYTES:
        raise ValueError(f"{text[:80]!r} is not a {what}: it has the wrong length")
    if encode_id(raw[:KEY_BYTES], domain) != text:
        raise ValueError(f"{text!r} is not a {what}: its checksum does not match; was it mistyped?")
    return raw[:KEY_BYTES]


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    """A peer's name: its 32-byte Ed25519 public key. `str()` is the text form with a checksum."""

    key: bytes

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"a PeerId is {KEY_BYTES} bytes, not {len(self.key)}")

    def __str__(self) -> str:
        return encode_id(self.key, "meshswarm/peer/1")

    def __repr__(self) -> str:
        return f"PeerId({str(self)[:8]}…)"

    @property
    def short(self) -> str:
        """The first eight characters: enough to tell peers apart on a screen, never enough to identify one."""
        return str(self)[:8]

    @classmethod
    def parse(cls, text: str) -> PeerId:
        """Raises ValueError with a sentence for a person."""
        return cls(decode_id(text, "meshswarm/peer/1", "PeerId"))

    def verify(self, what: str, payload: bytes, signature: bytes) -> bool:
        """True when this peer signed exactly `payload` for the purpose `what`."""
        try:
            Ed25519PublicKey.from_public_bytes(self.key).verify(signature, _signed_bytes(what, payload))
        except (InvalidSignature, ValueError):
            return False
        return True


def _signed_bytes(what: str, payload: bytes) -> bytes:
    return f"meshswarm/{what}/1".encode() + b"\0" + payload


class Identity:
    """A peer's key pair. The private key stays in here and in its file."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self.private_key = private_key
        public = private_key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.peer_id = PeerId(public)

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The key pair of a 32-byte seed: for tests and simulation."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def sign(self, what: str, payload: bytes) -> bytes:
        """64-byte signature over `payload` for the one purpose `what` (for example "record")."""
        return self.private_key.sign(_signed_bytes(what, payload))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The key in `path`, made on first use with mode 0600.

        Raises ConfigError when the file is readable by others, damaged, or cannot be made: a key that others could
        have read is not an identity any more, so it is never used silently.
        """
        try:
            if not path.exists():
                _write_private(path, cls.generate().private_key)
            _check_mode(path)
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise ConfigError(f"the key file {path} cannot be used: {error.strerror or error}") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"the key file {path} is damaged; restore it from a backup, or move it away to get a new identity"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"the key file {path} holds another kind of key than Ed25519")
        return cls(key)


def _write_private(path: Path, key: Ed25519PrivateKey) -> None:
    """Write the key completely or not at all: a crash half-way never leaves half a key under the real name."""
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _check_mode(path: Path) -> None:
    if sys.platform == "win32":  # POSIX modes mean nothing there
        return
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"the key file {path} can be read or written by others (mode {mode:04o}); if nobody has copied it, run "
            f"`chmod 600 {path}`, otherwise move it away to get a new identity"
        )
