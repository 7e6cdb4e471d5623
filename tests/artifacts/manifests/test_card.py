"""Model cards: signed bytes travel as they are; what is malformed, forged or out of its limits is refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.artifacts.manifests.card import MAX_CARD_BYTES, ModelCard, SignedCard
from meshswarm.errors import RemoteProtocolError
from meshswarm.identity import Identity

IDENTITY = Identity.from_seed(b"c" * 32)
CARD = ModelCard(
    model_id=b"m" * 32,
    name="smollm2-135m-instruct",
    architecture="llama",
    encoding="q4_1",
    n_layers=30,
    file_lengths=(98_362_432,),
    header_length=1_785_664,
    n_ctx=8192,
    n_embd=576,
    n_vocab=49152,
)
FIELDS: list[Any] = [
    1, b"m" * 32, "smollm2-135m-instruct", "llama", "q4_1", 30, [98_362_432], 1_785_664, 8192, 576, 49152
]  # fmt: skip

cards = st.builds(
    ModelCard,
    model_id=st.binary(min_size=32, max_size=32),
    name=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,95}", fullmatch=True),
    architecture=st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,31}", fullmatch=True),
    encoding=st.from_regex(r"[a-z0-9_]{1,16}", fullmatch=True),
    n_layers=st.integers(1, 512),
    file_lengths=st.lists(st.integers(1 << 20, 1 << 46), min_size=1, max_size=32).map(tuple),
    header_length=st.integers(1, 1 << 20),
    n_ctx=st.integers(1, 1 << 24),
    n_embd=st.integers(1, 1 << 17),
    n_vocab=st.integers(1, 1 << 22),
)


def signed(payload: bytes, identity: Identity = IDENTITY) -> bytes:
    return bytes(msgpack.packb([payload, identity.peer_id.key, identity.sign("model-card", payload)]))


@given(cards)
@settings(max_examples=100, deadline=None)
def test_a_card_arrives_as_it_was(card: ModelCard) -> None:
    sent = card.sign(IDENTITY)
    received = SignedCard.parse(sent.wire)
    assert received == sent
    assert (received.card, received.author) == (card, IDENTITY.peer_id)
    assert len(sent.wire) <= MAX_CARD_BYTES


def test_the_payload_is_pinned() -> None:
    assert CARD.sign(IDENTITY).wire == signed(msgpack.packb(FIELDS))


@given(st.integers(0, 8 * len(CARD.sign(IDENTITY).wire) - 1))
@settings(max_examples=200, deadline=None)
def test_any_flipped_bit_is_refused(bit: int) -> None:
    changed = bytearray(CARD.sign(IDENTITY).wire)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        SignedCard.parse(bytes(changed))


@given(st.binary(max_size=MAX_CARD_BYTES + 10))
@settings(max_examples=200, deadline=None)
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        SignedCard.parse(noise)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers(-5, 5) | st.text(max_size=5), st.lists))
@settings(max_examples=60, deadline=None)
def test_well_signed_noise_is_refused(noise: Any) -> None:
    payload = noise if isinstance(noise, bytes) else msgpack.packb(noise)
    with pytest.raises(RemoteProtocolError):
        SignedCard.parse(signed(payload))


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, 2), (0, True), (0, "1"),
        (1, b"m" * 31), (1, "m" * 32), (1, None),
        (2, ""), (2, "x" * 97), (2, "Evil\x1b[2J"), (2, "a b"), (2, b"name"), (2, 5),
        (3, ""), (3, "../x"), (3, None),
        (4, ""), (4, "q4 1"), (4, 4),
        (5, 0), (5, 513), (5, -1), (5, 1 << 63), (5, True), (5, 30.0), (5, "30"),
        (6, []), (6, [0]), (6, [1 << 47]), (6, [-1]), (6, ["x"]), (6, [1] * 33), (6, 5), (6, [True]), (6, None),
        (7, 0), (7, (64 << 20) + 1), (7, 98_362_433), (7, 1.0),
        (8, 0), (8, (1 << 24) + 1), (8, None),
        (9, 0), (9, (1 << 17) + 1), (9, b""),
        (10, 0), (10, (1 << 22) + 1), (10, [1]),
    ],
)  # fmt: skip
def test_a_well_signed_card_out_of_its_limits_is_refused(index: int, value: Any) -> None:
    fields = list(FIELDS)
    fields[index] = value
    with pytest.raises(RemoteProtocolError, match="model card"):
        SignedCard.parse(signed(msgpack.packb(fields)))


def test_more_or_fewer_fields_are_refused() -> None:
    for fields in (FIELDS[:-1], [*FIELDS, 1]):
        with pytest.raises(RemoteProtocolError, match="does not have 11 fields"):
            SignedCard.parse(signed(msgpack.packb(fields)))


def test_a_card_signed_by_another_or_for_another_purpose_is_refused() -> None:
    payload = msgpack.packb(FIELDS)
    other = Identity.from_seed(b"d" * 32)
    for signature in (other.sign("model-card", payload), IDENTITY.sign("record", payload)):
        with pytest.raises(RemoteProtocolError, match="signature is wrong"):
            SignedCard.parse(bytes(msgpack.packb([payload, IDENTITY.peer_id.key, signature])))


def test_a_card_of_our_own_out_of_its_limits_is_never_made() -> None:
    with pytest.raises(ValueError, match="name"):
        ModelCard(b"m" * 32, "A Name", "llama", "q4_1", 30, (1 << 30,), 1000, 8192, 576, 49152)
