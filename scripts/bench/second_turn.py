"""Time to the first token of the second turn of a chat with 2,000 tokens, against the first turn's.

    .venv/bin/python scripts/bench/second_turn.py [--models smollm2 1b] [--tokens 2000] [--rounds 5]

Two peers on loopback, one thread each, seen by an HTTP client. Every round is a new conversation: a long message, an
answer, and a short second message, sent with the whole history as clients do. The rule: <= 15 %.
"""

from __future__ import annotations

import argparse
import random
import secrets
import statistics
from pathlib import Path

from baseline import tokenize
from figures import Figure, Report, arguments, chosen, run
from models import NAMES, BenchModel, bench_model
from peers import PeerProcess, Streamed, ask, chain, fetch_model, scratch_folder
from streams import TEXT

MOST_OF_FIRST = 0.15
ANSWER_TOKENS = 32
QUESTION = "\n\nWhat is this text about?"
SECOND_QUESTION = "Thank you. And what does it say about fog?"


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--models", nargs="*", choices=NAMES, default=None)
    parser.add_argument("--tokens", type=int, default=None, help="of the first turn's prompt, about (default: 2000)")
    options, report = chosen(parser)
    options.tokens = options.tokens or (400 if options.quick else 2000)
    with scratch_folder() as folder:
        fetch_model(folder / "first")
        for name in options.models or (["tiny"] if options.quick else ["smollm2", "1b"]):
            compare(folder, bench_model(name), options, report)
    report.close()


def compare(folder: Path, model: BenchModel, options: argparse.Namespace, report: Report) -> None:
    spans = model.cut(1, 1, prompt=True)
    settings = ["--threads", "1", "--ctx", str(options.tokens * 3 // 2 + 256)]
    name = f"turns-{model.name}-{secrets.token_hex(4)}"
    with chain(folder, spans, name, *settings, model=model.reference) as peers:
        conversation(peers[0], model, options.tokens // 4, seed=0)  # warm up
        turns = [conversation(peers[0], model, options.tokens, seed) for seed in range(1, options.rounds + 1)]
    firsts, seconds = zip(*turns, strict=True)
    counts = {
        "first_prompt_tokens": statistics.median(turn.usage["prompt_tokens"] for turn in firsts),
        "second_prompt_tokens": statistics.median(turn.usage["prompt_tokens"] for turn in seconds),
        "cached_tokens": statistics.median(turn.usage["prompt_tokens_details"]["cached_tokens"] for turn in seconds),
    }
    report.say(
        f"{model.name}, spans {' and '.join(spans)}, {options.rounds} conversations: the first prompt has "
        f"{counts['first_prompt_tokens']:g} tokens, the second {counts['second_prompt_tokens']:g}, of which "
        f"{counts['cached_tokens']:g} were there already"
    )
    figure = Figure(
        "time to the first token of the second turn",
        "s",
        tuple(turn.ttft_s for turn in seconds),
        "first turn",
        tuple(turn.ttft_s for turn in firsts),
        MOST_OF_FIRST,
        at_most=True,
    )
    report.add(figure, model=model.name, spans=spans, **counts)


def conversation(head: PeerProcess, model: BenchModel, n_tokens: int, seed: int) -> tuple[Streamed, Streamed]:
    """Both turns of a conversation that shares nothing with those of other seeds."""
    words = TEXT.split()
    tokens_a_word = len(tokenize(model.gguf, TEXT)) / len(words)
    text = " ".join(random.Random(seed).choices(words, k=round(n_tokens / tokens_a_word)))
    messages = [{"role": "user", "content": text + QUESTION}]
    body = {"model": None, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    first = ask(head.api, "/chat/completions", body)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": SECOND_QUESTION}]
    return first, ask(head.api, "/chat/completions", body)


if __name__ == "__main__":
    run(main)
