#!/usr/bin/env python3
"""One peer has a model and six others want a third of it each, on equal links: who carries the bytes, and for how long?

    distribute.py [--rate 100] [--rtt 20] [--rounds 3] [--quick] [--json]

Seven hosts of scripts/wan.py, each with a line of one rate (Mbit/s, each way) to all others. On each a whole peer, with
table, gossip and torrents; only the engine is left out: seven would take the processors that carry the packets. First
one peer alone fetches the whole file from the seeder: the time of one copy. Then, in a new swarm, six fetch a third
each, two of them every third. What the emulator carries is shown: a rate it cannot keep says nothing of peers.
Needs root and iproute2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from figures import Figure, arguments, chosen, run
from hosts import PORT, address, network, on_host
from peers import MODEL, PeerFailure, fetch_model, scratch_folder

from meshswarm.artifacts import sources
from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address, Home
from meshswarm.discovery.settings import DiscoverySettings, Use
from meshswarm.fetching.fetch import Wanted
from meshswarm.identity import PeerId
from meshswarm.peer import Peer, PeerSettings

N_PEERS = 6
PARTS = 3
MOST_SENT = 1.5
MOST_TIME = 1.6


async def live(home: Path, swarm: str, host: int, join: str) -> None:
    """As a process on a host: a peer that fetches a part of a model for each line it reads, and says when it has it."""
    ready = asyncio.Event()

    def report(event: Any) -> None:
        if event["event"] == "ready":
            ready.set()

    friends = []
    if join:
        key, _, place = join.partition("@")
        friends.append((PeerId.parse(key), Address.parse(place)))
    settings = PeerSettings(
        home=Home(home),
        swarm=swarm,
        listen=Address(address(host), PORT),
        api=Address("127.0.0.1", 0),
        join=tuple(friends),
        discovery=DiscoverySettings(lan=Use.NO, rendezvous=Use.NO),
    )
    peer = Peer(settings, report)
    living = asyncio.create_task(peer.run())
    await ready.wait()
    print(json.dumps({"address": f"{peer.identity.peer_id}@{peer.endpoint.address}"}), flush=True)
    assert peer.sharing is not None
    while line := await asyncio.to_thread(sys.stdin.readline):
        errand = json.loads(line)
        if errand["do"] == "know":
            info = await peer.sharing.library.known(errand["model"])
            answer: dict[str, Any] = {"bytes": sum(info.file_lengths)}
        elif errand["do"] == "fetch":
            info = await peer.sharing.library.known(errand["model"])
            length = info.file_lengths[0]
            part = range(length * errand["part"] // errand["parts"], length * (errand["part"] + 1) // errand["parts"])
            started = time.monotonic()
            await peer.sharing.fetcher.fetch(Wanted.of(info.model_id, info.name, [[part]]))
            answer = {"seconds": time.monotonic() - started}
        else:
            answer = {"sent": peer.sharing.shelf.sent_bytes}
        print(json.dumps(answer), flush=True)
    peer.stop()
    await living


class HostedPeer:
    """A process of `live` on a host."""

    def __init__(self, prefix: str, home: Path, swarm: str, host: int, join: str = "") -> None:
        command = [*on_host(prefix, host), sys.executable, __file__, "live", str(home), swarm, str(host), join]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address: str = self.answer()["address"]

    def tell(self, **errand: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(errand) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailure("a peer of the benchmark ended; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **errand: Any) -> dict[str, Any]:
        self.tell(**errand)
        return self.answer()

    def __enter__(self) -> HostedPeer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextlib.contextmanager
def swarm_of(prefix: str, folder: Path, n_peers: int, model: str) -> Iterator[tuple[HostedPeer, list[HostedPeer]]]:
    """A seeder on host 0 and peers with nothing but the model's header on those after it."""
    name = f"bench-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        home = folder / secrets.token_hex(4)
        fetch_model(home / "0")
        seeder = stack.enter_context(HostedPeer(prefix, home / "0", name, 0))
        peers = [
            stack.enter_context(HostedPeer(prefix, home / str(host), name, host, seeder.address))
            for host in range(1, n_peers + 1)
        ]
        for peer in peers:
            peer.ask(do="know", model=model)
        time.sleep(2.0)  # what was done to get here is over
        yield seeder, peers


def fetch_all(peers: Sequence[HostedPeer], model: str, parts: Sequence[tuple[int, int]]) -> float:
    """Seconds until the last of `peers` has its (part, of how many)."""
    for peer, (part, of) in zip(peers, parts, strict=True):
        peer.tell(do="fetch", model=model, part=part, parts=of)
    return max(float(peer.answer()["seconds"]) for peer in peers)


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--rate", type=float, default=100.0, help="of every host's line, Mbit/s")
    parser.add_argument("--rtt", type=float, default=20.0, help="ms")
    options, report = chosen(parser)
    rate = 20.0 if options.quick else options.rate
    n_peers = PARTS if options.quick else N_PEERS
    path = sources.fetch(MODEL)
    size = path.stat().st_size
    with scratch_folder() as folder, network(n_peers + 1, options.rtt, line=rate) as prefix:
        store = Store(folder / "named")
        model = store.import_file(path).id_text
        ones, alls, sents = [], [], []
        for _ in range(options.rounds):
            with swarm_of(prefix, folder, 1, model) as (_, (peer,)):
                ones.append(fetch_all([peer], model, [(0, 1)]))
            with swarm_of(prefix, folder, n_peers, model) as (seeder, peers):
                alls.append(fetch_all(peers, model, [(number % PARTS, PARTS) for number in range(n_peers)]))
                sents.append(seeder.ask(do="sent")["sent"] / size)
        carried = [size * 8 / seconds / 1e6 for seconds in ones]
        what = f"{n_peers} peers, a third of {size / 1e6:.0f} MB each, {rate:g} Mbit/s, {options.rtt:g} ms"
        rounds = len(ones)
        report.add(Figure("one copy alone", "Mbit/s", tuple(carried), "the line", (rate,) * rounds))
        report.add(Figure(f"{what}: the last has it", "s", tuple(alls), "one copy", tuple(ones), MOST_TIME, True))
        report.add(Figure("the seeder sent", "files", tuple(sents), "one file", (1.0,) * rounds, MOST_SENT, True))
    report.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["live"]:
        _, _, home, swarm, host, *join = sys.argv
        asyncio.run(live(Path(home), swarm, int(host), join[0] if join else ""))
    else:
        run(main)
