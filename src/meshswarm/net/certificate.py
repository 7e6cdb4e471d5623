"""The TLS certificate of a peer: self-signed with the identity's own key, so that the key is the whole of it.

Names and dates in it mean nothing. The rule this file keeps: a certificate counts only when it came alone, carries an
Ed25519 key and is signed by that very key; the key is then the peer.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from meshswarm.errors import RemoteProtocolError
from meshswarm.identity import Identity, PeerId

_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "meshswarm")])
_VALID = datetime.timedelta(days=3650)
_CLOCK_SKEW = datetime.timedelta(days=1)


class CertificateError(RemoteProtocolError):
    """A peer showed a certificate that proves nothing."""


def make_certificate(identity: Identity, now: datetime.datetime) -> x509.Certificate:
    """A certificate of `identity`, valid for ten years around `now` (UTC)."""
    return (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(identity.private_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID)
        .sign(identity.private_key, algorithm=None)
    )


def certificate_hash(certificate: x509.Certificate) -> bytes:
    """SHA-256 of the certificate's DER bytes: what HELLO binds its signatures to."""
    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()


def certificate_key(certificate: x509.Certificate, chain: Sequence[x509.Certificate] = ()) -> PeerId:
    """The peer behind `certificate`; `chain` is whatever came with it. Raises CertificateError.

    Dates are not looked at: a peer whose clock is wrong is still the holder of its key.
    """
    if chain:
        raise CertificateError(f"a peer shows one certificate, not {1 + len(chain)}")
    try:
        key = certificate.public_key()
        if not isinstance(key, Ed25519PublicKey):
            raise CertificateError("the certificate holds another kind of key than Ed25519")
        key.verify(certificate.signature, certificate.tbs_certificate_bytes)
    except InvalidSignature:
        raise CertificateError("the certificate is not signed by its own key") from None
    except (ValueError, TypeError) as error:
        raise CertificateError(f"the certificate cannot be read: {error}") from error
    return PeerId(key.public_bytes(Encoding.Raw, PublicFormat.Raw))
