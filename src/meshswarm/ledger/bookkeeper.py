"""Receipts at the end of a session: the provider's claim, the consumer's counter-signature, both kept.

The two ends of every session call this; it reads the wall clock and hands receipts to the ledger's own thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from meshswarm.errors import MeshswarmError
from meshswarm.identity import Identity, PeerId
from meshswarm.ledger.receipt import Claim, Engagement, Receipt, numclass_tag
from meshswarm.ledger.store import ReceiptWriter
from meshswarm.span import Span
from meshswarm.stage.sessions.messages import Counters
from meshswarm.stage.sessions.session import SpanSession


class Bookkeeper:
    """Signs and keeps this peer's receipts. `wall_clock` returns Unix time in seconds."""

    def __init__(
        self,
        identity: Identity,
        writer: ReceiptWriter,
        swarm_id: bytes,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._writer = writer
        self._swarm_id = swarm_id
        self._wall_clock = wall_clock

    def _now_ms(self) -> int:
        return int(self._wall_clock() * 1000)

    def engagement(
        self, session: bytes, model_id: bytes, span: Span, numclass: str, provider: PeerId, consumer: PeerId
    ) -> Engagement:
        return Engagement(self._swarm_id, session, model_id, span, numclass_tag(numclass), provider, consumer)

    def offer(self, session: SpanSession, numclass: str, lasted_s: float) -> bytes:
        """As the provider: sign what this span counted, keep it half-signed, and return it for the consumer."""
        opening = session.opening
        now_ms = self._now_ms()
        claim = Claim.sign(
            self._identity,
            self.engagement(
                opening.session, opening.model_id, opening.span, numclass, self._identity.peer_id, opening.head
            ),
            session.counters,
            in_hash=session.input_hash.digest(),
            out_hash=session.output_hash.digest(),
            started_ms=now_ms - int(lasted_s * 1000),
            ended_ms=now_ms,
        )
        self._writer.add(Receipt(claim), now_ms)
        return claim.envelope

    def acknowledged(self, claim_envelope: bytes, acknowledgement: bytes) -> None:
        """As the provider: keep the consumer's answer. Raises ReceiptError when it answers something else."""
        receipt = Receipt.join(Claim.decode(claim_envelope), acknowledgement)
        self._writer.add(receipt, self._now_ms())

    def countersign(self, claim_envelope: bytes, engagement: Engagement, counters: Counters) -> bytes | None:
        """As the consumer: check a claim, keep it with this peer's own `counters`, and return the acknowledgement;
        None for a claim that is not about this session and deserves no signature."""
        try:
            receipt = Receipt.countersign(self._identity, claim_envelope, engagement, counters)
        except MeshswarmError:
            return None
        assert receipt.ack is not None
        self._writer.add(receipt, self._now_ms())
        return receipt.ack.envelope
