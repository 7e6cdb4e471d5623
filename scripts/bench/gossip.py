"""What gossip costs and how fast it is: real cores on a virtual clock, messages priced by what two real endpoints send.

    .venv/bin/python scripts/bench/gossip.py --calibrate          bytes of one swap between two endpoints on loopback
    .venv/bin/python scripts/bench/gossip.py --peers 1000         deaths, stalls, bytes at rest
    .venv/bin/python scripts/bench/gossip.py --peers 1000 --leaves-per-hour 200     bytes under that many deaths
    .venv/bin/python scripts/bench/gossip.py --peers 300 --events-per-s 0.56        ... of peers elsewhere

Prints one JSON object. A third of the peers serve one of three spans of one model; ways are up to 100 ms long, 1 % of
the messages are sent twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.routing.gossip.virtual import MODEL, SCOPE, START_MS, Node, World

from meshswarm.config import Address
from meshswarm.identity import Identity, PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.routing.gossip import messages
from meshswarm.routing.gossip.words import Accusation, Appointment

IP_UDP_BYTES = 28
STEP_S = 0.1


async def calibrate(n: int = 200) -> dict[str, float]:
    """Bytes each side sends for one request, beyond the payloads, headers down to IP included."""
    swarm = Swarm(f"bench-{random.SystemRandom().randbytes(8).hex()}")
    ends = [await Endpoint.bind(Identity.generate(), Address("127.0.0.1", 0), swarm=swarm) for _ in range(2)]
    sent = [0, 0]
    for place, end in enumerate(ends):
        inner = end._udp.send

        def count(data: bytes, sockaddr: Any, place: int = place, inner: Any = inner) -> Any:
            sent[place] += len(data) + IP_UDP_BYTES
            return inner(data, sockaddr)

        end._udp.send = count  # type: ignore[method-assign]

    async def answer(peer: PeerId, data: bytes) -> bytes:
        return bytes(300)

    ends[1].handle_request(messages.SWAP, answer, max_request_bytes=4096, max_reply_bytes=4096)
    connection = await ends[0].dial(ends[1].peer_id, [ends[1].address])
    await connection.request(messages.SWAP, bytes(300))
    await asyncio.sleep(2.0)  # the path's datagram size is probed first
    sent[:] = 0, 0
    for _ in range(n):
        await connection.request(messages.SWAP, bytes(300))
        await asyncio.sleep(0.05)
    request, reply = (round(total / n - 300, 1) for total in sent)
    for end in ends:
        await end.close()
    return {"request_bytes": request, "reply_bytes": reply}


def grown(seed: int, n_peers: int) -> tuple[World, list[Node]]:
    """A swarm after its first minute."""
    world = World(seed, loss=0.01)
    nodes = world.swarm(n_peers)
    servers = world.rng.sample(nodes, n_peers // 3)
    for node in servers:
        start = world.rng.choice((0, 10, 20))
        world.serve(node, f"{start}:{start + 10}")
        world.introduce(node, world.rng.sample(servers, min(10, len(servers))), is_kin=True)
    world.run(40)
    return world, nodes


def rates(world: World, seconds: float) -> dict[str, float]:
    """Bytes a peer sends a second."""
    nodes = world.up()
    for node in nodes:
        node.sent = 0
    world.run(seconds)
    sent = sorted(node.sent / seconds for node in nodes if node.is_up)
    return {"mean": round(statistics.fmean(sent)), "p99": round(sent[int(len(sent) * 0.99)]), "max": round(sent[-1])}


def death(world: World) -> dict[str, float]:
    """One peer dies: seconds until its neighbours, and all, think it gone."""
    dead = world.rng.choice(world.up())
    near = {node.peer for node in world.up() if dead.peer in node.core.neighbours.active}
    world.kill(dead)
    began, seen = world.now, {}
    while len(seen) < len(world.up()) and world.now < began + 30:
        world.run(STEP_S)
        for node in world.up():
            if node.peer not in seen and dead.peer in node.core.gone(world.now):
                seen[node.peer] = world.now - began
    missing = len(world.up()) - len(seen)
    return {
        "neighbours_s": round(max((seen.get(peer, 99.0) for peer in near), default=0.0), 1),
        "half_s": round(statistics.median(seen.values()), 1),
        "all_s": round(max(seen.values()), 1),
        "missing": missing,
    }


def churn(world: World, per_hour: int, seconds: float) -> dict[str, Any]:
    """That many deaths, and as many newcomers: bytes, and how many of all views are right 15 s after."""
    rng = random.Random(world.seed)
    number = 1_000_000
    dead: list[tuple[float, PeerId]] = []
    before = {node.peer for node in world.up()}
    for node in world.up():
        node.sent = 0
    began = world.now
    while world.now < began + seconds:
        world.run(rng.expovariate(per_hour / 3600))
        victim = rng.choice(world.up())
        world.kill(victim)
        dead.append((world.now, victim.peer))
        number += 1
        newcomer = world.add(number)
        world.introduce(newcomer, rng.sample(world.up(), min(20, len(world.up()))))
    sent = [node.sent / seconds for node in world.up() if node.peer in before]
    due = [peer for at, peer in dead if at <= world.now - 15]
    veterans = [node for node in world.up() if node.peer in before]
    right = sum(peer in node.core.gone(world.now) for node in veterans for peer in due)
    return {
        "deaths": len(dead),
        "bytes_per_s_mean": round(statistics.fmean(sent)),
        "views_right_after_15_s": round(right / max(1, len(due) * len(veterans)), 4),
        "live_thought_gone": sum(world.nodes[peer].is_up for node in world.up() for peer in node.core.gone(world.now)),
    }


def storm(world: World, per_s: float, seconds: float) -> dict[str, Any]:
    """Deaths elsewhere, in a swarm so large that so many of them happen in a second: each is heard of here by one peer
    first. Bytes, and in how many views they are 15 s after. What may be spent at once is spent in the first minute,
    which does not count."""
    rng = random.Random(world.seed)
    ghosts: list[tuple[float, PeerId]] = []
    warm_s = 60.0
    began, number, is_warm = world.now, 2_000_000, False
    while world.now < began + warm_s + seconds:
        world.run(rng.expovariate(per_s))
        if not is_warm and world.now >= began + warm_s:
            is_warm = True
            for node in world.up():
                node.sent = 0
        ghost, *watchers = (Identity.from_seed((number + each).to_bytes(32)) for each in range(6))
        number += 6
        appointment = Appointment.sign(ghost, SCOPE, 1, tuple(watcher.peer_id for watcher in watchers))
        at_s = START_MS // 1000 + int(world.now)
        accusation = Accusation.state(watchers[0], appointment, at_s)
        for watcher in watchers[1:3]:
            accusation = accusation.merged(Accusation.state(watcher, appointment, at_s))
        word = messages.Word(messages.WordKind.ACCUSATION, accusation.encode())
        first = rng.choice(world.up())
        neighbour = rng.choice(list(first.core.neighbours.active))
        first.core.answer(messages.PUSH, neighbour, messages.encode_push((word,)), world.now)
        ghosts.append((world.now, ghost.peer_id))
    due = [peer for at, peer in ghosts if at <= world.now - 15]
    known = sum(peer in node.core.gone(world.now) for node in world.up() for peer in due)
    return {
        "events": len(ghosts),
        "bytes_per_s_mean": round(statistics.fmean(node.sent for node in world.up()) / seconds),
        "known_after_15_s": round(known / max(1, len(due) * len(world.up())), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--peers", type=int, default=300)
    parser.add_argument("--deaths", type=int, default=3)
    parser.add_argument("--leaves-per-hour", type=int, default=0)
    parser.add_argument("--events-per-s", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.calibrate:
        print(json.dumps(asyncio.run(calibrate())))
        return
    began = time.perf_counter()
    world, nodes = grown(options.seed, options.peers)
    result: dict[str, Any] = {
        "peers": options.peers,
        "seed": options.seed,
        "neighbours_mean": round(statistics.fmean(len(node.core.neighbours.active) for node in nodes), 1),
        "bytes_per_s_at_rest": rates(world, 30),
        "know_a_summary": sum(bool(node.core.coverage(MODEL, world.now)) for node in nodes),
        "live_thought_gone": sum(len(node.core.gone(world.now)) for node in nodes),
        "deaths": [death(world) for _ in range(options.deaths)],
    }
    if options.leaves_per_hour:
        result["churn"] = churn(world, options.leaves_per_hour, 60)
    if options.events_per_s:
        result["storm"] = storm(world, options.events_per_s, 60)
    result["took_s"] = round(time.perf_counter() - began)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
