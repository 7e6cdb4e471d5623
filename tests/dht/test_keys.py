"""Places in the table follow from keys, topics and swarms."""

import hashlib
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from meshswarm.dht.keys import BLOCK_LAYERS, Topics, blocks, distance, node_id
from meshswarm.dht.signed import RecordKind, SignedRecord
from meshswarm.identity import PeerId
from meshswarm.net.swarm import Swarm


def test_a_node_id_is_the_hash_of_the_key() -> None:
    assert node_id(PeerId(b"k" * 32)) == hashlib.sha256(b"k" * 32).digest()[:20]


@given(st.binary(min_size=20, max_size=20), st.binary(min_size=20, max_size=20), st.binary(min_size=20, max_size=20))
def test_distance_is_a_metric(a: bytes, b: bytes, c: bytes) -> None:
    assert distance(a, a) == 0
    assert distance(a, b) == distance(b, a)
    assert distance(a, c) <= distance(a, b) + distance(b, c)


@given(st.integers(0, 511).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, 512))))
def test_blocks_are_those_that_hold_a_layer_of_the_span(span: tuple[int, int]) -> None:
    assert list(blocks(*span)) == sorted({layer // BLOCK_LAYERS for layer in range(*span)})


def test_overlapping_and_odd_spans_meet_under_a_common_key(topics: Topics) -> None:
    model = bytes(32)
    assert set(topics.span(model, 3, 5)) & set(topics.span(model, 0, 4))
    assert set(topics.span(model, 3, 5)) & set(topics.span(model, 4, 30))
    assert set(topics.span(model, 7, 9)) <= set(topics.span(model, 0, 30))
    assert not set(topics.span(model, 0, 30)) & set(topics.span(bytes(31) + b"x", 0, 30))


def test_another_swarm_has_other_keys_and_another_scope(topics: Topics) -> None:
    for other in (Topics(Swarm("others")), Topics(Swarm("tests", bytes(32)))):
        assert other.models != topics.models
        assert other.scope != topics.scope
        assert other.block(bytes(32), 0) != topics.block(bytes(32), 0)


def test_a_record_belongs_under_the_keys_of_what_it_says(
    topics: Topics, make_record: Callable[..., SignedRecord]
) -> None:
    assert topics.of_record(make_record(span="3:9")) == topics.span(bytes(range(32)), 3, 9)
    card = make_record(kind=RecordKind.CARD, layers=(0, 0), body=b"card")
    assert topics.of_record(card) == [topics.models]
