"""How many threads compute: chosen from a few counts timed at load, and watched while the span serves.

llama.cpp's threads wait for each other at a barrier after every node, spinning. One that another program keeps from its
core stalls all of them: two threads on two busy cores were measured at a hundredth of one thread's speed. So a core is
left for the event loop, more threads must earn their place, and a collapse makes the peer step down by itself.

The rule this file keeps: times and the clock come in as arguments; nothing here computes or sleeps.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshswarm.artifacts.files import read_json, write_json

GAIN = 1.1
"""More threads are taken when they are this many times faster than fewer."""
GIVE_UP = 1.2
"""Counts are timed from the most down; this many times slower than the best so far, and fewer are not tried."""
COLLAPSE = 5.0
"""A step this many times slower than usual has met the barrier's collapse; the context alone grows a step slowly."""
GROWN = 1.5
"""Fewer threads this many times slower than collapsed steps say that it was no collapse: the work has grown."""
_STRIKES = 3  # slow steps in a row before fewer threads are tried
_TRIAL_STEPS = 3  # steps that decide whether another count is better
_LEARNED = 1 / 16  # weight of a new step in what counts as usual
FIRST_HOLD_S = 15.0
MAX_HOLD_S = 900.0


def usable_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors this process may use: of the machine, less what its affinity or a container's quota takes away."""
    n_cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota_us, period_us = (cgroup / "cpu.max").read_text().split()
        return max(1, min(n_cpus, int(quota_us) // int(period_us)))
    except (OSError, ValueError):  # no cgroup of version 2, or "max"
        return n_cpus


def candidate_counts(n_cpus: int) -> tuple[int, ...]:
    """Thread counts worth timing, the most first: one processor is left for the event loop, where there are two."""
    most = max(1, n_cpus - 1)
    powers = [1 << power for power in range(most.bit_length())]
    return tuple(sorted({*powers, most}, reverse=True))


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """What was measured at load: seconds of one decode step, for each count that was tried."""

    step_s: Mapping[int, float]

    @property
    def best(self) -> int:
        """The fewest threads that nothing beats by `GAIN`."""
        fastest_s = min(self.step_s.values())
        return min(count for count, step_s in self.step_s.items() if step_s <= fastest_s * GAIN)


def time_counts(counts: Sequence[int], time_step: Callable[[int], float]) -> ThreadTimes:
    """Time each of `counts`, descending; `time_step` gives the seconds of a decode step with so many threads.

    It ends early when fewer threads have clearly become slower, since one thread may take very long on a large span.
    """
    step_s: dict[int, float] = {}
    for count in counts:
        step_s[count] = time_step(count)
        if step_s[count] > GIVE_UP * min(step_s.values()):
            break
    return ThreadTimes(step_s)


class KeptThreads:
    """What was measured for each slice, in a folder, so that the next start need not measure again.

    It is valid for the same llama.cpp and the same number of processors.
    """

    def __init__(self, folder: Path, build: str, n_cpus: int) -> None:
        self._folder = folder
        self._origin = {"build": build, "cpus": n_cpus}

    def get(self, slice_root: bytes) -> ThreadTimes | None:
        fields = read_json(self._path(slice_root))
        if fields is None or any(fields.get(key) != value for key, value in self._origin.items()):
            return None
        return _thread_times(fields.get("step_us"))

    def put(self, slice_root: bytes, times: ThreadTimes) -> None:
        """Raises ArtifactError when the disk refuses."""
        step_us = {str(count): round(step_s * 1e6, 1) for count, step_s in times.step_s.items()}
        write_json(self._path(slice_root), {**self._origin, "step_us": step_us})

    def _path(self, slice_root: bytes) -> Path:
        return self._folder / f"{slice_root.hex()}.json"


def _thread_times(step_us: Any) -> ThreadTimes | None:
    """None for anything but a table of counts and times."""
    try:
        step_s = {int(count): float(us) / 1e6 for count, us in step_us.items()}
    except (AttributeError, TypeError, ValueError):
        return None
    if not step_s or not all(count >= 1 and 0 < each < math.inf for count, each in step_s.items()):
        return None
    return ThreadTimes(step_s)


@dataclass(slots=True)
class _Trial:
    """Steps with another number of threads, each against what `reference` threads usually take."""

    reference: int
    ratios: list[float] = field(default_factory=list)


class ThreadWatch:
    """Watches the steps of an engine that starts with `n_threads`, and says when to go on with another count.

    Steps are compared with steps of about as many rows. Fewer threads are tried after `_STRIKES` collapsed steps, more,
    up to `n_threads`, from time to time; either is kept if it is faster. What fails or does not last doubles the wait.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._most = n_threads
        self._usual_s: dict[tuple[int, int], float] = {}  # by threads and size
        self._strikes: list[float] = []
        self._trial: _Trial | None = None
        self._hold_s = FIRST_HOLD_S
        self._settled_at = -math.inf

    def observe(self, n_rows: int, step_s: float, now: float) -> int | None:
        """A step of `n_rows` rows took `step_s` and ended at `now`. Returns the count to go on with, None: the same."""
        size = n_rows.bit_length()
        if self._trial is not None:
            return self._judge(self._trial, size, step_s, now)
        usual_s = self._usual_s.get((self.n_threads, size))
        if usual_s is not None and step_s > COLLAPSE * usual_s and self.n_threads > 1:
            self._strikes.append(step_s / usual_s)
            return self._step_down(now) if len(self._strikes) == _STRIKES else None
        self._strikes.clear()
        self._learn(size, step_s)
        if self.n_threads < self._most and now >= self._settled_at + self._hold_s:
            return self._try(min(self._most, 2 * self.n_threads))
        return None

    def _step_down(self, now: float) -> int:
        """Fewer threads are judged against the collapsed steps: had the work itself grown, they would be slower."""
        collapsed = min(self._strikes)
        self._strikes.clear()
        for threads, size in self._usual_s:
            if threads == self.n_threads:
                self._usual_s[threads, size] *= collapsed
        lasted = now - self._settled_at > 10 * self._hold_s
        self._hold_s = FIRST_HOLD_S if lasted else min(MAX_HOLD_S, 2 * self._hold_s)
        return self._try(self.n_threads // 2)

    def _try(self, n_threads: int) -> int:
        self._trial = _Trial(reference=self.n_threads)
        return self._enter(n_threads)

    def _enter(self, n_threads: int) -> int:
        """What was usual with so many threads before is learned anew."""
        self._usual_s = {key: usual_s for key, usual_s in self._usual_s.items() if key[0] != n_threads}
        self.n_threads = n_threads
        return n_threads

    def _judge(self, trial: _Trial, size: int, step_s: float, now: float) -> int | None:
        usual_s = self._usual_s.get((trial.reference, size))
        if usual_s is None:  # nothing to compare it with
            return None
        trial.ratios.append(step_s / usual_s)
        self._learn(size, step_s)
        if len(trial.ratios) < _TRIAL_STEPS and trial.ratios[-1] <= COLLAPSE:
            return None
        ratio = sum(trial.ratios) / len(trial.ratios)
        if 1 < self.n_threads < trial.reference and 1 / GAIN <= ratio <= GROWN:  # they stall as well
            trial.ratios.clear()
            return self._enter(self.n_threads // 2)
        self._trial = None
        self._settled_at = now
        if ratio < 1 / GAIN:
            return None
        if trial.reference < self.n_threads:
            self._hold_s = min(MAX_HOLD_S, 2 * self._hold_s)
        self.n_threads = trial.reference
        return self.n_threads

    def _learn(self, size: int, step_s: float) -> None:
        key = self.n_threads, size
        usual_s = self._usual_s.get(key, step_s)
        self._usual_s[key] = usual_s + _LEARNED * (step_s - usual_s)
