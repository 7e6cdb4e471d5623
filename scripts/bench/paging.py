"""A model that is larger than the memory it may use: what a turn reads again, and whether prefetching pays.

    sudo .venv/bin/python scripts/bench/paging.py [--model 1b] [--memory 450] [--rounds 12] [--threads 1]

llama.cpp decodes one row at a time in a cgroup with so many MB. In turn, step by step: as it is (`plain`), and with a
thread that asks for the weights a little ahead of where the step should be, by madvise(MADV_WILLNEED), in pieces of
16 MB, one, two and four pieces ahead. The pace is that of the last plain step. Said of each: a step's time, and what it
read from the disk (/proc/self/io). The file leaves the system's cache before.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
from figures import Figure, arguments, chosen, interleaved, run
from models import NAMES, bench_model

from meshswarm.stage.engine.llama import context_params, model_params, start_llama

MADV_WILLNEED = 3  # asm-generic/mman-common.h
PIECE = 16 << 20
AHEAD = (1, 2, 4)
N_CELLS = 256
CGROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))


def main() -> None:
    parser = arguments(__doc__, rounds=12)
    parser.add_argument("--model", choices=NAMES, default="1b")
    parser.add_argument("--memory", type=int, default=450, metavar="MB")
    parser.add_argument("--threads", type=int, default=1)
    options, report = chosen(parser)
    gguf = bench_model(options.model).gguf
    with gguf.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with cgroup(options.memory << 20) as procs:
        command = [sys.executable, __file__, "child", str(gguf), str(options.rounds), str(options.threads)]
        join = ["sh", "-c", f'echo $$ > {procs}; exec "$@"', "sh", *command]
        done = subprocess.run(join, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the model did not run with {options.memory} MB: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout)
    plain = found["plain"]
    report.say(
        f"{gguf.name}, {found['mapped_bytes'] / 1e6:.0f} MB mapped, {options.memory} MiB of memory: a plain step reads "
        f"{statistics.median(plain['read_bytes']) / 1e6:.0f} MB"
    )
    for ahead in AHEAD:
        name = f"{ahead} ahead"
        figure = Figure(f"a step with prefetch, {name}", "s", tuple(found[name]["seconds"]), "plain", plain["seconds"])
        report.add(figure, read_bytes=found[name]["read_bytes"], memory_mb=options.memory)
    report.close()


@contextlib.contextmanager
def cgroup(limit_bytes: int) -> Iterator[Path]:
    """A new group with that much memory; gives the file that takes process ids."""
    root, limit = next(((Path(root), limit) for root, limit in CGROUPS if (Path(root) / "cgroup.procs").exists()))
    group = root / f"bench-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        (group / limit).write_text(str(limit_bytes))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


class Decoder:
    """One session of the model at `path`, which decodes one row a step."""

    def __init__(self, path: str, n_threads: int) -> None:
        start_llama()
        model = llama_cpp.llama_model_load_from_file(path.encode(), model_params())
        settings = context_params(n_cells=N_CELLS, n_slots=1, n_threads=n_threads, max_rows=32)
        self._context = llama_cpp.llama_init_from_model(model, settings)
        self._batch = llama_cpp.llama_batch_init(32, 0, 1)
        self._position = 0
        self._plain_s = 1.0
        mapped = next(line for line in Path("/proc/self/maps").read_text().splitlines() if path in line)
        start, stop = (int(address, 16) for address in mapped.split()[0].split("-"))
        self._start, self.size = start, stop - start
        self._madvise = ctypes.CDLL(None).madvise

    def step(self, ahead: int) -> tuple[float, int]:
        """Seconds, and bytes read from the disk. `ahead` 0: plain."""
        read, began, is_over = _bytes_read(), time.perf_counter(), threading.Event()
        prefetch = threading.Thread(target=self._prefetch, args=(ahead, is_over)) if ahead else None
        if prefetch is not None:
            prefetch.start()
        self._decode()
        seconds = time.perf_counter() - began
        is_over.set()
        if prefetch is None:
            self._plain_s = seconds
        else:
            prefetch.join()
        return seconds, _bytes_read() - read

    def _decode(self) -> None:
        batch, at = self._batch, self._position
        batch.n_tokens = 1
        batch.token[0], batch.pos[0], batch.logits[0] = 100 + at, at, True
        batch.n_seq_id[0], batch.seq_id[0][0] = 1, 0
        if llama_cpp.llama_decode(self._context, batch) != 0:
            sys.exit("llama_decode failed")
        self._position += 1

    def _prefetch(self, ahead: int, is_over: threading.Event) -> None:
        began, n_pieces = time.perf_counter(), -(-self.size // PIECE)
        for piece in range(n_pieces):
            due = began + self._plain_s * (piece - ahead) / n_pieces
            if is_over.wait(max(0.0, due - time.perf_counter())):
                return
            length = min(PIECE, self.size - piece * PIECE)
            self._madvise(ctypes.c_void_p(self._start + piece * PIECE), ctypes.c_size_t(length), MADV_WILLNEED)


def _bytes_read() -> int:
    found = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def child(path: str, rounds: int, n_threads: int) -> None:
    decoder = Decoder(path, n_threads)
    cases = {"plain": lambda: decoder.step(0)}
    cases |= {f"{ahead} ahead": (lambda ahead=ahead: decoder.step(ahead)) for ahead in AHEAD}  # type: ignore[misc]
    found = interleaved(cases, rounds)
    steps = {
        name: {"seconds": [s for s, _ in steps], "read_bytes": [n for _, n in steps]} for name, steps in found.items()
    }
    print(json.dumps({"mapped_bytes": decoder.size, **steps}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        run(main)
