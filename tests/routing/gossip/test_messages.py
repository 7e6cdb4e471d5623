"""Messages between neighbours: what is said is what is heard, and any bytes are a message or an error."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.config import Address
from meshswarm.dht.contact import Contact
from meshswarm.dht.wire import WireError
from meshswarm.identity import PeerId
from meshswarm.routing.gossip import messages
from meshswarm.routing.gossip.messages import Digest, Swap, Swapped, Word, WordKind

PEER = PeerId(bytes(range(32)))
DECODERS = (
    messages.decode_swap, messages.decode_swapped, messages.decode_push, messages.decode_watch,
    messages.decode_watched, messages.decode_witness, messages.decode_heard, messages.decode_empty,
)  # fmt: skip

words = st.lists(st.builds(Word, st.sampled_from(WordKind), st.binary(max_size=100)), max_size=messages.MAX_WORDS)
tags = st.integers(0, 2**32 - 1)
digests = st.none() | st.builds(
    Digest, st.lists(st.tuples(tags, st.integers(0, 2**46)), max_size=messages.MAX_DIGEST).map(tuple), st.booleans()
)


@given(words.map(tuple), st.lists(tags, max_size=32).map(tuple), digests, digests, st.booleans(), st.booleans())
def test_a_swap_is_heard_as_it_was_said(
    said: tuple[Word, ...], events: tuple[int, ...], reports: Digest | None, summaries: Digest | None, a: bool, b: bool
) -> None:
    swap = Swap(said, events, reports, summaries, (7, 9), wants_contacts=a, is_lonely=b)
    assert messages.decode_swap(messages.encode_swap(swap)) == swap


@given(words.map(tuple), st.booleans())
def test_its_answer_too(said: tuple[Word, ...], accepted: bool) -> None:
    swapped = Swapped(accepted, said, (Contact(PEER, (Address("10.0.0.1", 4000),)),))
    assert messages.decode_swapped(messages.encode_swapped(swapped)) == swapped
    assert messages.decode_push(messages.encode_push(said)) == said


def test_the_small_ones() -> None:
    assert messages.decode_watch(messages.encode_watch(b"a", ((Address("10.0.0.1", 1),), ()))) == (
        b"a", ((Address("10.0.0.1", 1),), ()),
    )  # fmt: skip
    assert messages.decode_watched(messages.encode_watched(True))
    assert messages.decode_witness(messages.encode_witness(PEER, 5)) == (PEER, 5)
    assert messages.decode_heard(messages.encode_heard(1.5)) == 1.5
    assert messages.decode_heard(messages.encode_heard(None)) is None
    messages.decode_empty(messages.encode_empty())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    for decode in DECODERS:
        with contextlib.suppress(WireError):
            decode(data)


fields_of_any_kind = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**60) | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.lists(fields_of_any_kind, max_size=8))
def test_any_fields_are_a_message_or_an_error(fields: list[Any]) -> None:
    for decode in DECODERS:
        with contextlib.suppress(WireError):
            decode(msgpack.packb([messages.MESSAGE_VERSION, *fields]))


def test_what_is_too_much_is_refused() -> None:
    word = Word(WordKind.REPORT, b"x")
    for said in (
        messages.encode_swap(Swap(words=(word,) * (messages.MAX_WORDS + 1))),
        messages.encode_swap(Swap(events=tuple(range(messages.MAX_EVENT_TAGS + 1)))),
        messages.encode_swap(Swap(reports=Digest(tuple((n, n) for n in range(messages.MAX_DIGEST + 1))))),
        messages.encode_swap(Swap(interests=(1,) * (messages.MAX_INTERESTS + 1))),
        messages.encode_swap(Swap()) + b"x",
    ):
        with pytest.raises(WireError):
            messages.decode_swap(said)
    with pytest.raises(WireError):
        messages.decode_push(bytes(messages.MAX_MESSAGE_BYTES + 1))


def test_a_word_of_a_kind_that_is_not_known_here_is_left_out() -> None:
    said = msgpack.packb([messages.MESSAGE_VERSION, [[99, b"new"], [int(WordKind.REPORT), b"old"]]])
    assert messages.decode_push(said) == (Word(WordKind.REPORT, b"old"),)
