"""What the tests of the stage share: slices of the models, and engines on them, cut and loaded once."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tests.stage.staged import SPAN, Stage, staged

from meshswarm.artifacts.gguf.check import check_hyperparameters, read_header
from meshswarm.artifacts.store.store import Store
from meshswarm.span import Span
from meshswarm.stage.slices.slicing import write_slice
from meshswarm.stage.slices.store import Slices

Cut = Callable[..., Path]


@pytest.fixture(scope="session")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cut]:
    """`cut(model, span, pads=None)`: the path of that slice; the model itself where the span is the whole of it."""
    folder = tmp_path_factory.mktemp("slices")
    made: dict[tuple[Path, Span, tuple[int, ...] | None], Path] = {}

    def path_of(model: Path, span: Span, pads: tuple[int, ...] | None = None) -> Path:
        header = read_header(model)
        if len(span) == check_hyperparameters(header).n_layers:
            return model
        key = (model, span, pads)
        if key not in made:
            made[key] = folder / f"{len(made)}.gguf"
            write_slice(model, header, span, made[key], pads=pads)
        return made[key]

    yield path_of
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, gguf_recipe: type) -> Path:
    """A random llama model of 4 layers, width 64 and 32 tokens, in float32: there one row and two differ in bits."""
    path: Path = gguf_recipe(n_layers=4).write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", seed=1)
    return path


@pytest.fixture(scope="module")
def last_layers(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    home = tmp_path_factory.mktemp("store")
    store = Store(home)
    info = store.import_file(smollm2)
    return Slices(store, home).file(info.model_id, SPAN).path, info.model_id


@pytest.fixture
async def stage(last_layers: tuple[Path, bytes], tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(last_layers, tmp_path / "ledger.sqlite") as running:
        yield running
