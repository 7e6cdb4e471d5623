"""What a span reads from the disk again for every turn, because memory has no room for its weights, and how fast.

Weights lie in their file, mapped. A turn reads them from the first layer to the last; when they do not all fit, what
the next turn needs first is what was dropped last, so nearly all of them come from the disk every time: of 655 MB under
a limit of 450 MB for everything, a turn read 580 MB and more (docs/decisions/0017-planner.md).

The rule this file keeps: where weights fit, nothing is read to find out; and a disk is timed past the system's cache.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from meshswarm.artifacts.gguf.split import part_paths
from meshswarm.stage.engine.memory import EngineMemory

READ_BYTES = 128 << 10  # what Linux reads ahead for a mapped file, unless told otherwise
BUDGET_S = 0.2
MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Paging:
    """`paged_bytes`: weights that are read again for every turn, 0 where all fit. `read_bytes_per_s`: how fast, 0 where
    it was not needed or cannot be measured on this system."""

    paged_bytes: int = 0
    read_bytes_per_s: int = 0


ALL_FITS = Paging()


def paging_of(path: Path, memory: EngineMemory, free_bytes: int) -> Paging:
    """Of a span whose weights are in the file `path`, loaded where so much was free before. Blocks for `BUDGET_S` where
    it pages."""
    if memory.total_bytes <= free_bytes or not memory.mapped_bytes:
        return ALL_FITS
    largest = max(part_paths(path), key=lambda part: part.stat().st_size)  # of a split model the first may be tiny
    return Paging(memory.mapped_bytes, read_speed(largest))


def read_speed(path: Path) -> int:
    """Bytes a second in which the file comes from the disk, in the pieces that a mapped file is read in; 0 where that
    cannot be measured. Blocks for `BUDGET_S`, or until so much was read."""
    if sys.platform != "linux":
        return 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without direct reading, such as one in memory
        return 0
    try:
        with mmap.mmap(-1, READ_BYTES) as aligned:
            began = time.perf_counter()
            n_read = seconds = 0.0
            while n_read < MOST_BYTES and seconds < BUDGET_S:
                got = os.preadv(descriptor, [aligned], int(n_read))
                seconds = time.perf_counter() - began
                n_read += got
                if got < READ_BYTES:
                    break
    except OSError:
        return 0
    finally:
        os.close(descriptor)
    return int(n_read / seconds) if seconds > 0 else 0
