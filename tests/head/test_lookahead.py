"""What an answer sends along: when the text is asked, when a model is, and that nobody waits for a model in vain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from meshswarm.head.drafting import SuffixDrafter
from meshswarm.head.lookahead import LISTENING_TOKENS, MAX_UNREAD, Lookahead
from meshswarm.head.speculation import MAX_WINDOW, WINDOWS, Learned, WindowChooser

STEP_S = 0.1
DRAFTING_S = 0.001
PROSE = list(range(1000, 1400))
"""Nothing in it is said twice: the text never guesses."""


@dataclass
class Model:
    """A draft model that knows the truth; what it is asked for waits in `asked` until `answer`."""

    truth: list[int]
    n_unread: int = 0
    asked: list[tuple[int, Callable[[tuple[int, ...], float], None]]] = field(default_factory=list)
    n_said: int = 0
    closed: bool = False

    def said(self, tokens: tuple[int, ...]) -> None:
        self.n_said += len(tokens)

    def draft(self, n_tokens: int, then: Callable[[tuple[int, ...], float], None]) -> None:
        self.asked.append((n_tokens, then))

    def close(self) -> None:
        self.closed = True

    def answer(self) -> None:
        n_tokens, then = self.asked.pop()
        then(tuple(self.truth[self.n_said : self.n_said + n_tokens]), DRAFTING_S * (n_tokens + 1))


def lookahead_of(model: Model | None, ends: int = -1) -> Lookahead:
    chooser = WindowChooser(Learned())
    return Lookahead(SuffixDrafter([]), chooser, lambda token: token == ends, model)


def plain_steps(lookahead: Lookahead, truth: list[int], start: int, count: int) -> None:
    for token in truth[start : start + count]:
        lookahead.window(MAX_WINDOW, lambda guesses: None)
        lookahead.said((token,), STEP_S)


def test_a_model_is_listened_to_first_and_asked_when_it_was_right() -> None:
    model = Model(PROSE)
    lookahead = lookahead_of(model)
    lookahead.said((PROSE[0],), None)
    sent: list[tuple[int, ...]] = []
    lookahead.window(MAX_WINDOW, sent.append)
    assert sent == [()], "the step leaves at once, without the model"
    assert model.asked[-1][0] == LISTENING_TOKENS
    model.answer()
    plain_steps(lookahead, PROSE, 1, LISTENING_TOKENS)
    lookahead.window(MAX_WINDOW, sent.append)
    assert len(sent) == 1, "now the step waits for what the model was asked for"
    model.answer()
    assert sent[1] == tuple(PROSE[5 : 5 + len(sent[1])])
    assert len(sent[1]) in WINDOWS[1:]


def test_a_step_does_not_wait_for_a_model_that_has_much_to_read() -> None:
    model = Model(PROSE)
    lookahead = lookahead_of(model)
    lookahead.said((PROSE[0],), None)
    lookahead.window(MAX_WINDOW, lambda guesses: None)
    model.answer()
    plain_steps(lookahead, PROSE, 1, LISTENING_TOKENS)
    model.n_unread = MAX_UNREAD + 1
    sent: list[tuple[int, ...]] = []
    lookahead.window(MAX_WINDOW, sent.append)
    assert sent == [()]


def test_a_model_that_is_never_right_is_listened_to_ever_more_rarely() -> None:
    model = Model([token + 1 for token in PROSE])
    lookahead = lookahead_of(model)
    lookahead.said((PROSE[0],), None)
    steps_heard, n_sent = [], 0
    for step, token in enumerate(PROSE[1:]):
        sent: list[tuple[int, ...]] = []
        lookahead.window(MAX_WINDOW, sent.append)
        if model.asked:
            steps_heard.append(step)
            model.answer()
        n_sent += len(sent[0])
        lookahead.said((token,), STEP_S * (1 + len(sent[0])))
    assert n_sent <= 3
    assert len(steps_heard) < len(PROSE) // 16
    assert steps_heard[:5] == [0, 2, 6, 14, 30]


def test_a_model_that_fails_lets_the_step_go_without_guesses() -> None:
    model = Model(PROSE)
    lookahead = lookahead_of(model)
    lookahead.said((PROSE[0],), None)
    lookahead.window(MAX_WINDOW, lambda guesses: None)
    model.answer()
    plain_steps(lookahead, PROSE, 1, LISTENING_TOKENS)
    sent: list[tuple[int, ...]] = []
    lookahead.window(MAX_WINDOW, sent.append)
    _, then = model.asked.pop()
    then((), 0.0)
    assert sent == [()]
    lookahead.close()
    assert model.closed


@pytest.mark.parametrize(("ends", "expected"), [(-1, 15), (3, 5), (1, 3)])
def test_nothing_is_guessed_from_a_token_on_that_ends_the_answer(ends: int, expected: int) -> None:
    """The guesses 6 7 0 1 2 8 3 ... are cut before the end, to the next smaller size."""
    chooser = WindowChooser(learned := Learned())
    text = [*range(5, 30), 6, 7, 0, 1, 2, 8, 3, 9, 9, 9, 9, 9, 9, 9, 9, 9, *range(5, 30)]
    for window in WINDOWS:
        for _ in range(2):
            chooser.stepped(window, STEP_S, window + 1)
    learned.last_plain = learned.steps
    lookahead = Lookahead(SuffixDrafter(text), chooser, lambda token: token == ends)
    sent: list[tuple[int, ...]] = []
    lookahead.window(MAX_WINDOW, sent.append)
    assert sent == [(6, 7, 0, 1, 2, 8, 3, 9, 9, 9, 9, 9, 9, 9, 9)[:expected]]
