"""What a plan is made for when a person leaves something out, and what cannot be planned."""

from __future__ import annotations

import re

import pytest

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.errors import RequestError
from meshswarm.head.forecast import USUAL_PROMPT, Asked, question_of
from meshswarm.head.routes import USUAL_ANSWER
from meshswarm.routing.preview import Question

CARD = ModelCard(bytes(32), "tiny", "llama", "f32", 4, (1000,), 100, 2048, 8, 32)


def test_what_is_left_out_is_usual_and_fits_the_model() -> None:
    assert question_of(Asked("tiny"), CARD) == Question(USUAL_PROMPT + USUAL_ANSWER, USUAL_PROMPT, 1)
    assert question_of(Asked("tiny", n_prompt=100), CARD) == Question(100 + USUAL_ANSWER, 100, 1)
    assert question_of(Asked("tiny", n_ctx=64, n_streams=3), CARD) == Question(64, 63, 3)
    assert question_of(Asked("tiny", n_prompt=2000), CARD) == Question(2048, 2000, 1)


@pytest.mark.parametrize(
    ("asked", "because"),
    [
        (Asked("tiny", n_ctx=2049), "tiny was made for 2 to 2048 positions, not 2049"),
        (Asked("tiny", n_ctx=1), "not 1"),
        (Asked("tiny", n_ctx=100, n_prompt=100), "leaves no room for an answer"),
        (Asked("tiny", n_prompt=0), "a prompt of 0 tokens"),
        (Asked("tiny", n_streams=0), "streams are 1 to 256, not 0"),
        (Asked("tiny", n_streams=257), "not 257"),
    ],
)
def test_numbers_that_cannot_be_are_refused_in_a_sentence(asked: Asked, because: str) -> None:
    with pytest.raises(RequestError, match=re.escape(because)):
        question_of(asked, CARD)
