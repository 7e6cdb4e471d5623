"""How a peer finds out whether others can dial it, on real sockets: a network of its own with a translator in it.

All addresses are on the loopback interface of a fresh network namespace. `HOME` is behind a translator that shows it as
`TRANSLATED`; nothing is forwarded to it until the test says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from meshswarm.config import Address
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.dht.upkeep import Periods
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span

FIRST, LATE, LATER, PUBLIC = "198.51.100.1", "192.0.2.1", "20.0.0.1", "203.0.113.5"
HOME, TRANSLATED = "10.9.9.9", "203.0.113.77"
MODEL = bytes(range(32))


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            result = condition()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.02)


async def scenario() -> dict[str, object]:
    """What became of it, for the test outside of the namespace."""
    run("ip", "link", "set", "lo", "up")
    for host in (FIRST, LATE, LATER, PUBLIC, HOME, TRANSLATED):
        run("ip", "addr", "add", f"{host}/32", "dev", "lo")
    run("nft", "add table ip nat; add chain ip nat out { type nat hook postrouting priority 100; }")
    run("nft", f"add rule ip nat out ip saddr {HOME} ip daddr != {HOME} snat to {TRANSLATED}")
    swarm = Swarm(f"dial-back-{random.random()}")
    clock = 1_800_000_000.0
    said: dict[str, object] = {}
    periods = Periods(round_s=0.2, look_around_s=1e9, doubt_s=1e9, republish_s=1e9)

    async def later(condition: Callable[[], bool]) -> None:
        """Waits for what the next checks find: nobody may be free to try at the first."""
        nonlocal clock
        for _ in range(20):
            clock += 400.0
            for _ in range(30):
                if condition():
                    return
                await asyncio.sleep(0.02)
        raise TimeoutError

    async with asyncio.TaskGroup() as group:
        nodes: dict[str, tuple[Endpoint, Dht]] = {}
        tasks = []

        async def start(host: str) -> tuple[Endpoint, Dht]:
            identity = Identity.generate()
            endpoint = await Endpoint.bind(identity, Address(host, 0), swarm=swarm)
            dht = Dht(endpoint, identity, swarm, clock=lambda: clock, periods=periods)
            tasks.append(group.create_task(dht.run()))
            if nodes:
                first = nodes[FIRST][0]
                await dht.join([(first.peer_id, (first.address,))])
            nodes[host] = endpoint, dht
            return nodes[host]

        await start(FIRST)
        _, public = await start(PUBLIC)
        endpoint, home = await start(HOME)
        await until(lambda: not home.is_server)
        said_of_itself = CoverageRecord(
            endpoint.peer_id, (endpoint.address,), MODEL, Span(0, 4), True, "cpu", 4096, 300, 90, 100
        )
        await home.publish_coverage(said_of_itself)
        seen = await public.coverage(MODEL, 4, fresh=True)
        said["what it says is found"] = [record.peer for record in seen] == [endpoint.peer_id]
        await start(LATE)  # has no connection to the one at home, who is in no table
        await until(lambda: not home.is_server and len(nodes[FIRST][1]._core.table) == 2)
        await later(lambda: home._reachability._silent >= 2)
        said["the public one is a server"] = public.is_server
        said["the one at home is a client"] = not home.is_server
        said["it is in no table"] = all(endpoint.peer_id not in dht._core.table for _, dht in nodes.values())
        port = endpoint.address.port
        run("nft", "add chain ip nat in { type nat hook prerouting priority -100; }")
        run("nft", "add chain ip nat here { type nat hook output priority -100; }")
        for chain in ("in", "here"):
            run("nft", f"add rule ip nat {chain} ip daddr {TRANSLATED} udp dport {port} dnat to {HOME}:{port}")
        await nodes[LATE][0].close()  # the translator remembers for a while what it did with its packets
        await start(LATER)
        await later(lambda: home.is_server)
        said["once its port is forwarded it is a server"] = home._core.sender.addresses[0].host == TRANSLATED
        await home.publish_coverage(said_of_itself)
        [record] = await public.coverage(MODEL, 4, fresh=True)
        said["and says where"] = [address.host for address in record.addresses] == [TRANSLATED, HOME]
        for task in tasks:
            task.cancel()
    for endpoint, _ in nodes.values():
        await endpoint.close()
    return said


@pytest.mark.wan
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "nft"))),
    reason="needs root, unshare, iproute2 and nftables",
)
def test_a_peer_behind_a_translator_is_a_client_until_its_port_is_forwarded() -> None:
    inside = subprocess.run(
        ["unshare", "--net", sys.executable, __file__], capture_output=True, text=True, timeout=90, check=False
    )
    assert inside.returncode == 0, inside.stderr
    said = json.loads(inside.stdout.splitlines()[-1])
    assert all(value is True for value in said.values()), said
    assert len(said) == 6


if __name__ == "__main__":
    print(json.dumps(asyncio.run(scenario())))
