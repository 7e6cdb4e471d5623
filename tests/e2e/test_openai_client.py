"""The real `openai` client, in strict response validation, at every endpoint of a split model."""

from __future__ import annotations

import itertools
from typing import Any

import openai
import pytest
from tests.e2e.client import client_of, counts, wait_until_ready

QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]


def answer(api: str, **options: Any) -> Any:
    model = wait_until_ready(api)
    defaults: dict[str, Any] = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    return client_of(api).chat.completions.create(**{**defaults, **options})


@pytest.fixture(scope="module")
def reference(three_peers: Any) -> Any:
    """The answer at the first peer's endpoint."""
    return answer(three_peers.spans[0].api)


@pytest.mark.parametrize("index", range(4))
def test_every_endpoint_gives_the_same_answer_also_one_without_layers(
    three_peers: Any, reference: Any, index: int
) -> None:
    peer = three_peers.all[index]
    same = answer(peer.api)
    assert same.choices[0].message.content == reference.choices[0].message.content
    assert same.choices[0].message.content
    assert counts(same.usage) == counts(reference.usage)
    assert same.system_fingerprint == reference.system_fingerprint
    hops = [(hop["peer"], hop["layers"]) for hop in same.model_extra["meshswarm"]["route"]]
    assert hops == [
        (span.peer_id, layers) for span, layers in zip(three_peers.spans, ("0:10", "10:20", "20:30"), strict=True)
    ]


@pytest.mark.parametrize("index", [0, 1, 3])
def test_streamed_equals_unstreamed(three_peers: Any, reference: Any, index: int) -> None:
    stream = answer(three_peers.all[index].api, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == reference.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [reference.choices[0].finish_reason]
    assert counts(chunks[-1].usage) == counts(reference.usage)
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, chunks[0].model)
    }


def test_a_seed_repeats_a_sampled_answer_anywhere_in_the_swarm(three_peers: Any) -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 42, "max_tokens": 16}
    texts = {answer(peer.api, **options).choices[0].message.content for peer in three_peers.all}
    assert len(texts) == 1
    others = {
        answer(three_peers.client.api, **{**options, "seed": seed}).choices[0].message.content for seed in range(4)
    }
    assert len(others) > 1


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(three_peers: Any, reference: Any) -> None:
    words = reference.choices[0].message.content.split()
    stopped = answer(three_peers.client.api, stop=[words[3]])
    text = stopped.choices[0].message.content
    assert stopped.choices[0].finish_reason == "stop"
    assert reference.choices[0].message.content.startswith(text)
    assert words[3] not in text
    assert len(text) < len(reference.choices[0].message.content)


def test_max_tokens_is_kept_and_said(three_peers: Any) -> None:
    short = answer(three_peers.client.api, max_tokens=3)
    assert short.usage.completion_tokens == 3
    assert short.choices[0].finish_reason == "length"


def test_completions_take_text_and_token_ids(three_peers: Any) -> None:
    api = three_peers.spans[1].api
    model = wait_until_ready(api)
    completion = client_of(api).completions.create(model=model, prompt="Once upon a time", temperature=0, max_tokens=8)
    assert completion.choices[0].text
    tokens = client_of(api).completions.create(model=model, prompt=[6403, 1980, 253], temperature=0, max_tokens=2)
    assert tokens.usage.prompt_tokens == 3


def test_the_exact_profile_agrees_on_this_quantised_dense_model(three_peers: Any, reference: Any) -> None:
    exact = answer(three_peers.client.api, extra_body={"profile": "exact"})
    assert exact.choices[0].message.content == reference.choices[0].message.content


def test_answers_at_the_same_time_do_not_disturb_each_other(three_peers: Any, reference: Any) -> None:
    streams = [answer(peer.api, stream=True) for peer in three_peers.all]
    texts = [""] * len(streams)
    for chunks in itertools.zip_longest(*streams):
        for index, chunk in enumerate(chunks):
            for choice in chunk.choices if chunk is not None else ():
                texts[index] += choice.delta.content or ""
    assert set(texts) == {reference.choices[0].message.content}


def test_unknown_model_is_404_with_the_list(three_peers: Any) -> None:
    model = wait_until_ready(three_peers.client.api)
    with pytest.raises(openai.NotFoundError, match=model) as caught:
        answer(three_peers.client.api, model="no-such-model")
    assert caught.value.code == "model_not_found"


def test_a_prompt_longer_than_the_context_is_400_with_both_numbers(three_peers: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        answer(three_peers.client.api, messages=[{"role": "user", "content": "word " * 6000}])
    assert caught.value.code == "context_length_exceeded"
    assert "4095" in str(caught.value)
    assert "60" in str(caught.value)


def test_a_parameter_not_built_yet_is_400_and_named(three_peers: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        answer(three_peers.client.api, logprobs=True)
