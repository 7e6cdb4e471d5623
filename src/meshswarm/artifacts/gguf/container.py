"""The GGUF container, read strictly: counts, strings, arrays, tensor table and where every tensor's bytes lie.

The rule this file keeps: a length or count from a file is checked against a limit and against the bytes that are
there before anything is done with it, all in Python integers, which do not overflow. Values stay where they are in
the header's bytes until somebody asks for them: a vocabulary of 50,000 strings is stepped over, not turned into
objects. What the numbers mean is checked in `hyperparameters` and `tokenizer`; use `gguf`, which does it all.
Layout: the GGUF specification of the ggml project, version 3, little-endian.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshswarm.errors import ArtifactError

MAGIC = b"GGUF"
VERSION = 3
MAX_HEADER_BYTES = 64 << 20
MAX_ENTRIES = 4096
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 256
MAX_STRING_BYTES = 1 << 20
MAX_ITEMS = 1 << 22
MAX_DIMS = 4
MAX_NAME_BYTES = 63
MAX_SIDE = (1 << 31) - 1
MAX_ELEMENTS = 1 << 40
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
"""Below 32 a tensor's bytes would not be aligned for ggml, which asserts; far above, padding is the attack."""


class ValueType(IntEnum):
    """How a metadata value is stored."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_FORMATS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
)
_WIDTHS: Mapping[int, int] = MappingProxyType({kind: struct.calcsize("<" + code) for kind, code in _FORMATS.items()})
INTEGER_TYPES = frozenset(
    {
        ValueType.UINT8,
        ValueType.INT8,
        ValueType.UINT16,
        ValueType.INT16,
        ValueType.UINT32,
        ValueType.INT32,
        ValueType.UINT64,
        ValueType.INT64,
    }
)
FLOAT_TYPES = frozenset({ValueType.FLOAT32, ValueType.FLOAT64})


class TensorType(NamedTuple):
    """An encoding of weights: `block_bytes` bytes hold `block_elements` numbers."""

    code: int
    name: str
    block_elements: int
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        row[0]: TensorType(*row)
        for row in (
            (0, "F32", 1, 4),
            (1, "F16", 1, 2),
            (2, "Q4_0", 32, 18),
            (3, "Q4_1", 32, 20),
            (6, "Q5_0", 32, 22),
            (7, "Q5_1", 32, 24),
            (8, "Q8_0", 32, 34),
            (10, "Q2_K", 256, 84),
            (11, "Q3_K", 256, 110),
            (12, "Q4_K", 256, 144),
            (13, "Q5_K", 256, 176),
            (14, "Q6_K", 256, 210),
            (16, "IQ2_XXS", 256, 66),
            (17, "IQ2_XS", 256, 74),
            (18, "IQ3_XXS", 256, 98),
            (19, "IQ1_S", 256, 50),
            (20, "IQ4_NL", 32, 18),
            (21, "IQ3_S", 256, 110),
            (22, "IQ2_S", 256, 82),
            (23, "IQ4_XS", 256, 136),
            (26, "I32", 1, 4),
            (29, "IQ1_M", 256, 56),
            (30, "BF16", 1, 2),
            (34, "TQ1_0", 256, 54),
            (35, "TQ2_0", 256, 66),
            (39, "MXFP4", 32, 17),
        )
    }
)
"""What weights may be stored as. The encodings ggml uses only inside a computation (Q8_1, Q8_K) are not among them."""
F32 = TENSOR_TYPES[0]
F16 = TENSOR_TYPES[1]
Q5_0 = TENSOR_TYPES[6]
I32 = TENSOR_TYPES[26]


class Entry(NamedTuple):
    """One metadata entry: where it lies in the header's bytes. `[start, end)` is all of it, key included."""

    key: str
    type: ValueType
    item_type: ValueType  # of an array's items; for a scalar its own type
    n_items: int  # of an array; 1 for a scalar
    start: int
    value_start: int  # first byte of a scalar, or of an array's first item
    end: int

    @property
    def is_array(self) -> bool:
        return self.type is ValueType.ARRAY


class Tensor(NamedTuple):
    """One line of the tensor table. `offset` counts from the file's data section, `dims[0]` runs fastest; `file` is the
    part of a split model that it is in."""

    name: str
    dims: tuple[int, ...]
    type: TensorType
    offset: int
    n_bytes: int
    file: int = 0


class HeaderCutShortError(ArtifactError):
    """The header goes on beyond the bytes at hand: read more of the file, if there is more."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A checked header. `raw` is everything before the tensor data, padding included: [0, data_offset).

    Of a model split into files, this is the first one's header with the tensors of all; `parts` are the files' own
    headers in order, and `file_length` is their length together.
    """

    raw: bytes
    file_length: int
    alignment: int
    metadata: Mapping[str, Entry]
    tensors: Mapping[str, Tensor]
    source: str  # how errors name the file
    parts: tuple[GgufHeader, ...] = ()

    @property
    def files(self) -> tuple[GgufHeader, ...]:
        """The headers of all the model's files."""
        return self.parts or (self,)

    def position(self, tensor: Tensor) -> int:
        """The first byte of `tensor` in its file."""
        return self.files[tensor.file].data_offset + tensor.offset

    @property
    def data_offset(self) -> int:
        return len(self.raw)

    def fault(self, field: str, problem: str) -> ArtifactError:
        """The error for a field of this file that cannot be: the caller raises it."""
        return ArtifactError(f"{self.source} is refused: {field} {problem}")

    def scalar(self, key: str) -> int | float | bool | str | None:
        """The value of `key`, None when there is none. Raises ArtifactError when it is an array or not UTF-8."""
        entry = self.metadata.get(key)
        if entry is None:
            return None
        if entry.is_array:
            raise self.fault(key, "is an array where one value is expected")
        if entry.type is ValueType.STRING:
            try:
                return self.raw[entry.value_start + 8 : entry.end].decode()
            except UnicodeDecodeError:
                raise self.fault(key, "is not valid UTF-8") from None
        (value,) = struct.unpack_from("<" + _FORMATS[entry.type], self.raw, entry.value_start)
        return bool(value) if entry.type is ValueType.BOOL else value

    def text(self, key: str) -> str | None:
        """The string of `key`, None when there is none. Raises ArtifactError when it is something else."""
        value = self.scalar(key)
        if value is not None and not isinstance(value, str):
            raise self.fault(key, "is not a string")
        return value

    def numbers(self, key: str) -> NDArray[np.generic] | None:
        """The numeric array of `key` [n_items], a view into the header. Raises ArtifactError when it is not one."""
        entry = self.metadata.get(key)
        if entry is None:
            return None
        if not entry.is_array or entry.item_type not in _FORMATS:
            raise self.fault(key, "is not an array of numbers")
        return np.frombuffer(self.raw, "<" + _FORMATS[entry.item_type], entry.n_items, entry.value_start)

    def strings(self, key: str) -> Iterator[bytes]:
        """The items of a string array, one by one. Raises ArtifactError when it is not one."""
        entry = self.metadata.get(key)
        if entry is None or not entry.is_array or entry.item_type is not ValueType.STRING:
            raise self.fault(key, "is not an array of strings")
        return self._iter_strings(entry)

    def _iter_strings(self, entry: Entry) -> Iterator[bytes]:
        raw = self.raw
        length_at = struct.Struct("<Q").unpack_from
        position = entry.value_start
        for _ in range(entry.n_items):
            start = position + 8
            position = start + length_at(raw, position)[0]
            yield raw[start:position]


def parse_container(data: bytes | memoryview, file_length: int, source: str, *, min_tensors: int = 1) -> GgufHeader:
    """The header at the start of `data`, the first bytes of a file of `file_length` bytes. The first part of a split
    model may have no tensors at all (`min_tensors`).

    Raises HeaderCutShortError when `data` ends before the header does, ArtifactError when the file is wrong.
    """
    reader = _Reader(data, source)
    if not file_length:
        raise reader.fault("the file", "is empty")
    if not MAGIC.startswith(reader.data[:4].tobytes()):
        raise reader.fault("this", "is no GGUF file")
    reader.take(4, "the first word")
    version = reader.u32("the version")
    if version == int.from_bytes(VERSION.to_bytes(4, "little"), "big"):
        raise reader.fault("the version", "says that the file is big-endian, which is not supported")
    if version != VERSION:
        raise reader.fault("the version", f"is {version}; only GGUF version {VERSION} is supported")
    n_tensors = reader.count("the tensor count", min_tensors, MAX_TENSORS)
    n_entries = reader.count("the metadata count", 1, MAX_ENTRIES)
    metadata: dict[str, Entry] = {}
    for index in range(n_entries):
        entry = reader.entry(f"metadata entry {index}")
        if entry.key in metadata:
            raise reader.fault(entry.key, "appears twice in the metadata")
        metadata[entry.key] = entry
    alignment = _alignment(reader, metadata.get("general.alignment"))
    tensors: dict[str, Tensor] = {}
    data_bytes = 0
    for index in range(n_tensors):
        tensor = reader.tensor(f"tensor {index}")
        if tensor.name in tensors:
            raise reader.fault(f"tensor {tensor.name}", "appears twice")
        if tensor.offset != data_bytes:
            raise reader.fault(
                f"tensor {tensor.name}",
                f"lies at offset {tensor.offset} instead of {data_bytes}: tensors must follow each other without "
                "gap or overlap",
            )
        tensors[tensor.name] = tensor
        data_bytes += -(-tensor.n_bytes // alignment) * alignment
    data_offset = -(-reader.position // alignment) * alignment
    if not tensors:
        data_offset = min(data_offset, file_length)
    last = next(reversed(tensors.values()), None)
    needed = data_offset if last is None else data_offset + last.offset + last.n_bytes
    if needed > file_length:
        raise reader.fault("the file", f"is cut short: its tensors need {needed} bytes and it has {file_length}")
    raw = bytes(reader.padded(data_offset))
    return GgufHeader(raw, file_length, alignment, MappingProxyType(metadata), MappingProxyType(tensors), source)


def _alignment(reader: _Reader, entry: Entry | None) -> int:
    if entry is None:
        return DEFAULT_ALIGNMENT
    if entry.type is not ValueType.UINT32:
        raise reader.fault(entry.key, "is not a 32-bit unsigned integer")
    (alignment,) = struct.unpack_from("<I", reader.data, entry.value_start)
    if alignment & (alignment - 1) or not DEFAULT_ALIGNMENT <= alignment <= MAX_ALIGNMENT:
        raise reader.fault(
            entry.key, f"is {alignment}, not a power of two between {DEFAULT_ALIGNMENT} and {MAX_ALIGNMENT}"
        )
    return int(alignment)


class _Reader:
    """A position in the header's bytes that never passes their end."""

    def __init__(self, data: bytes | memoryview, source: str) -> None:
        self.data = memoryview(data)[:MAX_HEADER_BYTES]
        self.position = 0
        self._source = source
        self._at_cap = len(data) >= MAX_HEADER_BYTES

    def fault(self, field: str, problem: str) -> ArtifactError:
        return ArtifactError(f"{self._source} is refused: {field} {problem}")

    def _cut_short(self, field: str) -> ArtifactError:
        if self._at_cap:
            return self.fault("the header", f"is longer than {MAX_HEADER_BYTES >> 20} MiB")
        return HeaderCutShortError(f"{self._source} is refused: it ends in the middle of {field}")

    def take(self, n_bytes: int, field: str) -> bytes:
        end = self.position + n_bytes
        if end > len(self.data):
            raise self._cut_short(field)
        piece = self.data[self.position : end].tobytes()
        self.position = end
        return piece

    def padded(self, data_offset: int) -> memoryview:
        if data_offset > len(self.data):
            raise self._cut_short("the padding after the tensor table")
        return self.data[:data_offset]

    def u32(self, field: str) -> int:
        return int.from_bytes(self.take(4, field), "little")

    def u64(self, field: str) -> int:
        return int.from_bytes(self.take(8, field), "little")

    def count(self, field: str, low: int, high: int) -> int:
        value = self.u64(field)
        if not low <= value <= high:
            raise self.fault(field, f"is {value}, outside {low} to {high}")
        return value

    def name(self, field: str, max_bytes: int) -> str:
        """A key or tensor name: printable ASCII without spaces, as every real one is."""
        raw = self.take(self.count(f"the name length of {field}", 1, max_bytes), f"the name of {field}")
        if not re.fullmatch(rb"[!-~]+", raw):
            raise self.fault(field, f"has a name that is not plain text: {raw[:40]!r}")
        return raw.decode("ascii")

    def value_type(self, field: str) -> ValueType:
        code = self.u32(f"the type of {field}")
        try:
            return ValueType(code)
        except ValueError:
            raise self.fault(field, f"has the unknown value type {code}") from None

    def entry(self, field: str) -> Entry:
        start = self.position
        key = self.name(field, MAX_KEY_BYTES)
        kind = item_type = self.value_type(key)
        count = 1
        if kind is ValueType.ARRAY:
            item_type = self.value_type(key)
            if item_type is ValueType.ARRAY:
                raise self.fault(key, "is an array of arrays")
            count = self.count(f"the item count of {key}", 0, MAX_ITEMS)
        value_start = self.position
        if item_type is ValueType.STRING:
            self._skip_strings(key, count)
        else:
            values = self.take(count * _WIDTHS[item_type], key)
            if item_type is ValueType.BOOL and values.strip(b"\0\1"):
                raise self.fault(key, "has a truth value that is neither 0 nor 1")
        return Entry(key, kind, item_type, count, start, value_start, self.position)

    def _skip_strings(self, key: str, count: int) -> None:
        data, position, end = self.data, self.position, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position + 8 > end:
                raise self._cut_short(key)
            (length,) = length_at(data, position)
            if length > MAX_STRING_BYTES:
                raise self.fault(key, f"has a string of {length} bytes, more than {MAX_STRING_BYTES}")
            position += 8 + length
        if position > end:
            raise self._cut_short(key)
        self.position = position

    def tensor(self, field: str) -> Tensor:
        name = self.name(field, MAX_NAME_BYTES)
        field = f"tensor {name}"
        n_dims = self.u32(f"the dimension count of {field}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.fault(field, f"has {n_dims} dimensions, outside 1 to {MAX_DIMS}")
        dims = tuple(self.count(f"a side of {field}", 1, MAX_SIDE) for _ in range(n_dims))
        code = self.u32(f"the type of {field}")
        tensor_type = TENSOR_TYPES.get(code)
        if tensor_type is None:
            raise self.fault(field, f"is stored as type {code}, which is not a weight type known here")
        offset = self.u64(f"the offset of {field}")
        n_elements = math.prod(dims)
        if n_elements > MAX_ELEMENTS:
            raise self.fault(field, f"has {n_elements} elements, more than {MAX_ELEMENTS}")
        if dims[0] % tensor_type.block_elements:
            raise self.fault(field, f"has rows of {dims[0]}, which {tensor_type.name} blocks do not divide")
        return Tensor(name, dims, tensor_type, offset, tensor_bytes(dims, tensor_type))


def tensor_bytes(dims: tuple[int, ...], tensor_type: TensorType) -> int:
    """Bytes of a tensor with these sides; `dims[0]` must be whole blocks."""
    return math.prod(dims) // tensor_type.block_elements * tensor_type.block_bytes
