"""What a head refuses before it looks for a route."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.errors import RequestError
from meshswarm.head.head import Head
from meshswarm.head.models import Voice
from meshswarm.head.request import GenerationRequest
from meshswarm.head.sampling_params import SamplingParams
from meshswarm.stage.engine.profile import Profile

CARD = ModelCard(bytes(32), "tiny", "llama", "q4_k", 4, (1000,), 100, 512, 8, 32)


class Words:
    """A vocabulary in which every word of a prompt is one token."""

    n_vocab = 32
    suppressed = ()

    def encode_prompt(self, text: str) -> list[int]:
        return [1 for _ in text.split()]


def head_of(voice: Voice) -> Head:
    async def resolve(ref: str | None) -> ModelCard:
        return CARD

    async def get_voice(card: ModelCard, records: Any) -> Voice:
        return voice

    async def coverage(card: ModelCard) -> list[Any]:
        return []

    directory: Any = SimpleNamespace(resolve=resolve, voice=get_voice)
    routes: Any = SimpleNamespace(coverage=coverage)
    tasks: Any = SimpleNamespace()
    return Head(routes, directory, tasks)


def request(prompt: str, profile: Profile = Profile.FAST) -> GenerationRequest:
    return GenerationRequest(None, None, prompt, SamplingParams(), 4, (), profile)


@pytest.mark.parametrize(
    ("asked", "encodings", "complaint"),
    [
        (request("one two", Profile.EXACT), {"F32", "Q4_K"}, "Q4_K"),
        (request(""), {"F32"}, "empty"),
        (request("word " * 512), {"F32"}, "512 tokens.*context of 512"),
    ],
)
async def test_requests_that_no_route_could_serve_are_the_clients_to_change(
    asked: GenerationRequest, encodings: set[str], complaint: str
) -> None:
    vocabulary: Any = Words()
    events = head_of(Voice(CARD, vocabulary, encodings)).generate(asked)
    with pytest.raises(RequestError, match=complaint):
        async with asyncio.timeout(10):
            await anext(events)
