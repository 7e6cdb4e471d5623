"""A generation lives exactly as long as somebody waits for it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

ASK = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}


def raw_request(body: bytes) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
        + str(len(body)).encode()
        + b"\r\n\r\n"
        + body
    )


async def within(seconds, awaitable):
    async with asyncio.timeout(seconds):
        return await awaitable


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_leaves_ends_the_generation(server, generator, stream, started):
    reached = asyncio.Event()

    async def forever():
        reached.set()
        await asyncio.Event().wait()

    if started:
        generator.before_piece[2] = forever
    else:
        generator.before_start = forever
    body = b'{"messages":[{"role":"user","content":"hi"}],"stream":%s}' % (b"true" if stream else b"false")
    _, writer = await asyncio.open_connection("127.0.0.1", server.address.port)
    writer.write(raw_request(body))
    await within(5, reached.wait())
    assert generator.open_answers == 1
    writer.close()
    await within(5, generator.closed.wait())
    assert generator.open_answers == 0


async def test_openais_client_that_closes_its_stream_ends_the_generation(server, generator):
    from openai import AsyncOpenAI

    generator.pieces = ["x"] * 1000
    generator.before_piece = {n: (lambda: asyncio.sleep(0.01)) for n in range(1000)}
    async with AsyncOpenAI(base_url=server.base_url, api_key="unused", max_retries=0) as sdk:
        stream = await sdk.chat.completions.create(**ASK, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await within(5, generator.closed.wait())
    assert generator.pieces_sent < 1000


async def test_a_client_that_does_not_read_slows_the_generation(server, generator):
    """What is generated waits for the client: memory per answer is bounded by the socket's buffers."""
    generator.pieces = ["x" * 1000] * 20_000
    _, writer = await asyncio.open_connection("127.0.0.1", server.address.port, limit=1024)
    writer.write(raw_request(b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'))
    sent = -1
    while sent != generator.pieces_sent:
        sent = generator.pieces_sent
        await asyncio.sleep(0.3)
    assert 0 < sent < 20_000
    writer.transport.abort()
    await within(5, generator.closed.wait())


async def test_the_generator_is_closed_in_the_task_that_iterated_it(client, generator):
    """A head may use timeouts and task groups around its yields only if one task runs all of it."""
    tasks = []
    original = generator.generate

    async def generate(request):
        tasks.append(asyncio.current_task())
        try:
            async with asyncio.timeout(60), asyncio.TaskGroup():
                async for event in original(request):
                    tasks.append(asyncio.current_task())
                    yield event
        finally:
            tasks.append(asyncio.current_task())

    generator.generate = generate
    assert (await client.post("/v1/chat/completions", json={**ASK, "stream": True})).status_code == 200
    assert len(set(tasks)) == 1


async def test_a_stopping_peer_tells_its_streams_why(server, generator):
    reached = asyncio.Event()

    async def forever():
        reached.set()
        await asyncio.Event().wait()

    generator.before_piece[1] = forever
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json={**ASK, "stream": True}))
        await within(5, reached.wait())
        await within(5, server.stop())
        answer = await asking
    assert answer.status_code == 200
    assert '"code":"draining"' in answer.text.rsplit("data: ", 1)[1]
    assert generator.open_answers == 0


async def test_a_stopping_peer_answers_what_waits_whole_with_503(server, generator):
    reached = asyncio.Event()

    async def forever():
        reached.set()
        await asyncio.Event().wait()

    generator.before_piece[1] = forever
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=ASK))
        await within(5, reached.wait())
        await within(5, server.stop())
        answer = await asking
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "draining"
    assert "retry-after" in answer.headers


async def test_a_patient_stop_lets_answers_end(server, generator):
    reached = asyncio.Event()
    release = asyncio.Event()

    async def wait():
        reached.set()
        await release.wait()

    generator.before_piece[1] = wait
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=ASK))
        await within(5, reached.wait())
        stopping = asyncio.create_task(server.stop(drain_s=30))
        await asyncio.sleep(0.05)
        with pytest.raises(httpx.TransportError):
            await client.get("/health")
        release.set()
        answer = await within(5, asking)
        await within(5, stopping)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "Hello, wörld 🐝"
