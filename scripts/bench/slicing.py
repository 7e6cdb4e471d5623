"""How fast a third of a model's layers is cut out of it, against `cp` of a file of that size; and cut and hashed, as a
peer does it, against `cp` and `sha256sum` of the copy. All is on the disk when the time is taken.

Run: .venv/bin/python scripts/bench/slicing.py [--layers 24] [--runs 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.span import Span
from meshswarm.stage.slices.slicing import write_hashed_slice, write_slice

N_EMBD, N_FF, N_VOCAB = 2048, 5632, 32_000


def write_model(path: Path, n_layers: int) -> None:
    """A llama of random half-precision weights, about 90 MB a layer."""
    writer = GGUFWriter(path, "llama")
    for key, value in {
        "block_count": n_layers,
        "context_length": 4096,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": 32,
        "attention.head_count_kv": 4,
        "vocab_size": N_VOCAB,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    numbers = np.random.default_rng(0)
    shapes = {"attn_norm": (N_EMBD,), "ffn_norm": (N_EMBD,), "attn_k": (256, N_EMBD), "attn_v": (256, N_EMBD)}
    shapes |= {"attn_q": (N_EMBD, N_EMBD), "attn_output": (N_EMBD, N_EMBD)}
    shapes |= {"ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)}
    writer.add_tensor(
        "token_embd.weight", numbers.standard_normal((N_VOCAB, N_EMBD), dtype=np.float32).astype(np.float16)
    )
    writer.add_tensor("output_norm.weight", np.ones(N_EMBD, np.float32))
    layer = {name: numbers.standard_normal(sides, dtype=np.float32) for name, sides in shapes.items()}
    for index in range(n_layers):
        for name, values in layer.items():
            stored = values if values.ndim == 1 else values.astype(np.float16)
            writer.add_tensor(f"blk.{index}.{name}.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def timed(run: Callable[[], object], made: Path) -> float:
    """Seconds until what was made is on the disk; it is removed after that."""
    began = time.perf_counter()
    run()
    with made.open("rb") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    made.unlink()
    os.sync()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the file system to measure; the system's for temporary files")
    options = parser.parse_args()
    third = options.layers // 3
    span = Span(third, 2 * third)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model, cut, copy = (Path(folder) / name for name in ("model.gguf", "slice.gguf", "copy.gguf"))
        write_model(model, options.layers)
        header = read_header(model)
        example = Path(folder) / "example.gguf"
        write_slice(model, header, span, example)
        n_bytes = example.stat().st_size

        def copy_and_hash() -> None:
            subprocess.run(["cp", example, copy], check=True)
            subprocess.run(["sha256sum", copy], check=True, stdout=subprocess.DEVNULL)

        rounds = [
            (
                timed(lambda: subprocess.run(["cp", example, copy], check=True), copy),
                timed(lambda: write_slice(model, header, span, cut), cut),
                timed(copy_and_hash, copy),
                timed(lambda: write_hashed_slice([model], header, span, cut), cut),
            )
            for _ in range(options.runs)
        ]
    cp, ours, cp_hashed, ours_hashed = (statistics.median(times) for times in zip(*rounds, strict=True))
    print(f"a slice of {n_bytes / 1e6:.0f} MB")
    print(f"cp                   {n_bytes / cp / 1e6:7.0f} MB/s")
    print(f"cutting              {n_bytes / ours / 1e6:7.0f} MB/s   ratio {cp / ours:.2f}")
    print(f"cp, then sha256sum   {n_bytes / cp_hashed / 1e6:7.0f} MB/s")
    print(f"cutting and hashing  {n_bytes / ours_hashed / 1e6:7.0f} MB/s   ratio {cp_hashed / ours_hashed:.2f}")


if __name__ == "__main__":
    main()
