"""Endpoints on loopback that are closed when the test ends. Every test has a swarm of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from meshswarm.config import Address
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

LOOPBACK = Address("127.0.0.1", 0)
Bind = Callable[..., Awaitable[Endpoint]]


@pytest.fixture
def swarm() -> Swarm:
    return Swarm(f"test-{os.urandom(8).hex()}")


@pytest.fixture
async def bind(swarm: Swarm) -> AsyncIterator[Bind]:
    """`await bind()` makes an endpoint with a new key; any argument of `Endpoint.bind` can be given."""
    endpoints: list[Endpoint] = []

    async def make(identity: Identity | None = None, listen: Address = LOOPBACK, **settings: Any) -> Endpoint:
        endpoint = await Endpoint.bind(identity or Identity.generate(), listen, **{"swarm": swarm, **settings})
        endpoints.append(endpoint)
        return endpoint

    yield make
    for endpoint in endpoints:
        await endpoint.close()
