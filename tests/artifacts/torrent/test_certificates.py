"""The authority of a private swarm, and the leaves it signs."""

from __future__ import annotations

import ssl

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization

from meshswarm.artifacts.torrent.certificates import authority, tls_identity
from meshswarm.errors import ConfigError

SECRET = bytes(range(32))


def test_the_authority_is_pinned_byte_for_byte() -> None:
    """Members of different releases must agree on it."""
    certificate, _key = authority(SECRET)
    assert (
        certificate.fingerprint(hashes.SHA256()).hex()
        == "09ed4986f10195f557d26c4addc02231cdd6b5d4eadb54e5aeb3d16884b17c07"
    )


def test_the_authority_follows_from_the_secret_alone() -> None:
    pem = {tls_identity(SECRET).root for _ in range(3)}
    assert len(pem) == 1
    assert tls_identity(SECRET[:-1] + b"?").root not in pem


def test_every_start_has_a_leaf_of_its_own_that_the_authority_signed() -> None:
    one, other = tls_identity(SECRET), tls_identity(SECRET)
    assert one.key != other.key and one.leaf != other.leaf
    root = x509.load_pem_x509_certificate(one.root.encode())
    leaf = x509.load_pem_x509_certificate(one.leaf.encode())
    leaf.verify_directly_issued_by(root)
    with pytest.raises(InvalidSignature):
        other_root = x509.load_pem_x509_certificate(tls_identity(bytes(32)).root.encode())
        x509.load_pem_x509_certificate(other.leaf.encode()).verify_directly_issued_by(other_root)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["*"]


def test_the_secret_is_in_none_of_it() -> None:
    _certificate, key = authority(SECRET)
    identity = tls_identity(SECRET)
    private = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    assert SECRET not in private
    assert SECRET.hex() not in "".join((identity.root, identity.leaf, identity.key))


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="16 bytes"):
        authority(b"short")


def test_openssl_takes_the_parameters(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tls") / "dh.pem"
    path.write_text(tls_identity(SECRET).dh_params)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_dh_params(str(path))
