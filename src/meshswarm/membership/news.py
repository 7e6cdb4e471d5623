"""What connected members of a private swarm ask one another: is there a newer list, a newer key, a member we never met?

    question: [number and digest of our list, id of our newest key, our half of a handover, whether to name members]
    answer:   [number of our list, the list when yours is another, the keys sealed when yours are older, PeerIds]

The rule this file keeps: an answer gives a key only to whom the owner's list lets have it, and what comes in is
believed only as far as the owner signed it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from meshswarm.dht import wire
from meshswarm.dht.wire import WireError
from meshswarm.identity import KEY_BYTES, PeerId
from meshswarm.membership.handover import HALF_BYTES, MAX_PARCEL_BYTES, Receiver, parcel_of
from meshswarm.membership.member_list import MAX_LIST_BYTES, MemberList
from meshswarm.membership.standing import Standing
from meshswarm.net.swarm import key_id

KIND = "swarm/news"
MAX_NAMED = 512
_DIGEST_BYTES = 16
MAX_QUESTION_BYTES = 256
MAX_ANSWER_BYTES = MAX_LIST_BYTES + MAX_PARCEL_BYTES + MAX_NAMED * KEY_BYTES + 256


@dataclass(frozen=True, slots=True)
class Question:
    """`number`: of the asker's list, 0 for none. `wants_members`: the owner's own peer gets to know members so."""

    number: int
    digest: bytes
    key_id: bytes
    half: bytes
    wants_members: bool

    @classmethod
    def about(cls, standing: Standing, receiver: Receiver, *, wants_members: bool) -> Question:
        digest = _digest(standing.members)
        return cls(standing.number, digest, key_id(standing.keys[0]), receiver.half, wants_members)

    def pack(self) -> bytes:
        return wire.pack([self.number, self.digest, self.key_id, self.half, self.wants_members])

    @classmethod
    def unpack(cls, data: bytes) -> Question:
        """Raises WireError."""
        fields = wire.array(wire.unpack_array(data, MAX_QUESTION_BYTES, "a question"), "a question", at_least=5)
        return cls(
            wire.integer(fields[0], "number"),
            wire.binary(fields[1], "digest", size=_DIGEST_BYTES),
            wire.binary(fields[2], "key id", size=16),
            wire.binary(fields[3], "half", size=HALF_BYTES),
            wire.boolean(fields[4], "whether members are wanted"),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """`listed`: the answerer's list, unless it is older or the same; `parcel`: keys, sealed; both b"" for none."""

    number: int
    listed: bytes = b""
    parcel: bytes = b""
    named: tuple[PeerId, ...] = ()

    def pack(self) -> bytes:
        return wire.pack([self.number, self.listed, self.parcel, b"".join(peer.key for peer in self.named)])

    @classmethod
    def unpack(cls, data: bytes) -> Answer:
        """Raises WireError."""
        fields = wire.array(wire.unpack_array(data, MAX_ANSWER_BYTES, "an answer"), "an answer", at_least=4)
        joined = wire.binary(fields[3], "members", at_most=MAX_NAMED * KEY_BYTES)
        if len(joined) % KEY_BYTES:
            raise WireError("members is not a row of keys")
        return cls(
            wire.integer(fields[0], "number"),
            wire.binary(fields[1], "list", at_most=MAX_LIST_BYTES),
            wire.binary(fields[2], "sealed keys", at_most=MAX_PARCEL_BYTES),
            tuple(PeerId(joined[at : at + KEY_BYTES]) for at in range(0, len(joined), KEY_BYTES)),
        )


def answer_to(
    question: Question, asker: PeerId, own: PeerId, standing: Standing, met: Sequence[PeerId], now_ms: int
) -> Answer:
    """What `own` tells the connected member `asker`. `met`: members it has met. Raises WireError."""
    members = standing.members
    is_other = standing.number >= question.number and question.digest != _digest(members)
    listed = members.wire if members is not None and is_other else b""
    parcel = b""
    is_older = question.key_id != key_id(standing.keys[0]) and not standing.is_behind
    if is_older and standing.number >= question.number and standing.may_have_key(asker):
        try:
            parcel = parcel_of(standing.current_keys(now_ms), own, asker, question.half)
        except ValueError as error:
            raise WireError(f"a half of a handover that is none: {error}") from None
    named = tuple(peer for peer in met if peer != asker)[:MAX_NAMED] if question.wants_members else ()
    return Answer(standing.number, listed, parcel, named)


def learned(answer: Answer, standing: Standing, receiver: Receiver) -> Standing:
    """`standing` with what `answer` brought. Raises WireError when the answerer broke the protocol."""
    if answer.listed:
        standing = standing.with_list(MemberList.decode(answer.listed, standing.owner, standing.swarm_id))
    if answer.parcel:
        try:
            standing = standing.with_keys(receiver.open(answer.parcel))
        except ValueError as error:
            raise WireError(f"keys that cannot be opened: {error}") from None
    return standing


def _digest(members: MemberList | None) -> bytes:
    return bytes(_DIGEST_BYTES) if members is None else hashlib.sha256(members.wire).digest()[:_DIGEST_BYTES]
