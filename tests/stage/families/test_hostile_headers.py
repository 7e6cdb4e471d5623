"""Headers that nobody's converter writes: the table refuses or cuts them, and never fails in a way of its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.stage.tiny_models import TINY, write_tiny

from meshswarm.artifacts.gguf.check import check_hyperparameters, read_header
from meshswarm.artifacts.gguf.container import GgufHeader, ValueType, parse_container
from meshswarm.artifacts.gguf.header_writer import HeaderWriter
from meshswarm.errors import MeshswarmError
from meshswarm.span import Span
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.slices.slicing import slice_bytes

N_TRIALS = 60


def _write_random(writer: HeaderWriter, dice: random.Random, key: str, n_layers: int) -> None:
    """`key` with a value of some type, more often near the sane ones than far off."""
    length = dice.choice([0, 1, n_layers - 1, n_layers, n_layers + 1])
    values = [dice.choice([0, 1, 2, 3, 4, n_layers, 128, (1 << 31) - 1]) for _ in range(length)]
    match dice.randrange(4):
        case 0:
            writer.u32(key, dice.choice(values or [1 << 31]))
        case 1:
            writer.text(key, dice.choice(["", "yarn", "longrope", "x" * 40]))
        case 2:
            writer.array(key, ValueType.UINT32, values)
        case _:
            writer.array(key, ValueType.BOOL, [value % 2 for value in values])


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
            _write_random(writer, dice, key, n_layers)
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
