"""What the catalogue says of its models is true of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshswarm.artifacts.manifests.catalogue import CATALOGUE, SizeClass
from meshswarm.artifacts.names import NAME_PATTERN
from meshswarm.artifacts.sources import is_source
from meshswarm.artifacts.store.store import Store
from meshswarm.serving import DEFAULT_N_CTX, ServingSettings
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.sizes.memory import PROCESS_BYTES, Load, MemoryModel


def test_a_verified_entry_is_its_file(smollm2: Path, tmp_path: Path) -> None:
    """There is one that can be had here; each further one needs its file for this test."""
    (entry,) = (entry for entry in CATALOGUE if entry.is_verified)
    store = Store(tmp_path)
    info = store.import_file(smollm2, expected_id=entry.model_id)
    assert (info.name, info.n_layers, sum(info.file_lengths)) == (entry.name, entry.n_layers, entry.n_bytes)
    assert (info.architecture, info.encoding, entry.warning) == (entry.architecture, entry.encoding, "")
    load = Load(DEFAULT_N_CTX, ServingSettings("any").n_sessions)
    model = MemoryModel(store.header(info.model_id), load)
    assert model.span(model.whole).total == entry.memory_bytes
    assert model.cuts.refusal is None, "verified: it is proved in parts"


def test_ids_and_names_are_one_models_each() -> None:
    known = [entry.model_id for entry in CATALOGUE if entry.model_id is not None]
    assert len(set(known)) == len(known)
    assert len({entry.name for entry in CATALOGUE}) == len({entry.ref for entry in CATALOGUE}) == len(CATALOGUE)


def test_what_nobody_here_has_fetched_says_so() -> None:
    for entry in CATALOGUE:
        assert entry.is_verified or (entry.model_id is None and entry.ref in entry.warning), entry.name


def test_there_is_a_model_for_every_size_and_each_can_be_split() -> None:
    assert {entry.size_class for entry in CATALOGUE} == set(SizeClass)
    assert [entry.n_bytes for entry in CATALOGUE] == sorted(entry.n_bytes for entry in CATALOGUE)
    for entry in CATALOGUE:
        assert entry.architecture in FAMILIES, entry.name
        assert is_source(entry.ref) and NAME_PATTERN.fullmatch(entry.name)
        assert entry.memory_bytes > entry.n_bytes + PROCESS_BYTES


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
