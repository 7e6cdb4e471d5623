"""Fuzzes the check that every GGUF passes before C++ sees it, and loads what it lets through in throwaway processes.

With --mutations N (no further package needed): N damaged headers of tiny models, one of every architecture, damaged
where it hurts (counts, types, sizes, offsets, settings, strings) and at random; the same seed gives the same files.
With --load those that pass are loaded by llama.cpp, each in a process of its own that may die of it; what does is told:
the check should have known. The check itself must refuse with a sentence or pass; anything else ends the run.

With --atheris: guided by coverage, until stopped or for -max_total_time=SECONDS (libFuzzer's options go through). It
needs a package that the project does not depend on: .venv/bin/pip install atheris

Run: .venv/bin/python scripts/fuzz_gguf.py --mutations 10000 --load
     .venv/bin/python scripts/fuzz_gguf.py --atheris -max_total_time=600
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import os
import random
import signal
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshswarm.artifacts.gguf.check import GgufHeader, check_tokenizer, parse_header, read_header
from meshswarm.errors import ArtifactError

ROOT = Path(__file__).parents[1]
EXTREMES = (0, 1, 2, 3, 7, 31, 33, 255, 256, 511, 513, 4096, 65535, 65536, (1 << 20) + 1)
EXTREMES += ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62), (1 << 63) - 1, (1 << 64) - 1)
FLOATS = (0.0, -1.0, 1e-45, 1e30, -1e38, float("inf"), float("-inf"), float("nan"), 0.5, 2.0, 1e4)
LOAD_SECONDS = 20
LOAD_BYTES = 4 << 30


def corpus(folder: Path) -> list[Path]:
    """Tiny models of every architecture of the table, written to `folder`."""
    sys.path.insert(0, str(ROOT))
    from tests.stage.tiny_models import TINY, write_tiny

    return [write_tiny(name, folder / f"{name}.gguf") for name in TINY]


def examine(data: bytes, file_length: int) -> bool:
    """True when the check lets the header pass, False when it refuses. Raises whatever else comes of it."""
    try:
        check_tokenizer(parse_header(data, file_length, source="fuzzed.gguf"))
    except ArtifactError:
        return False
    return True


def damaged(header: GgufHeader, numbers: random.Random) -> bytes:
    """The header with one to three changes."""
    data = bytearray(header.raw)
    for _ in range(numbers.choice((1, 1, 1, 2, 3))):
        numbers.choice((_bend_setting, _bend_setting, _bend_setting, _bend_tensor, _bend_count, _bend_bytes))(
            header, data, numbers
        )
    return bytes(data)


def _bend_setting(header: GgufHeader, data: bytearray, numbers: random.Random) -> None:
    """Another value, or another type, for one setting, or for one item of an array."""
    entry = header.metadata[numbers.choice(list(header.metadata))]
    if numbers.random() < 0.1:
        struct.pack_into("<I", data, entry.start + 8 + len(entry.key), numbers.randrange(14))
        return
    width = (entry.end - entry.value_start) // max(1, entry.n_items)
    at = entry.value_start + width * numbers.randrange(max(1, entry.n_items))
    at = min(at, len(data) - 8)
    match width:
        case 1:
            data[at] = numbers.randrange(256)
        case 4 if entry.item_type == 6:
            struct.pack_into("<f", data, at, numbers.choice(FLOATS))
        case 4:
            struct.pack_into("<I", data, at, numbers.choice(EXTREMES) & 0xFFFFFFFF)
        case _:
            struct.pack_into("<Q", data, at, numbers.choice(EXTREMES))


def _bend_tensor(header: GgufHeader, data: bytearray, numbers: random.Random) -> None:
    """Another side, type, offset or name for one tensor."""
    tensor = header.tensors[numbers.choice(list(header.tensors))]
    at = data.find(struct.pack("<Q", len(tensor.name)) + tensor.name.encode())
    if at < 0:
        return
    sides = at + 8 + len(tensor.name) + 4
    after = sides + 8 * len(tensor.dims)
    match numbers.randrange(5):
        case 0:
            struct.pack_into("<Q", data, sides + 8 * numbers.randrange(len(tensor.dims)), numbers.choice(EXTREMES))
        case 1:
            struct.pack_into("<I", data, after, numbers.randrange(42))
        case 2:
            struct.pack_into(
                "<Q", data, after + 4, numbers.choice((*EXTREMES, tensor.offset + 32, tensor.offset - 32)) % (1 << 64)
            )
        case 3:
            struct.pack_into("<I", data, sides - 4, numbers.choice((0, 1, 2, 3, 4, 5, 1 << 31)))
        case _:
            data[at + 8 + numbers.randrange(len(tensor.name))] = numbers.randrange(256)


def _bend_count(_header: GgufHeader, data: bytearray, numbers: random.Random) -> None:
    """Another version, or number of tensors or settings."""
    struct.pack_into("<Q", data, numbers.choice((8, 16)), numbers.choice(EXTREMES))


def _bend_bytes(_header: GgufHeader, data: bytearray, numbers: random.Random) -> None:
    at = numbers.randrange(len(data) - 8)
    match numbers.randrange(3):
        case 0:
            data[at] ^= 1 << numbers.randrange(8)
        case 1:
            struct.pack_into("<Q", data, at, numbers.choice(EXTREMES))
        case _:
            length, source = numbers.randrange(1, 32), numbers.randrange(len(data) - 40)
            data[at : at + length] = data[source : source + length]
            del data[len(_header.raw) :]


def load(path: Path) -> str:
    """What became of a process that loaded the file as a peer's first load does: "loaded", "refused", or the signal
    that ended it."""
    import llama_cpp  # noqa: F401  loaded before the fork, once

    from meshswarm.artifacts.gguf import probe_child

    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            os.dup2(null, 2)
            signal.alarm(LOAD_SECONDS)
            arguments = ["--memory", str(LOAD_BYTES), "--seconds", str(LOAD_SECONDS)]
            status = probe_child.main([str(path), *arguments])
        os._exit(status)
    _, waited = os.waitpid(child, 0)
    if os.WIFSIGNALED(waited):
        return signal.Signals(os.WTERMSIG(waited)).name
    return "refused" if os.WEXITSTATUS(waited) else "loaded"


def mutate(n_mutations: int, seed: int, *, loads: bool, keep: Path | None) -> collections.Counter[str]:
    """Damage headers, check them, and perhaps load what passes. How many came to what."""
    ends: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        models = [(path.stem, path.read_bytes(), read_header(path)) for path in corpus(Path(folder))]
        target = Path(folder) / "damaged.gguf"
        for number in range(n_mutations):
            numbers = random.Random(f"{seed}/{number}")
            name, whole, header = models[number % len(models)]
            data = damaged(header, numbers)
            if not examine(data, len(whole)):
                ends["refused by the check"] += 1
                continue
            ends["passed the check"] += 1
            if not loads:
                continue
            target.write_bytes(data + whole[len(data) :])
            end = load(target)
            ends[f"passed, then {end}"] += 1
            if end.startswith("SIG"):
                print(f"{end}: number {number} of {name}, seed {seed}", flush=True)
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{name}-{seed}-{number}-{end}.gguf").write_bytes(target.read_bytes())
    return ends


def guided(arguments: Sequence[str]) -> None:
    try:
        import atheris  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        sys.exit("atheris is not installed, and not something the project depends on: .venv/bin/pip install atheris")
    with tempfile.TemporaryDirectory() as folder:
        models, seeds = Path(folder) / "models", Path(folder) / "seeds"
        for made in (models, seeds):
            made.mkdir()
        paths = corpus(models)
        for path in paths:
            (seeds / path.stem).write_bytes(read_header(path).raw)
        longest = max(path.stat().st_size for path in paths)
        for name in [name for name in sys.modules if name.startswith("meshswarm.artifacts")]:
            del sys.modules[name]  # to be imported again, with what it covers being counted
        with atheris.instrument_imports(include=["meshswarm.artifacts"]):
            gguf = importlib.import_module("meshswarm.artifacts.gguf.check")

        def run(data: bytes) -> None:
            with contextlib.suppress(ArtifactError):
                gguf.check_tokenizer(gguf.parse_header(data, longest, source="fuzzed.gguf"))

        atheris.Setup([sys.argv[0], *arguments, "-max_len=65536", str(seeds)], run)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", action="store_true", help="load what passes, each in a process of its own")
    parser.add_argument("--keep", type=Path, help="folder for files that passed and ended their process")
    parser.add_argument("--atheris", action="store_true", help="guided by coverage instead")
    options, rest = parser.parse_known_args()
    if options.atheris:
        guided(rest)
        return
    for end, count in sorted(mutate(options.mutations, options.seed, loads=options.load, keep=options.keep).items()):
        print(f"{count:7}  {end}")


if __name__ == "__main__":
    main()
