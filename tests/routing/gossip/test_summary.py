"""Summaries of a model, and which of them are kept."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.routing.gossip.virtual import MODEL, SCOPE

from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity
from meshswarm.routing.gossip.messages import Digest
from meshswarm.routing.gossip.summaries import FRESH_S, MAX_AUTHORS, MAX_MODELS, Summaries
from meshswarm.routing.gossip.summary import MAX_RUNS, MAX_SUMMARY_BYTES, Holding, Summary
from meshswarm.span import MAX_LAYERS, Span

ME = Identity.from_seed(b"m" * 32)


def summary(author: Identity, number: int = 1, model_id: bytes = MODEL, spans: tuple[str, ...] = ("0:30",)) -> Summary:
    holdings = [Holding(Identity.from_seed(bytes([n]) * 32).peer_id, Span.parse(s), 100) for n, s in enumerate(spans)]
    return Summary.sign(author, SCOPE, number, model_id, 30, holdings, 1.5)


def test_it_says_who_holds_what_and_what_the_weakest_layer_can_do() -> None:
    said = summary(ME, spans=("0:10", "0:20", "20:30"))
    assert Summary.decode(said.wire) == said and said.verify()
    assert said.runs == ((10, 2), (20, 1)) and said.holders() == [2] * 10 + [1] * 20
    assert said.n_peers == 3 and said.n_layers == 30 and said.requests_per_s == 1.5
    assert said.weakest_layer == 10 and said.tokens_per_s == 500.0  # 1e6 / (100 µs * 20 layers)


def test_layers_nobody_holds_are_the_weakest() -> None:
    said = summary(ME, spans=("0:10", "12:30"))
    assert said.weakest_layer == 10 and said.tokens_per_s == 0.0


@given(st.lists(st.tuples(st.integers(0, MAX_LAYERS - 1), st.integers(1, 40)), max_size=60))
def test_it_never_says_more_than_there_is_and_keeps_its_size(spans: list[tuple[int, int]]) -> None:
    holdings = [Holding(ME.peer_id, Span(start, min(start + length, MAX_LAYERS)), 100) for start, length in spans]
    said = Summary.sign(ME, SCOPE, 1, MODEL, MAX_LAYERS, holdings, 0.0)
    assert len(said.wire) <= MAX_SUMMARY_BYTES and len(said.runs) <= MAX_RUNS and said.n_layers == MAX_LAYERS
    truth = [sum(layer in holding.span for holding in holdings) for layer in range(MAX_LAYERS)]
    assert all(told <= true for told, true in zip(said.holders(), truth, strict=True))
    assert len(said.runs) == MAX_RUNS or all(a[1] != b[1] for a, b in pairwise(said.runs))


@given(st.binary(max_size=600))
def test_any_bytes_are_a_summary_or_an_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        Summary.decode(data)


def test_an_author_has_one_summary_of_a_model(who: Callable[[int], Identity]) -> None:
    kept = Summaries(bytes(16))
    kept.take(summary(who(1), 5), 0.0, ())
    assert not kept.is_wanted(summary(who(1), 5), 0.0, ()) and not kept.is_wanted(summary(who(1), 4), 0.0, ())
    assert kept.is_wanted(summary(who(1), 6), 0.0, ())
    assert kept.of(MODEL, FRESH_S) and not kept.of(MODEL, FRESH_S + 1)


def test_floods_of_authors_and_models_push_out_nothing_that_matters(who: Callable[[int], Identity]) -> None:
    kept = Summaries(bytes(16))
    for number in range(1, 60):
        said = summary(who(number))
        if kept.is_wanted(said, 0.0, (MODEL,)):
            kept.take(said, 0.0, (MODEL,))
    assert len(kept.of(MODEL, 0.0)) == MAX_AUTHORS
    for number in range(100):
        said = summary(who(99), 1, number.to_bytes(32))
        if kept.is_wanted(said, 1.0, (MODEL,)):
            kept.take(said, 1.0, (MODEL,))
    assert len(kept.models(1.0)) <= MAX_MODELS and MODEL in kept.models(1.0)


@pytest.mark.parametrize(("listed", "expected"), [(0, 2), (1, 1), (2, 0)])
def test_who_asks_gets_what_he_lacks(who: Callable[[int], Identity], listed: int, expected: int) -> None:
    kept = Summaries(bytes(16))
    for number in (1, 2):
        kept.take(summary(who(number), 1_000_000), 0.0, ())
    entries = kept.digest(0.0, random.Random(1)).entries[:listed]
    assert len(kept.lacking(Digest(entries), 0.0, random.Random(1))) == expected
