"""A certificate is a key in an envelope: nothing but the key may count."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from meshswarm.identity import Identity
from meshswarm.net.certificate import CertificateError, certificate_hash, certificate_key, make_certificate

NOW = datetime.datetime(2030, 1, 2, tzinfo=datetime.UTC)
ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)
NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])


def test_a_certificate_carries_its_makers_key() -> None:
    certificate = make_certificate(ALICE, NOW)
    assert certificate_key(certificate) == ALICE.peer_id
    assert certificate.not_valid_before_utc < NOW < certificate.not_valid_after_utc


def test_the_hash_is_of_the_exact_bytes() -> None:
    first, second = make_certificate(ALICE, NOW), make_certificate(ALICE, NOW)
    assert certificate_hash(first) != certificate_hash(second)
    again = x509.load_der_x509_certificate(first.public_bytes(Encoding.DER))
    assert certificate_hash(again) == certificate_hash(first)


def test_a_chain_is_refused() -> None:
    certificate = make_certificate(ALICE, NOW)
    with pytest.raises(CertificateError, match="one certificate, not 2"):
        certificate_key(certificate, [make_certificate(BOB, NOW)])


def _builder() -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(NAME)
        .issuer_name(NAME)
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + datetime.timedelta(days=1))
    )


def test_a_key_signed_by_somebody_else_is_refused() -> None:
    forged = _builder().public_key(ALICE.private_key.public_key()).sign(BOB.private_key, algorithm=None)
    with pytest.raises(CertificateError, match="not signed by its own key"):
        certificate_key(forged)


def test_another_kind_of_key_is_refused() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(CertificateError, match="another kind of key"):
        certificate_key(_builder().public_key(key.public_key()).sign(key, SHA256()))
