"""An engine is loaded with what was chosen, and with what was measured where nothing was."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.stage.conftest import Cut

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.errors import ConfigError
from meshswarm.span import Span
from meshswarm.stage import loading
from meshswarm.stage.engine.devices import Device, DeviceKind
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS, KvType, LlamaOptions, parse_llama_options
from meshswarm.stage.engine.memory import Room
from meshswarm.stage.engine.paging import ALL_FITS
from meshswarm.stage.loading import Wants, cpu_only_because, load_engine
from meshswarm.stage.slices.store import SliceFile

CARD = Device(1, "CUDA0", "a card", "CUDA", DeviceKind.GPU, 24 * 10**9, 24 * 10**9)


class Loader:
    """Loads spans of the tiny model, and closes them again."""

    def __init__(self, model: Path, cut: Cut, folder: Path) -> None:
        self.folder = folder
        self._model = model
        self._cut = cut

    def load(
        self, span: Span = Span(0, 4), *, n_threads: int | None = None, options: LlamaOptions = DEFAULT_OPTIONS
    ) -> SpanEngine:
        slice_file = SliceFile(self._cut(self._model, span), bytes(32), 0)
        wants = Wants(n_ctx=64, n_sessions=2, n_threads=n_threads, options=options)
        engine = load_engine(slice_file, span, read_header(self._model), wants, self.folder)
        asyncio.run(engine.stop())
        return engine


@pytest.fixture
def loader(tiny: Path, cut: Cut, tmp_path: Path) -> Loader:
    return Loader(tiny, cut, tmp_path / "threads")


def test_threads_are_measured_once_and_kept(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "usable_cpus", lambda: 3)
    first = loader.load()
    assert first.thread_times is not None
    assert set(first.thread_times.step_s) <= {1, 2}
    assert first.n_threads == first.thread_times.best
    again = loader.load()
    assert again.thread_times is None and again.n_threads == first.n_threads
    other = loader.load(options=parse_llama_options(["type_k=q8_0"]))
    assert other.thread_times is not None


def test_a_chosen_number_of_threads_is_taken(loader: Loader) -> None:
    engine = loader.load(n_threads=1)
    assert engine.n_threads == 1 and engine.thread_times is None
    assert not loader.folder.exists()


def test_a_span_that_memory_has_no_room_for_reads_all_that_is_mapped_again(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loader.load(n_threads=1).paging == ALL_FITS
    monkeypatch.setattr(loading, "room", lambda: Room(free=1000, total=10**12))
    engine = loader.load(n_threads=1)
    assert 0 < engine.paging.paged_bytes == engine.memory.mapped_bytes


def test_a_folder_that_cannot_be_written_only_costs_the_measuring(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "usable_cpus", lambda: 3)
    loader.folder.write_text("a file is in the way")
    assert loader.load().thread_times is not None


def test_options_that_change_bits_are_another_numclass(loader: Loader) -> None:
    plain = loader.load(n_threads=1)
    assert plain.numclass.startswith("cpu-")
    for pair in ("type_k=q8_0", "flash_attn=on"):
        engine = loader.load(n_threads=1, options=parse_llama_options([pair]))
        assert engine.numclass.startswith("cpu-") and engine.numclass != plain.numclass
        assert engine.exact_obstacle is None  # proved in test_llama.py
    quick = loader.load(n_threads=1, options=parse_llama_options(["load_mode=none", "check_tensors=on"]))
    assert quick.numclass == plain.numclass


def test_a_gpu_that_is_not_there_is_an_error_for_a_person(loader: Loader) -> None:
    with pytest.raises(ConfigError, match="sees no GPU"):
        loader.load(options=LlamaOptions(n_gpu_layers=4))


def test_a_part_of_a_model_stays_on_the_cpu_beside_a_gpu_and_says_why(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "list_devices", lambda: [CARD])
    engine = loader.load(Span(0, 2), n_threads=1)
    assert engine.offload.backend == "CPU" and engine.numclass.startswith("cpu-")
    assert "computed on the CPU" in cpu_only_because(Span(0, 2), 4, [CARD])
    assert cpu_only_because(Span(0, 4), 4, [CARD]) == ""
    assert cpu_only_because(Span(0, 2), 4, []) == ""


def test_the_whole_of_a_model_would_go_to_the_gpu(tiny: Path) -> None:
    """Planned, not computed: no GPU is needed to see where the layers would go."""
    header = read_header(tiny)
    model = loading.MemoryModel(header, loading.Load(64, 2, KvType.F16, KvType.F16))
    offload = loading._offload([CARD], model, Span(0, 4), DEFAULT_OPTIONS)
    assert offload.devices == (CARD,) and offload.n_gpu_layers == 5
    layer_bytes, output_bytes = loading._layer_bytes(model)
    assert output_bytes == header.tensors["token_embd.weight"].n_bytes
    assert sum(layer_bytes) == pytest.approx(sum(model.layer_weights) + model.span(Span(0, 4)).kv)
