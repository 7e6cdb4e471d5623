"""Who may take pieces in a private swarm: TLS under an authority that only members can make.

The rule this file keeps: the authority's certificate follows from the swarm's secret alone, byte for byte, so members
agree on it without a word. A leaf shows that its holder knows the secret, not who it is.
"""

from __future__ import annotations

import base64
import datetime
from dataclasses import dataclass
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshswarm.errors import ConfigError

MIN_SECRET_BYTES = 16
_CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256 (SEC 2, 2.4.2)
_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
"""Fixed: a member whose clock is wrong is a member still."""


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """What libtorrent needs for a torrent of a private swarm, in PEM."""

    root: str
    leaf: str
    key: str
    dh_params: str


def authority(secret: bytes) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The swarm's authority: the same certificate on every call. Raises ConfigError for a secret that is too short."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"a swarm's secret has at least {MIN_SECRET_BYTES} bytes")
    # 48 bytes reduced modulo the order: no scalar is noticeably likelier than another (FIPS 186-5, A.2.1).
    scalar = int.from_bytes(_derive(secret, "key", 48)) % (_CURVE_ORDER - 1) + 1
    key = ec.derive_private_key(scalar, ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "swarm")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(int.from_bytes(_derive(secret, "serial", 16)) >> 1 | 1)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    )
    return certificate, key


def tls_identity(secret: bytes) -> TlsIdentity:
    """A new leaf of the swarm's authority, with a key of its own."""
    root, root_key = authority(secret)
    key = ec.generate_private_key(ec.SECP256R1())
    leaf = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "*")]))
        .issuer_name(root.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("*")]), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .sign(root_key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return TlsIdentity(_pem(root), _pem(leaf), private.decode(), _dh_params())


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _derive(secret: bytes, purpose: str, n_bytes: int) -> bytes:
    info = f"meshswarm/torrent-{purpose}/1".encode()
    return HKDF(hashes.SHA256(), n_bytes, salt=None, info=info).derive(secret)


@cache
def _dh_params() -> str:
    """The group ffdhe2048 (RFC 7919, A.1), from its formula. TLS 1.3 does not use it; libtorrent asks for one."""
    prime = 2**2048 - 2**1984 + (_floor_of_e_times(1918) + 560_316) * 2**64 - 1
    fields = b"".join(_der(0x02, number.to_bytes(number.bit_length() // 8 + 1)) for number in (prime, 2))
    body = base64.encodebytes(_der(0x30, fields)).decode()
    return f"-----BEGIN DH PARAMETERS-----\n{body}-----END DH PARAMETERS-----\n"


def _der(tag: int, content: bytes) -> bytes:
    """One element of DER (X.690): PKCS #3 parameters are a sequence of two integers."""
    length = len(content)
    if length < 0x80:
        return bytes([tag, length]) + content
    return bytes([tag, 0x82]) + length.to_bytes(2) + content


def _floor_of_e_times(n_bits: int) -> int:
    """floor(2**n_bits * e), from the series of 1/k!."""
    spare = 64
    total = term = 1 << n_bits + spare
    for k in range(1, n_bits + spare):
        term //= k
        if not term:
            break
        total += term
    return total >> spare
