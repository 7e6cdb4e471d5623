"""Time per output token of a model split over peers that are 20 or 50 ms apart, against compute and flights alone.

    sudo .venv/bin/python scripts/bench/wan_tpot.py [--rtt 20 50] [--spans 2 3] [--rounds 5] [--tokens 64]

Real peers on the hosts of scripts/wan.py, one thread each; the head is on the first span. S spans cost S one-way
flights a token, so the rule is TPOT <= compute + S x RTT/2 + 1.5 ms a hop. `compute` is unsplit llama-cpp-python's
TPOT, taken in turn with the split rounds. The emulator adds to the round trip asked for, so the one it really gave is
measured too.
"""

from __future__ import annotations

import argparse
import statistics

from baseline import Baseline, tokenize
from hosts import measured_rtt_s, network, on_host, peers_on
from peers import MODEL, PeerProcess, ask, even_spans, fetch_model, machine, scratch_folder
from split_tpot import PROMPT

from meshswarm.artifacts import sources

ALLOWED_MS_A_HOP = 1.5


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
                with network(spans, rtt_ms) as prefix, peers_on(prefix, case, even_spans(spans)) as head:
                    report(prefix, head, baseline, prompt, rtt_ms, spans, options)


def report(
    prefix: str,
    head: PeerProcess,
    baseline: Baseline,
    prompt: list[int],
    rtt_ms: float,
    spans: int,
    options: argparse.Namespace,
) -> None:
    body = {
        "model": None,
        "prompt": prompt,
        "max_tokens": options.tokens,
        "temperature": 0,
        "speculation": "off",
        "ignore_eos": True,
    }
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
