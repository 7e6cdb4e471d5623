"""How right plans are: the time per output token that `meshswarm plan` predicts, against what a client then measures.

    sudo .venv/bin/python scripts/bench/plan_accuracy.py [--topologies 1 4 9] [--rounds 5] [--tokens 48] [--json]

Ten topologies on the hosts of scripts/wan.py, a peer on each with one thread, the client beside host 0. The plan is
asked twice: before the first answer, when it rests on what peers claim, and after `--rounds` answers, when the head has
seen their steps. The second is judged by answers that come after it. The rule: a median error of 10 % at most over all
topologies, for the first kind of plan. Whether the answers took the route that was planned is said too.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baseline import tokenize
from figures import Figure, Report, arguments, chosen, run
from hosts import network, on_host, peers_on
from peers import MESHSWARM, MODEL, PeerFailure, PeerProcess, ask, even_spans, fetch_model, scratch_folder
from split_tpot import PROMPT

from meshswarm.artifacts import sources

MOST_ERROR = 0.10
SURVEYED_S = 6.0  # after which the peers have measured each other's distance and said so


@dataclass(frozen=True)
class Topology:
    """A span for each host, None for a peer without layers; how far they are apart, in ms."""

    name: str
    spans: Sequence[str | None]
    rtt_ms: float | Sequence[Sequence[float]]


TOPOLOGIES = (
    Topology("whole model beside the client", ["0:30"], 0.0),
    Topology("whole model 20 ms away", [None, "0:30"], 20.0),
    Topology("2 even spans, 5 ms", even_spans(2), 5.0),
    Topology("2 even spans, 20 ms", even_spans(2), 20.0),
    Topology("2 even spans, 50 ms", even_spans(2), 50.0),
    Topology("3 even spans, 20 ms", even_spans(3), 20.0),
    Topology("4 even spans, 10 ms", even_spans(4), 10.0),
    Topology("2 uneven spans, 20 ms", ["0:5", "5:30"], 20.0),
    Topology("3 spans, 10, 40 and 80 ms", even_spans(3), ((0, 10, 80), (10, 0, 40), (80, 40, 0))),
    Topology(
        "a head without layers, spans near it and far",
        [None, "0:15", "15:30", "15:30"],
        ((0, 10, 15, 60), (10, 0, 30, 60), (15, 30, 0, 60), (60, 60, 60, 0)),
    ),
)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--topologies", type=int, nargs="*", default=None, metavar="N", help="1 to 10 (default: all)")
    parser.add_argument("--tokens", type=int, default=None, help="of each answer (default: 48)")
    options, report = chosen(parser)
    options.tokens = options.tokens or (16 if options.quick else 48)
    numbers = options.topologies or ([3] if options.quick else range(1, len(TOPOLOGIES) + 1))
    prompt = tokenize(sources.fetch(MODEL), PROMPT)
    errors: dict[str, list[float]] = {"claims": [], "seen": []}
    with scratch_folder() as folder:
        fetch_model(folder / "first")
        for number in numbers:
            found = measure(
                folder / str(number), TOPOLOGIES[number - 1], prompt, options.rounds, options.tokens, report
            )
            for basis, error in found.items():
                errors[basis].append(error)
    first, later = statistics.median(errors["claims"]), statistics.median(errors["seen"])
    verdict = "kept" if first <= MOST_ERROR else "BROKEN"
    report.say(
        f"Median error over {len(errors['claims'])} topologies: {first:.1%} from claims, {later:.1%} after the head's "
        f"own sessions   rule (<= {MOST_ERROR:.0%} from claims) {verdict}"
    )
    report.close()


def measure(
    folder: Path, topology: Topology, prompt: list[int], rounds: int, n_tokens: int, report: Report
) -> dict[str, float]:
    """The errors of the plan from claims and of the one from what was seen."""
    body = {"model": None, "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"speculation": "off"}
    errors = {}
    with contextlib.ExitStack() as stack:
        prefix = stack.enter_context(network(len(topology.spans), topology.rtt_ms))
        head = stack.enter_context(peers_on(prefix, folder, topology.spans))
        before = on_host(prefix, 0)
        time.sleep(SURVEYED_S)
        for basis in ("claims", "seen"):
            plan = planned(head, len(prompt), len(prompt) + n_tokens + 1, before)
            route = plan["routes"][0]
            answers = [ask(head.api, "/completions", body, before) for _ in range(rounds + 1)][1:]
            predicted = route["tpot_ms"]
            measured = [answer.tpot_s * 1e3 for answer in answers]
            errors[basis] = abs(predicted - statistics.median(measured)) / statistics.median(measured)
            taken = [(hop["peer"], hop["layers"]) for hop in answers[-1].details["route"]]
            is_as_planned = taken == [(hop["peer"], hop["layers"]) for hop in route["hops"]]
            what = f"{topology.name}, planned from {basis}: error {errors[basis]:.1%}, predicted TPOT"
            report.add(
                Figure(what, "ms", (predicted,), "measured", (statistics.median(measured),)),
                topology=topology.name,
                basis=basis,
                error=errors[basis],
                measured_ms=measured,
                route_as_planned=is_as_planned,
                predicted=route,
                ttft_measured_ms=[answer.ttft_s * 1e3 for answer in answers],
            )
            if not is_as_planned:
                report.say(f"  answers took another route than planned: {answers[-1].route}")
    return errors


def planned(head: PeerProcess, n_prompt: int, n_ctx: int, before: Sequence[str]) -> dict[str, Any]:
    """What the peer's own command says."""
    command = [*before, str(MESHSWARM), "--home", str(head.home), "plan", MODEL, "--json"]
    command += ["--prompt", str(n_prompt), "--context", str(n_ctx)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerFailure(f"no plan: {done.stderr.strip()}")
    plan: dict[str, Any] = json.loads(done.stdout)
    if not plan["routes"]:
        raise PeerFailure(f"no route is planned: {plan['refusal']}")
    return plan


if __name__ == "__main__":
    run(main)
