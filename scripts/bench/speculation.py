"""Guessing ahead over the wide area: an "edit this file" prompt and free prose, with speculation and without.

    sudo .venv/bin/python scripts/bench/speculation.py [--rtt 20] [--rounds 5]

SmolLM2 over two peers on hosts of scripts/wan.py, one thread each, the head on the first; "speculation": "auto" and
"off" take turns on the same peers. The rules at 20 ms RTT, in tokens a second after the first: the edit >= 2.5 x, the
prose >= 0.98 x.

- The edit is a chat that has shown one file before and after an edit, and asks for the same edit of another file,
  greedily. A model this small leaves the file as it is, so the answer is a copy of the file in the last message, while
  the older files, which differ in their names, lead guesses astray. How much of the file came back is printed.
- The prose is sampled at temperature 1 with a new seed every round, the same for both: greedily this model would repeat
  itself, and that is no free prose.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from figures import Figure, Report, arguments, chosen, interleaved, run
from hosts import measured_rtt_s, network, on_host, peers_on
from models import bench_model
from peers import PeerProcess, Streamed, ask, fetch_model, scratch_folder

LEAST_ON_EDITS, LEAST_ON_PROSE = 2.5, 0.98
PROMISED_AT_MS = 20.0
FILE = '''def load_settings(path):
    """Read the settings from a file of lines like "name = value"."""
    settings = {}
    with open(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, equals, value = line.partition("=")
            if not equals:
                raise ValueError(f"{path}, line {number}: there is no = in {line!r}")
            settings[name.strip()] = value.strip()
    return settings


def save_settings(settings, path):
    """Write the settings to a file, sorted by name."""
    with open(path, "w") as file:
        for name in sorted(settings):
            file.write(f"{name} = {settings[name]}\\n")


def merge_settings(first, second):
    """Settings of both; where both have a name, the second wins."""
    merged = dict(first)
    merged.update(second)
    return merged
'''
EDITED = FILE.replace("[name.strip()]", "[name.strip().lower()]")
OTHER_FILE = FILE.replace("settings", "options").replace("merged", "both")
WISH = "Edit this file so that names are kept in lower case:\n\n"
PROSE = "Tell me a long story about a lighthouse keeper who finds a letter in a bottle."


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--rtt", type=float, default=PROMISED_AT_MS, metavar="MS")
    options, report = chosen(parser)
    model = bench_model("smollm2")
    with scratch_folder() as folder:
        fetch_model(folder / "first")
        with network(2, options.rtt) as prefix, peers_on(prefix, folder, model.cut(1, 1, prompt=True)) as head:
            compare(prefix, head, options, report)
    report.close()


def compare(prefix: str, head: PeerProcess, options: argparse.Namespace, report: Report) -> None:
    given_ms = measured_rtt_s(prefix) * 1e3
    report.say(f"smollm2, 2 peers, {options.rtt:g} ms RTT (measured {given_ms:.2f}), {options.rounds} rounds")
    turn = partial(ask_in_turn, head.api, on_host(prefix, 0))
    n_tokens = 24 if options.quick else 300
    edit = {"messages": edit_chat(), "temperature": 0, "max_tokens": n_tokens}
    prose = {"messages": [{"role": "user", "content": PROSE}], "temperature": 1, "max_tokens": n_tokens // 2}
    prose |= {"ignore_eos": True}
    cases: dict[tuple[str, str], Callable[[], Streamed]] = {
        ("edit", "auto"): turn(edit, "auto"),
        ("edit", "off"): turn(edit, "off"),
        ("prose", "auto"): turn(prose, "auto"),
        ("prose", "off"): turn(prose, "off"),
    }
    found = interleaved(cases, options.rounds)
    for text, target in (("edit", LEAST_ON_EDITS), ("prose", LEAST_ON_PROSE)):
        answers = found[text, "auto"]
        counts = {name: statistics.median(answer.timings[name] for answer in answers) for name in COUNTS}
        copied = min(map(copied_part, answers)) if text == "edit" else None
        report.say(
            f"{text}: of {answers[0].completion_tokens} tokens {counts['draft_n']:g} were guessed ahead and "
            f"{counts['draft_n_accepted']:g} of them accepted, in {counts['flights']:g} flights"
            + ("" if copied is None else f"; {copied:.0%} of the answer is the file")
        )
        figure = Figure(
            f"{text} with speculation, {options.rtt:g} ms RTT",
            "tokens/s",
            speeds(answers),
            "without",
            speeds(found[text, "off"]),
            target if options.rtt == PROMISED_AT_MS else None,
        )
        report.add(figure, rtt_ms=options.rtt, measured_rtt_ms=given_ms, copied=copied, **counts)


COUNTS = ("draft_n", "draft_n_accepted", "flights")


def edit_chat() -> list[dict[str, str]]:
    def block(file: str) -> str:
        return f"```python\n{file}```"

    return [
        {"role": "user", "content": WISH + block(FILE)},
        {"role": "assistant", "content": block(EDITED)},
        {"role": "user", "content": WISH + block(OTHER_FILE)},
    ]


def ask_in_turn(api: str, before: list[str], body: dict[str, Any], speculation: str) -> Callable[[], Streamed]:
    """Asks `body` each time it is called, with another seed than the time before."""
    seeds = iter(range(1000))

    def ask_next() -> Streamed:
        settings = {"model": None, "seed": next(seeds), "speculation": speculation}
        return ask(api, "/chat/completions", body | settings, before)

    return ask_next


def speeds(answers: list[Streamed]) -> tuple[float, ...]:
    return tuple(1 / answer.tpot_s for answer in answers)


def copied_part(answer: Streamed) -> float:
    """How much of the answer is the file that it was to be the edit of, in order."""
    blocks = SequenceMatcher(None, OTHER_FILE, answer.text, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(answer.text)


if __name__ == "__main__":
    run(main)
