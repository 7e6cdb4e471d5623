"""How fast a file is hashed for everything that is kept of its tree (root, header proof, piece layer), against
`sha256sum` and against one plain SHA-256 by hashlib, side by side on the same file in the page cache.

Run: .venv/bin/python scripts/bench/hashing.py [--megabytes 1500] [--runs 5]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from meshswarm.artifacts.header_proof import nodes_to_keep
from meshswarm.artifacts.merkle import hash_file, piece_layer_nodes
from meshswarm.artifacts.torrent.content import piece_length_of

HEADER_BYTES = 2 << 20


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def sha256(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        hashlib.file_digest(file, "sha256")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(options.megabytes):
            file.write(os.urandom(1_000_000))
        file.flush()
        path, length = Path(file.name), options.megabytes * 1_000_000
        wanted = nodes_to_keep(HEADER_BYTES, length).union(piece_layer_nodes(length, piece_length_of(length)))
        rounds = [
            (
                timed(lambda: hash_file(path, wanted=wanted)),
                timed(lambda: subprocess.run(["sha256sum", path], check=True, stdout=subprocess.DEVNULL)),
                timed(lambda: sha256(path)),
            )
            for _ in range(options.runs)
        ]
    ours, command, plain = (statistics.median(times) for times in zip(*rounds, strict=True))
    speed = options.megabytes / 1000
    print(f"ours        {speed / ours:6.2f} GB/s")
    print(f"sha256sum   {speed / command:6.2f} GB/s   ratio {command / ours:.2f}")
    print(f"hashlib     {speed / plain:6.2f} GB/s   ratio {plain / ours:.2f}")


if __name__ == "__main__":
    main()
