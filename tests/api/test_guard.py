"""No web page and nobody without the key gets in."""

from __future__ import annotations

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from meshswarm.api.app import create_app
from meshswarm.api.guard import host_name
from meshswarm.api.server import ApiServer
from meshswarm.config import Address

ASK = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
KEY = "mesh-0123456789abcdef"


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost", "localhost"),
        ("LOCALHOST:8410", "localhost"),
        ("localhost.", "localhost"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[::1]:8410", "::1"),
        ("", None),
        (":80", None),
        ("a:b", None),
        ("::1", None),
        ("a:80:80", None),
        ("a:²", None),
    ],
)
def test_the_host_header_is_taken_apart(host, name):
    assert host_name(host) == name


@given(st.text(st.characters(max_codepoint=255), max_size=30))
def test_no_host_header_breaks_the_check(host):
    name = host_name(host)
    assert name is None or name


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1", 200),
        ("127.0.0.1:9", 200),
        ("[::1]:8410", 200),
        ("192.168.1.9:8410", 200),
        ("mybox.lan:8410", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.nip.example", 403),
        ("evil.example:8410", 403),
        ("a b", 403),
        ("x:y", 400),
    ],
)
async def test_only_known_hosts_are_answered(generator, host, status):
    transport = httpx.ASGITransport(create_app(generator, allowed_hosts=["MyBox.lan"]))
    async with httpx.AsyncClient(base_url="http://localhost", transport=transport) as client:
        for path in ("/health", "/v1/models", "/nothing"):
            answer = await client.get(path, headers={"host": host})
            assert answer.status_code == (404 if (status, path) == (200, "/nothing") else status)
        if status != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://127.0.0.1:8410", 200),
        ("http://127.0.0.1:3000", 403),
        ("https://evil.example", 403),
        ("http://localhost:8410", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
        ("app://obsidian.md", 200),
        ("chrome-extension://abcdef", 200),
    ],
)
async def test_web_pages_of_other_origins_are_refused(generator, origin, status):
    transport = httpx.ASGITransport(create_app(generator))
    async with httpx.AsyncClient(base_url="http://127.0.0.1:8410", transport=transport) as client:
        headers = {"content-type": "text/plain"} | ({} if origin is None else {"origin": origin})
        answer = await client.post(
            "/v1/chat/completions", content=b'{"messages":[{"role":"user","content":"hi"}]}', headers=headers
        )
        assert answer.status_code == status
        assert len(generator.requests) == (1 if status == 200 else 0)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


async def test_a_preflight_gets_no_permission(client):
    answer = await client.options(
        "/v1/chat/completions",
        headers={"origin": "https://evil.example", "access-control-request-method": "POST"},
    )
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.fixture
async def locked(generator):
    server = ApiServer.bind(Address("127.0.0.1", 0), api_key=KEY)
    await server.start(generator)
    yield server
    await server.stop()


async def test_the_right_key_opens(locked):
    async with AsyncOpenAI(
        base_url=locked.base_url, api_key=KEY, max_retries=0, _strict_response_validation=True
    ) as sdk:
        assert (await sdk.chat.completions.create(**ASK)).choices[0].finish_reason == "stop"


async def test_a_wrong_key_does_not(locked, generator):
    async with AsyncOpenAI(base_url=locked.base_url, api_key=KEY + "x", max_retries=0) as sdk:
        with pytest.raises(openai.AuthenticationError) as caught:
            await sdk.chat.completions.create(**ASK)
    assert caught.value.code == "invalid_api_key"
    assert KEY not in str(caught.value)
    assert generator.requests == []


async def test_other_credentials_are_401_on_every_path(locked):
    wrong = [None, "", "Bearer", f"Basic {KEY}", KEY, f"Bearer {KEY} x", "Bearer \xe9", "bearer x"]
    async with httpx.AsyncClient(base_url=locked.url, trust_env=False) as client:
        for authorization in wrong:
            headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
            for path in ("/", "/v1/models", "/v1/models/small", "/nothing"):
                answer = await client.get(path, headers=headers)
                assert answer.status_code == 401, (authorization, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["type"] == "invalid_request_error"
            answer = await client.post("/v1/completions", content=b"not json", headers=headers)
            assert answer.status_code == 401
            assert (await client.get("/health", headers=headers)).status_code == 200


async def test_the_scheme_is_spelt_in_any_case(locked):
    async with httpx.AsyncClient(base_url=locked.url, trust_env=False) as client:
        assert (await client.get("/v1/models", headers={"authorization": f"bearer {KEY}"})).status_code == 200


async def test_without_a_key_any_credentials_do(client):
    assert (await client.get("/v1/models", headers={"authorization": "Bearer whatever"})).status_code == 200
