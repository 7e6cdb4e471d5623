"""Split models: taken together, by any part, or refused with the part that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.artifacts.gguf.split_writing import I32, U16, split_model

from meshswarm.artifacts.gguf.check import (
    check_hyperparameters,
    check_tokenizer,
    parse_headers,
    read_header,
    read_headers,
)
from meshswarm.artifacts.gguf.probe import probe
from meshswarm.artifacts.gguf.split import (
    MAX_PARTS,
    are_named_as_parts,
    link_as_parts,
    model_stem,
    part_name,
    part_paths,
)
from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.merkle import file_root, model_id
from meshswarm.artifacts.names import matches
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError


@pytest.fixture
def tiny(tmp_path: Path, gguf_recipe: Any) -> Path:
    return gguf_recipe(tied=False, rope_freqs=True).write(tmp_path / "Tiny-1M.F32.gguf", seed=1)


@pytest.mark.parametrize(("named", "is_first_empty"), [(0, False), (1, True), (3, False)])
def test_a_split_model_is_imported_by_any_of_its_parts(
    tmp_path: Path, tiny: Path, named: int, is_first_empty: bool
) -> None:
    parts = split_model(tiny, tmp_path / "parts", 4, is_first_empty=is_first_empty)
    store = Store(tmp_path / "home")
    info = store.import_file(parts[named])
    whole = Store(tmp_path / "other").import_file(tiny)
    assert info.name == whole.name == "tiny-1m"
    assert info.model_id == model_id([(part.stat().st_size, file_root(part)) for part in parts])
    assert info.file_lengths == tuple(part.stat().st_size for part in parts)
    assert (info.n_layers, info.n_vocab, info.tied_embeddings) == (whole.n_layers, whole.n_vocab, False)
    assert store.paths(info.model_id) == tuple(parts)
    assert store.path(info.model_id) == parts[0]
    assert [store.find(str(part)) for part in parts] == [info] * 4
    assert ModelCard.of(info).file_lengths == info.file_lengths
    again = Store(tmp_path / "home")
    assert again.models() == [info]
    assert again.import_file(parts[0]) == info
    probe(parts[0])


def test_the_joined_header_knows_where_every_tensor_lies(tmp_path: Path, tiny: Path) -> None:
    parts = split_model(tiny, tmp_path / "parts", 3)
    whole, header = read_header(tiny), read_headers(parts)
    assert list(header.tensors) == list(whole.tensors)
    assert {tensor.file for tensor in header.tensors.values()} == {0, 1, 2}
    assert check_hyperparameters(header) == check_hyperparameters(whole)
    assert header.file_length == sum(part.stat().st_size for part in parts)
    original = tiny.read_bytes()
    for name, tensor in header.tensors.items():
        start, was = header.position(tensor), whole.position(whole.tensors[name])
        assert parts[tensor.file].read_bytes()[start : start + tensor.n_bytes] == original[was : was + tensor.n_bytes]


def test_the_header_of_a_split_model_travels(tmp_path: Path, tiny: Path) -> None:
    parts = split_model(tiny, tmp_path / "parts", 3, is_first_empty=True)
    store, other = Store(tmp_path / "home"), Store(tmp_path / "other")
    info = store.import_file(parts[2])
    message = store.header_proof(info.model_id)
    header = other.save_foreign_header(info.model_id, message)
    assert [file.raw for file in header.files] == [file.raw for file in store.header(info.model_id).files]
    assert Store(tmp_path / "other").describe(info.model_id, info.name) == info
    with pytest.raises(ArtifactError, match="wrong block"):
        other.save_foreign_header(info.model_id, message[:-1] + bytes([message[-1] ^ 1]))


def test_a_missing_part_is_named(tmp_path: Path, tiny: Path) -> None:
    parts = split_model(tiny, tmp_path / "parts", 4)
    parts[2].unlink()
    with pytest.raises(
        ArtifactError, match=r"does not hold all 4 parts of the model: no Tiny-1M\.F32-00003-of-00004\.gguf"
    ):
        Store(tmp_path / "home").import_file(parts[0])
    parts[1].unlink()
    with pytest.raises(ArtifactError, match=r"no Tiny-1M\.F32-00002-of-00004\.gguf and 1 more"):
        part_paths(parts[3])


def test_a_part_under_another_name_is_not_taken_for_a_model(tmp_path: Path, tiny: Path) -> None:
    part = split_model(tiny, tmp_path / "parts", 2)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ArtifactError, match=r"split\.count says this is one of 2 parts .* named NAME-00001-of-0000N"):
        Store(tmp_path / "home").import_file(part)


@pytest.mark.parametrize(
    ("bend", "problem"),
    [
        ({(1, "split.no"): (U16, 2)}, r"00002-of-00003\.gguf is refused: split\.no is 2 where 1 is right"),
        ({(0, "split.no"): (U16, 1)}, r"split\.no is 1 where 0 is right"),
        ({(2, "split.count"): (U16, 4)}, r"split\.count is 4 where 3 is right"),
        ({(0, "split.count"): (U16, 0)}, r"split\.count is 0 where 3 is right"),
        ({(1, "split.tensors.count"): (I32, 5)}, r"split\.tensors\.count is 5 where"),
        ({(1, "split.tensors.count"): (I32, -1)}, r"split\.tensors\.count is -1 where"),
        ({(1, "split.count"): (4, 3)}, r"split\.count is not stored as uint16"),
        ({(1, "split.no"): (I32, 1)}, r"split\.no is not stored as uint16"),
        ({(1, "split.tensors.count"): (U16, 5)}, r"split\.tensors\.count is not stored as int32"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(tmp_path: Path, tiny: Path, bend: Any, problem: str) -> None:
    parts = split_model(tiny, tmp_path / "parts", 3, bend=bend)
    with pytest.raises(ArtifactError, match=problem):
        Store(tmp_path / "home").import_file(parts[0])


def test_parts_of_other_models_are_refused(tmp_path: Path, tiny: Path, gguf_recipe: Any) -> None:
    parts = split_model(tiny, tmp_path / "parts", 3)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ArtifactError, match=r"00002-of-00003\.gguf is refused: split\.no is 2"):
        read_headers(parts)
    parts[1].write_bytes(tiny.read_bytes())
    with pytest.raises(ArtifactError, match=r"00002-of-00003\.gguf is refused: split\.no is missing"):
        read_headers(parts)
    twice = split_model(tiny, tmp_path / "twice", 2)
    second = split_model(tiny, tmp_path / "bent", 2, bend={(0, "split.no"): (U16, 1)})[0]
    with pytest.raises(ArtifactError, match=r"tensor token_embd\.weight is in another part already"):
        read_headers([twice[0], second])
    with pytest.raises(ArtifactError, match=r"the tensor count is 0, outside 1"):
        read_header(split_model(tiny, tmp_path / "empty", 2, is_first_empty=True)[0])


def test_a_changed_part_is_no_longer_the_model(tmp_path: Path, tiny: Path) -> None:
    parts = split_model(tiny, tmp_path / "parts", 3)
    store = Store(tmp_path / "home")
    info = store.import_file(parts[0])
    data = bytearray(parts[1].read_bytes())
    data[-40] ^= 1
    parts[1].write_bytes(data)
    (model,) = [store.check(info.model_id)]
    assert [bool(check.bad) for check in model] == [False, True, False]
    with pytest.raises(ArtifactError, match=r"00002-of-00003\.gguf was changed since"):
        store.path(info.model_id)
    assert store.paths(info.model_id) is None


@pytest.mark.parametrize(
    "name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-00000.gguf", "m-00001-of-99999.gguf"]
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ArtifactError, match=rf"that cannot be|more than {MAX_PARTS}"):
        part_paths(tmp_path / name)


def test_names_of_parts() -> None:
    assert part_name("m", 0, 12) == "m-00001-of-00012.gguf"
    assert model_stem(Path("/a/Big-Q4_K_M-00002-of-00003.gguf")) == "Big-Q4_K_M"
    assert model_stem(Path("/a/Big-00002-of-3.gguf")) == "Big-00002-of-3"
    assert part_paths(Path("/a/Big.gguf")) == (Path("/a/Big.gguf"),)
    assert are_named_as_parts([Path(f"/a/m-0000{n}-of-00002.gguf") for n in (1, 2)])
    assert not are_named_as_parts([Path("/a/m-00001-of-00002.gguf"), Path("/b/m-00002-of-00002.gguf")])
    assert not are_named_as_parts([Path("/a/model.gguf"), Path("/b/model.gguf")])
    assert matches("Big-Q4_K_M.gguf", "big", "q4_k_m")


def test_parts_under_other_names_are_linked_for_llama_cpp(tmp_path: Path, tiny: Path) -> None:
    parts = split_model(tiny, tmp_path / "parts", 3)
    moved = []
    for index, part in enumerate(parts):
        (tmp_path / str(index)).mkdir()
        moved.append(part.rename(tmp_path / str(index) / "model.gguf"))
    first = link_as_parts(moved, tmp_path / "links")
    probe(first)
    stale = tmp_path / "links" / "model-00002-of-00003.gguf"
    stale.unlink()
    stale.write_text("something else")
    assert link_as_parts(moved, tmp_path / "links") == first
    assert stale.samefile(moved[1])
    assert len(list((tmp_path / "links").iterdir())) == 3


def test_a_model_in_many_files_has_a_card_too(tmp_path: Path, tiny: Path) -> None:
    parts = split_model(tiny, tmp_path / "parts", 38)
    info = Store(tmp_path / "home").import_file(parts[5])
    assert len(info.file_lengths) == 38
    lengths = ModelCard.of(info).file_lengths
    assert (len(lengths), sum(lengths)) == (2, sum(info.file_lengths))


@pytest.fixture(scope="module")
def raw_parts(tmp_path_factory: pytest.TempPathFactory, gguf_recipe: Any) -> tuple[list[bytes], list[int]]:
    folder = tmp_path_factory.mktemp("raw")
    parts = split_model(gguf_recipe().write(folder / "tiny.gguf"), folder, 3)
    return [read.raw for read in read_headers(parts).files], [part.stat().st_size for part in parts]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damage_in_any_part_is_refused_or_read(raw_parts: tuple[list[bytes], list[int]], data: st.DataObject) -> None:
    raws, lengths = list(raw_parts[0]), raw_parts[1]
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.integers(0, 2))
        start = data.draw(st.integers(0, len(raws[part]) - 1))
        stretch = data.draw(st.binary(min_size=1, max_size=16))
        raws[part] = raws[part][:start] + stretch + raws[part][start + len(stretch) :]
    order = data.draw(st.permutations(range(3)) | st.just([0, 1, 2]))
    try:
        header = parse_headers([raws[at] for at in order], [lengths[at] for at in order], source="damaged.gguf")
        check_tokenizer(header)
    except ArtifactError as error:
        assert "damaged.gguf is refused: " in str(error)
        return
    for tensor in header.tensors.values():
        assert header.position(tensor) + tensor.n_bytes <= header.files[tensor.file].file_length
