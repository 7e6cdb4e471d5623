"""What the table costs on loopback: finding who serves a model, against one plain request over the same connections.

All peers run in this process and share its one core, so the numbers are upper bounds.
Run: .venv/bin/python scripts/bench/dht.py
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.messages import Sender
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span

MODEL = bytes(range(32))
N_LAYERS = 30
RUNS = 15
IDLE_S = 10.0


def coverage(endpoint: Endpoint, start: int) -> CoverageRecord:
    addresses = tuple(endpoint.addresses)
    return CoverageRecord(
        endpoint.peer_id, addresses, MODEL, Span(start, start + 10), True, "cpu", 4096, 300, 90, 16384
    )


async def median_ms(run: Callable[[], Awaitable[object]], runs: int = RUNS) -> float:
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        await run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


async def measure(count: int) -> None:
    swarm = Swarm("dht-bench")
    identities = [Identity.generate() for _ in range(count)]
    endpoints = [await Endpoint.bind(who, Address("127.0.0.1", 0), swarm=swarm) for who in identities]
    nodes = [Dht(endpoint, who, swarm) for endpoint, who in zip(endpoints, identities, strict=True)]
    tasks = [asyncio.create_task(node.run()) for node in nodes]
    began = time.perf_counter()
    for number in range(1, count):
        await nodes[number].join([(endpoints[number - 1].peer_id, (endpoints[number - 1].address,))])
    joined_ms = (time.perf_counter() - began) * 1e3 / (count - 1)
    for number, node in enumerate(nodes):
        await node.publish_coverage(coverage(endpoints[number], number % 3 * 10))
    reader = nodes[-1]
    connection = await endpoints[-1].dial(endpoints[0].peer_id)
    ping = messages.encode_ping(Sender(True, ()))
    one_request = await median_ms(lambda: connection.request(messages.PING, ping))
    fresh = await median_ms(lambda: reader.coverage(MODEL, N_LAYERS, fresh=True))
    remembered = await median_ms(lambda: reader.coverage(MODEL, N_LAYERS))
    publish = await median_ms(lambda: nodes[0].publish_coverage(coverage(endpoints[0], 0)), 5)
    assert len(await reader.coverage(MODEL, N_LAYERS)) == count
    await asyncio.sleep(1.0)
    cpu = time.process_time()
    await asyncio.sleep(IDLE_S)
    idle = (time.process_time() - cpu) / IDLE_S / count
    print(
        f"{count} peers: join {joined_ms:.0f} ms, publish {publish:.1f} ms, one request {one_request:.2f} ms, "
        f"lookup {fresh:.1f} ms ({fresh / one_request / (count - 1):.1f} requests' time for each peer asked), "
        f"remembered {remembered:.2f} ms, idle {idle:.3%} of a core each"
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for endpoint in endpoints:
        await endpoint.close()


async def main() -> None:
    for count in (2, 3, 20):
        await measure(count)


if __name__ == "__main__":
    asyncio.run(main())
