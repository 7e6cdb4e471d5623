"""What a loaded span takes in memory, in llama.cpp's own figures, and whether a machine has room for it.

The rule this file keeps: the figures are llama.cpp's, read from its log, where each buffer is rounded to 0.01 MiB. Its
dry run gives the same ones without allocating, so what would not fit is refused before it is tried: Linux promises more
memory than it has, and ends a process that takes it at its word.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from meshswarm.errors import OutOfMemoryError
from meshswarm.stage.engine.kv_layers import CELLS_STEP, session_cells

_MIB = 1 << 20
_CACHE = re.compile(r"size = +([\d.]+) MiB \(|layers = \d+, size = +([\d.]+) MiB")
_WORK = re.compile(r"(?:compute|output) buffer size = +([\d.]+) MiB")
_WEIGHTS = re.compile(r"model buffer size = +([\d.]+) MiB")
_MAPPED = re.compile(r"_Mapped model buffer size = +([\d.]+) MiB")


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes that a span takes, llama.cpp's own and those of the states saved beside it.

    `mapped_bytes` of the weights lie in the file, and the system may drop and read them again; `kv_bytes`: what
    sessions keep, recurrent states included; `compute_bytes`: work space; `saved_bytes`: what the engine may save of
    its sessions' states, to go back to (`checkpoints`).
    """

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    mapped_bytes: int = 0
    saved_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.saved_bytes

    def as_json(self) -> dict[str, int]:
        """Its parts, for a person or a program to see."""
        return {
            "weights_bytes": self.weights_bytes,
            "kv_bytes": self.kv_bytes,
            "compute_bytes": self.compute_bytes,
            "saved_bytes": self.saved_bytes,
        }


def read_memory(log: Iterable[str]) -> EngineMemory:
    """Add up the buffers in what llama.cpp logged while it loaded a model and made one context."""
    text = "\n".join(log)
    kv = (figure for pair in _CACHE.findall(text) for figure in pair if figure)
    return EngineMemory(
        _bytes(_WEIGHTS.findall(text)), _bytes(kv), _bytes(_WORK.findall(text)), _bytes(_MAPPED.findall(text))
    )


def _bytes(figures: Iterable[str]) -> int:
    return round(sum(map(float, figures)) * _MIB)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes this process may still take: `free` without pushing anything out, `total` with nothing else around."""

    free: int
    total: int

    def holds(self, n_bytes: int, mapped_bytes: int) -> bool:
        """What sessions and the work space take must be free; weights mapped from the file may push out other
        programs' file pages, but must fit."""
        return n_bytes - mapped_bytes <= self.free and n_bytes <= self.total


def room() -> Room:
    """What the system has, less what a container's or the process's own limit takes away."""
    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    for limit, used in (_cgroup_limit(), _process_limit()):
        if limit is not None:
            free, total = min(free, max(0, limit - used)), min(total, max(0, limit - used))
    return Room(free, total)


def _cgroup_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """The container's limit, None without one, and what it uses apart from file pages it would give up."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        pages = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no cgroup of version 2, or "max"
        return None, 0
    return limit, used - (int(pages[1]) if pages else 0)


def _process_limit() -> tuple[int | None, int]:
    """The limit of this process's address space, as `ulimit -v` sets it, and what it uses."""
    if sys.platform == "win32":
        return None, 0
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return (None, 0) if limit == resource.RLIM_INFINITY else (limit, int(psutil.Process().memory_info().vms))


Foresee = Callable[[int, int], EngineMemory]
"""What so many sessions of so many positions would take."""


def check_room(foresee: Foresee, has: Room, *, n_sessions: int, n_ctx: int) -> None:
    """Raises OutOfMemoryError unless there is room."""
    needed = foresee(n_sessions, n_ctx)
    if has.holds(needed.total_bytes, needed.mapped_bytes):
        return
    of_sessions = needed.kv_bytes + needed.saved_bytes
    raise OutOfMemoryError(
        f"this span needs {in_words(needed.total_bytes)} of memory: {in_words(needed.weights_bytes)} of weights, "
        f"{in_words(of_sessions)} for {sessions_in_words(n_sessions)} of {n_ctx} positions and "
        f"{in_words(needed.compute_bytes)} of work space; {in_words(has.free)} are free. "
        f"{_what_fits(foresee, has, n_sessions, n_ctx)}"
    )


def _what_fits(foresee: Foresee, has: Room, n_sessions: int, n_ctx: int) -> str:
    def does_fit(n_sessions: int, n_ctx: int) -> bool:
        needed = foresee(n_sessions, n_ctx)
        return has.holds(needed.total_bytes, needed.mapped_bytes)

    fewer, shorter = at_most(does_fit, n_sessions, n_ctx)
    options = [f"{sessions_in_words(fewer)} of {n_ctx} positions"] if fewer else []
    options += [f"{sessions_in_words(n_sessions)} of {shorter} positions"] if shorter else []
    less = "fewer layers (`meshswarm models show MODEL` says what each takes)"
    if not options:
        return f"Not even short sessions would fit beside its weights, only {less}."
    return f"{' or '.join(options)} would fit, or {less}."


def at_most(does_fit: Callable[[int, int], bool], n_sessions: int, n_ctx: int) -> tuple[int, int]:
    """How many sessions of `n_ctx` positions fit, and `n_sessions` sessions of how many positions, where so many of
    both do not; 0 for none."""
    fewer = _most(n_sessions, lambda most: does_fit(most, n_ctx))
    steps = _most(session_cells(n_ctx) // CELLS_STEP, lambda most: does_fit(n_sessions, most * CELLS_STEP - 1))
    return fewer, max(0, steps * CELLS_STEP - 1)


def _most(limit: int, does_fit: Callable[[int], bool]) -> int:
    """The largest number below `limit` that fits, 0 when none does."""
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does_fit(middle) else (low, middle)
    return low


def sessions_in_words(n: int) -> str:
    return "1 session" if n == 1 else f"{n} sessions"


def in_words(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"
