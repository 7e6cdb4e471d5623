"""The sampler must choose, from k logits and the tail's mass, what the whole row would have given: for every k."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshswarm.errors import RemoteProtocolError, RequestError
from meshswarm.head.sampler import NeedFullRow, Sampler, SamplingParams, Token, unit_draw

N_VOCAB = 24


@dataclass(frozen=True)
class Top:
    ids: NDArray[np.int32]
    logits: NDArray[np.float32]
    tail_log_mass: float


def top(row: NDArray[np.float32], k: int, temperature: float) -> Top:
    """What the last span of an honest route returns for `row`."""
    order = np.argsort(-row, kind="stable")
    tail = row[order[k:]].astype(np.float64) / temperature
    peak = tail.max(initial=-math.inf)
    mass = peak + math.log(np.exp(tail - peak).sum()) if math.isfinite(peak) else -math.inf
    return Top(order[:k].astype(np.int32), row[order[:k]], float(mass))


def plainly(params: SamplingParams, row: NDArray[np.float32], prompt: list[int], answer: list[int], seed: int) -> int:
    """The definition, written as plainly as possible and over the whole row."""
    logits = [float(value) for value in row]
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in set((prompt + answer)[-64:]):
        value = logits[token]
        logits[token] = value * params.repeat_penalty if value <= 0 else value / params.repeat_penalty
    for token, count in Counter(answer).items():
        logits[token] -= count * params.frequency_penalty + params.presence_penalty
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.greedy:
        return order[0]
    weights = [math.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order]
    if params.top_k:
        weights = weights[: params.top_k]
    if params.top_p < 1:
        total, reached = sum(weights), 0.0
        for count, weight in enumerate(weights, start=1):
            reached += weight
            if reached >= params.top_p * total:
                weights = weights[:count]
                break
    weights = [weight for weight in weights if weight >= params.min_p]
    point, reached = unit_draw(seed, len(prompt) + len(answer)) * sum(weights), 0.0
    for token, weight in zip(order, weights, strict=False):
        reached += weight
        if reached > point:
            return token
    raise AssertionError("the draw fell off the end")


def choose(sampler: Sampler, row: NDArray[np.float32], k: int) -> int:
    sent = top(row, k, sampler.params.tail_temperature)
    choice = sampler.next(sent)
    if isinstance(choice, NeedFullRow):
        choice = sampler.next(sent, row)
    assert isinstance(choice, Token)
    return choice.id


rows = st.lists(st.integers(-60, 60).map(lambda n: n / 8), min_size=N_VOCAB, max_size=N_VOCAB).map(
    lambda values: np.array(values, np.float32)
)
tokens = st.lists(st.integers(0, N_VOCAB - 1), max_size=80)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.05, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 8, N_VOCAB, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, 2.0, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.5]),
    repeat_penalty=st.sampled_from([1.0, 1.0, 1.1, 1.5, 0.8]),
    logit_bias=st.dictionaries(
        st.integers(0, N_VOCAB - 1), st.sampled_from([-math.inf, -100.0, -1.0, 0.5, 4.0, 100.0]), max_size=3
    ).map(lambda biases: tuple(biases.items())),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=250, deadline=None)
@given(params=params_strategy, row=rows, prompt=tokens, answer=tokens)
@example(SamplingParams(temperature=0), np.zeros(N_VOCAB, np.float32), [], [])
@example(SamplingParams(top_k=3, seed=1), np.zeros(N_VOCAB, np.float32), [], [])
@example(SamplingParams(repeat_penalty=1.5, temperature=0), np.zeros(N_VOCAB, np.float32), [23], [])
def test_every_k_gives_what_the_whole_row_gives(
    params: SamplingParams, row: NDArray[np.float32], prompt: list[int], answer: list[int]
) -> None:
    sampler = Sampler(params, N_VOCAB, prompt)
    for token in answer:
        sampler.accept(token)
    expected = plainly(params, row, prompt, answer, sampler.seed)
    for k in (1, 2, 5, 11, N_VOCAB - 1, N_VOCAB):
        assert choose(sampler, row, k) == expected


def test_large_rows_agree_to_the_last_bit_for_every_k() -> None:
    generator = np.random.default_rng(5)
    n_vocab = 20_000
    fetched = 0
    for seed in range(30):
        row = generator.normal(0, 3, n_vocab).astype(np.float32)
        params = SamplingParams(temperature=0.7 + seed % 3 * 0.3, top_p=1 if seed % 2 else 0.9, seed=seed)
        sampler = Sampler(params, n_vocab, [])
        sent = top(row, n_vocab, params.temperature)
        expected = sampler.next(sent)
        assert isinstance(expected, Token)
        for k in (1, 40, 777, 15_000):
            fetched += isinstance(sampler.next(top(row, k, params.temperature)), NeedFullRow)
            assert choose(sampler, row, k) == expected.id
    assert 30 < fetched < 100


def test_the_tail_may_be_off_by_what_single_precision_loses() -> None:
    generator = np.random.default_rng(6)
    for seed in range(300):
        row = generator.normal(0, 2, 500).astype(np.float32)
        sampler = Sampler(SamplingParams(seed=seed, top_p=0.97), 500, [])
        sent = top(row, 300, 1.0)
        rough = Top(sent.ids, sent.logits, sent.tail_log_mass + (-1) ** seed * 5e-5)
        expected = sampler.next(top(row, 500, 1.0))
        assert sampler.next(rough) in (expected, NeedFullRow())


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    row = np.array([2.0, 1.5, 1.0, 0.0, -1.0, -1.0], np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=11), len(row), [])
    n_draws = 4_000
    counts = [0] * len(row)
    for _ in range(n_draws):
        counts[choose(sampler, row, 3)] += 1
        sampler.position += 1
    shares = np.exp(row / temperature) / np.exp(row / temperature).sum()
    chi_square = float((((np.array(counts) - n_draws * shares) ** 2) / (n_draws * shares)).sum())
    assert chi_square < 20.5  # 5 degrees of freedom: 0.1 %


def test_only_a_draw_in_the_tail_fetches_the_row() -> None:
    row = np.zeros(1000, np.float32)
    row[:10] = 8.0
    sampler = Sampler(SamplingParams(seed=3), 1000, [])
    tail_share = 990 / (990 + 10 * math.exp(8))
    fetched = 0
    for _ in range(1500):
        fetched += isinstance(sampler.next(top(row, 10, 1.0)), NeedFullRow)
        sampler.position += 1
    assert 0.5 * tail_share < fetched / 1500 < 2 * tail_share


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    assert unit_draw(1, 2) == unit_draw(1, 2)
    assert len({unit_draw(seed, position) for seed in range(20) for position in range(20)}) == 400
    assert unit_draw(7, 0) == 0.5851820713470217
    row = np.array([0.3, 0.2, 0.1, 0.0], np.float32)
    whole = Sampler(SamplingParams(seed=9), 4, [1, 2])
    answer = []
    for _ in range(40):
        answer.append(choose(whole, row, 4))
        whole.accept(answer[-1])
    resumed = Sampler(SamplingParams(seed=9), 4, [1, 2, *answer[:25]])
    for token in answer[25:]:
        assert choose(resumed, row, 2) == token
        resumed.accept(token)


def test_without_a_seed_answers_differ() -> None:
    assert Sampler(SamplingParams(), 4, []).seed != Sampler(SamplingParams(), 4, []).seed


def test_the_repeat_penalty_looks_back_64_tokens_into_the_prompt() -> None:
    row = np.array([1.0, 0.9, 0.0], np.float32)
    params = SamplingParams(temperature=0, repeat_penalty=1.3)
    assert choose(Sampler(params, 3, [0] + [2] * 63), row, 3) == 1
    assert choose(Sampler(params, 3, [0] + [2] * 64), row, 3) == 0


def test_openai_penalties_count_the_answer_and_not_the_prompt() -> None:
    row = np.array([1.0, 0.8, 0.0], np.float32)
    sampler = Sampler(SamplingParams(temperature=0, frequency_penalty=0.15), 3, [0] * 9)
    assert choose(sampler, row, 3) == 0
    sampler.accept(0)
    assert choose(sampler, row, 3) == 0
    sampler.accept(0)
    assert choose(sampler, row, 3) == 1


def test_k_needed_reaches_past_everything_a_penalty_can_push_down() -> None:
    assert Sampler(SamplingParams(temperature=0), 1000, []).k_needed == 1
    params = SamplingParams(temperature=0, repeat_penalty=1.5, logit_bias=((4, -math.inf),))
    row = np.linspace(9, 1, 1000).astype(np.float32)
    sampler = Sampler(params, 1000, list(range(64)))
    assert choose(sampler, row, sampler.k_needed) == 64
    assert sampler.next(top(row, sampler.k_needed, 1.0)) == Token(64)
    assert Sampler(SamplingParams(top_k=40), 1000, []).k_needed == 40
    assert Sampler(SamplingParams(top_k=40), 20, []).k_needed == 20
    assert Sampler(SamplingParams(top_k=10**9), 10**6, []).k_needed == 4096


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 1.5},
        {"min_p": -0.5},
        {"frequency_penalty": 3},
        {"presence_penalty": -3},
        {"repeat_penalty": 0.0},
        {"logit_bias": ((1, math.nan),)},
        {"logit_bias": ((1, math.inf),)},
        {"logit_bias": ((-1, 0.0),)},
        {"logit_bias": ((1, 0.0), (1, 1.0))},
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(bad: dict[str, object]) -> None:
    (name,) = bad
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**bad)  # type: ignore[arg-type]
    assert caught.value.param == name


def test_biases_that_leave_nothing_are_the_clients_fault() -> None:
    with pytest.raises(RequestError, match="logit_bias has a token id outside"):
        Sampler(SamplingParams(logit_bias=((3, 1.0),)), 3, [])
    with pytest.raises(RequestError, match="prompt has a token id outside"):
        Sampler(SamplingParams(), 3, [0, -1])
    sampler = Sampler(SamplingParams(logit_bias=tuple((token, -math.inf) for token in range(3))), 3, [])
    with pytest.raises(RequestError, match="forbids every token"):
        choose(sampler, np.zeros(3, np.float32), 3)


@pytest.mark.parametrize(
    ("ids", "logits", "tail"),
    [
        ([], [], 0.0),
        ([0, 9], [2.0, 1.0], 0.0),
        ([0, -1], [2.0, 1.0], 0.0),
        ([0, 0], [2.0, 1.0], 0.0),
        ([0, 1], [1.0, 2.0], 0.0),
        ([1, 0], [1.0, 1.0], 0.0),
        ([0, 1], [1.0, math.nan], 0.0),
        ([0, 1], [math.inf, 1.0], 0.0),
        ([0, 1], [2.0], 0.0),
        ([0, 1], [2.0, 1.0], math.nan),
    ],
)
def test_a_row_that_cannot_be_is_the_last_spans_fault(ids: list[int], logits: list[float], tail: float) -> None:
    sampler = Sampler(SamplingParams(seed=0), 4, [])
    with pytest.raises(RemoteProtocolError):
        sampler.next(Top(np.array(ids, np.int32), np.array(logits, np.float32), tail))


def test_a_full_row_must_be_the_row_it_completes() -> None:
    row = np.array([3.0, 2.0, 1.0, 0.0], np.float32)
    sampler = Sampler(SamplingParams(seed=0), 4, [])
    for other in (row[:3], row[::-1].copy(), np.array([3.0, 2.0, 1.0, math.nan], np.float32)):
        with pytest.raises(RemoteProtocolError, match="full row"):
            sampler.next(top(row, 2, 1.0), other)


def test_a_monstrous_tail_mass_never_decides_anything() -> None:
    sent = top(np.array([3.0, 2.0, 1.0, 0.0], np.float32), 2, 1.0)
    sampler = Sampler(SamplingParams(seed=0), 4, [])
    assert sampler.next(Top(sent.ids, sent.logits, 1e9)) == NeedFullRow()
    assert sampler.next(Top(sent.ids, sent.logits, math.inf)) == NeedFullRow()
