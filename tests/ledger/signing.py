"""Peers, engagements and receipts for the ledger's tests, and hypothesis strategies for them."""

from __future__ import annotations

from hypothesis import strategies as st

from meshswarm.identity import Identity
from meshswarm.ledger.receipt import MAX_INTEGER, Claim, Engagement, Receipt, numclass_tag
from meshswarm.span import Span
from meshswarm.stage.sessions.messages import Counters

PROVIDER, CONSUMER, STRANGER = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
NUMCLASS = numclass_tag("llama.cpp 0.3.36 cpu avx2")

amounts = st.integers(0, MAX_INTEGER)
counters = st.builds(Counters, amounts, amounts, amounts, amounts, amounts, amounts)


def engagement(number: int = 0, provider: Identity = PROVIDER, consumer: Identity = CONSUMER) -> Engagement:
    session = number.to_bytes(16, "big")
    return Engagement(bytes(16), session, bytes(32), Span(10, 20), NUMCLASS, provider.peer_id, consumer.peer_id)


def claim(
    number: int = 0,
    counted: Counters = Counters(20, 100, 0, 0, 80, 276480),  # noqa: B008
    provider: Identity = PROVIDER,
    consumer: Identity = CONSUMER,
    ended_ms: int = 1_790_000_060_000,
) -> Claim:
    return Claim.sign(
        provider,
        engagement(number, provider, consumer),
        counted,
        in_hash=b"i" * 32,
        out_hash=b"o" * 32,
        started_ms=0,
        ended_ms=ended_ms,
    )


def answered(half: Claim, counted: Counters | None = None, consumer: Identity = CONSUMER) -> Receipt:
    """The receipt once the consumer answered, by default with the same counters."""
    return Receipt.countersign(consumer, half.envelope, half.engagement, counted or half.counters)
