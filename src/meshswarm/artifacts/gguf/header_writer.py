"""Writing a GGUF header: metadata entries, mostly copied byte for byte from a checked one, and a tensor table.

The rule this file keeps: what goes in comes out the same everywhere. The same calls give the same bytes, so that
peers who cut the same slice of the same model hold the same file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from meshswarm.artifacts.gguf.container import (
    DEFAULT_ALIGNMENT,
    MAGIC,
    VERSION,
    Entry,
    GgufHeader,
    TensorType,
    ValueType,
    tensor_bytes,
)


class HeaderWriter:
    """Collects entries and tensors in order; `finish` gives the header's bytes."""

    def __init__(self, alignment: int = DEFAULT_ALIGNMENT) -> None:
        self.alignment = alignment
        self._entries: list[bytes] = []
        self._tensors: list[bytes] = []
        self.data_bytes = 0  # length of the data section so far, padding included

    def copy(self, header: GgufHeader, entry: Entry) -> None:
        """The entry as it is in `header`."""
        self._entries.append(header.raw[entry.start : entry.end])

    def pick_items(self, header: GgufHeader, entry: Entry, indices: Sequence[int]) -> None:
        """The items at `indices` of a numeric array entry, in that order."""
        width = (entry.end - entry.value_start) // entry.n_items
        starts = [entry.value_start + index * width for index in indices]
        head = struct.pack("<IIQ", ValueType.ARRAY, entry.item_type, len(indices))
        self._entries.append(_string(entry.key) + head + b"".join(header.raw[at : at + width] for at in starts))

    def array(self, key: str, item_type: ValueType, values: Sequence[int]) -> None:
        """An array of booleans or 32-bit unsigned integers."""
        code = {ValueType.BOOL: "?", ValueType.UINT32: "I"}[item_type]
        head = struct.pack("<IIQ", ValueType.ARRAY, item_type, len(values))
        self._entries.append(_string(key) + head + struct.pack(f"<{len(values)}{code}", *values))

    def u32(self, key: str, value: int) -> None:
        self._entries.append(_string(key) + struct.pack("<II", ValueType.UINT32, value))

    def text(self, key: str, value: str) -> None:
        self._entries.append(_string(key) + struct.pack("<I", ValueType.STRING) + _string(value))

    def tensor(self, name: str, dims: tuple[int, ...], tensor_type: TensorType) -> int:
        """Add a line to the tensor table. Returns the tensor's offset in the data section, in bytes."""
        offset = self.data_bytes
        sides = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        self._tensors.append(_string(name) + sides + struct.pack("<IQ", tensor_type.code, offset))
        self.data_bytes += -(-tensor_bytes(dims, tensor_type) // self.alignment) * self.alignment
        return offset

    def finish_at(self, filler_key: str, remainder: int, modulus: int) -> bytes:
        """The whole header with blanks under `filler_key`, so many that its length leaves `remainder` when divided by
        `modulus`, where the alignment allows."""
        self.text(filler_key, "")
        n_blanks = (remainder - len(self.finish())) % modulus
        self._entries.pop()
        self.text(filler_key, " " * n_blanks)
        return self.finish()

    def finish(self) -> bytes:
        """The whole header, padded to where the data section starts."""
        start = MAGIC + struct.pack("<IQQ", VERSION, len(self._tensors), len(self._entries))
        header = b"".join([start, *self._entries, *self._tensors])
        return header + bytes(-len(header) % self.alignment)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
