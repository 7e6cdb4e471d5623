"""A receipt: what one peer did for another in one session, signed by both.

The provider signs a claim (what it counted), the consumer answers with an acknowledgement (the claim's hash and what it
counted itself). The rules this file keeps: a `Claim`, `Ack` or `Receipt` exists only with valid signatures; the exact
bytes that were signed are kept and never made again; payloads are msgpack arrays in a fixed order that hold integers
and bytes only, in the one canonical form. Where the two sides counted differently, both values stay and `outcome` says
so: an acknowledgement is about having heard the claim, not about agreeing with it.

No I/O and no clock: times are the caller's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import msgpack

from meshswarm.errors import LocalError, RemoteProtocolError
from meshswarm.identity import Identity, PeerId
from meshswarm.span import Span
from meshswarm.stage.sessions.messages import SESSION_ID_BYTES, Counters

VERSION = 1
CLAIM_DOMAIN = "receipt"
ACK_DOMAIN = "receipt-ack"
HASH_BYTES = 32
SWARM_ID_BYTES = 16
NUMCLASS_BYTES = 8
SIGNATURE_BYTES = 64
MAX_ENVELOPE_BYTES = 1024
MAX_INTEGER = 2**63 - 1  # what SQLite and every language's integers hold; no honest count comes near

_COUNTER_NAMES = tuple(field.name for field in fields(Counters))


class ReceiptError(RemoteProtocolError):
    """A claim or acknowledgement that is malformed, wrongly signed, or about something else than it should be."""


class Outcome(Enum):
    """`HALF_SIGNED`: the consumer has not answered, so it counts for nothing yet. `DISAGREED`: it counted otherwise."""

    HALF_SIGNED = "half-signed"
    AGREED = "agreed"
    DISAGREED = "disagreed"


def numclass_tag(numclass: str) -> bytes:
    """The 8 bytes that stand for a numeric class in ledger payloads."""
    return hashlib.sha256(b"meshswarm/numclass/1\0" + numclass.encode()).digest()[:NUMCLASS_BYTES]


@dataclass(frozen=True, slots=True)
class Engagement:
    """What a receipt is about. Both sides know it when the session opens."""

    swarm_id: bytes  # 16
    session: bytes  # 16
    model_id: bytes  # 32
    span: Span
    numclass: bytes  # 8, see `numclass_tag`
    provider: PeerId
    consumer: PeerId


@dataclass(frozen=True, slots=True)
class Claim:
    """The provider's half. Hashes are running hashes over the rows that came in and went out (`RowHash`).

    Made by `sign` and `decode` only, which is why its signature is known to be good.
    """

    engagement: Engagement
    counters: Counters
    in_hash: bytes
    out_hash: bytes
    started_ms: int  # Unix time, the provider's clock
    ended_ms: int
    payload: bytes
    signature: bytes

    @classmethod
    def sign(
        cls,
        identity: Identity,
        engagement: Engagement,
        counters: Counters,
        *,
        in_hash: bytes,
        out_hash: bytes,
        started_ms: int,
        ended_ms: int,
    ) -> Claim:
        """The claim of `identity`, which must be the engagement's provider.

        Raises LocalError when a value does not fit a payload: a number below 0 or above 2^63 - 1, a wrong length.
        """
        if identity.peer_id != engagement.provider:
            raise LocalError("a claim can only be signed by the provider it names")
        e = engagement
        values: list[Any] = [VERSION, e.swarm_id, e.session, e.model_id, e.span.start, e.span.stop, e.numclass]
        values += [e.provider.key, e.consumer.key, *_counter_values(counters), in_hash, out_hash, started_ms, ended_ms]
        payload = _pack(values)
        try:
            return cls._read(payload, identity.sign(CLAIM_DOMAIN, payload))
        except ReceiptError as error:
            raise LocalError(f"this session cannot be accounted for: {error}") from None

    @classmethod
    def decode(cls, envelope: bytes) -> Claim:
        """The claim in an envelope from another peer. Raises ReceiptError unless it is whole and its provider's own."""
        claim = cls._read(*_open_envelope("claim", envelope))
        provider = claim.engagement.provider
        if not provider.verify(CLAIM_DOMAIN, claim.payload, claim.signature):
            raise ReceiptError("a claim is not signed by the provider it names", peer=str(provider))
        return claim

    @classmethod
    def _read(cls, payload: bytes, signature: bytes) -> Claim:
        take = _Values("claim", payload)
        swarm_id = take.data("swarm id", SWARM_ID_BYTES)
        session = take.data("session", SESSION_ID_BYTES)
        model_id = take.data("model id", HASH_BYTES)
        span = take.span()
        numclass = take.data("numclass", NUMCLASS_BYTES)
        provider, consumer = take.peer("provider"), take.peer("consumer")
        claim = cls(
            Engagement(swarm_id, session, model_id, span, numclass, provider, consumer),
            take.counters(),
            take.data("hash of what came in", HASH_BYTES),
            take.data("hash of what went out", HASH_BYTES),
            take.integer("start"),
            take.integer("end"),
            payload,
            signature,
        )
        take.end()
        if claim.ended_ms < claim.started_ms:
            raise ReceiptError("a claim ends before it starts", peer=str(provider))
        return claim

    @property
    def envelope(self) -> bytes:
        """The bytes that travel."""
        return seal(self.payload, self.signature)

    @property
    def hash(self) -> bytes:
        return payload_hash(self.payload)


@dataclass(frozen=True, slots=True)
class Ack:
    """The consumer's half: the hash of the claim it answers, and what it counted itself.

    Whose it is only the claim knows, so it is checked where it is joined with its claim, in `Receipt.join`.
    """

    claim_hash: bytes
    counters: Counters
    payload: bytes
    signature: bytes

    @classmethod
    def _read(cls, payload: bytes, signature: bytes) -> Ack:
        take = _Values("acknowledgement", payload)
        ack = cls(take.data("claim hash", HASH_BYTES), take.counters(), payload, signature)
        take.end()
        return ack

    @property
    def envelope(self) -> bytes:
        """The bytes that travel."""
        return seal(self.payload, self.signature)

    @property
    def hash(self) -> bytes:
        return payload_hash(self.payload)


@dataclass(frozen=True, slots=True)
class Receipt:
    """A claim with its acknowledgement, or still without one."""

    claim: Claim
    ack: Ack | None = None

    @classmethod
    def join(cls, claim: Claim, ack_envelope: bytes) -> Receipt:
        """The provider's last step. Raises ReceiptError unless this is the consumer's own answer to this claim."""
        consumer = claim.engagement.consumer
        ack = Ack._read(*_open_envelope("acknowledgement", ack_envelope))
        if ack.claim_hash != claim.hash:
            raise ReceiptError("an acknowledgement answers another claim", peer=str(consumer))
        if not consumer.verify(ACK_DOMAIN, ack.payload, ack.signature):
            raise ReceiptError("an acknowledgement is not signed by the claim's consumer", peer=str(consumer))
        return cls(claim, ack)

    @classmethod
    def countersign(
        cls, identity: Identity, claim_envelope: bytes, engagement: Engagement, counters: Counters
    ) -> Receipt:
        """The consumer's one step: check a provider's claim against what was agreed, and answer with own `counters`.

        Send `ack.envelope` back. Raises ReceiptError when the claim is bad or about another session, span or peer;
        different counters are no error, they are the receipt's `outcome`.
        """
        claim = Claim.decode(claim_envelope)
        if identity.peer_id != claim.engagement.consumer or claim.engagement != engagement:
            wrong = [field.name for field in fields(Engagement) if not _same(field.name, claim.engagement, engagement)]
            raise ReceiptError(
                f"a claim is about another {' and '.join(wrong) or 'consumer'} than this session's",
                peer=str(engagement.provider),
            )
        payload = _pack([VERSION, claim.hash, *_counter_values(counters)])
        try:
            return cls(claim, Ack._read(payload, identity.sign(ACK_DOMAIN, payload)))
        except ReceiptError as error:
            raise LocalError(f"this session cannot be accounted for: {error}") from None

    @property
    def outcome(self) -> Outcome:
        if self.ack is None:
            return Outcome.HALF_SIGNED
        return Outcome.DISAGREED if self.differences else Outcome.AGREED

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of the counters that the two sides counted differently; both values are in `claim` and `ack`."""
        if self.ack is None:
            return ()
        ours, theirs = self.claim.counters, self.ack.counters
        return tuple(name for name in _COUNTER_NAMES if getattr(ours, name) != getattr(theirs, name))


def payload_hash(payload: bytes) -> bytes:
    """BLAKE2b-256: what links an acknowledgement to its claim."""
    return hashlib.blake2b(payload, digest_size=HASH_BYTES).digest()


def seal(payload: bytes, signature: bytes) -> bytes:
    """The envelope of signed bytes."""
    return _pack([payload, signature])


def _same(name: str, one: Engagement, other: Engagement) -> bool:
    return bool(getattr(one, name) == getattr(other, name))


# -- payloads


def _counter_values(counters: Counters) -> list[int]:
    return [getattr(counters, name) for name in _COUNTER_NAMES]


def _pack(values: list[Any]) -> bytes:
    try:
        packed: bytes = msgpack.packb(values, use_bin_type=True)
    except (OverflowError, TypeError, ValueError) as error:
        raise LocalError(f"this session cannot be accounted for: {error}") from None
    return packed


def _unpack(what: str, data: bytes, limit: int) -> list[Any]:
    """The array in `data`, which must be the canonical encoding of one."""
    if len(data) > limit:
        raise ReceiptError(f"{what} has {len(data)} bytes; at most {limit} are allowed")
    try:
        values = msgpack.unpackb(data, raw=False, use_list=True)
        canonical = msgpack.packb(values, use_bin_type=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException):
        raise ReceiptError(f"{what} is not msgpack") from None
    if type(values) is not list or canonical != data:
        raise ReceiptError(f"{what} is not an array in canonical form")
    return values


def _open_envelope(what: str, envelope: bytes) -> tuple[bytes, bytes]:
    """Payload and signature."""
    values = _unpack(f"the envelope of a {what}", envelope, MAX_ENVELOPE_BYTES)
    if len(values) != 2 or any(type(value) is not bytes for value in values) or len(values[1]) != SIGNATURE_BYTES:
        raise ReceiptError(f"the envelope of a {what} does not hold a payload and a signature")
    return values[0], values[1]


class _Values:
    """Takes the values of a payload in order, each checked."""

    def __init__(self, what: str, payload: bytes) -> None:
        self._what = what
        self._values = iter(_unpack(f"a {what}", payload, MAX_ENVELOPE_BYTES))
        if (version := self.integer("version")) != VERSION:
            raise ReceiptError(f"a {what} has version {version}, and this peer knows version {VERSION}")

    def integer(self, name: str) -> int:
        value = next(self._values, None)
        if type(value) is not int or not 0 <= value <= MAX_INTEGER:
            raise ReceiptError(f"the {name} in a {self._what} is not an integer from 0 to 2^63 - 1")
        return value

    def data(self, name: str, length: int) -> bytes:
        value = next(self._values, None)
        if type(value) is not bytes or len(value) != length:
            raise ReceiptError(f"the {name} in a {self._what} is not {length} bytes")
        return value

    def peer(self, name: str) -> PeerId:
        return PeerId(self.data(name, 32))

    def span(self) -> Span:
        try:
            return Span(self.integer("first layer"), self.integer("last layer"))
        except ValueError as error:
            raise ReceiptError(f"the layers in a {self._what} are impossible: {error}") from None

    def counters(self) -> Counters:
        return Counters(*(self.integer(name) for name in _COUNTER_NAMES))

    def end(self) -> None:
        if list(self._values):
            raise ReceiptError(f"a {self._what} has more values than it should")
