"""Models that have files in common, truly or by a stranger's word: what goes of one is not lost to the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.artifacts.gguf.split_writing import split_model

from meshswarm.artifacts.header_proof import verify_message
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.store.store import Store


@pytest.fixture
def tiny(tmp_path: Path, gguf_recipe: Any) -> Path:
    path: Path = gguf_recipe(n_layers=4, n_embd=128).write(tmp_path / "tiny.gguf", seed=1)
    return path


@pytest.fixture
def publisher(tmp_path: Path) -> Store:
    return Store(tmp_path / "publisher")


def fetch(store: Store, publisher: Store, info: ModelInfo) -> None:
    """All of a model, as a fetch leaves it."""
    store.save_foreign_header(info.model_id, publisher.header_proof(info.model_id))
    sources = publisher.paths(info.model_id)
    assert sources is not None
    for file, source in enumerate(sources):
        layer = publisher.piece_layer(info.model_id, file)
        assert layer is not None
        store.save_piece_layer(info.model_id, file, layer)
        path = store.piece_file(info.model_id, file)
        if not path.exists():
            path.write_bytes(source.read_bytes())
    ranges = [[range(content.length)] for content in store.contents(info.model_id)]
    store.note_ranges(info.model_id, info.name, ranges)


def test_a_root_said_to_be_of_a_longer_file_costs_the_real_one_nothing(
    tmp_path: Path, tiny: Path, publisher: Store
) -> None:
    """The proof of a header shows the root, and the root of a file that is a byte longer may be said to be the same."""
    info = publisher.import_file(tiny)
    store = Store(tmp_path / "home")
    fetch(store, publisher, info)
    message = publisher.header_proof(info.model_id)
    proof, _ = verify_message(message, info.model_id)
    ((length, root),) = proof.files
    for more in (1, 256 << 10):
        false = replace(proof, files=((length + more, root),))
        store.save_foreign_header(false.model_id, false.encode() + message[-proof.blocks_length :])
        assert store.ranges(false.model_id) == ((),)
        store.piece_file(false.model_id, 0).write_bytes(b"something else")
        store.note_ranges(false.model_id, "false", [[range(10)]])
        store.drop_pieces(false.model_id)
        store.remove(false.model_id)
    again = Store(tmp_path / "home")
    assert again.paths(info.model_id) is not None and again.path(info.model_id).read_bytes() == tiny.read_bytes()
    assert again.piece_layer(info.model_id, 0) is not None


def test_files_that_two_models_share_stay_as_long_as_one_of_them(tmp_path: Path, tiny: Path, publisher: Store) -> None:
    parts = split_model(tiny, tmp_path / "parts", 3)
    first = publisher.import_file(parts[0])
    others = split_model(tiny, tmp_path / "others", 3)
    with others[2].open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    second = publisher.import_file(others[0])
    assert first.model_id != second.model_id
    store = Store(tmp_path / "home")
    fetch(store, publisher, first)
    fetch(store, publisher, second)
    assert store.drop_pieces(second.model_id) > 0
    store.remove(second.model_id)
    again = Store(tmp_path / "home")
    paths = again.paths(first.model_id)
    assert paths is not None and [path.read_bytes() for path in paths] == [part.read_bytes() for part in parts]
    assert all(again.piece_layer(first.model_id, file) is not None for file in range(3))
    assert again.drop_pieces(first.model_id) > 0
    assert not list((tmp_path / "home" / "pieces").rglob("*.gguf"))
