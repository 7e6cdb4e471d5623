"""Time per output token of a model split over peers that are 20 or 50 ms apart, against compute and flights alone.

    sudo .venv/bin/python scripts/bench/wan_tpot.py [--rtt 20 50] [--spans 2 3] [--rounds 5] [--tokens 64]

Real peers on the hosts of scripts/wan.py, one thread each; the head is on the first span. S spans cost S one-way
flights a token, so the rule is TPOT <= compute + S x RTT/2 + 1.5 ms a hop. `compute` is unsplit llama-cpp-python's
TPOT, taken in turn with the split rounds. The emulator adds to the round trip asked for, so the one it really gave is
measured too.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from baseline import Baseline, tokenize
from peers import MODEL, PeerProcess, ask, even_spans, fetch_model, machine, scratch_folder, wait_for_route
from split_tpot import PROMPT

from meshswarm.artifacts import sources

WAN = [sys.executable, str(Path(__file__).parents[1] / "wan.py")]
ALLOWED_MS_A_HOP = 1.5
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtt", type=float, nargs="*", default=[20.0, 50.0], metavar="MS")
    parser.add_argument("--spans", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    print(machine(), flush=True)
    gguf = sources.fetch(MODEL)
    prompt = tokenize(gguf, PROMPT)
    print(f"TPOT, median of {options.rounds} rounds of {options.tokens} greedy tokens, 1 thread a process", flush=True)
    with scratch_folder() as folder, Baseline(gguf, options.tokens) as baseline:
        fetch_model(folder / "first")
        baseline.run(prompt)
        for rtt_ms in options.rtt:
            for spans in options.spans:
                case = folder / f"{rtt_ms:g}-{spans}"
                with network(spans, rtt_ms) as prefix, peers_on(prefix, case, spans) as head:
                    report(prefix, head, baseline, prompt, rtt_ms, spans, options)


@contextlib.contextmanager
def network(hosts: int, rtt_ms: float) -> Iterator[str]:
    """Hosts that far apart; gives the prefix of their namespaces."""
    prefix = "bench" + "".join(chr(ord("a") + byte % 26) for byte in secrets.token_bytes(4))
    command = [*WAN, "--prefix", prefix, "up", "--hosts", str(hosts), "--rtt", str(rtt_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        if "hosts up" not in process.stdout.readline():
            sys.exit("wan_tpot: the emulated network did not come up; see above")
        yield prefix
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def on_host(prefix: str, host: int) -> list[str]:
    return ["ip", "netns", "exec", f"{prefix}{host}"]


@contextlib.contextmanager
def peers_on(prefix: str, folder: Path, spans: int) -> Iterator[PeerProcess]:
    """A peer per host and span; gives the head, which has the first span."""
    name = f"bench-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        peers: list[PeerProcess] = []
        for host, span in enumerate(even_spans(spans)):
            arguments = ["--model", MODEL, "--layers", span, "--swarm", name, "--threads", "1"]
            arguments += ["--listen", f"10.99.0.{host + 1}:{PORT}", "--api", "127.0.0.1:0"]
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


def report(
    prefix: str,
    head: PeerProcess,
    baseline: Baseline,
    prompt: list[int],
    rtt_ms: float,
    spans: int,
    options: argparse.Namespace,
) -> None:
    body = {"model": None, "prompt": prompt, "max_tokens": options.tokens, "temperature": 0, "ignore_eos": True}
    before = on_host(prefix, 0)
    given_ms = measured_rtt_s(prefix) * 1e3
    ask(head.api, "/completions", body, before)  # warm up
    computes, splits = [], []
    for _ in range(options.rounds):
        computes.append(baseline.run(prompt) * 1e3)
        splits.append(ask(head.api, "/completions", body, before).tpot_s * 1e3)
    compute_ms, split_ms = statistics.median(computes), statistics.median(splits)
    asked = (split_ms - compute_ms - spans * rtt_ms / 2) / spans
    given = (split_ms - compute_ms - spans * given_ms / 2) / spans
    verdict = "kept" if asked <= ALLOWED_MS_A_HOP else "BROKEN"
    print(
        f"  RTT {rtt_ms:g} ms (measured {given_ms:.2f}), {spans} spans: {split_ms:.2f} ms = compute {compute_ms:.2f} + "
        f"{spans} x RTT/2 + {asked:+.2f} ms a hop ({given:+.2f} over the measured RTT)   "
        f"rule (<= {ALLOWED_MS_A_HOP} ms a hop) {verdict}",
        flush=True,
    )


if __name__ == "__main__":
    main()
