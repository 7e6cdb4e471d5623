"""The bytes of a stream: their shape, their comments, their errors, and that any cut of the text reads the same."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.api.chat import ChatShape
from meshswarm.api.completions import CompletionShape
from meshswarm.api.failure import Failure
from meshswarm.api.reply import ClientStalledError, Pace, StreamReply, WholeReply
from meshswarm.errors import NoRouteError
from meshswarm.head.request import Finished, Queued, RouteSummary, Started, TextDelta, Timings, Usage

STARTED = Started("r1", "small", 1_760_000_000, 7, RouteSummary((("p", "0:30"),), "cpu"))
FINISHED = Finished("stop", Usage(7, 2, 0, 1, 2), Timings(7, 0.0, 2, 4.0, 3, 1, 2), "fp_1")
ASK = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "stream": True}

GOLDEN_CHAT = (
    'data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1760000000,"model":"small","choices":'
    '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    'data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1760000000,"model":"small","choices":'
    '[{"index":0,"delta":{"content":"ö\\n"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    'data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1760000000,"model":"small","choices":'
    '[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null,"system_fingerprint":"fp_1",'
    '"timings":{"prompt_n":7,"prompt_ms":0.0,"prompt_per_token_ms":0.0,"prompt_per_second":0.0,"predicted_n":2,'
    '"predicted_ms":4.0,"predicted_per_token_ms":2.0,"predicted_per_second":500.0,"draft_n":3,'
    '"draft_n_accepted":1,"flights":2},"meshswarm":{"route":[{"peer":"p","layers":"0:30"}],"numclass":"cpu","wire":null}}\n\n'
    'data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1760000000,"model":"small","choices":[],'
    '"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,"prompt_tokens_details":{"cached_tokens":0},'
    '"completion_tokens_details":{"accepted_prediction_tokens":1,"rejected_prediction_tokens":2}},'
    '"system_fingerprint":"fp_1"}\n\n'
    "data: [DONE]\n\n"
)
GOLDEN_COMPLETION = (
    'data: {"id":"cmpl-r1","object":"text_completion","created":1760000000,"model":"small","choices":'
    '[{"index":0,"text":"ö\\n","logprobs":null,"finish_reason":null}]}\n\n'
    'data: {"id":"cmpl-r1","object":"text_completion","created":1760000000,"model":"small","choices":'
    '[{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}],"system_fingerprint":"fp_1",'
    '"timings":{"prompt_n":7,"prompt_ms":0.0,"prompt_per_token_ms":0.0,"prompt_per_second":0.0,"predicted_n":2,'
    '"predicted_ms":4.0,"predicted_per_token_ms":2.0,"predicted_per_second":500.0,"draft_n":3,'
    '"draft_n_accepted":1,"flights":2},"meshswarm":{"route":[{"peer":"p","layers":"0:30"}],"numclass":"cpu","wire":null}}\n\n'
    "data: [DONE]\n\n"
)


class Wire:
    """Collects what an ASGI application sends."""

    def __init__(self) -> None:
        self.messages = []
        self._sent = asyncio.Event()

    async def send(self, message) -> None:
        self.messages.append(message)
        self._sent.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._sent.clear()
                await self._sent.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def complete(self) -> bool:
        return self.messages[-1].get("more_body") is False


async def write(reply_type, shape, pieces) -> Wire:
    wire = Wire()
    reply = reply_type(wire.send, shape, Pace())
    await reply.write(STARTED)
    for piece in pieces:
        await reply.write(TextDelta(piece, (1,)))
    await reply.write(FINISHED)
    await reply.finish()
    assert wire.complete
    return wire


async def test_the_bytes_of_a_streamed_chat():
    wire = await write(StreamReply, ChatShape(include_usage=True), ["ö\n", ""])
    assert wire.body.decode() == GOLDEN_CHAT
    headers = dict(wire.messages[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"


async def test_the_bytes_of_a_streamed_completion():
    wire = await write(StreamReply, CompletionShape(include_usage=False), ["ö\n"])
    assert wire.body.decode() == GOLDEN_COMPLETION


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[start:stop] for start, stop in itertools.pairwise(places)]


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    cuts=st.lists(st.integers(min_value=0), max_size=20),
    empty=st.booleans(),
    chat=st.booleans(),
)
async def test_any_cut_of_the_text_reads_the_same(text, cuts, empty, chat):
    """Streamed, joined and whole are one text, and no text can break out of its event."""
    pieces = cut(text, cuts) + ([""] if empty else [])
    shape = (ChatShape if chat else CompletionShape)(include_usage=False)
    streamed = await write(StreamReply, shape, pieces)
    whole = await write(WholeReply, shape, pieces)
    events = streamed.body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events[:-2]]
    final = json.loads(whole.body)["choices"][0]
    if chat:
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert final["message"]["content"] == text
    else:
        assert "".join(choice["text"] for choice in choices) == text
        assert final["text"] == text
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == final["finish_reason"] == "stop"


async def test_events_that_stop_too_early_are_an_error():
    for reply_type, status in ((StreamReply, 200), (WholeReply, 500)):
        wire = Wire()
        reply = reply_type(wire.send, ChatShape(include_usage=False), Pace())
        await reply.write(STARTED)
        await reply.finish()
        assert wire.status == status
        assert wire.complete
        assert b'"internal_error"' in wire.body
        assert b"[DONE]" not in wire.body


async def test_nothing_follows_the_end():
    wire = Wire()
    reply = StreamReply(wire.send, ChatShape(include_usage=False), Pace())
    await reply.write(STARTED)
    await reply.write(FINISHED)
    await reply.finish()
    before = wire.body
    await reply.fail(Failure(500, "too late"))
    assert wire.body == before


@pytest.mark.parametrize("reply_type", [StreamReply, WholeReply])
async def test_a_client_that_does_not_read_is_given_up(reply_type):
    async def never(message):
        await asyncio.Event().wait()

    reply = reply_type(never, ChatShape(include_usage=False), Pace(stall_s=0.01))
    with pytest.raises(ClientStalledError):
        await reply.write(STARTED)
        await reply.write(FINISHED)
        await reply.finish()


async def test_comments_come_while_the_route_forms(hasty_client, generator):
    generator.before_start = lambda: asyncio.sleep(0.4)
    answer = await hasty_client.post("/v1/chat/completions", json=ASK)
    assert answer.status_code == 200
    pings, _, rest = answer.text.partition("data: ")
    assert pings.count(": ping\n\n") >= 2
    assert pings.replace(": ping\n\n", "") == ""
    assert rest.startswith('{"id":"chatcmpl-r1"')
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_comments_come_in_a_silence_of_the_answer(hasty_client, generator):
    generator.before_piece[2] = lambda: asyncio.sleep(0.2)
    answer = await hasty_client.post("/v1/chat/completions", json=ASK)
    assert ": ping\n\n" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_an_answer_that_flows_has_no_comments(client):
    answer = await client.post("/v1/chat/completions", json=ASK)
    assert ": ping" not in answer.text


async def test_an_error_after_the_first_comment_is_an_event(hasty_client, generator):
    async def late():
        await asyncio.sleep(0.15)
        raise NoRouteError("nobody serves layers 10:20 of small")

    generator.before_start = late
    answer = await hasty_client.post("/v1/chat/completions", json=ASK)
    assert answer.status_code == 200
    last = json.loads(answer.text.rsplit("data: ", 1)[1])
    assert last["error"] == {
        "message": "nobody serves layers 10:20 of small",
        "type": "server_error",
        "param": None,
        "code": "no_route",
    }
    assert "[DONE]" not in answer.text


async def test_a_whole_answer_keeps_its_status_however_late_it_fails(hasty_client, generator):
    async def late():
        await asyncio.sleep(0.15)
        raise NoRouteError("nobody serves layers 10:20 of small")

    generator.before_start = late
    answer = await hasty_client.post("/v1/chat/completions", json={**ASK, "stream": False})
    assert answer.status_code == 503


async def test_a_place_in_line_is_the_sign_of_life_until_the_answer_starts():
    wire = Wire()
    reply = StreamReply(wire.send, ChatShape(include_usage=False), Pace(commit_s=0.01, ping_s=0.02))
    await reply.write(Queued(3, 11.2))
    assert not wire.messages, "an error may still become a status"
    pulse = asyncio.create_task(reply.keep_alive())
    await wire.until(lambda: wire.body.count(b"\n\n") >= 2)
    assert set(wire.body.decode().split("\n\n")) == {": queued, place 3, about 12 s", ""}
    await reply.write(Queued(2, 8.0))
    assert wire.body.endswith(b": queued, place 2, about 8 s\n\n"), "a new place is told at once"
    await reply.write(STARTED)
    told = len(wire.body)
    await wire.until(lambda: b": ping" in wire.body[told:])
    assert b"queued" not in wire.body[told:]
    pulse.cancel()


@pytest.mark.parametrize("reply_type", [StreamReply, WholeReply])
async def test_who_stood_in_line_in_vain_is_told_where(reply_type):
    wire = Wire()
    reply = reply_type(wire.send, ChatShape(include_usage=False), Pace())
    await reply.write(Queued(2, 7.5))
    await reply.fail(Failure(503, "everybody is busy", code="refused", retry_after_s=5))
    assert wire.status == 503
    assert json.loads(wire.body)["error"]["message"] == "everybody is busy (in line: place 2, about 8 s)"


async def test_a_whole_answer_says_nothing_while_it_waits():
    wire = Wire()
    reply = WholeReply(wire.send, ChatShape(include_usage=False), Pace())
    await reply.write(Queued(1, 0.5))
    assert not wire.messages
