"""What the table costs and withstands among strangers: real cores that reach each other at once, in one process.

Prints, for a swarm of PEERS: questions and rounds of a lookup, how many of the 20 nearest it finds, how well its size
is judged, memory and processor time of a core; and, for each CROWD of attackers who are all nearer to one key than
any honest peer and hide what they were given, how many readers still find a record under it: as it is, and without
regions (as if nobody knew the swarm's size).
Run: .venv/bin/python scripts/bench/dht_strangers.py [PEERS [CROWD ...]]
"""

from __future__ import annotations

import importlib.util
import logging
import statistics
import sys
import time
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

from meshswarm.dht.keys import distance, node_id
from meshswarm.net.swarm import Swarm

MODEL = bytes(range(32))
LOOKUPS = 100
READERS = 20
TESTS = Path(__file__).parents[2] / "tests" / "dht"


def load(name: str) -> ModuleType:
    """The tests' own network and attackers."""
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def measure(conftest: Any, peers: int) -> tuple[Any, list[Any]]:
    network = conftest.Network(Swarm("bench"), seed=peers)
    tracemalloc.start()
    nodes = network.grow(peers)
    memory = tracemalloc.get_traced_memory()[0] / peers
    tracemalloc.stop()
    readers = nodes[: READERS + 1]
    for node in readers:
        node.look_up(*(network.rng.randbytes(20) for _ in range(4)))
    sizes = [node.core.swarm_size(network.now) / peers for node in readers]
    asked, began, found, hits, lookups = network.questions, time.process_time(), 0, 0, []
    for _ in range(LOOKUPS):
        target, reader = network.rng.randbytes(20), network.rng.choice(readers)
        [lookup], _ = reader.look_up(target)
        lookups.append((lookup, reader))
    seconds = time.process_time() - began
    asked = network.questions - asked
    for lookup, reader in lookups:
        others = (node.core.own for node in nodes if node is not reader)
        nearest = sorted(others, key=lambda peer: distance(node_id(peer), lookup.target))[:20]
        hits += len(set(nearest) & {each.contact.peer for each in lookup.found()})
        found += len(lookup.found())
    print(
        f"{peers} peers: {asked / LOOKUPS:.1f} questions and {statistics.median(k.rounds for k, _ in lookups):g} "
        f"rounds a lookup (median), {hits / 20 / LOOKUPS:.2%} of the 20 nearest found among {found / LOOKUPS:.1f}, "
        f"{sum(k.is_dense for k, _ in lookups)} of {LOOKUPS} called crowded; size judged {min(sizes):.2f} to "
        f"{max(sizes):.2f} times what it is; {statistics.mean(len(n.core.table) for n in nodes):.0f} contacts and "
        f"{memory / 1024:.0f} KiB a core; {seconds / asked * 1e6:.0f} µs of processor a question, both sides together"
    )
    return network, readers


def attack(strangers: Any, network: Any, readers: list[Any], size: int, block: int) -> None:
    author, key = readers[0], readers[0].core.topics.block(MODEL, block)
    honest = list(network.nodes.values())
    nearest = min(distance(node_id(node.core.own), key) for node in honest)
    drawn = max(size * len(honest), int(size * 2**160 / max(1, nearest)))
    crowd = {node.core.own for node in strangers.crowd_around(network, key, size, drawn=min(drawn, 300_000))}
    layers = (4 * block, 4 * block + 4)
    places = {}
    for is_control in (False, True):
        network.now += 1.0
        radius = {node: node.core.radius for node in network.nodes.values()}
        for node in radius if is_control else ():
            node.core.radius = lambda now: 0
        asked = network.questions
        *_, record = records = author.say(layers)
        lookup = next(each for each in author.publish(records) if each.target == key)
        sees = sum(record in set(reader.look_up(key)[1]) for reader in readers[1:])
        each = (network.questions - asked) / len(readers)
        honest_places = sum(found.contact.peer not in crowd for found in lookup.found())
        places[is_control] = f"{sees} of {len(readers) - 1} ({honest_places} honest places, {each:.0f} questions)"
        for node, method in radius.items():
            node.core.radius = method
    print(f"  crowd of {size}: found by {places[False]}, noticed; without regions by {places[True]}")


def main() -> None:
    logging.disable()
    peers = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    crowds = [int(each) for each in sys.argv[2:]] or [25, 60]
    conftest, strangers = load("conftest"), load("test_strangers")
    network, readers = measure(conftest, peers)
    for block, size in enumerate(crowds):
        attack(strangers, network, readers, size, block)


if __name__ == "__main__":
    main()
