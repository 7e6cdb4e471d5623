"""What we lean on in llama-cpp-python and llama.cpp without a promise of theirs. A failure names what moved.

Everything here holds for the range of versions pinned in pyproject.toml; read the failing test before widening it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp as package
import numpy as np
import pytest
from llama_cpp import _ctypes_extensions
from llama_cpp import llama_cpp as llama
from numpy.typing import NDArray

from meshswarm.stage.engine.llama import MAX_SLOTS, LlamaSpan, context_params
from meshswarm.stage.engine.tap import Port


def ggml() -> ctypes.CDLL:
    library: ctypes.CDLL = _ctypes_extensions.load_shared_library("ggml-base", llama._base_path)
    return library


def state_of(span: LlamaSpan, slot: int) -> bytes:
    size = llama.llama_state_seq_get_size(span._context, slot)
    buffer = (ctypes.c_uint8 * size)()
    llama.llama_state_seq_get_data(span._context, buffer, size, slot)
    return bytes(buffer)


def fill(span: LlamaSpan, n_rows: int) -> None:
    span.tokens[:n_rows] = np.arange(n_rows)
    span.positions[:n_rows] = np.arange(n_rows)
    span.slots[:n_rows] = 0
    span.wanted[:n_rows] = 1


@pytest.fixture
def span(tiny: Path) -> LlamaSpan:
    return LlamaSpan(tiny, n_cells=256, n_slots=2, n_threads=1, max_rows=32)


def test_the_version_is_one_that_was_tested() -> None:
    assert package.__version__.startswith("0.3.36")


@pytest.mark.parametrize(
    "name", ["get_name", "nbytes", "nelements", "nrows", "backend_tensor_get", "backend_tensor_set"]
)
def test_ggml_is_a_library_of_its_own_with_the_functions_of_the_tap(name: str) -> None:
    assert getattr(ggml(), f"ggml_{name}")


def test_the_first_field_of_a_tensor_is_its_type() -> None:
    """`struct ggml_tensor` begins with `enum ggml_type type`."""
    library = ggml()
    library.ggml_init.restype = library.ggml_new_tensor_1d.restype = ctypes.c_void_p
    library.ggml_init.argtypes = [type("Params", (ctypes.Structure,), {"_fields_": _INIT_FIELDS})]
    library.ggml_new_tensor_1d.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    library.ggml_free.argtypes = [ctypes.c_void_p]
    context = library.ggml_init(library.ggml_init.argtypes[0](1 << 16, None, True))
    for kind in (llama.GGML_TYPE_F32, llama.GGML_TYPE_F16, llama.GGML_TYPE_I32, llama.GGML_TYPE_Q8_0):
        tensor = library.ggml_new_tensor_1d(context, kind, 64)
        assert ctypes.c_int32.from_address(tensor).value == kind
    library.ggml_free(context)


_INIT_FIELDS = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def test_the_parameters_we_set_exist() -> None:
    params = context_params(n_cells=256, n_slots=3, n_threads=2, max_rows=64)
    names = {name for name, *_ in llama.llama_context_params._fields_}
    assert {"cb_eval", "cb_eval_user_data", "abort_callback", "kv_unified", "flash_attn_type", "n_ubatch"} <= names
    assert {"devices", "load_mode", "use_extra_bufts"} <= {name for name, *_ in llama.llama_model_params._fields_}
    assert (params.n_ctx, params.n_seq_max, params.kv_unified) == (768, 3, False)
    assert llama.llama_max_parallel_sequences() == MAX_SLOTS


def test_the_system_info_names_the_instruction_sets() -> None:
    """`numclass` and the way round AMX read it."""
    assert llama.llama_print_system_info().startswith(b"CPU : ")


def test_the_graph_has_the_nodes_of_the_llama_family_in_order(tiny: Path) -> None:
    names: list[bytes] = []
    get_name = ggml().ggml_get_name
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]

    @llama.ggml_backend_sched_eval_callback
    def note(tensor: int, ask: bool, _user_data: int) -> bool:
        if ask:
            names.append(get_name(tensor))
        return False

    span = LlamaSpan(tiny, n_cells=256, n_slots=1, n_threads=1, max_rows=32)
    params = context_params(n_cells=256, n_slots=1, n_threads=1, max_rows=32)
    params.cb_eval = note
    llama.llama_free(span._context)
    span._context = llama.llama_init_from_model(span._model, params)
    fill(span, 3)
    assert span.decode(3) == 0
    nodes = [name for name in names if name == b"embd" or name.startswith(b"l_out-")]
    assert nodes == [b"embd", b"l_out-0", b"l_out-1", b"l_out-2", b"l_out-3"]
    assert 15 < len(names) / 4 < 60
    span.close()


def test_a_graph_that_was_ended_early_leaves_the_memory_a_whole_run_leaves(span: LlamaSpan) -> None:
    fill(span, 6)
    span.tap.start(6)
    assert span.decode(6) == 0
    whole = state_of(span, 0)
    span.remove(0, 0)
    rows: NDArray[np.float32] = np.empty((6, 64), np.float32)
    span.tap.start(6, capture=Port("l_out-3", rows))
    assert span.decode(6) == 0
    assert state_of(span, 0) == whole
    span.close()


def test_the_last_layer_drops_the_rows_nobody_wants(span: LlamaSpan) -> None:
    """Why rows that leave through the last layer of the graph are all wanted, and others need not be."""
    fill(span, 4)
    span.wanted[:4] = (0, 1, 0, 1)
    for layer, n_rows in ((2, 4), (3, 2)):
        span.remove(0, 0)
        rows: NDArray[np.float32] = np.empty((4, 64), np.float32)
        span.tap.start(4, capture=Port(f"l_out-{layer}", rows))
        assert span.decode(4) == 0
        assert span.tap._context.captured == n_rows
    span.close()
