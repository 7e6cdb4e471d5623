"""Eight answers at the same time over two spans, against unsplit llama-cpp-python that batches the same eight.

    .venv/bin/python scripts/bench/streams.py [--models 1b smollm2] [--uneven] [--cut 8:16] [--rounds 5]

Two peers in processes of their own on loopback, one thread each, asked through the HTTP endpoint of the first; the
baseline is one process with two threads. All decode one row a stream and step, greedily, without speculation. The
speed of a group of answers is taken while all of them decode: from the moment when the last has its first token to the
moment when the first has its last. With the prompts it is all tokens over the time from the start.

The rules: >= 0.9 x the baseline on the model of 1 billion weights (SmolLM2's ratio is reported too), and >= 1.7 x one
stream through the same peers. With --uneven one span costs three times the other. The slower span then bounds every
pipeline of two cores to 2/3 of what two even ones can do, so the first rule compares with that part of the baseline.

While both spans of a pipeline work, each has half of the streams in its batch, and a smaller batch costs more a row. So
a third figure compares with twice what one unsplit process gives with one thread and four streams: the most that two
peers could reach. What is missing from there to the baseline is the model's and the kernels' doing.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baseline import MAX_ROWS, Baseline, tokenize
from figures import Figure, Report, arguments, chosen, interleaved, run
from models import NAMES, BenchModel, bench_model
from peers import PeerProcess, ask_together, chain, fetch_model, scratch_folder

N_STREAMS = 8
PROMPT_TOKENS = 32
LEAST_OF_BASELINE = 0.9
LEAST_OF_ONE_STREAM = 1.7
PROMISED_ON = "1b"
TEXT = (
    "The history of the lighthouse begins with fires on hilltops, which guided ships long before there were towers. "
    "A keeper trimmed the wick, wound the clockwork that turned the lens, and wrote every passing sail into the log. "
    "Fog was worse than night: then bells, guns and sirens spoke for the light that nobody could see from the water. "
    "Some towers stand on rocks which the tide covers, so that their stones had to be cut to lock into each other. "
    "Lenses grew from plain lamps to cages of glass, and the beam reached as far as the curve of the earth allowed. "
)


@dataclass(frozen=True)
class Speed:
    """Tokens a second of a group of answers: while all of them decode (`decode`), and from the start to the end of the
    last, prompts included (`overall`)."""

    decode: float
    overall: float


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--models", nargs="*", choices=NAMES, default=None)
    parser.add_argument("--tokens", type=int, default=None, help="of each answer (default: 64)")
    parser.add_argument("--uneven", action="store_true", help="the first span costs three times the second")
    parser.add_argument("--cut", default=None, metavar="LAYER", type=int, help="where the second span starts")
    options, report = chosen(parser)
    options.tokens = options.tokens or (12 if options.quick else 64)
    with scratch_folder() as folder:
        fetch_model(folder / "first")
        for name in options.models or (["tiny"] if options.quick else ["1b", "smollm2"]):
            compare(folder, bench_model(name), options, report)
    report.close()


def compare(folder: Path, model: BenchModel, options: argparse.Namespace, report: Report) -> None:
    spans = model.cut(3, 1) if options.uneven else model.cut(1, 1)
    if options.cut is not None:
        spans = [f"0:{options.cut}", f"{options.cut}:{model.n_layers}"]
    share = max(map(model.share, spans))
    words = tokenize(model.gguf, TEXT)
    assert len(words) >= PROMPT_TOKENS + 8 * N_STREAMS and N_STREAMS * PROMPT_TOKENS <= MAX_ROWS
    prompts = [words[8 * stream :][:PROMPT_TOKENS] for stream in range(N_STREAMS)]
    report.say(
        f"{model.name}, spans {' and '.join(spans)} (the greater is {share:.0%} of the work), {options.rounds} rounds, "
        f"{options.tokens} tokens an answer after {PROMPT_TOKENS} of prompt"
    )
    settings = ["--threads", "1", "--sessions", str(N_STREAMS), "--ctx", str(PROMPT_TOKENS + options.tokens + 64)]
    with contextlib.ExitStack() as stack:
        baseline = stack.enter_context(Baseline(model.gguf, options.tokens, n_threads=2, n_streams=N_STREAMS))
        half = stack.enter_context(Baseline(model.gguf, options.tokens, n_streams=N_STREAMS // 2))
        name = f"streams-{model.name}-{secrets.token_hex(4)}"
        peers = stack.enter_context(chain(folder, spans, name, *settings, model=model.reference))
        cases: dict[str, Callable[[], Speed]] = {
            "unsplit": partial(unsplit, baseline, prompts),
            "half": partial(unsplit, half, prompts[: N_STREAMS // 2]),
            "streams": partial(through_peers, peers[0], prompts, options.tokens),
            "one": partial(through_peers, peers[0], prompts[:1], options.tokens),
        }
        conditions = {"model": model.name, "spans": spans, "greatest_share": share, "tokens": options.tokens}
        show(interleaved(cases, options.rounds), model, share if options.uneven else 0.5, report, conditions)


def unsplit(baseline: Baseline, prompts: Sequence[list[int]]) -> Speed:
    times_s = baseline.times_s(prompts)
    n_tokens = len(prompts) * len(times_s)
    return Speed((n_tokens - len(prompts)) / (times_s[-1] - times_s[0]), n_tokens / times_s[-1])


def through_peers(head: PeerProcess, prompts: Sequence[list[int]], n_tokens: int) -> Speed:
    settings = {"model": None, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "speculation": "off"}
    answers = ask_together(head.api, "/completions", [settings | {"prompt": prompt} for prompt in prompts])
    all_tokens = sum(answer.completion_tokens for answer in answers)
    assert all_tokens == n_tokens * len(prompts), answers
    first_s, last_s = max(answer.times_s[0] for answer in answers), min(answer.times_s[-1] for answer in answers)
    decoded = sum(first_s < time_s <= last_s for answer in answers for time_s in answer.times_s)
    return Speed(decoded / (last_s - first_s), all_tokens / max(answer.times_s[-1] for answer in answers))


def show(
    found: dict[str, list[Speed]], model: BenchModel, share: float, report: Report, conditions: dict[str, object]
) -> None:
    for phase in ("decode", "overall"):
        speeds = {name: tuple(getattr(speed, phase) for speed in rounds) for name, rounds in found.items()}
        promised = phase == "decode"
        what = f"{N_STREAMS} streams over 2 peers, {phase}"
        unit = "tokens/s"
        part = 0.5 / share
        prefix = "" if part == 1 else f"{part:.2f} of "
        name = f"{prefix}unsplit llama-cpp-python, 2 threads, one batch"
        bound = tuple(part * speed for speed in speeds["unsplit"])
        target = LEAST_OF_BASELINE if promised and model.name == PROMISED_ON else None
        report.add(Figure(what, unit, speeds["streams"], name, bound, target), phase=phase, **conditions)
        name = f"{prefix}twice unsplit llama-cpp-python, 1 thread, {N_STREAMS // 2} streams"
        most = tuple(2 * part * speed for speed in speeds["half"])
        report.add(Figure(what, unit, speeds["streams"], name, most), phase=phase, **conditions)
        target = LEAST_OF_ONE_STREAM if promised else None
        one = Figure(what, unit, speeds["streams"], "one stream through the same peers", speeds["one"], target)
        report.add(one, phase=phase, **conditions)


if __name__ == "__main__":
    run(main)
