"""Headers that nobody's converter writes: the table refuses or cuts them, and never fails in a way of its own."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.stage.tiny_models import TINY, write_tiny

from meshswarm.artifacts.container import GgufHeader, ValueType, parse_container
from meshswarm.artifacts.gguf import check_hyperparameters, read_header
from meshswarm.artifacts.header_writer import HeaderWriter
from meshswarm.errors import MeshswarmError
from meshswarm.span import Span
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.slicing import slice_bytes

N_TRIALS = 150
_CODES = {ValueType.BOOL: "?", ValueType.UINT32: "I", ValueType.INT32: "i", ValueType.FLOAT32: "f"}


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _random_entry(dice: random.Random, key: str, n_layers: int) -> bytes:
    """`key` with a value of some type, more often near the sane ones than far off."""
    kind = dice.choice([*_CODES, ValueType.STRING])
    if kind is ValueType.STRING:
        return _string(key) + struct.pack("<I", kind) + _string(dice.choice(["", "yarn", "longrope", "x" * 40]))
    length = dice.choice([0, 1, n_layers - 1, n_layers, n_layers + 1])
    values: Sequence[Any] = [dice.choice([0, 1, 2, 3, 4, n_layers, 128, (1 << 31) - 1]) for _ in range(length)]
    if kind is ValueType.BOOL:
        values = [value % 2 for value in values]
    if dice.random() < 0.5 and values:
        return _string(key) + struct.pack(f"<I{_CODES[kind]}", kind, values[0])
    head = struct.pack("<IIQ", ValueType.ARRAY, kind, len(values))
    return _string(key) + head + struct.pack(f"<{len(values)}{_CODES[kind]}", *values)


def _bent(header: GgufHeader, dice: random.Random, n_layers: int) -> GgufHeader:
    """The header with one to three of its settings gone or replaced."""
    architecture = header.text("general.architecture")
    settings = [key for key in header.metadata if key.startswith(f"{architecture}.")]
    bent = set(dice.sample(settings, dice.randint(1, 3)))
    writer = HeaderWriter(header.alignment)
    for key, entry in header.metadata.items():
        if key not in bent:
            writer.copy(header, entry)
        elif dice.random() < 0.8:
            writer._entries.append(_random_entry(dice, key, n_layers))
    for tensor in header.tensors.values():
        writer.tensor(tensor.name, tensor.dims, tensor.type)
    data = writer.finish()
    return parse_container(data, len(data) + writer.data_bytes, "bent.gguf")


@pytest.mark.parametrize("name", TINY)
def test_a_bent_header_is_refused_or_cut(name: str, tmp_path: Path) -> None:
    header = read_header(write_tiny(name, tmp_path / "model.gguf"))
    n_layers = check_hyperparameters(header).n_layers
    n_cut = 0
    for seed in range(N_TRIALS):
        dice = random.Random(seed)
        try:
            bent = _bent(header, dice, n_layers)
            n_left = check_hyperparameters(bent).n_layers
            starts = legal_cuts(bent).starts
            start = dice.choice(starts)
            stop = dice.choice([*(stop for stop in starts if stop > start), n_left])
            slice_bytes(bent, Span(start, stop))
            n_cut += 1
        except MeshswarmError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert 0 < n_cut < N_TRIALS
