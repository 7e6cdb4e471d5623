"""What the memory model says is what llama.cpp reserves: for every family, whole and in parts."""

from pathlib import Path

import pytest
from tests.stage.llama_memory import PRECISION, reported_memory
from tests.stage.tiny_models import TINY, write_tiny

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.errors import ConfigError
from meshswarm.span import Span
from meshswarm.stage.engine.checkpoints import MAX_CHECKPOINTS, n_checkpoints
from meshswarm.stage.engine.kv_layers import is_kv_known, session_cells
from meshswarm.stage.engine.llama_options import KvType
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.sizes.memory import PROCESS_BYTES, Load, MemoryModel
from meshswarm.stage.slices.slicing import slice_bytes, write_slice

LOAD = Load(n_ctx=4095, n_sessions=3)


@pytest.fixture(scope="module", params=sorted(TINY))
def tiny(request, tmp_path_factory) -> Path:
    return write_tiny(request.param, tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf")


def parts(model: MemoryModel) -> list[Span]:
    """A span of each position that a model can have, the middle one as short as can be."""
    starts = model.cuts.starts
    if len(starts) < 2:
        return []
    middles = [Span(starts[1], starts[2])] if len(starts) > 2 else []
    return [Span(0, starts[1]), *middles, Span(starts[-1], model.n_layers)]


def test_a_whole_model_takes_what_llama_cpp_reserves(tiny):
    model = MemoryModel(read_header(tiny), LOAD)
    memory, reported = model.span(model.whole), reported_memory(tiny, LOAD)
    assert model.is_exact
    assert 0 <= memory.weights - reported.weights_bytes < model.header.alignment * len(model.header.tensors)
    assert abs(memory.kv - reported.kv_bytes) < PRECISION
    assert reported.compute_bytes <= memory.work


def test_its_parts_do_so_with_their_zero_layers(tiny, tmp_path):
    header = read_header(tiny)
    model = MemoryModel(header, LOAD)
    assert parts(model)
    for span in parts(model):
        path = tmp_path / f"{span.start}.gguf"
        write_slice(tiny, header, span, path)
        memory, reported = model.span(span), reported_memory(path, LOAD)
        written = read_header(path)
        assert memory.weights == slice_bytes(header, span) == written.file_length - written.data_offset
        assert abs(memory.kv - reported.kv_bytes) < PRECISION, span
        assert reported.compute_bytes <= memory.work, span


@pytest.mark.parametrize(("name", "n_states"), [("qwen3", 0), ("qwen35moe", MAX_CHECKPOINTS + 1)])
def test_states_that_are_saved_to_go_back_to_count(name, n_states, tmp_path):
    model = MemoryModel(read_header(write_tiny(name, tmp_path / "tiny.gguf")), LOAD)
    memory = model.span(model.whole)
    assert memory.saved == n_states * LOAD.n_sessions * model.state_bytes(model.whole)
    assert memory.total == memory.weights + memory.kv + memory.work + memory.saved + PROCESS_BYTES


def test_large_states_are_few():
    assert [n_checkpoints(size << 20) for size in (0, 1, 16, 20, 40, 63, 400)] == [4, 4, 4, 3, 1, 1, 1]


@pytest.mark.parametrize("name", ["qwen3", "deepseek4", "qwen35moe"])
def test_keys_and_values_may_be_kept_smaller(name, tmp_path):
    path = write_tiny(name, tmp_path / "tiny.gguf")
    load = Load(4095, 3, KvType.Q8_0, KvType.Q8_0)
    model = MemoryModel(read_header(path), load)
    assert abs(model.span(model.whole).kv - reported_memory(path, load).kv_bytes) < PRECISION
    assert model.token_bytes(model.whole) < MemoryModel(model.header, LOAD).token_bytes(model.whole)


def test_heads_that_blocks_do_not_divide_are_refused(tmp_path):
    path = write_tiny("llama", tmp_path / "tiny.gguf", keys={"attention.key_length": 20, "rope.dimension_count": 20})
    with pytest.raises(ConfigError, match="K heads of 20 numbers cannot be kept in q8_0"):
        MemoryModel(read_header(path), Load(255, 1, KvType.Q8_0))


def test_the_default_model_takes_what_llama_cpp_reserves(smollm2, tmp_path):
    header = read_header(smollm2)
    load = Load(n_ctx=4095, n_sessions=4)
    model = MemoryModel(header, load)
    assert model.token_bytes(model.whole) == 30 * 2 * 3 * 64 * 2
    for span in (model.whole, Span(0, 10), Span(10, 20), Span(20, 30)):
        path = smollm2
        if span != model.whole:
            path = tmp_path / f"{span.start}.gguf"
            write_slice(smollm2, header, span, path)
        memory, reported = model.span(span), reported_memory(path, load)
        assert abs(memory.kv - reported.kv_bytes) < PRECISION, span
        assert reported.compute_bytes <= memory.work <= 3 * reported.compute_bytes + (4 << 20), span


def test_another_load_changes_keys_and_values_alone(tmp_path):
    model = MemoryModel(read_header(write_tiny("qwen3", tmp_path / "tiny.gguf")), Load(255, 1))
    other = model.under(Load(511, 3))
    span = Span(1, 3)
    assert other.span(span).kv == 3 * 2 * model.span(span).kv
    assert other.span(span).weights == model.span(span).weights
    assert model.load == Load(255, 1)


def test_every_family_that_is_split_is_counted_exactly():
    assert [architecture for architecture in FAMILIES if not is_kv_known(architecture)] == []
    assert {model.architecture for model in TINY.values()} >= set(FAMILIES), "or it was not compared with llama.cpp"


def test_a_session_has_one_cell_more_than_positions_in_whole_steps():
    assert [session_cells(n) for n in (1, 255, 256, 4095)] == [256, 256, 512, 4096]
