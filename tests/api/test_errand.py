"""Errands of commands: told as they go, ended by a result or an error, called off by whoever leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from tests.api.conftest import ScriptedGenerator

from meshswarm.api.errand import Tell, is_same_machine
from meshswarm.api.server import ApiServer
from meshswarm.config import Address
from meshswarm.errors import ArtifactError


class Errands:
    """Counts to "n", fails, or waits for ever."""

    def __init__(self) -> None:
        self.called_off = asyncio.Event()

    async def count(self, body: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
        for number in range(body["n"]):
            tell({"number": number})
            await asyncio.sleep(0)
        return {"n": body["n"]}

    async def refuse(self, body: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
        tell({"number": 0})
        raise ArtifactError("nobody has it")

    async def mistake(self, body: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
        raise ZeroDivisionError("a secret")

    async def wait(self, body: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
        tell({"number": 0})
        try:
            await asyncio.Event().wait()
        finally:
            self.called_off.set()
        return {}


def events(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


async def started(errands: Errands) -> ApiServer:
    server = ApiServer.bind(Address("127.0.0.1", 0), api_key=None)
    names = ("count", "refuse", "mistake", "wait")
    await server.start(ScriptedGenerator(), errands={f"/meshswarm/{name}": getattr(errands, name) for name in names})
    return server


@pytest.mark.parametrize(
    ("name", "last"),
    [("count", {"result": {"n": 3}}), ("refuse", "nobody has it"), ("mistake", "a mistake of its own")],
)
async def test_an_errand_ends_with_its_result_or_its_error(name: str, last: object) -> None:
    server = await started(Errands())
    try:
        async with httpx.AsyncClient(base_url=server.url) as client:
            response = await client.post(f"/meshswarm/{name}", json={"n": 3})
            told = events(response.text)
            if name == "count":
                assert told == [*({"progress": {"number": number}} for number in range(3)), last]
            else:
                assert str(last) in told[-1]["error"]["message"]
                assert "secret" not in response.text
            refused = await client.post(f"/meshswarm/{name}", content=b"[]")
            assert refused.status_code == 400
            elsewhere = await client.post(f"/meshswarm/{name}", json={"n": 1}, headers={"origin": "http://a.example"})
            assert elsewhere.status_code == 403, "no web page sends this peer on errands"
            assert (await client.get(f"/meshswarm/{name}")).status_code == 405
    finally:
        await server.stop()


async def test_who_leaves_calls_it_off() -> None:
    errands = Errands()
    server = await started(errands)
    try:
        async with (
            httpx.AsyncClient(base_url=server.url) as client,
            client.stream("POST", "/meshswarm/wait", json={}) as response,
        ):
            async for _ in response.aiter_lines():
                break
        async with asyncio.timeout(10):
            await errands.called_off.wait()
    finally:
        await server.stop()


async def test_nobody_elsewhere_has_an_errand_done() -> None:
    """A pull by path would import a file that lies here and share it; one by URL would ask programs on this machine."""
    server = await started(Errands())
    try:
        async with httpx.AsyncClient(base_url=server.url) as client:
            for name in ("x-forwarded-for", "forwarded", "via"):
                answer = await client.post("/meshswarm/count", json={"n": 1}, headers={name: "203.0.113.5"})
                assert answer.status_code == 403 and answer.json()["error"]["code"] == "not_from_here"
            assert (await client.post("/meshswarm/count", json={"n": 1})).status_code == 200
    finally:
        await server.stop()
    for client_host, server_host, is_same in (
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::ffff:127.0.0.1", "::", True),
        ("192.168.1.2", "192.168.1.2", True),
        ("192.168.1.3", "192.168.1.2", False),
        ("", "", False),
    ):
        assert is_same_machine(client_host, server_host) is is_same
