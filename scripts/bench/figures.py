"""How a benchmark says what it measured: the conditions, then every figure as a ratio to a named baseline.

The rule this file keeps: no figure stands alone. A figure and its baseline are measured in turn, round by round, and
the ratio is the median of the rounds' ratios: what else the machine does then falls on both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from peers import PeerFailure, machine

Name = TypeVar("Name")
T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """One thing measured, and what it is compared with, round by round. `target`: the least ratio allowed, or with
    `at_most` the greatest; None where nothing was promised."""

    what: str
    unit: str
    rounds: tuple[float, ...]
    baseline: str
    baseline_rounds: tuple[float, ...]
    target: float | None = None
    at_most: bool = False

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.rounds, self.baseline_rounds, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def kept(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target

    def __str__(self) -> str:
        ours, theirs = statistics.median(self.rounds), statistics.median(self.baseline_rounds)
        text = (
            f"  {self.what}: {ours:.4g} {self.unit}; {self.baseline}: {theirs:.4g}; "
            f"ratio {self.ratio:.3f} ({min(self.ratios):.3f} to {max(self.ratios):.3f})"
        )
        if self.target is None:
            return text
        return f"{text}   rule ({'<=' if self.at_most else '>='} {self.target:g}) {'kept' if self.kept else 'BROKEN'}"

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "unit": self.unit,
            "median": statistics.median(self.rounds),
            "rounds": self.rounds,
            "baseline": self.baseline,
            "baseline_median": statistics.median(self.baseline_rounds),
            "baseline_rounds": self.baseline_rounds,
            "ratio": self.ratio,
            "target": self.target,
            "at_most": self.at_most,
            "kept": self.kept,
        }


class Report:
    """Prints as it goes, or one JSON object at the end."""

    def __init__(self, *, as_json: bool, quick: bool, rounds: int) -> None:
        self._as_json = as_json
        self._conditions: dict[str, Any] = {
            "machine": machine(),
            "cores": os.cpu_count(),
            "load_before": os.getloadavg()[0],
            "rounds": rounds,
            "quick": quick,
        }
        self._figures: list[dict[str, Any]] = []
        self.say(machine())
        if quick:
            self.say("A quick run: it shows that the benchmark works; its figures mean nothing.")

    def say(self, sentence: str) -> None:
        """A line for a person; not part of the JSON."""
        if not self._as_json:
            print(sentence, flush=True)

    def add(self, figure: Figure, **conditions: Any) -> None:
        """A figure, with what it was measured under beside the conditions of the whole run."""
        self._figures.append(figure.as_json() | conditions)
        self.say(str(figure))

    def close(self) -> None:
        if self._as_json:
            conditions = self._conditions | {"load_after": os.getloadavg()[0]}
            print(json.dumps({"conditions": conditions, "figures": self._figures}))
        else:
            self.say(f"Load average {os.getloadavg()[0]:.1f} at the end.")


def interleaved(cases: Mapping[Name, Callable[[], T]], rounds: int) -> dict[Name, list[T]]:
    """Run every case once a round, the order turning; what comes out of the first time, cold, does not count."""
    for run in cases.values():
        run()
    found: dict[Name, list[T]] = {name: [] for name in cases}
    order = list(cases)
    for _ in range(rounds):
        for name in order:
            found[name].append(cases[name]())
        order.append(order.pop(0))
    return found


def arguments(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has; add others to it, and read it with `chosen`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=None, help=f"repeats of every case (default: {rounds})")
    parser.add_argument("--quick", action="store_true", help="a smoke test: one short round of the smallest case")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.set_defaults(usual_rounds=rounds)
    return parser


def chosen(parser: argparse.ArgumentParser, given: Sequence[str] | None = None) -> tuple[argparse.Namespace, Report]:
    """The options, with `rounds` filled in, and the report to write to."""
    options = parser.parse_args(given)
    options.rounds = options.rounds or (1 if options.quick else options.usual_rounds)
    return options, Report(as_json=options.as_json, quick=options.quick, rounds=options.rounds)


def run(main: Callable[[], None]) -> None:
    """Run a benchmark; a peer that fails, or Ctrl-C, ends it without a traceback."""
    try:
        main()
    except PeerFailure as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
