"""Models in several files, and models that are here in part: they are cut and loaded as the whole one file would be."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.artifacts.gguf.split_writing import split_model
from tests.stage.unsplit import Unsplit

from meshswarm.artifacts.gguf.check import read_header, read_headers
from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.ranges import covers, merged, n_bytes_of
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError
from meshswarm.span import Span
from meshswarm.stage.slices.slicing import write_slice
from meshswarm.stage.slices.store import Slices

PROMPT = [1, 4093, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]
N_STEPS = 24


@pytest.fixture
def tiny(tmp_path: Path, gguf_recipe: Any) -> Path:
    return gguf_recipe(n_embd=128, n_layers=8).write(tmp_path / "tiny.gguf", seed=1)


def answer(path: Path) -> tuple[list[int], np.ndarray]:
    """Greedy tokens after the prompt, and all of their logits."""
    model = Unsplit(path, 128)
    rows = [model.rows(PROMPT, 0, [len(PROMPT) - 1])[0]]
    tokens = [int(rows[-1].argmax())]
    for step in range(N_STEPS - 1):
        rows.append(model.rows(tokens[-1:], len(PROMPT) + step, [0])[0])
        tokens.append(int(rows[-1].argmax()))
    model.close()
    return tokens, np.stack(rows)


def test_the_embedded_model_in_parts_answers_alike_and_gives_the_same_slices(smollm2: Path, tmp_path: Path) -> None:
    parts = split_model(smollm2, tmp_path / "parts", 3, is_first_empty=True)
    for span in (Span(0, 10), Span(10, 20), Span(20, 30)):
        for name, source in (("one", [smollm2]), ("several", parts)):
            write_slice(source, read_headers(source), span, tmp_path / f"{name}.gguf")
        one, several = (read_header(tmp_path / f"{name}.gguf") for name in ("one", "several"))
        assert one.tensors == several.tensors
        assert all(
            one.raw[entry.start : entry.end] == several.raw[several.metadata[key].start : several.metadata[key].end]
            for key, entry in one.metadata.items()
            if key != "meshswarm.filler"  # says where the bytes lie in the model's file
        )
        data = [
            (tmp_path / f"{h}.gguf").read_bytes()[header.data_offset :]
            for h, header in (("one", one), ("several", several))
        ]
        assert data[0] == data[1]
    store = Store(tmp_path / "home")
    whole = Slices(store, tmp_path / "home").file(store.import_file(parts[1]).model_id, Span(0, 30))
    assert (whole.path, whole.n_bytes) == (parts[0], sum(part.stat().st_size for part in parts))
    tokens, logits = answer(smollm2)
    tokens_of_parts, logits_of_parts = answer(whole.path)
    assert tokens_of_parts == tokens
    assert np.array_equal(logits_of_parts, logits)


def take(store: Store, source: Store, model_id: bytes, wanted: Iterable[Iterable[range]]) -> None:
    """Fetch these bytes of the model's files from one store to the other: whole pieces, as torrents do."""
    store.save_foreign_header(model_id, source.header_proof(model_id))
    paths = source.paths(model_id)
    assert paths is not None
    held = []
    for index, (path, ranges) in enumerate(zip(paths, wanted, strict=True)):
        content = store.contents(model_id)[index]
        store.save_piece_layer(model_id, index, source.piece_layer(model_id, index) or b"")
        got = content.ranges_of(content.pieces_of(ranges))
        target = store.piece_file(model_id, index)
        with path.open("rb") as model, target.open("r+b" if target.exists() else "w+b") as file:
            file.truncate(content.length)
            for each in got:
                model.seek(each.start)
                file.seek(each.start)
                file.write(model.read(len(each)))
        held.append(merged([*store.pieces.ranges(content), *got]))
    store.note_ranges(model_id, "taken", held)


@pytest.fixture
def seed(tmp_path: Path, smollm2: Path) -> tuple[Store, bytes]:
    store = Store(tmp_path / "seed")
    return store, store.import_file(smollm2).model_id


def is_here(store: Store, slices: Slices, model_id: bytes, span: Span) -> bool:
    """The slice was cut, or can be."""
    needs = slices.plan(model_id, span).needs
    return all(covers(have, want) for have, want in zip(store.ranges(model_id), needs, strict=True))


def test_a_slice_is_cut_from_the_pieces_of_its_layers_alone(seed: tuple[Store, bytes], tmp_path: Path) -> None:
    source, model_id = seed
    store = Store(tmp_path / "home")
    store.save_foreign_header(model_id, source.header_proof(model_id))
    slices = Slices(store, tmp_path / "home")
    span = Span(10, 20)
    wanted = slices.needs(model_id, span)
    assert not is_here(store, slices, model_id, span)
    with pytest.raises(ArtifactError, match=r"is not stored here whole: \d+\.\d MB that are needed are missing"):
        slices.file(model_id, span)
    take(store, source, model_id, wanted)
    assert is_here(store, slices, model_id, span)
    assert not is_here(store, slices, model_id, Span(0, 10)) and not is_here(store, slices, model_id, Span(0, 30))
    (held,) = store.ranges(model_id)
    assert covers(held, wanted[0]) and n_bytes_of(held) < 1.05 * n_bytes_of(wanted[0]) + 600_000
    assert store.models() == [] and store.parts() == [model_id] and store.paths(model_id) is None
    cut = slices.file(model_id, span)
    assert cut.root == Slices(source, tmp_path / "seed").file(model_id, span).root
    again = Store(tmp_path / "home")
    assert (again.parts(), again.name_of(model_id), again.ranges(model_id)) == ([model_id], "taken", (held,))
    assert store.piece_file(model_id, 0).stat().st_blocks * 512 < 1.1 * n_bytes_of(held), "the rest is a hole"
    store.drop_pieces(model_id)
    assert slices.file(model_id, span) == cut, "a slice needs nothing else"
    assert not is_here(store, slices, model_id, Span(11, 20)) and store.name_of(model_id) == "taken"


def test_pieces_of_a_file_that_was_touched_are_hashed_again(seed: tuple[Store, bytes], tmp_path: Path) -> None:
    source, model_id = seed
    store = Store(tmp_path / "home")
    take(store, source, model_id, Slices(source, tmp_path / "seed").needs(model_id, Span(10, 20)))
    (held,) = store.ranges(model_id)
    path = store.piece_file(model_id, 0)
    os.utime(path, ns=(1, 1))
    assert store.ranges(model_id) == (held,), "touched, not changed"
    at = held[1].start + 700_000
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    (left,) = store.ranges(model_id)
    assert n_bytes_of(held) - n_bytes_of(left) == 256 << 10 and not covers(left, [range(at, at + 1)])
    with pytest.raises(ArtifactError, match="that are needed are missing"):
        Slices(store, tmp_path / "home").file(model_id, Span(10, 20))
    path.unlink()
    assert store.ranges(model_id) == ((),)


def test_a_model_whose_last_piece_came_is_whole_until_it_is_damaged(seed: tuple[Store, bytes], tmp_path: Path) -> None:
    source, model_id = seed
    store = Store(tmp_path / "home")
    slices = Slices(store, tmp_path / "home")
    for span in (Span(0, 10), Span(10, 20), Span(20, 30), Span(0, 30)):
        assert store.find("taken") is None
        store.save_foreign_header(model_id, source.header_proof(model_id))
        take(store, source, model_id, slices.needs(model_id, span))
    (info,) = store.models()
    path = store.path(model_id)
    assert (info.name, path, file_root(path)) == ("taken", store.piece_file(model_id, 0), store.files(model_id)[0][1])
    assert store.parts() == [] and slices.file(model_id, Span(0, 30)).path == path
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    os.utime(path, ns=(1, 1))  # a write in the same tick of the file system's clock could not be noticed
    with pytest.raises(ArtifactError, match="has changed"):
        store.path(model_id)
    assert store.models() == [] and store.parts() == [model_id]
    (left,) = store.ranges(model_id)
    assert info.file_lengths[0] - n_bytes_of(left) <= 256 << 10, "only the bad piece is fetched again"
    take(store, source, model_id, [[range(info.file_lengths[0] - 10, info.file_lengths[0])]])
    assert store.models() == [info]


def test_a_split_model_that_was_fetched_loads_through_links(tmp_path: Path, tiny: Path) -> None:
    parts = split_model(tiny, tmp_path / "parts", 3)
    source, store = Store(tmp_path / "seed"), Store(tmp_path / "home")
    info = source.import_file(parts[0])
    take(store, source, info.model_id, [[range(length)] for length in info.file_lengths])
    assert store.get(info.model_id) is not None
    whole = Slices(store, tmp_path / "home").file(info.model_id, Span(0, 8))
    assert whole.path == tmp_path / "home" / "links" / info.id_text / "model-00001-of-00003.gguf"
    assert whole.path.resolve() == store.piece_file(info.model_id, 0).resolve()
    (home, other) = (Slices(each, folder) for each, folder in ((store, tmp_path / "home"), (source, tmp_path / "seed")))
    assert home.file(info.model_id, Span(2, 5)).root == other.file(info.model_id, Span(2, 5)).root
    assert [bool(ranges) for ranges in other.needs(info.model_id, Span(2, 4))] == [True, True, False]
    store.remove(info.model_id)
    assert not whole.path.exists() and store.parts() == [] and not store.has_header(info.model_id)
    assert all(part.is_file() for part in parts)
