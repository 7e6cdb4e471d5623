"""Answers whose steps carry guesses: the same tokens as without them, whatever is guessed, and the same chances."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshswarm.head.answer import Answer, Limits
from meshswarm.head.drafting import SuffixDrafter
from meshswarm.head.lookahead import Lookahead
from meshswarm.head.request import Finished, TextDelta
from meshswarm.head.sampler import Sampler
from meshswarm.head.sampling_params import SamplingParams
from meshswarm.head.speculation import MAX_WINDOW, Learned, WindowChooser
from meshswarm.head.text_stream import TextStream
from meshswarm.stage.sessions.messages import Row

END = 0
N_VOCAB = 12
PROMPT = [1, 2, 3, 1, 2]
Guess = Callable[[Sequence[int]], Sequence[int]]
"""What to guess after a text."""


def logits_after(text: Sequence[int]) -> NDArray[np.float32]:
    """A model: a table of logits by the last two tokens."""
    rng = np.random.default_rng([7, *text[-2:]])
    return (1.5 * rng.standard_normal(N_VOCAB)).astype("<f4")


class Letters:
    def is_end_of_generation(self, token: int) -> bool:
        return token == END

    def token_bytes(self, token: int) -> bytes:
        return bytes([96 + token])


@dataclass
class Route:
    """A session over the model above, with the rules of the protocol; it answers when `step` is called."""

    n_ctx: int
    top_k: int
    temperature: float
    text: list[int] = field(default_factory=list)
    flights: int = 0
    _due: list[Callable[[], None]] = field(default_factory=list)
    _seq: int = -1
    _rows: list[NDArray[np.float32]] = field(default_factory=list)
    listener: Answer | None = None

    def push(self, tokens: list[int], *, truncate_to: int | None = None, n_draft: int = 0) -> None:
        assert not self._due, "a step left before the one before it had come back"
        assert 0 <= n_draft < len(tokens) and n_draft <= MAX_WINDOW
        if truncate_to is not None:
            assert 0 < truncate_to < len(self.text)
            del self.text[truncate_to:]
        self.text += tokens
        assert len(self.text) <= self.n_ctx
        self._seq += 1
        self._rows = [logits_after(self.text[: len(self.text) - n_draft + ahead]) for ahead in range(n_draft + 1)]
        rows = tuple(self._row(logits) for logits in self._rows)
        self._due.append(lambda: self._listener.on_rows(self._seq, rows))

    def request_full_row(self, seq: int, row: int) -> None:
        assert seq == self._seq
        logits = self._rows[row].tobytes()
        self._due.append(lambda: self._listener.on_full_row(seq, row, logits))

    @property
    def _listener(self) -> Answer:
        assert self.listener is not None
        return self.listener

    def _row(self, logits: NDArray[np.float32]) -> Row:
        order = np.lexsort((np.arange(N_VOCAB), -logits))
        top, tail = order[: self.top_k], order[self.top_k :]
        mass = np.exp(logits[tail].astype(float) / self.temperature).sum()
        return Row(top.astype("<i4").tobytes(), logits[top].tobytes(), float(np.log(mass)) if len(tail) else -np.inf)

    def step(self) -> bool:
        if not self._due:
            return False
        self.flights += 1
        self._due.pop()()
        return True


class Guesses:
    """A lookahead that sends whatever `guess` says, as far as it fits."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self._text = list(PROMPT)

    def window(self, limit: int, send: Callable[[tuple[int, ...]], None]) -> None:
        guesses = itertools.takewhile(lambda token: token != END, self._guess(self._text))
        send(tuple(guesses)[: min(limit, MAX_WINDOW)])

    def said(self, tokens: tuple[int, ...], seconds: float | None) -> None:
        self._text += tokens


@dataclass(frozen=True)
class Ended:
    tokens: list[int]
    text: str
    finished: Finished
    flights: int

    @property
    def answer(self) -> tuple[list[int], str, str]:
        return self.tokens, self.text, self.finished.reason


def run(
    lookahead: Any,
    params: SamplingParams,
    *,
    top_k: int = 4,
    max_tokens: int | None = 24,
    n_ctx: int = 64,
    ignore_eos: bool = False,
    stop: tuple[str, ...] = (),
) -> Ended:
    async def drive() -> Ended:
        route = Route(n_ctx, top_k, params.tail_temperature)
        limits = Limits(max_tokens, n_ctx, ignore_eos, bool(stop))
        sampler = Sampler(params, N_VOCAB, PROMPT)
        making = Answer(PROMPT, route, Letters(), sampler, TextStream(stop), limits, "fp", lookahead)
        route.listener = making
        making.start()
        while route.step():
            pass
        events = [event async for event in making.events()]
        assert isinstance(events[-1], Finished)
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        return Ended(making.tokens, text, events[-1], route.flights)

    return asyncio.run(drive())


def oracle(params: SamplingParams, **options: Any) -> Guess:
    """Knows the answer."""
    tokens = run(None, params, **options).tokens
    return lambda text: tokens[len(text) - len(PROMPT) :]


parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.6]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 2.5), (END, -3.0))]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=150, deadline=None)
@given(
    params=parameters,
    top_k=st.sampled_from([1, 4, N_VOCAB]),
    max_tokens=st.sampled_from([None, 1, 2, 9, 24]),
    n_ctx=st.integers(len(PROMPT) + 1, 40),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([(), ("ab",), ("c", "dd")]),
    whims=st.lists(st.lists(st.integers(0, N_VOCAB - 1), max_size=16), min_size=1, max_size=8),
    knows=st.floats(0, 1),
)
def test_no_guess_changes_an_answer(
    params: SamplingParams,
    top_k: int,
    max_tokens: int | None,
    n_ctx: int,
    ignore_eos: bool,
    stop: tuple[str, ...],
    whims: list[list[int]],
    knows: float,
) -> None:
    """Guesses that are partly right, partly anything, of any length: same tokens, same text, same reason to end."""
    options: dict[str, Any] = {
        "top_k": top_k, "max_tokens": max_tokens, "n_ctx": n_ctx, "ignore_eos": ignore_eos, "stop": stop,
    }  # fmt: skip
    truth = oracle(params, **options)
    rng = random.Random(knows)

    def guess(text: Sequence[int]) -> Sequence[int]:
        whim = whims[len(text) % len(whims)]
        return [right if rng.random() < knows else wrong for right, wrong in zip(truth(text), whim, strict=False)]

    plain = run(None, params, **options)
    guessed = run(Guesses(guess), params, **options)
    assert guessed.answer == plain.answer
    usage = guessed.finished.usage
    assert usage.completion_tokens == plain.finished.usage.completion_tokens
    assert usage.accepted_prediction_tokens <= len(guessed.tokens)
    timings = guessed.finished.timings
    assert timings.draft_n == usage.accepted_prediction_tokens + usage.rejected_prediction_tokens
    assert timings.draft_n_accepted == usage.accepted_prediction_tokens
    assert timings.flights == guessed.flights


def test_right_guesses_save_their_flights_and_nothing_is_sent_twice() -> None:
    params = SamplingParams(temperature=0.0)
    options: dict[str, Any] = {"ignore_eos": True, "top_k": 1, "max_tokens": 33}
    plain = run(None, params, **options)
    guessed = run(Guesses(oracle(params, **options)), params, **options)
    assert guessed.answer == plain.answer
    assert (plain.flights, guessed.flights) == (33, 3)  # the prompt's token, 16 at once, 16 at once
    assert guessed.finished.usage.accepted_prediction_tokens == 30
    assert guessed.finished.usage.rejected_prediction_tokens == 0


def test_wrong_guesses_are_counted_and_cost_no_flight() -> None:
    params = SamplingParams(temperature=0.0)
    options: dict[str, Any] = {"ignore_eos": True, "top_k": 1, "max_tokens": 10}
    plain = run(None, params, **options)
    truth = oracle(params, **options)
    guessed = run(Guesses(lambda text: [(token + 1) % N_VOCAB for token in truth(text)[:1]]), params, **options)
    assert guessed.answer == plain.answer
    assert guessed.flights == plain.flights
    assert guessed.finished.usage.accepted_prediction_tokens == 0
    assert guessed.finished.usage.rejected_prediction_tokens > 0


def test_the_lookahead_of_a_real_head_repeats_itself_into_few_flights() -> None:
    """Drafts from the text itself; every step takes the time the loop says, so sizes are chosen by their gain alone."""
    params = SamplingParams(temperature=0.0, logit_bias=((END, -100.0),))
    options: dict[str, Any] = {"top_k": N_VOCAB, "max_tokens": 300, "n_ctx": 400}
    plain = run(None, params, **options)
    chooser = WindowChooser(Learned())
    guessed = run(Lookahead(SuffixDrafter(PROMPT), chooser, Letters().is_end_of_generation), params, **options)
    assert guessed.answer == plain.answer
    assert guessed.flights < plain.flights


def expected_distribution(temperature: float) -> dict[tuple[int, ...], float]:
    """Probabilities of the answers of two tokens, none of which may end it, straight from the table."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(2):
        longer = {}
        for said, share in found.items():
            logits = logits_after([*PROMPT, *said]).astype(float) / temperature
            logits[END] = -np.inf
            chances = np.exp(logits - logits.max())
            for token, chance in enumerate(chances / chances.sum()):
                if chance:
                    longer[*said, token] = share * chance
        found = longer
    return found


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; answers expected fewer than 5 times are taken together."""
    total = counts.total()
    assert set(counts) <= set(expected)
    common = [said for said, share in expected.items() if share * total >= 5]
    pairs = [(counts[said], expected[said] * total) for said in common]
    rest = total - sum(seen for seen, _ in pairs), total - sum(share for _, share in pairs)
    pairs.append(rest)
    return sum((seen - share) ** 2 / share for seen, share in pairs if share > 0), len(pairs) - 1


def sampled(guess: Guess | None, n_answers: int, temperature: float) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(n_answers):
        params = SamplingParams(temperature=temperature, seed=seed, logit_bias=((END, -np.inf),))
        lookahead = None if guess is None else Guesses(guess)
        counts[tuple(run(lookahead, params, max_tokens=2, top_k=N_VOCAB).tokens)] += 1
    return counts


LIKELY = {"the likeliest": lambda text: [int(logits_after(text)[1:].argmax()) + 1], "a fixed one": lambda text: [5, 5]}


@pytest.mark.parametrize("guess", [None, *LIKELY.values()], ids=["no guess", *LIKELY])
def test_the_sampled_distribution_is_the_models_whatever_is_guessed(guess: Guess | None) -> None:
    """2,000 seeds, answers of two tokens, against the exact probabilities: chi-square below its mean plus four
    standard deviations (p about 1e-4 for so many degrees of freedom)."""
    expected = expected_distribution(1.2)
    statistic, freedom = chi_square(sampled(guess, 2000, 1.2), expected)
    assert freedom > 50
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_a_wrong_distribution_would_be_seen() -> None:
    """The same statistic, for answers of which one in ten had kept a guess that was not drawn."""
    right = sampled(None, 2000, 1.2)
    wrong = Counter((5, *said[1:]) if index % 10 == 0 else said for index, said in enumerate(right.elements()))
    statistic, freedom = chi_square(wrong, expected_distribution(1.2))
    assert statistic > freedom + 4 * (2 * freedom) ** 0.5
