"""How a swarm spreads over a model by its peers' own moves: how near it comes to the best there is, how long gaps last.

    python scripts/bench/rebalance.py [--seeds N] [--load-s S] [--json]

The deciding core is the product's (`routing/rebalance`); peers, their knowledge, which is up to a round old, and the
loading of layers are simulated on a virtual clock (`tests/routing/balance.py`). Peers differ: 4 to 23 layers fit,
speeds lie around 490 µs a layer (log-normal, sigma 0.6), and half of the peers have no room for two slices.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.routing.balance import Swarm, cuts_of

from meshswarm.routing.rebalance import ROUND_S, propose

N_LAYERS = 80
MOST_ROUNDS = 360


def grown(seed: int, n_peers: int, load_s: float, *, least: int = 4, most: int = 24) -> Swarm:
    swarm = Swarm(cuts_of(N_LAYERS), random.Random(seed), load_s=load_s, lag_rounds=1)
    for _ in range(n_peers):
        come(swarm, least, most)
    swarm.grow_old()
    return swarm


def come(swarm: Swarm, least: int = 4, most: int = 24) -> None:
    rng = swarm.rng
    us = int(rng.lognormvariate(6.2, 0.6))
    swarm.join(most=rng.randrange(least, most), us_per_layer=us, has_room_for_two=rng.random() < 0.5)


def lopsided(seed: int, load_s: float) -> dict[str, float]:
    """500 peers of whom 7 in 10 leave who held one half of the model; others come and go for 30 minutes."""
    swarm = grown(seed, 500, load_s)
    before = swarm.weakest() / swarm.ideal()
    swarm.leave([p for p, m in swarm.members.items() if m.holder.span.start >= 40 and swarm.rng.random() < 0.7])
    after = swarm.weakest() / swarm.ideal()
    quiet = 0
    for number in range(MOST_ROUNDS):
        if number < 1800 / ROUND_S:
            leaving = [peer for peer in swarm.members if swarm.rng.random() < 0.001]
            swarm.leave(leaving)
            for _ in leaving:
                come(swarm)
        quiet = 0 if swarm.round() else quiet + 1
        if quiet >= 30 and number > 1800 / ROUND_S:
            break
    n_moves = [member.n_moves for member in swarm.members.values()]
    last = max((at for at, moves in enumerate(swarm.moves) if moves), default=0)
    return {
        "joined": before, "after_loss": after, "at_rest": swarm.weakest() / swarm.ideal(),
        "moves": sum(map(len, swarm.moves)), "most_moves_of_a_peer": max(n_moves), "last_move_s": last * ROUND_S,
    }  # fmt: skip


def gap_s(seed: int, n_peers: int, load_s: float) -> float | None:
    """How long layers are without a holder after 3 of 10 peers left at once; None when none ever were."""
    swarm = grown(seed, n_peers, load_s, least=8, most=16)
    swarm.now = 1000 * ROUND_S * (seed + 1)
    swarm.round()
    swarm.leave([peer for peer in list(swarm.members) if swarm.rng.random() < 0.3])
    left_s = swarm.now
    if not swarm.view().unheld:
        return None
    while swarm.view().unheld and swarm.now < left_s + 600:
        swarm.round()
    return swarm.now - left_s


def propose_ms(n_peers: int) -> float:
    """What one peer's decision costs with nothing worked out before, in a swarm that is out of balance."""
    swarm = grown(1, n_peers, 20.0)
    swarm.leave([p for p, m in swarm.members.items() if m.holder.span.start >= 40 and swarm.rng.random() < 0.7])
    took = []
    for member in list(swarm.members.values())[:20]:
        view = swarm.view()
        started = time.perf_counter()
        propose(view, member.own(0.0, None), swarm.rng, 0.0)
        took.append(time.perf_counter() - started)
    return statistics.median(took) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--load-s", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = [lopsided(seed, options.load_s) for seed in range(options.seeds)]
    gaps = {
        n: [found for seed in range(5 * options.seeds) if (found := gap_s(seed, n, options.load_s)) is not None]
        for n in (20, 24, 30, 40)
    }
    result: dict[str, Any] = {
        "seeds": options.seeds,
        "load_s": options.load_s,
        "lopsided": {key: [round(run[key], 3) for run in runs] for key in runs[0]},
        "gap_s": {n: [len(found), statistics.median(found), max(found)] for n, found in gaps.items()},
        "propose_ms": {n: round(propose_ms(n), 1) for n in (50, 500)},
    }
    if options.json:
        print(json.dumps(result))
        return
    for key, values in result["lopsided"].items():
        print(f"{key:>22}: median {statistics.median(values):g}, from {min(values):g} to {max(values):g}")
    for n, (n_swarms, middle, most) in result["gap_s"].items():
        print(f"gaps with {n} peers: in {n_swarms} swarms, {middle:g} s in the middle, {most:g} s at most")
    print(f"one decision: {result['propose_ms']} ms by number of holders")


if __name__ == "__main__":
    main()
