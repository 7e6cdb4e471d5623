"""Splits a GGUF into parts the way gguf-split does: every part a GGUF, the first with all of the metadata."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshswarm.artifacts.gguf.check import GgufHeader, Tensor, read_header

U16, I32 = 2, 5
_PACKED = {U16: "<H", I32: "<i", 4: "<I"}


def split_model(
    source: Path,
    folder: Path,
    n_parts: int = 3,
    *,
    stem: str = "",
    is_first_empty: bool = False,
    bend: Mapping[tuple[int, str], tuple[int, int]] | None = None,
) -> list[Path]:
    """The parts of the model in `source`, as NAME-00001-of-0000N.gguf in `folder`. `bend`: what part number says of a
    key, (type, value), instead of the truth."""
    folder.mkdir(parents=True, exist_ok=True)
    header = read_header(source)
    shares = _shares(list(header.tensors.values()), n_parts, is_first_empty)
    paths = []
    for index, tensors in enumerate(shares):
        said = {
            "split.no": (U16, index),
            "split.count": (U16, n_parts),
            "split.tensors.count": (I32, len(header.tensors)),
        }
        said |= {key: value for (part, key), value in (bend or {}).items() if part == index}
        path = folder / f"{stem or source.stem}-{index + 1:05d}-of-{n_parts:05d}.gguf"
        with source.open("rb") as model:
            path.write_bytes(_part(header, model, tensors, said, is_first=index == 0))
        paths.append(path)
    return paths


def _shares(tensors: Sequence[Tensor], n_parts: int, is_first_empty: bool) -> list[list[Tensor]]:
    n_full = n_parts - is_first_empty
    size = -(-len(tensors) // n_full)
    shares = [list(tensors[at * size : (at + 1) * size]) for at in range(n_full)]
    return [[], *shares] if is_first_empty else shares


def _part(
    header: GgufHeader, model: Any, tensors: Sequence[Tensor], said: Mapping[str, tuple[int, int]], *, is_first: bool
) -> bytes:
    entries = [header.raw[entry.start : entry.end] for entry in header.metadata.values()] if is_first else []
    entries += [
        _string(key) + struct.pack("<I", kind) + struct.pack(_PACKED[kind], value)
        for key, (kind, value) in said.items()
    ]
    alignment = header.alignment if is_first else 32
    table, data = [], bytearray()
    for tensor in tensors:
        sides = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        table.append(_string(tensor.name) + sides + struct.pack("<IQ", tensor.type.code, len(data)))
        model.seek(header.data_offset + tensor.offset)
        data += model.read(tensor.n_bytes)
        data += bytes(-len(data) % alignment)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join([*entries, *table])
    return start + bytes(-len(start) % alignment) + bytes(data)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
