"""Slices on disk: cut on demand, cut again when damaged, tried in a child process once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError
from meshswarm.span import Span
from meshswarm.stage.engine.llama import numclass
from meshswarm.stage.engine.llama_options import parse_llama_options
from meshswarm.stage.families.cuts import IllegalCutError
from meshswarm.stage.families.proofs import CutProof, note
from meshswarm.stage.slices import store as slices_module
from meshswarm.stage.slices.store import Slices


@pytest.fixture
def tiny(tmp_path: Path, gguf_recipe: Any) -> Path:
    (tmp_path / "files").mkdir()
    return gguf_recipe().write(tmp_path / "files" / "Tiny-1M-Test.F32.gguf", seed=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture
def slices(store: Store, tmp_path: Path) -> Slices:
    return Slices(store, tmp_path / "home")


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Every real first load, counted."""
    loaded: list[Path] = []
    real = slices_module.probe

    def counting(path: Path) -> None:
        loaded.append(path)
        real(path)

    monkeypatch.setattr(slices_module, "probe", counting)
    return loaded


def touch(path: Path) -> None:
    os.utime(path, ns=(1_000_000_000, 1_000_000_000))


def test_slices_are_cut_once_probed_once_and_found_again(
    store: Store, slices: Slices, tiny: Path, tmp_path: Path, probes: list[Path]
) -> None:
    info = store.import_file(tiny)
    first = slices.file(info.model_id, Span(1, 3))
    assert first.path == tmp_path / "home" / "slices" / info.id_text / "1-3.gguf"
    assert (first.root, first.n_bytes) == (file_root(first.path), first.path.stat().st_size)
    stamp = first.path.stat().st_mtime_ns
    for again in (slices, Slices(store, tmp_path / "home")):
        assert again.file(info.model_id, Span(1, 3)) == first
    assert first.path.stat().st_mtime_ns == stamp
    assert probes == [first.path]
    other = Store(tmp_path / "elsewhere")
    other.import_file(tiny)
    assert Slices(other, tmp_path / "elsewhere").file(info.model_id, Span(1, 3)).root == first.root


def test_a_damaged_slice_is_cut_again(store: Store, slices: Slices, tiny: Path, probes: list[Path]) -> None:
    info = store.import_file(tiny)
    path = slices.file(info.model_id, Span(1, 3)).path
    good = path.read_bytes()
    for damage in (
        lambda: path.write_bytes(good[:-1] + b"x"),
        lambda: os.truncate(path, 100),
        path.unlink,
        path.with_name("1-3.gguf.json").unlink,
        lambda: path.with_name("1-3.gguf.json").write_text('{"format": 1, "root": "zz"}'),
        lambda: path.with_name("1-3.gguf.json").write_text('{"format": 0}'),
        lambda: touch(path),
    ):
        damage()
        assert slices.file(info.model_id, Span(1, 3)).path.read_bytes() == good
    assert probes == [path], "the same content was loaded once before"


def test_a_new_llama_cpp_tries_again(
    store: Store, slices: Slices, tiny: Path, probes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = store.import_file(tiny)
    slices.file(info.model_id, Span(1, 3))
    monkeypatch.setattr(slices_module, "engine_build", lambda: "9.9.9")
    slices.file(info.model_id, Span(1, 3))
    assert len(probes) == 2


def test_on_another_build_nothing_is_cut_before_it_is_proved_here(
    store: Store, slices: Slices, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = store.import_file(tiny)
    monkeypatch.setattr("meshswarm.stage.families.proofs.installed_build", lambda: "9.9.9")
    with pytest.raises(IllegalCutError, match=r"and this is 9\.9\.9"):
        slices.file(info.model_id, Span(1, 3))
    note(tmp_path / "home" / "proofs", info.model_id, CutProof(numclass(), (0, 1, 3)))
    assert slices.file(info.model_id, Span(1, 3)).path.name == "1-3.gguf"
    with pytest.raises(IllegalCutError, match="no other cut of it was tried on this machine"):
        slices.file(info.model_id, Span(0, 2))
    with pytest.raises(IllegalCutError, match=r"and this is 9\.9\.9"):
        slices.file(info.model_id, Span(1, 3), parse_llama_options(["type_k=q8_0"]))


def test_what_was_found_to_differ_is_not_cut_any_more(store: Store, slices: Slices, tiny: Path, tmp_path: Path) -> None:
    info = store.import_file(tiny)
    slices.file(info.model_id, Span(1, 3))
    note(tmp_path / "home" / "proofs", info.model_id, CutProof(numclass(), refusal="a logit differs by 1"))
    with pytest.raises(IllegalCutError, match=r"served whole \(layers 0:4\) on this machine, because .* differs by 1"):
        slices.file(info.model_id, Span(1, 3))
    assert slices.file(info.model_id, Span(0, 4)).path == tiny


def test_the_whole_model_is_its_own_file(store: Store, slices: Slices, tiny: Path, probes: list[Path]) -> None:
    info = store.import_file(tiny)
    whole = slices.file(info.model_id, Span(0, 4))
    assert (whole.path, whole.root, whole.n_bytes) == (tiny, file_root(tiny), tiny.stat().st_size)
    slices.file(info.model_id, Span(0, 4))
    assert probes == [tiny]
    with pytest.raises(IllegalCutError, match="the layers 0:5 are outside the model"):
        slices.file(info.model_id, Span(0, 5))


def test_a_file_that_aborts_llama_cpp_is_never_handed_out(
    store: Store, slices: Slices, tmp_path: Path, gguf_recipe: Any
) -> None:
    recipe = gguf_recipe()
    recipe.tensors = [tensor for tensor in recipe.tensors if tensor[0] != "blk.2.ffn_up.weight"]
    info = store.import_file(recipe.write(tmp_path / "incomplete.gguf"))
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"llama\.cpp could not load it"):
            slices.file(info.model_id, Span(2, 4))


def test_many_threads_at_once(store: Store, slices: Slices, tiny: Path, probes: list[Path]) -> None:
    gate = threading.Barrier(8)

    def work(index: int) -> tuple[bytes, Path]:
        gate.wait()
        info = store.import_file(tiny)
        return info.model_id, slices.file(info.model_id, Span(1, 3) if index % 2 else Span(0, 1)).path

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert len({model for model, _ in results}) == 1
    assert sorted(path.name for path in probes) == ["0-1.gguf", "1-3.gguf"]


def test_two_processes_in_one_folder(tiny: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from meshswarm.artifacts.store.store import Store\n"
        "from meshswarm.span import Span; from meshswarm.stage.slices.store import Slices\n"
        "store = Store(Path(sys.argv[1])); info = store.import_file(Path(sys.argv[2]))\n"
        "print(Slices(store, Path(sys.argv[1])).file(info.model_id, Span(1, 3)).root.hex())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "home"), str(tiny)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert [info.name for info in Store(tmp_path / "home").models()] == ["tiny-1m-test"]


def test_a_model_that_is_not_here_any_more_is_not_cut(store: Store, slices: Slices, tiny: Path, tmp_path: Path) -> None:
    info = store.import_file(tiny)
    elsewhere = Store(tmp_path / "elsewhere")
    elsewhere.save_foreign_header(info.model_id, store.header_proof(info.model_id))
    with pytest.raises(ArtifactError, match="is not stored here"):
        Slices(elsewhere, tmp_path / "elsewhere").file(info.model_id, Span(0, 2))
    data = bytearray(tiny.read_bytes())
    data[-1] ^= 1
    tiny.write_bytes(data)
    with pytest.raises(ArtifactError, match="was changed since it was imported"):
        slices.file(info.model_id, Span(0, 2))


def test_slices_that_nobody_will_load_again_are_swept(
    store: Store, slices: Slices, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices_module, "probe", lambda _path: None)
    model_id = store.import_file(tiny).model_id
    earlier = Slices(store, tmp_path / "home")
    old, recent, foreign, outdated, unnoted = (
        earlier.file(model_id, span).path for span in (Span(0, 1), Span(1, 2), Span(2, 3), Span(1, 3), Span(0, 3))
    )
    long_ago = time.time() - slices_module.UNUSED_S - 60
    for path in (old, foreign):
        os.utime(path.with_name(path.name + ".json"), (long_ago, long_ago))
    alone = foreign.parent.with_name("a-model-that-is-not-here") / "2-3.gguf"
    foreign.parent.with_name(alone.parent.name).mkdir()
    foreign.rename(alone)
    foreign.with_name("2-3.gguf.json").rename(alone.with_name("2-3.gguf.json"))
    outdated.with_name("1-3.gguf.json").write_text('{"format": 1}')
    unnoted.with_name("0-3.gguf.json").unlink()
    for path in (outdated, unnoted):
        os.utime(path, (long_ago, long_ago))
    new = unnoted.with_name("0-2.gguf")
    new.write_bytes(b"just cut by another process, and not noted yet")
    given = slices.file(model_id, Span(1, 2)).path
    cut = slices.file(model_id, Span(3, 4)).path
    assert set((tmp_path / "home" / "slices").glob("*/*.gguf")) == {recent, given, cut, alone, new}
    os.utime(cut.with_name("3-4.gguf.json"), (long_ago, long_ago))
    slices.file(model_id, Span(2, 4))
    assert cut.exists(), "what this process was given may be loaded"
