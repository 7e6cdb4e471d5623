"""What a connection costs in bytes, measured between two real endpoints on loopback: the source of `network.Costs`.

The rule this file keeps: every datagram that leaves either socket is counted, with the 28 bytes of IPv4 and UDP headers
it would have on a network. Larger datagrams are probed for as towards any host elsewhere: not for a question or two.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.simulation.network import Costs

from meshswarm.config import Address
from meshswarm.identity import Identity, PeerId
from meshswarm.net import pathmtu, udp, upkeep
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.liveness import FREE
from meshswarm.net.swarm import Swarm

IP_UDP_BYTES = 28
QUIET_S = 0.4  # by then nothing of an exchange is still on its way, acknowledgements and path probes included
_ROUNDS = 5
_LONG = 13_500


async def measure(*, rest_s: float = 61.0) -> Costs:
    """`rest_s`: how long to watch the connection rest; 0 leaves the price of signs of life as it was assumed."""
    sent: Counter[int] = Counter()
    send = udp.UdpSocket.send

    def counted(self: udp.UdpSocket, data: bytes, sockaddr: Any) -> int:
        sent[self.address.port] += len(data) + IP_UDP_BYTES
        return send(self, data, sockaddr)

    with (
        mock.patch.object(udp.UdpSocket, "send", counted),
        mock.patch.object(upkeep, "rungs_for", lambda host: (pathmtu.ETHERNET_BYTES,)),
        mock.patch.object(upkeep, "is_near", lambda host: False),
    ):
        swarm = Swarm(f"costs-{Identity.generate().peer_id.short}")
        one, other = [await Endpoint.bind(Identity.generate(), Address("127.0.0.1", 0), swarm=swarm) for _ in "12"]
        try:
            return await _between(one, other, sent, rest_s)
        finally:
            await one.close()
            await other.close()


async def _between(one: Endpoint, other: Endpoint, sent: Counter[int], rest_s: float) -> Costs:
    async def reply(_peer: PeerId, question: bytes) -> bytes:
        return bytes(int.from_bytes(question[:4]))

    async def spent(seconds: float) -> tuple[float, float]:
        await asyncio.sleep(seconds)
        both = sent[one.address.port], sent[other.address.port]
        sent.clear()
        return both

    async def ask(n_bytes: int) -> tuple[float, float]:
        for _ in range(_ROUNDS):
            await connection.request("costs", n_bytes.to_bytes(4), max_reply_bytes=2 * _LONG)
            await asyncio.sleep(0.05)
        asked, answered = await spent(QUIET_S)
        return asked / _ROUNDS, answered / _ROUNDS

    other.handle_request("costs", reply, max_request_bytes=64, max_reply_bytes=2 * _LONG)
    connection = await one.dial(other.peer_id, [other.address])
    dial, dialled = await spent(QUIET_S)
    asked, answered = await ask(500)
    _, long_answered = await ask(_LONG)
    costs = replace(
        Costs(),
        dial_bytes=round(dial),
        dialled_bytes=round(dialled),
        request_bytes=round(asked - 4),
        reply_bytes=round(answered - 500),
        datagram_bytes=round((long_answered - answered - _LONG + 500) / (_LONG // Costs().payload_per_datagram)),
    )
    if not rest_s:
        return costs
    rested, _ = await spent(rest_s)
    return replace(costs, ping_bytes=round(rested / (rest_s // FREE.probe_s)))
