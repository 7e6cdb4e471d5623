"""What the catalogue says of its models is true of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshswarm.artifacts.catalogue import CATALOGUE, SizeClass
from meshswarm.artifacts.store import Store
from meshswarm.serving import DEFAULT_N_CTX, ServingSettings
from meshswarm.stage.sizes.memory import Load, MemoryModel


def test_an_entry_is_its_file(smollm2: Path, tmp_path: Path) -> None:
    """There is one that can be had here; each further one needs its file for this test."""
    (entry,) = CATALOGUE
    store = Store(tmp_path)
    info = store.import_file(smollm2, expected_id=entry.model_id)
    assert (info.name, info.n_layers, sum(info.file_lengths)) == (entry.name, entry.n_layers, entry.n_bytes)
    load = Load(DEFAULT_N_CTX, ServingSettings("any").n_sessions)
    model = MemoryModel(store.header(info.model_id), load)
    assert model.span(model.whole).total == entry.memory_bytes
    assert model.cuts.refusal is None, "verified: it is proved in parts"


def test_ids_and_names_are_one_models_each() -> None:
    assert len({entry.model_id for entry in CATALOGUE}) == len({entry.name for entry in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize(
    ("n_bytes", "size_class"),
    [
        (0, SizeClass.TINY),
        (10**9, SizeClass.TINY),
        (10**9 + 1, SizeClass.SMALL),
        (2 * 10**10, SizeClass.LARGE),
        (10**12, SizeClass.HUGE),
    ],
)
def test_size_classes(n_bytes: int, size_class: SizeClass) -> None:
    assert SizeClass.of(n_bytes) is size_class
