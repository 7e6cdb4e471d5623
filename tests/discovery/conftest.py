"""Endpoints on loopback, and a mainline DHT of this machine's own: several libtorrent sessions, no internet."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import libtorrent
import pytest

from meshswarm.config import Address
from meshswarm.discovery.mainline import CLOSED_NETWORK
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

Bind = Callable[..., Awaitable[Endpoint]]


@pytest.fixture
def swarm() -> Swarm:
    return Swarm(f"test-{os.urandom(8).hex()}")


@pytest.fixture
async def bind(swarm: Swarm) -> AsyncIterator[Bind]:
    """`await bind()` makes an endpoint on loopback with a new key; any argument of `Endpoint.bind` can be given."""
    endpoints: list[Endpoint] = []

    async def make(**settings: Any) -> Endpoint:
        listen = settings.pop("listen", Address("127.0.0.1", 0))
        identity = settings.pop("identity", None) or Identity.generate()
        endpoint = await Endpoint.bind(identity, listen, **{"swarm": swarm, **settings})
        endpoints.append(endpoint)
        return endpoint

    yield make
    for endpoint in endpoints:
        await endpoint.close()


def dht_node(host: str, bootstrap: str = "") -> Any:
    """A plain node of BitTorrent's DHT that never leaves loopback."""
    parameters = libtorrent.session_params()
    parameters.settings = {
        **CLOSED_NETWORK,
        "listen_interfaces": f"{host}:0",
        "enable_dht": True,
        "enable_lsd": False,
        "enable_upnp": False,
        "enable_natpmp": False,
        "dht_bootstrap_nodes": bootstrap,
    }
    return libtorrent.session(parameters)


@pytest.fixture
def mainline() -> Iterator[Address]:
    """One node of a DHT of four, to start from."""
    first = dht_node("127.0.0.1")
    address = Address("127.0.0.1", first.listen_port())
    nodes = [first, *(dht_node(f"127.0.0.{10 + n}", str(address)) for n in range(3))]
    yield address
    nodes.clear()
