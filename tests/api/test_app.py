"""The endpoint as OpenAI's own client sees it, in strict response validation, over a real socket."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from meshswarm.errors import (
    ArtifactError,
    NoRouteError,
    PeerUnreachableError,
    RefusedError,
    RemoteProtocolError,
    RequestError,
)

ASK = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
TEXT = "Hello, wörld 🐝"


@pytest.fixture
async def sdk(server):
    async with AsyncOpenAI(
        base_url=server.base_url, api_key="unused", max_retries=0, _strict_response_validation=True
    ) as sdk:
        yield sdk


def raising(error):
    async def before():
        raise error

    return before


async def test_a_chat_answers_whole(sdk):
    answer = await sdk.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.id, answer.created, answer.model) == ("chatcmpl-r1", 1_760_000_000, "small")
    assert answer.system_fingerprint == "fp_0123"
    assert answer.usage.prompt_tokens == 7
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == 11
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 1
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 3


async def test_extras_reach_the_user(sdk):
    answer = await sdk.chat.completions.create(**ASK)
    assert answer.meshswarm == {
        "route": [{"peer": "peerone", "layers": "0:10"}, {"peer": "peertwo", "layers": "10:30"}],
        "numclass": "llama.cpp/cpu/avx2",
        "wire": "f32",
    }
    assert answer.timings == {
        "prompt_n": 5,
        "prompt_ms": 10.0,
        "prompt_per_token_ms": 2.0,
        "prompt_per_second": 500.0,
        "predicted_n": 4,
        "predicted_ms": 40.0,
        "predicted_per_token_ms": 10.0,
        "predicted_per_second": 100.0,
        "draft_n": 4,
        "draft_n_accepted": 1,
        "flights": 3,
    }


async def test_a_streamed_chat_says_the_same(sdk):
    chunks = [chunk async for chunk in await sdk.chat.completions.create(**ASK, stream=True)]
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {("chatcmpl-r1", 1_760_000_000, "small")}
    first = chunks[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].system_fingerprint == "fp_0123"
    assert chunks[-1].timings["predicted_n"] == 4
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


async def test_a_usage_chunk_comes_when_asked_for(sdk):
    stream = await sdk.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 11


async def test_the_synchronous_client_works_too(server):
    def ask():
        with OpenAI(base_url=server.base_url, api_key="unused", max_retries=0, _strict_response_validation=True) as sdk:
            whole = sdk.chat.completions.create(**ASK)
            chunks = list(sdk.chat.completions.create(**ASK, stream=True))
            return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in chunks)

    assert await asyncio.to_thread(ask) == (TEXT, TEXT)


async def test_the_accumulating_stream_helper_works(sdk):
    async with sdk.chat.completions.stream(**ASK) as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == TEXT


async def test_max_tokens_ends_with_length(sdk):
    answer = await sdk.chat.completions.create(**ASK, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "Hello, "


async def test_a_completion_answers_whole(sdk, generator):
    answer = await sdk.completions.create(model="small", prompt="Once")
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion"
    assert answer.id == "cmpl-r1"
    assert answer.usage.total_tokens == 11
    assert generator.requests[0].prompt == "Once"
    assert generator.requests[0].messages is None


async def test_a_streamed_completion_says_the_same(server):
    # Not strict: the client's own type forbids the null that OpenAI sends as finish_reason until a stream's last chunk.
    async with AsyncOpenAI(base_url=server.base_url, api_key="unused", max_retries=0) as sdk:
        stream = await sdk.completions.create(
            model="small", prompt=[1, 2], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == TEXT
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None] * 4 + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4


async def test_models_are_listed(sdk):
    models = [model async for model in await sdk.models.list()]
    assert [model.id for model in models] == ["small", "broken"]
    assert models[0].owned_by == "meshswarm"
    assert models[0].meta == {
        "model_id": "smallid",
        "n_ctx": 2048,
        "layers": 30,
        "covered": ["0:30"],
        "missing": [],
        "holders": 2,
        "ready": True,
    }
    assert models[1].meta["missing"] == ["10:20"]


async def test_one_model_is_found_by_name_and_by_id(sdk):
    assert (await sdk.models.retrieve("broken")).created == 1_750_000_001
    assert (await sdk.models.retrieve("smallid")).id == "small"


async def test_a_model_with_a_slash_in_its_name_is_found(sdk, generator):
    generator.listings = [generator.listings[0].__class__("org/name", "x", 1, 1, 1, (), 0, False)]
    assert (await sdk.models.retrieve("org/name")).id == "org/name"


async def test_an_unknown_model_is_answered_with_the_list(sdk):
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.models.retrieve("gpt-7")
    assert caught.value.code == "model_not_found"
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match=r"'gpt-7'.*small, broken") as caught:
            await sdk.chat.completions.create(model="gpt-7", messages=ASK["messages"], stream=stream)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


FAILURES = [
    (RequestError("the prompt has 3000 tokens, the context 2048", code="context_length_exceeded"), 400, None),
    (NoRouteError("nobody serves layers 10:20 of small"), 503, "5"),
    (NoRouteError("nobody serves layers 10:20 of small", retry_after_s=2.1), 503, "3"),
    (RefusedError("peer abc has no room", retry_after_s=0.2), 503, "1"),
    (PeerUnreachableError("peer abc did not answer OPEN within 5 s"), 503, "5"),
    (RemoteProtocolError("peer abc sent garbage"), 503, "5"),
    (ArtifactError("a slice is damaged"), 500, None),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_byte_are_statuses(client, generator, stream):
    for error, status, retry_after in FAILURES:
        generator.before_start = raising(error)
        answer = await client.post("/v1/chat/completions", json={**ASK, "stream": stream})
        assert answer.status_code == status, error
        assert answer.headers.get("retry-after") == retry_after
        assert answer.headers["content-type"] == "application/json"
        body = answer.json()["error"]
        assert body["message"] == str(error)
        assert set(body) == {"message", "type", "param", "code"}
        assert body["type"] == ("invalid_request_error" if status == 400 else "server_error")


async def test_the_context_overflow_keeps_its_code(sdk, generator):
    generator.before_start = raising(RequestError("3000 > 2048", param="messages", code="context_length_exceeded"))
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(**ASK)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mistake_of_ours_is_a_500_that_tells_nothing(client, generator, stream, caplog):
    generator.before_start = raising(ZeroDivisionError("secret"))
    answer = await client.post("/v1/chat/completions", json={**ASK, "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "ZeroDivisionError" in caplog.text


async def test_a_mistake_in_a_listing_is_a_500_that_tells_nothing(client, generator):
    async def models(*, ask=True):
        raise ZeroDivisionError("secret")

    generator.models = models
    answer = await client.get("/v1/models")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


async def test_a_failure_in_mid_stream_is_an_event_the_client_raises(sdk, generator):
    generator.before_piece[2] = raising(PeerUnreachableError("peer abc went away"))
    received = []
    with pytest.raises(openai.APIError, match="peer abc went away") as caught:
        async for chunk in await sdk.chat.completions.create(**ASK, stream=True):
            received.append(chunk.choices[0].delta.content)
    assert received == ["", "Hello", ", "]
    assert not isinstance(caught.value, openai.APIStatusError)
    assert caught.value.code == "peer_unreachable"


async def test_a_failure_in_mid_answer_is_a_status_when_nothing_was_sent(sdk, generator):
    generator.before_piece[2] = raising(PeerUnreachableError("peer abc went away"))
    with pytest.raises(openai.InternalServerError, match="peer abc went away") as caught:
        await sdk.chat.completions.create(**ASK)
    assert caught.value.status_code == 503


WRONG = [
    ("GET", "/v1/nothing", 404, "unknown_url"),
    ("POST", "/chat/completions", 404, "unknown_url"),
    ("POST", "/v1/responses", 404, "unknown_url"),
    ("GET", "/docs", 404, "unknown_url"),
    ("GET", "/openapi.json", 404, "unknown_url"),
    ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
    ("POST", "/v1/models", 405, "method_not_allowed"),
    ("DELETE", "/v1/models/small", 405, "method_not_allowed"),
    ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed"),
    ("GET", "/v1/models/nothing", 404, "model_not_found"),
]


async def test_wrong_paths_and_methods(client):
    for method, path, status, code in WRONG:
        answer = await client.request(method, path)
        assert answer.status_code == status, (method, path)
        assert answer.json()["error"]["code"] == code
        assert ("allow" in answer.headers) == (status == 405)


async def test_who_only_watches_makes_the_swarm_be_asked_nothing(client, generator):
    """/health is answered without a key, as often as anybody likes."""
    for path in ("/health", "/"):
        for _ in range(20):
            assert (await client.get(path)).status_code == 200
    assert generator.n_asked == 0
    await client.get("/v1/models")
    assert generator.n_asked == 1


async def test_health_follows_the_models(client, generator):
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    generator.listings = generator.listings[1:]
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "no route")
    assert answer.json()["error"]["code"] == "no_route"
    generator.listings = []
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "loading")
    assert (await client.head("/health")).status_code == 503


async def test_the_front_page_is_for_people(client, server):
    answer = await client.get("/")
    assert answer.headers["content-type"].startswith("text/plain")
    assert server.base_url in answer.text
    assert "small, broken" in answer.text


async def test_a_client_that_retries_gets_through(server, generator):
    """Retry-After and 503 together are what OpenAI's client acts on by itself."""
    refusals = iter([RefusedError("peer abc has no room", retry_after_s=0.01)])

    async def once():
        for refusal in refusals:
            raise refusal

    generator.before_start = once
    async with AsyncOpenAI(base_url=server.base_url, api_key="unused", max_retries=1) as sdk:
        assert (await sdk.chat.completions.create(**ASK)).choices[0].message.content == TEXT
    assert len(generator.requests) == 2


async def test_many_clients_at_once_are_answered(server):
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/chat/completions", json={**ASK, "stream": n % 2 == 0}) for n in range(40))
        )
    assert {answer.status_code for answer in answers} == {200}
