"""Tokens a second over the wide area, against llama.cpp's RPC servers on the same hosts, model and threads.

    sudo .venv/bin/python scripts/bench/rpc.py [--models smollm2 1b] [--rtt 0.1 5 20 50] [--rounds 5] [--tokens 48]

Three hosts of scripts/wan.py, and on both sides two of them compute half of the layers each:

- two peers, the head on the first of them, against an RPC client with two servers: the usual ways to run either. The
  rule: >= 1.5 x the tokens a second at 20 and at 50 ms RTT;
- a head without layers and two peers, against the same: everybody a host of their own;
- two peers against an RPC client that keeps the first half of the layers, and one server.

One thread a process, f16 KV, flash attention, one row at a time, greedy, no speculation. The client is llama-bench,
built from the same source as the peers' engine. It loads the model anew for every round, which does not count, as the
prompts do not. The emulator adds to the round trip asked for; what it really gave is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from baseline import tokenize
from figures import Figure, Report, arguments, chosen, interleaved, run
from hosts import PORT, address, measured_rtt_s, network, on_host, peers_on
from models import NAMES, BenchModel, bench_model
from peers import PeerProcess, ask, fetch_model, scratch_folder
from rpc_build import RpcTools, rpc_tools
from split_tpot import PROMPT

from meshswarm.span import Span
from meshswarm.stage.engine.llama import model_params

LEAST_SPEED_UP = 1.5
PROMISED_AT_MS = (20.0, 50.0)
SERVER_PORT = 50052
SERVER_HOSTS = (1, 2)
WAYS = {
    "peers": "2 peers, the head on the first",
    "apart": "a head without layers and 2 peers",
    "servers": "llama.cpp RPC, client and 2 servers",
    "server": "llama.cpp RPC, client with half of the layers and 1 server",
}


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--models", nargs="*", choices=NAMES, default=None)
    parser.add_argument("--rtt", type=float, nargs="*", default=None, metavar="MS")
    parser.add_argument("--tokens", type=int, default=None, help="of each answer (default: 48)")
    options, report = chosen(parser)
    options.tokens = options.tokens or (8 if options.quick else 48)
    tools = rpc_tools()
    with scratch_folder() as folder:
        fetch_model(folder / "first")
        for name in options.models or (["tiny"] if options.quick else ["smollm2", "1b"]):
            model = bench_model(name)
            for rtt_ms in options.rtt or ([5.0] if options.quick else [0.1, 5.0, 20.0, 50.0]):
                compare(folder, tools, model, rtt_ms, options, report)
    report.close()


def compare(
    folder: Path, tools: RpcTools, model: BenchModel, rtt_ms: float, options: argparse.Namespace, report: Report
) -> None:
    halves = model.cut(1, 1, prompt=True)
    case = folder / f"{model.name}-{rtt_ms:g}"
    prompt = tokenize(model.gguf, PROMPT)
    with contextlib.ExitStack() as stack:
        prefix = stack.enter_context(network(3, rtt_ms))
        stack.enter_context(rpc_servers(prefix, tools, folder / "rpc-cache"))
        peers = stack.enter_context(peers_on(prefix, case / "peers", halves, model=model.reference))
        apart = stack.enter_context(
            peers_on(prefix, case / "apart", [None, *halves], model=model.reference, port=PORT + 1)
        )
        given_ms = measured_rtt_s(prefix) * 1e3
        cases: dict[str, Callable[[], float]] = {
            "peers": partial(swarm_speed, prefix, peers, prompt, options.tokens),
            "apart": partial(swarm_speed, prefix, apart, prompt, options.tokens),
            "servers": partial(rpc_speed, prefix, tools, model, 99, SERVER_HOSTS, options.tokens),
            "server": partial(rpc_speed, prefix, tools, model, half_offloaded(model), SERVER_HOSTS[:1], options.tokens),
        }
        found = interleaved(cases, options.rounds)
    report.say(f"{model.name} at {rtt_ms:g} ms RTT (measured {given_ms:.2f}), {options.tokens} tokens an answer")
    target = LEAST_SPEED_UP if rtt_ms in PROMISED_AT_MS else None
    for ours, theirs, rule in (("peers", "servers", target), ("apart", "servers", None), ("peers", "server", None)):
        what = f"{WAYS[ours]}, {rtt_ms:g} ms RTT"
        figure = Figure(what, "tokens/s", tuple(found[ours]), WAYS[theirs], tuple(found[theirs]), rule)
        report.add(figure, model=model.name, rtt_ms=rtt_ms, measured_rtt_ms=given_ms, tokens=options.tokens)


def half_offloaded(model: BenchModel) -> int:
    """How many layers leave the client, as llama.cpp counts them: from the end on, the output matrix being one."""
    return 1 + len(Span.parse(model.cut(1, 1, prompt=True)[1]))


def swarm_speed(prefix: str, head: PeerProcess, prompt: list[int], n_tokens: int) -> float:
    """Tokens a second after the first, as a client on the head's host sees them."""
    body = {"model": None, "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    answer = ask(head.api, "/completions", body | {"speculation": "off"}, on_host(prefix, 0))
    return 1 / answer.tpot_s


@contextlib.contextmanager
def rpc_servers(prefix: str, tools: RpcTools, cache: Path) -> Iterator[None]:
    """A server on each of SERVER_HOSTS. They keep the weights they were sent in `cache`, so that only the first load of
    a model takes them through the emulated links."""
    cache.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        for host in SERVER_HOSTS:
            options = ["--host", address(host), "--port", str(SERVER_PORT), "--threads", "1", "--cache"]
            server = subprocess.Popen(
                [*on_host(prefix, host), str(tools.server), *options],
                env={**os.environ, "LLAMA_CACHE": str(cache)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(server.wait)
            stack.callback(server.kill)
        yield


def rpc_speed(
    prefix: str, tools: RpcTools, model: BenchModel, n_offloaded: int, hosts: Sequence[int], n_tokens: int
) -> float:
    """Tokens a second as llama-bench counts them: one row after the other, without a prompt, after a row to warm up."""
    servers = ",".join(f"{address(host)}:{SERVER_PORT}" for host in hosts)
    command = [*on_host(prefix, 0), str(tools.bench), "--model", str(model.gguf), "--rpc", servers]
    command += ["-ngl", str(n_offloaded), "-ts", "/".join("1" for _ in hosts), "--threads", "1", "-fa", "on"]
    if not model_params().use_extra_bufts:
        command += ["--repack", "0"]
    command += ["-p", "0", "-n", str(n_tokens), "-r", "1", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last_lines = "\n".join(done.stderr.splitlines()[-10:])
        sys.exit(f"llama-bench ended with status {done.returncode}:\n{last_lines}")
    (test,) = json.loads(done.stdout)
    return float(test["avg_ts"])


if __name__ == "__main__":
    run(main)
