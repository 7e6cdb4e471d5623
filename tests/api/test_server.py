"""The server takes a port, leaves the process to the peer, and goes without leaving anything behind."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket

import httpx
import pytest

from meshswarm.api.server import ApiServer
from meshswarm.config import Address
from meshswarm.errors import ConfigError, NoRouteError

LOOPBACK = Address("127.0.0.1", 0)


async def test_a_free_port_is_taken_and_told(server):
    assert server.address.port > 0
    assert server.url == f"http://127.0.0.1:{server.address.port}"
    assert server.base_url == server.url + "/v1"


async def test_a_taken_port_is_a_clear_error(server):
    with pytest.raises(ConfigError, match=rf"port {server.address.port} .*taken"):
        ApiServer.bind(server.address, api_key=None)


async def test_a_port_is_taken_from_bind_on():
    first = ApiServer.bind(LOOPBACK, api_key=None)
    with pytest.raises(ConfigError, match="taken"):
        ApiServer.bind(first.address, api_key=None)
    await first.stop()
    second = ApiServer.bind(first.address, api_key=None)
    await second.stop()


async def test_a_stop_in_the_middle_of_the_start_ends_both(generator):
    server = ApiServer.bind(LOOPBACK, api_key=None)
    starting = asyncio.create_task(server.start(generator))
    while server._serving is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await server.stop()
    await starting


def test_foreign_addresses_are_clear_errors():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not an address of this machine"):
        ApiServer.bind(Address("192.0.2.1", 0), api_key="x" * 20)
    with pytest.raises(ConfigError, match="cannot be resolved"):
        ApiServer.bind(Address("no-such-host.invalid", 0), api_key="x" * 20)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "mybox.lan"])
def test_off_loopback_a_key_is_required(host):
    with pytest.raises(ConfigError, match="without an API key"):
        ApiServer.bind(Address(host, 0), api_key=None)


async def test_a_wildcard_address_is_shown_as_one_a_program_can_use(generator):
    server = ApiServer.bind(Address("0.0.0.0", 0), api_key="x" * 20)
    try:
        await server.start(generator)
        assert server.url == f"http://127.0.0.1:{server.address.port}"
        async with httpx.AsyncClient(trust_env=False) as client:
            headers = {"host": socket.gethostname(), "authorization": "Bearer " + "x" * 20}
            assert (await client.get(server.base_url + "/models", headers=headers)).status_code == 200
    finally:
        await server.stop()


async def test_ipv6_loopback(generator):
    try:
        server = ApiServer.bind(Address("::1", 0), api_key=None)
    except ConfigError:
        pytest.skip("no IPv6 here")
    await server.start(generator)
    assert server.url == f"http://[::1]:{server.address.port}"
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(server.url + "/health")).status_code == 200
    await server.stop()


async def test_the_peers_own_views_stand_behind_the_same_door(generator):
    async def peers():
        return [{"peer": "bücher"}]

    async def broken():
        raise NoRouteError("not now")

    async def echo(parameters):
        return dict(parameters)

    server = ApiServer.bind(LOOPBACK, api_key="x" * 20)
    await server.start(
        generator,
        views={"/meshswarm/peers": peers, "/meshswarm/broken": broken},
        queries={"/meshswarm/echo": echo},
    )
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        assert (await client.get("/meshswarm/peers")).status_code == 401
        client.headers["authorization"] = "Bearer " + "x" * 20
        assert (await client.get("/meshswarm/peers")).json() == [{"peer": "bücher"}]
        assert (await client.get("/meshswarm/broken")).status_code == 503
        assert (await client.get("/meshswarm/echo", params={"model": "a b"})).json() == {"model": "a b"}
        assert (await client.post("/meshswarm/peers")).status_code == 405
    await server.stop()


async def test_signals_stay_the_peers(generator):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    server = ApiServer.bind(LOOPBACK, api_key=None)
    await server.start(generator)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    await server.stop()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


async def test_nothing_is_left_after_stop(generator):
    before = asyncio.all_tasks()
    server = ApiServer.bind(LOOPBACK, api_key=None)
    await server.start(generator)
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(server.url + "/health")).status_code == 200
        await server.stop()  # while the client keeps its connection
    assert asyncio.all_tasks() == before
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.address.port)
    gc.collect()  # an unclosed socket or transport would warn here


async def test_stopping_twice_and_before_starting_is_fine(generator):
    server = ApiServer.bind(LOOPBACK, api_key=None)
    await server.stop()
    await server.stop()
    server = ApiServer.bind(LOOPBACK, api_key=None)
    await server.start(generator)
    await server.stop()
    await server.stop()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
        b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"prompt"',
    ],
    ids=["silent", "half a head", "half a body"],
)
async def test_half_a_request_does_not_hold_up_the_stop(generator, request_bytes, caplog):
    server = ApiServer.bind(LOOPBACK, api_key=None)
    await server.start(generator)
    _, writer = await asyncio.open_connection("127.0.0.1", server.address.port)
    writer.write(request_bytes)
    await asyncio.sleep(0.05)
    async with asyncio.timeout(10):
        await server.stop()
    writer.close()
    assert caplog.text == ""


async def test_a_client_that_does_not_read_does_not_hold_up_the_stop(generator):
    generator.pieces = ["x" * 10_000] * 5_000
    server = ApiServer.bind(LOOPBACK, api_key=None)
    await server.start(generator)
    _, writer = await asyncio.open_connection("127.0.0.1", server.address.port, limit=1024)
    body = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    await asyncio.sleep(0.3)
    async with asyncio.timeout(10):
        await server.stop()
    assert generator.open_answers == 0
    writer.transport.abort()


async def test_garbage_is_not_http(server, caplog):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.address.port)
    writer.write(b"\x16\x03\x01\x02\x00\x01\x00 garbage\r\n\r\n")
    async with asyncio.timeout(5):
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()
    assert caplog.text == ""


async def test_an_idle_server_hardly_wakes(generator):
    """The peer's loop is shared: uvicorn's own ten wake-ups a second would be most of an idle peer's work."""
    server = ApiServer.bind(LOOPBACK, api_key=None)
    await server.start(generator)
    ticks = 0
    uvicorn_server = server._server
    original = uvicorn_server.on_tick

    async def counted(counter):
        nonlocal ticks
        ticks += 1
        return await original(counter)

    uvicorn_server.on_tick = counted
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(1.2)
    elapsed_s = asyncio.get_running_loop().time() - began
    await server.stop()
    assert 1 <= ticks <= elapsed_s + 3
