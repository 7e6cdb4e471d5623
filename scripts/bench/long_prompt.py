"""A prompt of 1,024 tokens over two spans that compute at the same time, against the spans one after the other.

    .venv/bin/python scripts/bench/long_prompt.py [--models 1b smollm2] [--tokens 1024] [--rounds 5]

The speed through the peers is seen by an HTTP client: tokens of the prompt over the time to the first token of the
answer. "One after the other" is the time that each peer's slice takes for the same rows in an engine of its own, added
up, with no network and no head between them, and in whichever chunks are fastest: the strictest baseline there is. The
rule: >= 1.7 x its speed. One thread a process.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import secrets
from collections.abc import Sequence
from pathlib import Path

from baseline import tokenize
from figures import Figure, Report, arguments, chosen, run
from models import NAMES, BenchModel, bench_model
from peers import PeerProcess, ask, chain, fetch_model, scratch_folder
from span_alone import SpanAlone
from streams import TEXT

from meshswarm.artifacts.store.store import Store
from meshswarm.span import Span
from meshswarm.stage.slices.store import Slices

LEAST_SPEED_UP = 1.7
CHUNKS = (32, 48, 64, 128, 256)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--models", nargs="*", choices=NAMES, default=None)
    parser.add_argument("--tokens", type=int, default=None, help="of the prompt (default: 1024)")
    options, report = chosen(parser)
    options.tokens = options.tokens or (256 if options.quick else 1024)
    with scratch_folder() as folder:
        fetch_model(folder / "first")
        for name in options.models or (["tiny"] if options.quick else ["1b", "smollm2"]):
            compare(folder, bench_model(name), options, report)
    report.close()


def compare(folder: Path, model: BenchModel, options: argparse.Namespace, report: Report) -> None:
    spans = model.cut(1, 1, prompt=True)
    name = f"prompt-{model.name}-{secrets.token_hex(4)}"
    settings = ["--threads", "1", "--ctx", str(options.tokens + 64)]
    words = tokenize(model.gguf, TEXT)
    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(chain(folder, spans, name, *settings, model=model.reference))
        alone = [stack.enter_context(slice_alone(peer, model)) for peer in peers]
        chunk_rows, seconds = fastest_chunks(alone, options.tokens)
        report.say(
            f"{model.name}, spans {' and '.join(spans)}, {options.tokens} tokens, {options.rounds} rounds; alone the "
            f"spans take {' + '.join(f'{part:.2f}' for part in seconds)} s in chunks of {chunk_rows}"
        )
        split, serial = [], []
        prompt_speed(peers[0], words, options.tokens, seed=0)
        for seed in range(1, options.rounds + 1):
            serial.append(options.tokens / sum(span.prefill_s(options.tokens, chunk_rows) for span in alone))
            split.append(prompt_speed(peers[0], words, options.tokens, seed))
    what, baseline = f"prompt of {options.tokens} tokens over 2 spans", "the spans one after the other"
    figure = Figure(what, "tokens/s", tuple(split), baseline, tuple(serial), LEAST_SPEED_UP)
    conditions = {"model": model.name, "spans": spans, "baseline_chunk_rows": chunk_rows, "alone_s": seconds}
    report.add(figure, **conditions)


def slice_alone(peer: PeerProcess, model: BenchModel) -> SpanAlone:
    """The very slice that the peer serves."""
    span = Span.parse(peer.ready["layers"])
    store = Store(peer.home)
    (info,) = store.models()
    return SpanAlone(Slices(store, peer.home).file(info.model_id, span).path, span, model.n_layers)


def fastest_chunks(alone: Sequence[SpanAlone], n_tokens: int) -> tuple[int, list[float]]:
    """The rows a chunk with which the spans together are fastest, and the seconds of each."""
    alone[0].prefill_s(n_tokens, max(CHUNKS))  # warm up
    found = {rows: [span.prefill_s(n_tokens, rows) for span in alone] for rows in CHUNKS}
    best = min(found, key=lambda rows: sum(found[rows]))
    return best, found[best]


def prompt_speed(head: PeerProcess, words: Sequence[int], n_tokens: int, seed: int) -> float:
    """Tokens of a prompt that no session has seen before, over the seconds to the first of the answer."""
    prompt = random.Random(seed).choices(words, k=n_tokens)
    body = {"model": None, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = ask(head.api, "/completions", body)
    assert answer.usage["prompt_tokens"] == n_tokens, answer
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] < n_tokens // 16, answer
    return n_tokens / answer.ttft_s


if __name__ == "__main__":
    run(main)
