#!/usr/bin/env python3
"""What the network layer costs on loopback, between two processes, against two baselines measured in the same run.

    net_echo.py [--count 400] [--gap-ms 2] [--bulk-mb 64] [--loop uvloop|asyncio]

`meshswarm`: one frame on an open stream, echoed from the frame handler. `udp`: the same bytes in one datagram of a
plain asyncio UDP echo, the floor of what Python and the kernel allow. `aioquic`: a stream of aioquic's own client and
server with its default settings. Latency one way is taken with the machine's one monotonic clock: the echoing process
writes when the message arrived into the answer. Messages follow each other after a pause, as decode steps do. Bulk is
1 MB messages sent without waiting, until the other side has said that it has them all. The rounds of the three are
interleaved, so a busy moment of the machine hits all of them. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import ssl
import statistics
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aioquic.asyncio import QuicConnectionProtocol, connect, serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import QuicEvent, StreamDataReceived

from meshswarm.config import Address
from meshswarm.identity import Identity, PeerId
from meshswarm.net.certificate import make_certificate
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.stream import Stream
from meshswarm.net.swarm import Swarm

SIZES = (64, 2_304, 24_576)
BULK_BYTES = 1_000_000
MAX_FRAME_BYTES = 16_000_000
SWARM = "bench-net-echo"
STAMP = struct.Struct("=qq")  # ns: when the message was sent, when it arrived
BULK = b"B"


@dataclass
class Samples:
    one_way_s: list[float] = field(default_factory=list)
    round_trip_s: list[float] = field(default_factory=list)


def stamped(message: bytes) -> bytes:
    """`message` with the time of its arrival."""
    sent, _ = STAMP.unpack_from(message)
    return STAMP.pack(sent, time.monotonic_ns()) + message[STAMP.size :]


def message_of(size: int) -> bytes:
    return STAMP.pack(time.monotonic_ns(), 0) + bytes(size - STAMP.size)


class Contestant:
    """`send` sends a message; `arrived` is called with each answer."""

    arrived: Callable[[bytes], None]

    def send(self, message: bytes) -> None:
        raise NotImplementedError

    async def once(self, size: int, samples: Samples) -> None:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.arrived = lambda message: None if answer.done() else answer.set_result(message)
        self.send(message_of(size))
        sent, arrived = STAMP.unpack_from(await asyncio.wait_for(answer, 10))
        samples.round_trip_s.append((time.monotonic_ns() - sent) / 1e9)
        samples.one_way_s.append((arrived - sent) / 1e9)

    async def bulk(self, count: int) -> float:
        """MB/s of `count` messages."""
        done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.arrived = lambda message: None if done.done() else done.set_result(message)
        start = time.monotonic()
        self.send_bulk(count)
        await asyncio.wait_for(done, 300)
        return count * BULK_BYTES / 1e6 / (time.monotonic() - start)

    def send_bulk(self, count: int) -> None:
        raise NotImplementedError


# -- meshswarm


def serve_stream(stream: Stream) -> None:
    received = 0

    def on_frame(frame: bytes) -> None:
        nonlocal received
        if len(frame) != BULK_BYTES:
            stream.send(stamped(frame))
            return
        received += 1
        if received == int(frame[1:9].strip(b"\0")):
            received = 0
            stream.send(b"done" + bytes(STAMP.size))

    stream.receive_with(on_frame, lambda _error: None)


class Mesh(Contestant):
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        stream.receive_with(lambda frame: self.arrived(frame), lambda error: print("meshswarm ended:", error))

    def send(self, message: bytes) -> None:
        self.stream.send(message)

    def send_bulk(self, count: int) -> None:
        for _ in range(count):
            self.stream.send((BULK + str(count).encode()).ljust(BULK_BYTES, b"\0"))


# -- plain UDP


class UdpEcho(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.transport.sendto(stamped(data), addr)  # type: ignore[attr-defined]


class Udp(Contestant, asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.arrived(data)

    def send(self, message: bytes) -> None:
        self.transport.sendto(message)  # type: ignore[attr-defined]


# -- aioquic as it comes


class Framed(QuicConnectionProtocol):
    """aioquic's protocol with the least framing that tells messages apart: a length and that many bytes."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.buffer = bytearray()
        self.received = 0
        self.arrived: Callable[[bytes], None] = lambda _message: None

    def quic_event_received(self, event: QuicEvent) -> None:
        if not isinstance(event, StreamDataReceived):
            return
        self.buffer += event.data
        while len(self.buffer) >= 4 and len(self.buffer) >= 4 + (length := int.from_bytes(self.buffer[:4], "big")):
            message = bytes(self.buffer[4 : 4 + length])
            del self.buffer[: 4 + length]
            self.message(message, event.stream_id)

    def message(self, message: bytes, stream_id: int) -> None:
        self.arrived(message)

    def write(self, message: bytes, stream_id: int) -> None:
        self._quic.send_stream_data(stream_id, len(message).to_bytes(4, "big") + message)
        self.transmit()


class FramedServer(Framed):
    def message(self, message: bytes, stream_id: int) -> None:
        if len(message) != BULK_BYTES:
            self.write(stamped(message), stream_id)
            return
        self.received += 1
        if self.received == int(message[1:9].strip(b"\0")):
            self.received = 0
            self.write(b"done" + bytes(STAMP.size), stream_id)


class Aioquic(Contestant):
    def __init__(self, protocol: Framed) -> None:
        self.protocol = protocol
        protocol.arrived = lambda message: self.arrived(message)

    def send(self, message: bytes) -> None:
        self.protocol.write(message, 0)

    def send_bulk(self, count: int) -> None:
        for _ in range(count):
            self.protocol.write((BULK + str(count).encode()).ljust(BULK_BYTES, b"\0"), 0)


# -- the two processes


async def server() -> None:
    """Echo for all three; prints where on one line."""
    identity = Identity.generate()
    endpoint = await Endpoint.bind(identity, Address("127.0.0.1", 0), swarm=Swarm(SWARM))
    endpoint.handle_stream("echo", serve_stream, max_frame_bytes=MAX_FRAME_BYTES)
    loop = asyncio.get_running_loop()
    udp, _ = await loop.create_datagram_endpoint(UdpEcho, local_addr=("127.0.0.1", 0))
    configuration = QuicConfiguration(is_client=False, alpn_protocols=["echo"])
    configuration.certificate = make_certificate(identity, datetime.datetime.now(datetime.UTC))
    configuration.private_key = identity.private_key
    quic = await serve("127.0.0.1", 0, configuration=configuration, create_protocol=FramedServer)
    ports = {
        "peer": str(endpoint.peer_id),
        "mesh": endpoint.address.port,
        "udp": udp.get_extra_info("sockname")[1],
        "quic": quic._transport.get_extra_info("sockname")[1],  # type: ignore[union-attr]
    }
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


async def measure(ports: dict[str, str], arguments: argparse.Namespace) -> None:
    endpoint = await Endpoint.bind(Identity.generate(), Address("127.0.0.1", 0), swarm=Swarm(SWARM))
    connection = await endpoint.dial(PeerId.parse(ports["peer"]), [Address("127.0.0.1", int(ports["mesh"]))])
    loop = asyncio.get_running_loop()
    _, udp = await loop.create_datagram_endpoint(Udp, remote_addr=("127.0.0.1", int(ports["udp"])))
    settings = QuicConfiguration(alpn_protocols=["echo"], verify_mode=ssl.CERT_NONE)
    async with connect("127.0.0.1", int(ports["quic"]), configuration=settings, create_protocol=Framed) as protocol:
        assert isinstance(protocol, Framed)
        contestants: dict[str, Contestant] = {
            "meshswarm": Mesh(connection.open_stream("echo", max_frame_bytes=MAX_FRAME_BYTES)),
            "udp": udp,
            "aioquic": Aioquic(protocol),
        }
        await latency(contestants, arguments)
        await bulk(contestants, arguments)
    await endpoint.close()


async def latency(contestants: dict[str, Contestant], arguments: argparse.Namespace) -> None:
    print(f"{'bytes':>7} {'who':>10} {'one way':>29} {'round trip':>29}   one way against")
    print(
        f"{'':>18} {'best 10th':>10} {'median':>9} {'p99':>9} {'best 10th':>9} {'median':>9} {'p99':>9}   udp  aioquic"
    )
    for size in SIZES:
        samples = {name: Samples() for name in contestants}
        for round_number in range(arguments.count + 20):
            for name, contestant in contestants.items():
                await contestant.once(size, samples[name] if round_number >= 20 else Samples())
                await asyncio.sleep(arguments.gap_ms / 1000)
        medians = {name: statistics.median(sample.one_way_s) for name, sample in samples.items()}
        for name, sample in samples.items():
            cells = [f"{figure * 1e3:7.3f}ms" for values in (sample.one_way_s, sample.round_trip_s)
                     for figure in spread(values)]  # fmt: skip
            ratios = [f"{medians[name] / medians[base]:5.2f}x" for base in ("udp", "aioquic")]
            print(f"{size:>7} {name:>10} {' '.join(cells)}   {' '.join(ratios)}", flush=True)


def spread(values: list[float]) -> tuple[float, float, float]:
    """What the best tenth stays below (little else ran then), the median, and the 99th percentile."""
    return statistics.quantiles(values, n=10)[0], statistics.median(values), statistics.quantiles(values, n=100)[98]


async def bulk(contestants: dict[str, Contestant], arguments: argparse.Namespace) -> None:
    runs: dict[str, list[float]] = {"meshswarm": [], "aioquic": []}
    for _ in range(3):
        for name, share in (("meshswarm", 1), ("aioquic", 8)):
            runs[name].append(await contestants[name].bulk(max(1, arguments.bulk_mb // share)))
    best = {name: statistics.median(figures) for name, figures in runs.items()}
    for name, figure in best.items():
        print(f"   bulk {name:>10} {figure:7.1f} MB/s   {figure / best['aioquic']:.2f}x aioquic", flush=True)


def run(work: Awaitable[None], loop: str) -> None:
    if loop == "uvloop":
        import uvloop

        uvloop.run(work)  # type: ignore[arg-type]
    else:
        asyncio.run(work)  # type: ignore[arg-type]


async def main(arguments: argparse.Namespace) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", "--loop", arguments.loop, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        await measure(json.loads(await child.stdout.readline()), arguments)
    finally:
        child.terminate()
        await child.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="messages of each size and contestant")
    parser.add_argument("--gap-ms", type=float, default=2.0, help="pause between messages")
    parser.add_argument("--bulk-mb", type=int, default=64)
    parser.add_argument(
        "--loop", choices=("uvloop", "asyncio"), default="asyncio" if sys.platform == "win32" else "uvloop"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    run(server() if chosen.serve else main(chosen), chosen.loop)
