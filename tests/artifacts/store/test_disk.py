"""The quota: what is easiest to have again goes first, nothing in use ever, and nothing in vain."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.store import holes
from meshswarm.artifacts.store.disk import Disk, Holding, Kind, choose_evictions, remove_slice
from meshswarm.artifacts.store.store import Store

A, B, C, D = (bytes([letter]) * 32 for letter in b"abcd")


def pieces(model: bytes, n_bytes: int = 10, used_at: float = 0.0) -> Holding:
    return Holding(model, Kind.PIECES, Path(f"/pieces/{model[:1].decode()}"), n_bytes, used_at, n_bytes)


def cut(model: bytes, n_bytes: int = 10, used_at: float = 0.0, name: str = "s") -> Holding:
    return Holding(model, Kind.SLICE, Path(f"/slices/{model[:1].decode()}/{name}"), n_bytes, used_at, n_bytes)


def test_nothing_goes_while_there_is_room() -> None:
    assert choose_evictions([pieces(A), cut(A)], quota_bytes=30, wanted_bytes=10).go == ()


def test_a_slice_that_can_be_cut_again_goes_before_what_must_be_fetched() -> None:
    held = [pieces(A, used_at=1), cut(A, used_at=9), cut(B, used_at=0)]
    gone = [choose_evictions(held, quota_bytes=quota, n_holders={A: 9, B: 9}).go for quota in (20, 10, 0)]
    assert gone == [(held[1],), (held[1], held[2]), (held[1], held[2], held[0])]


def test_what_is_rare_goes_last_and_the_rarest_after_that() -> None:
    held = [pieces(A, used_at=1), pieces(B, used_at=2), pieces(C, used_at=3), pieces(D, used_at=4)]
    go = choose_evictions(held, quota_bytes=0, n_holders={A: 0, B: 2, C: 3, D: 50}).go
    assert [holding.model_id for holding in go] == [C, D, A, B], "of two common ones the longest unused"


def test_nobody_knows_of_other_holders_means_rare() -> None:
    held = [pieces(A, used_at=1), pieces(B, used_at=2)]
    assert choose_evictions(held, quota_bytes=10, n_holders={B: 5}).go == (held[1],)


def test_nothing_in_use_goes_and_nothing_goes_in_vain() -> None:
    held = [pieces(A), cut(A), pieces(B)]
    eviction = choose_evictions(held, quota_bytes=25, wanted_bytes=15, in_use={A}, slices_in_use={held[1].path})
    assert (eviction.go, eviction.short_bytes) == ((), 10)
    assert choose_evictions(held, quota_bytes=35, wanted_bytes=15, in_use={A}, slices_in_use={held[1].path}).go == (
        held[2],
    )


def test_of_pieces_that_are_needed_in_part_the_rest_goes_and_counts() -> None:
    held = [replace(pieces(A), spare_bytes=6, needed=((range(4),),)), replace(pieces(B), spare_bytes=0), cut(A)]
    assert choose_evictions(held, quota_bytes=14).go == (held[2], held[0])
    assert choose_evictions(held, quota_bytes=13).short_bytes == 1


def test_pieces_of_what_is_served_go_after_others_that_are_no_rarer() -> None:
    held = [pieces(A, used_at=1), pieces(B, used_at=2), pieces(C, used_at=3)]
    go = choose_evictions(held, quota_bytes=0, served={A}, n_holders={A: 9, B: 9, C: 2}).go
    assert [holding.model_id for holding in go] == [B, A, C]


def test_a_slice_of_an_imported_model_goes_before_what_must_be_fetched() -> None:
    held = [cut(A, used_at=9), cut(B), replace(cut(C, used_at=9), is_of_whole=True)]
    assert choose_evictions(held, quota_bytes=20, n_holders={A: 9, B: 9}).go == (held[2],)


@given(
    st.lists(st.tuples(st.sampled_from([A, B, C, D]), st.booleans(), st.integers(0, 50), st.integers(0, 9))),
    st.integers(0, 300),
    st.integers(0, 100),
    st.sets(st.sampled_from([A, B, C, D])),
)
def test_every_choice_keeps_the_promises(
    drawn: list[tuple[bytes, bool, int, int]], quota: int, wanted: int, in_use: set[bytes]
) -> None:
    held = [
        cut(model, n_bytes, used_at, str(at)) if is_cut else pieces(model, n_bytes, used_at)
        for at, (model, is_cut, n_bytes, used_at) in enumerate(drawn)
    ]
    eviction = choose_evictions(held, quota_bytes=quota, wanted_bytes=wanted, in_use=in_use)
    assert not any(holding.kind is Kind.PIECES and holding.model_id in in_use for holding in eviction.go)
    left = sum(holding.n_bytes for holding in held) - sum(holding.spare_bytes for holding in eviction.go)
    if eviction.short_bytes:
        assert not eviction.go
    else:
        assert left + wanted <= quota
        if eviction.go:
            assert left + eviction.go[-1].n_bytes + wanted > quota, "the last one was needed"


@pytest.fixture
def tiny(tmp_path: Path, gguf_recipe: Any) -> Path:
    return gguf_recipe(n_embd=128).write(tmp_path / "tiny.gguf", seed=1)


def test_files_of_a_person_are_never_counted_nor_removed(tmp_path: Path, tiny: Path) -> None:
    home = tmp_path / "home"
    store = Store(home)
    disk = Disk(home, store)
    info = store.import_file(tiny)
    assert disk.holdings() == [] and disk.used(info.model_id) == {Kind.PIECES: 0, Kind.SLICE: 0}
    assert choose_evictions(disk.holdings(), quota_bytes=0, wanted_bytes=9).short_bytes == 9
    assert store.remove(info.model_id) == (tiny,)
    assert tiny.is_file() and store.models() == [] and store.known() == []
    assert not list((home / "headers").iterdir()) and not list((home / "layers").glob("*"))


def test_what_was_fetched_and_cut_goes_when_room_is_needed(tmp_path: Path, tiny: Path) -> None:
    home = tmp_path / "home"
    store, source = Store(home), Store(tmp_path / "source")
    model_id = source.import_file(tiny).model_id
    store.save_foreign_header(model_id, source.header_proof(model_id))
    store.piece_file(model_id, 0).write_bytes(tiny.read_bytes())
    store.note_ranges(model_id, "taken", [[range(tiny.stat().st_size)]])
    assert [info.name for info in store.models()] == ["taken"]
    slices = home / "slices" / store.models()[0].id_text
    slices.mkdir(parents=True)
    for name in ("0-1.gguf", "1-2.gguf"):
        (slices / name).write_bytes(bytes(500_000))
        (slices / f"{name}.json").write_text("{}")
    os.utime(slices / "0-1.gguf", (5, 5))
    os.utime(slices / "0-1.gguf.json", (5, 5))
    (home / "slices" / "no model").mkdir()
    (home / "slices" / "no model" / "0-1.gguf").write_bytes(b"x")
    disk = Disk(home, store, clock=lambda: 1e6)
    assert {holding.kind for holding in disk.holdings()} == {Kind.PIECES, Kind.SLICE}
    assert max(holding.used_at for holding in disk.holdings()) == 1e6, "a time to come counts as now"
    taken, in_use = sum(holding.n_bytes for holding in disk.holdings()), {slices / "1-2.gguf"}
    (gone,) = choose_evictions(disk.holdings(), quota_bytes=taken - 1, slices_in_use=in_use, in_use={model_id}).go
    disk.remove(gone)
    assert gone.path == slices / "0-1.gguf" and not gone.path.exists() and (slices / "1-2.gguf").exists()
    go = choose_evictions(disk.holdings(), quota_bytes=0).go
    assert [holding.kind for holding in go] == [Kind.SLICE, Kind.PIECES]
    for holding in go:
        disk.remove(holding)
    assert disk.holdings() == [] and store.models() == [] and store.name_of(model_id) == "taken"
    remove_slice(slices / "1-2.gguf")


@pytest.mark.parametrize("can_punch", [True, False])
@pytest.mark.parametrize("is_whole", [True, False])
def test_of_what_was_fetched_the_needed_pieces_stay_and_are_believed(
    tmp_path: Path, gguf_recipe: Any, monkeypatch: pytest.MonkeyPatch, is_whole: bool, can_punch: bool
) -> None:
    """Also where the file system makes no holes, of a model that is here whole or in part."""
    if not can_punch:
        monkeypatch.setattr(holes, "_punch", lambda file, hole: False)
    piece = 256 << 10
    model = gguf_recipe(n_layers=8, n_embd=96).write(tmp_path / "model.gguf", seed=1)
    length = model.stat().st_size
    home = tmp_path / "home"
    store, source = Store(home), Store(tmp_path / "source")
    model_id = source.import_file(model).model_id
    store.save_foreign_header(model_id, source.header_proof(model_id))
    layer = source.piece_layer(model_id, 0)
    assert layer is not None
    store.save_piece_layer(model_id, 0, layer)
    path = store.piece_file(model_id, 0)
    path.write_bytes(model.read_bytes())
    store.note_ranges(model_id, "taken", [[range(length if is_whole else 4 * piece)]])
    assert (store.get(model_id) is not None) == is_whole
    needed = ((range(piece + 5, 2 * piece + 5),),)
    disk = Disk(home, store)
    (holding,) = disk.holdings({model_id: needed})
    before = holding.n_bytes
    disk.remove(holding)
    assert store.ranges(model_id) == ((range(piece, 3 * piece),),) and store.get(model_id) is None
    assert path.read_bytes()[piece : 3 * piece] == model.read_bytes()[piece : 3 * piece]
    assert path.stat().st_size == length
    (left,) = disk.holdings({model_id: needed})
    assert left.n_bytes <= before - holding.spare_bytes + 4096 and left.spare_bytes == 0
    assert left.n_bytes < 2 * piece + 64_000, "what goes takes nothing on disk any more"
    path.touch()
    assert Store(home).ranges(model_id) == ((range(piece, 3 * piece),),), "right when it is hashed again"
    assert store.keep_pieces(model_id, [()]) > 2 * piece and not path.exists()
