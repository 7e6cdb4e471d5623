"""A receipt holds what both sides signed and nothing else: tampering, mixing and overflow are refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ledger.signing import CONSUMER, PROVIDER, STRANGER, answered, claim, counters, engagement

from meshswarm.errors import LocalError
from meshswarm.identity import Identity
from meshswarm.ledger.receipt import (
    ACK_DOMAIN,
    CLAIM_DOMAIN,
    MAX_INTEGER,
    Claim,
    Engagement,
    Outcome,
    Receipt,
    ReceiptError,
    seal,
)
from meshswarm.span import Span
from meshswarm.stage.sessions.messages import Counters

Values = list[Any]


def resigned(half: Claim, change: Any, identity: Identity = PROVIDER) -> bytes:
    """The envelope of a claim whose values were changed before the provider signed it."""
    values = msgpack.unpackb(half.payload)
    change(values)
    payload = msgpack.packb(values)
    return seal(payload, identity.sign(CLAIM_DOMAIN, payload))


@given(counters, counters)
def test_both_sides_end_with_the_same_receipt(provider_counted: Counters, consumer_counted: Counters) -> None:
    half = claim(counted=provider_counted)
    at_consumer = Receipt.countersign(CONSUMER, half.envelope, engagement(), consumer_counted)
    assert at_consumer.ack is not None
    at_provider = Receipt.join(half, at_consumer.ack.envelope)
    assert at_provider == at_consumer
    assert at_provider.claim.counters == provider_counted
    assert at_provider.ack is not None and at_provider.ack.counters == consumer_counted
    agree = provider_counted == consumer_counted
    assert at_provider.outcome is (Outcome.AGREED if agree else Outcome.DISAGREED)
    assert bool(at_provider.differences) is not agree


def test_a_claim_alone_is_half_signed() -> None:
    assert Receipt(claim()).outcome is Outcome.HALF_SIGNED
    assert Receipt(claim()).differences == ()


def test_disagreement_names_the_counters_and_keeps_both_values() -> None:
    half = claim(counted=Counters(20, 100, 0, 0, 80, 500))
    receipt = answered(half, Counters(20, 99, 0, 0, 80, 400))
    assert receipt.outcome is Outcome.DISAGREED
    assert receipt.differences == ("decode_rows", "bytes_out")
    assert receipt.ack is not None
    assert (receipt.claim.counters.decode_rows, receipt.ack.counters.decode_rows) == (100, 99)


@given(st.data())
def test_one_changed_byte_of_a_claim_is_refused(data: st.DataObject) -> None:
    envelope = bytearray(claim().envelope)
    envelope[data.draw(st.integers(0, len(envelope) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ReceiptError):
        Claim.decode(bytes(envelope))


@given(st.data())
def test_one_changed_byte_of_an_acknowledgement_is_refused(data: st.DataObject) -> None:
    receipt = answered(claim())
    assert receipt.ack is not None
    envelope = bytearray(receipt.ack.envelope)
    envelope[data.draw(st.integers(0, len(envelope) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ReceiptError):
        Receipt.join(receipt.claim, bytes(envelope))


@given(st.binary(max_size=2000))
def test_arbitrary_bytes_are_refused(junk: bytes) -> None:
    with pytest.raises(ReceiptError):
        Claim.decode(junk)
    with pytest.raises(ReceiptError):
        Receipt.join(claim(), junk)


def test_a_claim_signed_by_another_is_refused() -> None:
    with pytest.raises(ReceiptError, match="not signed by the provider"):
        Claim.decode(resigned(claim(), lambda values: None, STRANGER))
    with pytest.raises(LocalError, match="only be signed by the provider"):
        Claim.sign(STRANGER, engagement(), Counters(), in_hash=b"i" * 32, out_hash=b"o" * 32, started_ms=0, ended_ms=0)


def test_an_acknowledgement_signed_by_another_is_refused() -> None:
    receipt = answered(claim())
    assert receipt.ack is not None
    forged = seal(receipt.ack.payload, STRANGER.sign(ACK_DOMAIN, receipt.ack.payload))
    with pytest.raises(ReceiptError, match="not signed by the claim's consumer"):
        Receipt.join(receipt.claim, forged)


def test_signatures_of_claims_and_acknowledgements_cannot_be_swapped() -> None:
    half = claim()
    payload = half.payload
    with pytest.raises(ReceiptError):
        Claim.decode(seal(payload, PROVIDER.sign(ACK_DOMAIN, payload)))


def test_an_acknowledgement_of_another_claim_is_refused() -> None:
    other = answered(claim(number=1))
    assert other.ack is not None
    with pytest.raises(ReceiptError, match="answers another claim"):
        Receipt.join(claim(number=2), other.ack.envelope)


@pytest.mark.parametrize("name", [field.name for field in fields(Engagement)])
def test_the_consumer_signs_only_what_was_agreed(name: str) -> None:
    agreed = engagement()
    values: dict[str, Any] = {"span": Span(0, 10), "provider": STRANGER.peer_id, "consumer": STRANGER.peer_id}
    other = replace(agreed, **{name: values.get(name) or b"x" * len(getattr(agreed, name))})
    with pytest.raises(ReceiptError, match=f"another {name}"):
        Receipt.countersign(CONSUMER, claim().envelope, other, Counters())


def test_a_receipt_made_out_to_somebody_else_is_not_countersigned() -> None:
    with pytest.raises(ReceiptError, match="another consumer"):
        Receipt.countersign(STRANGER, claim().envelope, engagement(), Counters())


@pytest.mark.parametrize("value", [-1, MAX_INTEGER + 1, 2**64 - 1, 1.0, True, None, "1", b"1", [1]])
def test_counters_are_integers_in_range(value: Any) -> None:
    with pytest.raises(ReceiptError, match="prefill_rows"):
        Claim.decode(resigned(claim(), lambda values: values.__setitem__(9, value)))


@pytest.mark.parametrize("value", [-1, MAX_INTEGER + 1, 2**64, 2**70])
def test_own_counters_that_do_not_fit_are_refused_before_signing(value: int) -> None:
    with pytest.raises(LocalError, match="cannot be accounted for"):
        claim(counted=Counters(decode_rows=value))
    with pytest.raises(LocalError, match="cannot be accounted for"):
        answered(claim(), Counters(decode_rows=value))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda values: values.append(None), "more values"),
        (lambda values: values.pop(), "not an integer"),
        (lambda values: values.clear(), "version"),
        (lambda values: values.__setitem__(0, 2), "version 2"),
        (lambda values: values.__setitem__(1, b"short"), "swarm id"),
        (lambda values: values.__setitem__(5, 10), "layers"),
        (lambda values: values.__setitem__(17, 1) or values.__setitem__(18, 0), "ends before it starts"),
    ],
)
def test_malformed_claims_are_refused_even_when_signed(change: Any, why: str) -> None:
    with pytest.raises(ReceiptError, match=why):
        Claim.decode(resigned(claim(), change))


def test_only_the_canonical_form_is_accepted() -> None:
    half = claim()
    longer = half.payload.replace(b"\xc4\x10", b"\xc5\x00\x10", 1)  # the swarm id as bin16 instead of bin8
    assert longer != half.payload
    assert msgpack.unpackb(longer) == msgpack.unpackb(half.payload)
    with pytest.raises(ReceiptError, match="canonical"):
        Claim.decode(seal(longer, PROVIDER.sign(CLAIM_DOMAIN, longer)))


def test_oversized_envelopes_are_refused_unread() -> None:
    with pytest.raises(ReceiptError, match="at most 1024"):
        Claim.decode(bytes(1025))
