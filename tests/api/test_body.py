"""Whatever bytes come as a body, the outcome is an answer or an error in OpenAI's shape, never a 500."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

from hypothesis import given
from hypothesis import strategies as st

from meshswarm.api import body as body_module
from meshswarm.api.body import MAX_BODY_BYTES, parse_object
from meshswarm.errors import RequestError

GOOD = json.dumps(
    {
        "model": "small",
        "messages": [{"role": "user", "content": "hi"}],
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "temperature": 0.5,
        "stream_options": {"include_usage": True},
    }
).encode()

MALFORMED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"5",
    b'"text"',
    b"{'a': 1}",
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1,}',
    b'{"a": 1} {"b": 2}',
    b"\xff\xfe{}",
    b'{"a": "\xff"}',
    b'{"a": "\n"}',
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b'{"a": ' + b"9" * 5000 + b"}",
    b"model=small&messages=hi",
]


async def test_malformed_bodies_are_400(client):
    for body, path in itertools.product(MALFORMED, ("/v1/chat/completions", "/v1/completions")):
        answer = await client.post(path, content=body)
        assert answer.status_code == 400, body[:40]
        assert answer.json()["error"]["code"] == "invalid_json"
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_the_content_type_does_not_matter(client):
    """`curl -d` calls its body a form."""
    answer = await client.post(
        "/v1/chat/completions", content=GOOD, headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert answer.status_code == 200


async def test_a_byte_order_mark_is_no_reason_to_fail(client):
    assert (await client.post("/v1/chat/completions", content=b"\xef\xbb\xbf" + GOOD)).status_code == 200


async def test_a_body_that_says_it_is_too_large_is_413(client):
    answer = await client.post("/v1/chat/completions", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


async def test_a_body_that_turns_out_too_large_is_413(client):
    async def pieces():
        for _ in range(MAX_BODY_BYTES // 65536 + 1):
            yield b" " * 65536

    answer = await client.post("/v1/chat/completions", content=pieces())
    assert answer.status_code == 413


async def test_the_largest_body_is_read(client):
    answer = await client.post("/v1/chat/completions", content=GOOD.ljust(MAX_BODY_BYTES))
    assert answer.status_code == 200


async def test_a_body_that_does_not_arrive_is_408(client, monkeypatch):
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.05)

    async def pieces():
        yield b"{"
        await asyncio.sleep(0.5)
        yield b"}"

    answer = await client.post("/v1/chat/completions", content=pieces())
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "request_timeout"


async def test_mutated_bodies_never_break_the_endpoint(client):
    chance = random.Random(20260101)
    values = [b"null", b"-1", b"1e999", b"{}", b"[]", b'""', b"true", b'"\\ud800"', b"0.5", b'[["x"]]', b"99999999999"]
    for turn in range(400):
        body = bytearray(GOOD)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(body))
            match chance.randrange(4):
                case 0:
                    body[place] = chance.randrange(256)
                case 1:
                    del body[place : place + chance.randint(1, 12)]
                case 2:
                    body[place:place] = chance.choice(values)
                case _:
                    body = bytearray(
                        GOOD.replace(
                            chance.choice([b'"small"', b'"hi"', b"0.5", b"true", b'["x"]', b"1"]), chance.choice(values)
                        )
                    )
            if not body:
                break
        path = chance.choice(["/v1/chat/completions", "/v1/completions"])
        answer = await client.post(path, content=bytes(body))
        assert answer.status_code in (200, 400, 404), f"turn {turn}: {bytes(body)!r} -> {answer.text}"
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@given(st.binary(max_size=64) | st.text(st.sampled_from('{}[]":,0123456789eE+-. \\u"truefalsn'), max_size=40))
def test_no_bytes_escape_the_parser(body):
    try:
        assert isinstance(parse_object(body if isinstance(body, bytes) else body.encode()), dict)
    except RequestError as error:
        assert error.code == "invalid_json"
