"""A swarm of thousands of peers in one process: the product's own shells on a virtual clock (docs/scale.md).

Bytes are what two real endpoints send for the same (`--calibrate` measures them again), time is virtual, and one seed
gives one run: start it with PYTHONHASHSEED=0 or not, it is the same. `--peers 10000` takes the better part of an hour
and about 6 GB.

Run: .venv/bin/python scripts/bench/simulate.py life --peers 10000
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.simulation import pricing, real_costs, restoring, scenarios

SEED = 20261130


@dataclasses.dataclass(frozen=True)
class Rule:
    """What was promised of one figure."""

    what: str
    value: float
    limit: float
    at_most: bool
    unit: str = ""

    @property
    def kept(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        verdict = "kept" if self.kept else "BROKEN"
        return f"  {self.what}: {self.value:.6g} {self.unit}   rule {sign} {self.limit:g}   {verdict}"


def life(arguments: argparse.Namespace, say: scenarios.Say) -> tuple[Any, list[Rule]]:
    """A swarm under churn, all honest."""
    seen = _live(arguments, say, liars=0.0)
    rounds = math.log2(arguments.peers) / 2
    return seen, [
        Rule("lookups of records that succeed", 100 * seen.by_record.success, 99.9, at_most=False, unit="%"),
        Rule("lookups of peers that succeed", 100 * seen.by_peer.success, 99.9, at_most=False, unit="%"),
        Rule("rounds to the record, median", seen.by_record.median_hit_round, rounds, at_most=True),
        Rule("rounds to the end of the lookup, median", seen.by_record.median_rounds, rounds, at_most=True),
        Rule("sent by a peer, mean", seen.sent.mean, 4000, at_most=True, unit="B/s"),
    ]


def malice(arguments: argparse.Namespace, say: scenarios.Say) -> tuple[Any, list[Rule]]:
    """The same, of which a fifth lies."""
    seen = _live(arguments, say, liars=0.2)
    return seen, [
        Rule("lookups of records that succeed", 100 * seen.by_record.success, 99.0, at_most=False, unit="%"),
        Rule("lookups of peers that succeed", 100 * seen.by_peer.success, 99.0, at_most=False, unit="%"),
    ]


def _live(arguments: argparse.Namespace, say: scenarios.Say, *, liars: float) -> scenarios.Life:
    return scenarios.live(
        arguments.peers,
        arguments.seed,
        virtual_s=arguments.virtual_s,
        settling_s=arguments.settling_s,
        n_lookups=arguments.lookups,
        liars=liars,
        talks=arguments.talks,
        say=say,
    )


def restoration(arguments: argparse.Namespace, say: scenarios.Say) -> tuple[Any, list[Rule]]:
    """Three tenths leave at once, among them all holders of some layers of a model of 80."""
    seen = restoring.restore(arguments.peers, arguments.seed, say=say)
    never = math.inf
    return seen, [
        Rule("all layers are held again after", seen.covered_s or never, 60, at_most=True, unit="s"),
        Rule("all holders know who has gone after", seen.known_gone_s or never, 15, at_most=True, unit="s"),
        Rule("sent by a peer, mean", seen.sent_before.mean, 4000, at_most=True, unit="B/s"),
        Rule("sent by a holder of the model, mean", seen.sent_by_holders.mean, 4000, at_most=True, unit="B/s"),
    ]


def speed(arguments: argparse.Namespace, say: scenarios.Say) -> tuple[Any, list[Rule]]:
    """Liars about speed among 64 holders of one model, as many as a key gives (`dht/storage.py`), and heads."""
    seen = pricing.price_out(64, arguments.seed, n_heads=40)
    return seen, [
        Rule("sessions of a head with a liar it used, median", seen.uses_median, 2, at_most=True),
        Rule("sessions harmed by liars in the end", 100 * seen.harmed_last, 5, at_most=True, unit="%"),
    ]


SCENARIOS: dict[str, Callable[[argparse.Namespace, scenarios.Say], tuple[Any, list[Rule]]]] = {
    "life": life,
    "malice": malice,
    "restoration": restoration,
    "speed": speed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=[*SCENARIOS, "all"], nargs="?", default="all")
    parser.add_argument("--peers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--virtual-s", type=float, default=300.0, help="how long to measure, in simulated seconds")
    parser.add_argument("--settling-s", type=float, default=60.0, help="how long to run before that")
    parser.add_argument("--lookups", type=int, default=3000)
    parser.add_argument(
        "--talks", action="store_true", help="life, malice: with gossip and readings, not the table alone"
    )
    parser.add_argument("--json", action="store_true", help="one object for each scenario, and nothing else")
    parser.add_argument("--calibrate", action="store_true", help="only measure what real connections cost")
    arguments = parser.parse_args()
    if arguments.calibrate:
        print(asyncio.run(real_costs.measure()))
        return
    gc.set_threshold(200_000, 50, 1000)  # millions of objects stay; looking through them all again and again is slow
    for name in SCENARIOS if arguments.scenario == "all" else [arguments.scenario]:
        _run(name, arguments)


def _run(name: str, arguments: argparse.Namespace) -> None:
    began = time.process_time()

    def say(line: str) -> None:
        if not arguments.json:
            print(f"  [{time.process_time() - began:.0f} s of processor time] {line}", file=sys.stderr, flush=True)

    seen, rules = SCENARIOS[name](arguments, say)
    conditions = {key: getattr(arguments, key) for key in ("peers", "seed", "virtual_s", "settling_s", "lookups")}
    conditions["processor_s"] = round(time.process_time() - began)
    if arguments.json:
        told = [dataclasses.asdict(rule) | {"kept": rule.kept} for rule in rules]
        print(json.dumps({"scenario": name, "conditions": conditions, "seen": dataclasses.asdict(seen), "rules": told}))
        return
    print(f"{name}: {conditions}")
    for rule in rules:
        print(rule)
    for field in dataclasses.fields(seen):
        print(f"    {field.name}: {getattr(seen, field.name)}")


if __name__ == "__main__":
    main()
