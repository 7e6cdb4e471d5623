#!/usr/bin/env python3
"""How much slower a peer answers while others fetch its model as fast as it gives it.

    seeding_tpot.py [--tokens 96] [--rounds 7] [--quick] [--json]

One peer serves all of SmolLM2 with one thread, and seeds the file it loaded. Time per output token of a greedy answer,
alone and while another process on this machine fetches the whole file from it again and again; rounds are interleaved.
What went out meanwhile is shown, and what goes out when nobody computes: a peer that sent nothing would be quick too.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from baseline import tokenize
from fetch_loopback import content_of
from figures import Figure, arguments, chosen, interleaved, run
from peers import MODEL, PeerFailure, PeerProcess, ask, fetch_model, scratch_folder

from meshswarm.artifacts import sources
from meshswarm.artifacts.torrent.session import TorrentSession

PROMPT = "The history of the lighthouse begins with fires on hilltops, which guided ships long before there were"
MOST = 1.15
SETTLE_S = 3.0
"""Seeding has found its rate beside the answers, or goes at full rate again."""


async def leech(path: Path, port: int) -> None:
    """As a process: fetch the file at `path` from the peer's torrent port until the input ends, into the void. A line
    of input asks for the bytes that came so far."""
    content, layer = content_of(path)
    done = 0
    current: list[int] = [0]

    async def again() -> None:
        nonlocal done
        while True:
            with tempfile.TemporaryDirectory(prefix="meshswarm-bench-", ignore_cleanup_errors=True) as folder:
                session = await TorrentSession.start("127.0.0.1", folder=Path(folder))
                try:
                    torrent = await session.open(content, Path(folder) / "model.gguf", layer)
                    torrent.connect("127.0.0.1", port)
                    await torrent.fetch(
                        range(content.n_pieces), progress=lambda p: current.__setitem__(0, p.have_bytes)
                    )
                finally:
                    done, current[0] = done + current[0], 0
                    await session.close()

    fetching = asyncio.create_task(again())
    while await asyncio.to_thread(sys.stdin.readline):
        if fetching.done():
            fetching.result()
        print(done + current[0], flush=True)
    fetching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await fetching


class Leech:
    """The fetching process. `bytes`: what it has got so far."""

    def __init__(self, path: Path, port: int) -> None:
        command = [sys.executable, __file__, "leech", str(path), str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def bytes(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailure("the fetching process ended; what it said is above")
        return int(line)

    def __enter__(self) -> Leech:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def torrent_port(peer: PeerProcess) -> int:
    """Where the peer gives pieces, once it does."""
    url = urlsplit(peer.api)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)
        connection.request("GET", "/meshswarm/status")
        port = json.loads(connection.getresponse().read()).get("files", {}).get("torrent_port")
        if port:
            return int(port)
        time.sleep(0.2)
    raise PeerFailure("the peer seeds nothing")


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--tokens", type=int, default=96)
    options, report = chosen(parser)
    n_tokens = 16 if options.quick else options.tokens
    path = sources.fetch(MODEL)
    prompt = tokenize(path, PROMPT)
    swarm = f"bench-{secrets.token_hex(4)}"
    with scratch_folder() as folder, contextlib.ExitStack() as stack:
        fetch_model(folder / "peer")
        listen = ["--swarm", swarm, "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--no-lan", "--no-rendezvous"]
        peer = PeerProcess(folder / "peer", *listen, "--model", MODEL, "--threads", "1")
        stack.enter_context(peer).wait_ready()
        port = torrent_port(peer)
        body = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "speculation": "off", "ignore_eos": True}
        rates: list[float] = []
        free: list[float] = []

        def alone() -> float:
            return ask(peer.api, "/completions", body).tpot_s

        def while_seeding() -> float:
            with Leech(path, port) as other:
                before, began = other.bytes, time.monotonic()
                time.sleep(SETTLE_S)
                free.append((other.bytes - before) / (time.monotonic() - began) / 1e6)
                ask(peer.api, "/completions", body)  # the rate settles
                before, began = other.bytes, time.monotonic()
                tpot_s = ask(peer.api, "/completions", body).tpot_s
                rates.append((other.bytes - before) / (time.monotonic() - began) / 1e6)
                return tpot_s

        cases: dict[str, Callable[[], float]] = {"alone": alone, "seeding": while_seeding}
        times = interleaved(cases, options.rounds)
        seeding, idle = (tuple(1e3 * second for second in times[name]) for name in ("seeding", "alone"))
        report.add(Figure("a token while the file is fetched from the peer", "ms", seeding, "alone", idle, MOST, True))
        n_rounds = len(seeding)
        report.add(Figure("sent meanwhile", "MB/s", tuple(rates[-n_rounds:]), "nobody asks", tuple(free[-n_rounds:])))
    report.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["leech"]:
        asyncio.run(leech(Path(sys.argv[2]), int(sys.argv[3])))
    else:
        run(main)
