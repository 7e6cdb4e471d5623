"""Peers that are milliseconds apart: hosts of scripts/wan.py with a peer on each. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from peers import MODEL, PeerProcess, wait_for_route

WAN = [sys.executable, str(Path(__file__).parents[1] / "wan.py")]
PORT = 4000
ECHO = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", 9000))
print("listening", flush=True)
while True:
    data, sender = s.recvfrom(2048)
    s.sendto(data, sender)
"""
PING = """
import socket, statistics, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
times = []
for _ in range(21):
    started = time.perf_counter()
    s.sendto(bytes(1200), ("10.99.0.2", 9000))
    s.recv(2048)
    times.append(time.perf_counter() - started)
print(statistics.median(times))
"""


@contextlib.contextmanager
def network(hosts: int, rtt_ms: float | Sequence[Sequence[float]], *, line: float | None = None) -> Iterator[str]:
    """Hosts that far apart, each from every other or by a matrix, and each with a line of `line` Mbit/s (None: no
    limit); gives the prefix of their namespaces."""
    prefix = "bench" + "".join(chr(ord("a") + byte % 26) for byte in secrets.token_bytes(4))
    if isinstance(rtt_ms, float | int):
        distance = ["--rtt", str(rtt_ms)]
    else:
        distance = ["--rtt-matrix", ";".join(",".join(map(str, row)) for row in rtt_ms)]
    command = [*WAN, "--prefix", prefix, "up", "--hosts", str(hosts), *distance]
    if line is not None:
        command += ["--line", str(line)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        if "hosts up" not in process.stdout.readline():
            sys.exit("the emulated network did not come up; see above")
        yield prefix
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def on_host(prefix: str, host: int) -> list[str]:
    return ["ip", "netns", "exec", f"{prefix}{host}"]


def address(host: int) -> str:
    return f"10.99.0.{host + 1}"


@contextlib.contextmanager
def peers_on(
    prefix: str, folder: Path, spans: Sequence[str | None], *options: str, model: str = MODEL, port: int = PORT
) -> Iterator[PeerProcess]:
    """A peer per host, with that host's span; None is a peer without layers. Gives the one on host 0."""
    name = f"bench-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        peers: list[PeerProcess] = []
        for host, span in enumerate(spans):
            arguments = ["--swarm", name, "--listen", f"{address(host)}:{port}", "--api", "127.0.0.1:0"]
            arguments += ["--no-lan", "--no-rendezvous", *options]
            if span is not None:
                arguments += ["--model", model, "--layers", span, "--threads", "1"]
            if peers:
                arguments += ["--join", peers[0].address]
            peer = PeerProcess(folder / str(host), *arguments, before=on_host(prefix, host))
            peers.append(stack.enter_context(peer).wait_ready())
        wait_for_route(peers[0].api, on_host(prefix, 0))
        yield peers[0]


def measured_rtt_s(prefix: str) -> float:
    """Median round trip of a full datagram between hosts 0 and 1."""
    echo = subprocess.Popen([*on_host(prefix, 1), sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    try:
        assert echo.stdout is not None
        echo.stdout.readline()
        command = [*on_host(prefix, 0), sys.executable, "-c", PING]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    finally:
        echo.kill()
        echo.wait()
