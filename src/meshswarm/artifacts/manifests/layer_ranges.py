"""Where a model's layers lie in its files: runs of bytes, worked out from a header or taken from a manifest.

The rule this file keeps: the same header always gives the same runs. Neighbouring tensors of one layer are one run,
the padding between them included; tensors outside the layers (the embedding, the output, blocks that only predict
further tokens) count as layer `n_layers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshswarm.artifacts.gguf.check import check_hyperparameters
from meshswarm.artifacts.gguf.container import GgufHeader
from meshswarm.errors import ArtifactError
from meshswarm.span import MAX_LAYERS

MAX_RUNS = 1 << 14
"""In all files together. Converters write a layer's tensors behind each other, so there are about as many as layers."""

_MAX_SHIFT = 56


class Run(NamedTuple):
    """The bytes [start, stop) of a file are one layer's."""

    layer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LayerRanges:
    """The runs of each file, in order. Raises ValueError for what no model's files can be like."""

    n_layers: int
    files: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        if not 1 <= self.n_layers <= MAX_LAYERS:
            raise ValueError(f"a model has 1 to {MAX_LAYERS} layers")
        if sum(map(len, self.files)) > MAX_RUNS:
            raise ValueError(f"its layers lie in more than {MAX_RUNS} pieces")
        for runs in self.files:
            position = 0
            for run in runs:
                if not 0 <= run.layer <= self.n_layers:
                    raise ValueError(f"bytes belong to layer {run.layer} of {self.n_layers}")
                if not position <= run.start < run.stop:
                    raise ValueError(
                        f"the bytes {run.start} to {run.stop} of layer {run.layer} cannot be where they are"
                    )
                position = run.stop
        if not all(self.layer_bytes):
            raise ValueError(f"layer {self.layer_bytes.index(0)} has no bytes")

    @classmethod
    def of(cls, header: GgufHeader) -> LayerRanges:
        """Of a checked header, with the tensors of all files. Raises ArtifactError when there are too many runs."""
        n_layers = check_hyperparameters(header).n_layers
        files: list[list[Run]] = [[] for _ in header.files]
        for tensor in header.tensors.values():
            runs, start = files[tensor.file], header.position(tensor)
            layer, stop = _layer(tensor.name, n_layers), start + tensor.n_bytes
            if runs and runs[-1].layer == layer:
                runs[-1] = runs[-1]._replace(stop=stop)
            else:
                runs.append(Run(layer, start, stop))
        try:
            return cls(n_layers, tuple(map(tuple, files)))
        except ValueError as error:
            raise ArtifactError(f"{header.source} cannot be described: {error}") from None

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer."""
        sizes = [0] * (self.n_layers + 1)
        for runs in self.files:
            for run in runs:
                sizes[run.layer] += run.stop - run.start
        return tuple(sizes[:-1])

    def of_layers(self, start: int, stop: int) -> tuple[tuple[range, ...], ...]:
        """The bytes of the layers [start, stop) in each file; of `[n_layers, n_layers + 1)`, those outside layers."""
        return tuple(
            tuple(range(run.start, run.stop) for run in runs if start <= run.layer < stop) for runs in self.files
        )

    def fields(self) -> list[bytes]:
        """For each file its runs behind each other, as LEB128 numbers: layer, bytes since the run before, length."""
        return [_packed(runs) for runs in self.files]

    @classmethod
    def parse(cls, n_layers: int, fields: Sequence[Any]) -> LayerRanges:
        """What `fields` gave. Raises ValueError for anything else."""
        return cls(n_layers, tuple(map(_unpacked, fields)))


def _layer(tensor_name: str, n_layers: int) -> int:
    match = re.match(r"blk\.(\d+)\.", tensor_name)
    return n_layers if match is None else min(int(match[1]), n_layers)


def _packed(runs: Sequence[Run]) -> bytes:
    packed, position = bytearray(), 0
    for run in runs:
        for number in (run.layer, run.start - position, run.stop - run.start):
            while number > 0x7F:
                packed.append(number & 0x7F | 0x80)
                number >>= 7
            packed.append(number)
        position = run.stop
    return bytes(packed)


def _unpacked(packed: Any) -> tuple[Run, ...]:
    if type(packed) is not bytes:
        raise ValueError("the places of its layers are not bytes")
    runs: list[Run] = []
    numbers = list(_numbers(packed))
    if len(numbers) % 3 or len(numbers) > 3 * MAX_RUNS:
        raise ValueError("the places of its layers are not told in threes, or too many")
    position = 0
    for layer, gap, length in zip(*[iter(numbers)] * 3, strict=True):
        runs.append(Run(layer, position + gap, position + gap + length))
        position += gap + length
    return tuple(runs)


def _numbers(packed: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in packed:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number
            number = shift = 0
        elif shift > _MAX_SHIFT:
            raise ValueError("a place of its layers is no number below 2^63")
    if shift:
        raise ValueError("the places of its layers are cut short")
