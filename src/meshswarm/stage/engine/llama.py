"""Thin glue over llama-cpp-python's low-level API: one slice loaded, rows in, rows out.

The rule this file keeps: it decides nothing and checks nothing about the work. Whoever calls it has checked shapes,
positions and slots, because a wrong one ends the process in a GGML_ASSERT. One thread at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp as package
import numpy as np
from llama_cpp import llama_cpp as llama
from numpy.typing import NDArray

from meshswarm.errors import LocalError
from meshswarm.stage.engine.devices import ON_CPU, Offload, device_pointers
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS, LlamaOptions, LoadMode
from meshswarm.stage.engine.memory import EngineMemory, read_memory
from meshswarm.stage.engine.tap import Tap

_LOG_INFO = 2  # enum ggml_log_level
_LOG_LEVELS_KEPT = (3, 4)  # warnings and errors
_PARTIAL = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
MAX_SLOTS = 256  # LLAMA_MAX_SEQ


class LlamaError(LocalError):
    """llama.cpp could not load or compute; the message carries its own last words."""


_last_words: deque[str] = deque(maxlen=3)
_logits_address = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", llama._lib))
"""The package's own `llama_get_logits` gives a pointer object, which costs 20 microseconds to look into."""


class _Listener(threading.local):
    """Where this thread's information lines go, while somebody wants them."""

    lines: list[str] | None = None


_listener = _Listener()


@llama.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
def _keep_last_words(level: int, text: bytes, _user_data: int) -> None:
    if level in _LOG_LEVELS_KEPT:
        _last_words.append(text.decode(errors="replace").strip())
    elif level == _LOG_INFO and _listener.lines is not None:
        _listener.lines.append(text.decode(errors="replace"))


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """What llama.cpp tells this thread."""
    lines = _listener.lines = []
    try:
        yield lines
    finally:
        _listener.lines = None


def start_llama() -> None:
    """Prepare llama.cpp in this process: quiet, its last warnings kept for error messages. Calling it again is free."""
    llama.llama_log_set(_keep_last_words, ctypes.c_void_p())
    llama.llama_backend_init()


def model_params(options: LlamaOptions = DEFAULT_OPTIONS, offload: Offload = ON_CPU) -> llama.llama_model_params:
    """How this package loads weights: memory-mapped and on the CPU alone, unless somebody chose otherwise.

    Repacked weight buffers stay off where the library was built for AMX. In llama.cpp 0.3.36's sources the tile
    configuration is a local the GNU compiler may drop as dead (its `_tile_loadconfig` names only 8 of the 64 bytes as
    input): measured with gcc 12, the first batch of two rows ends the process with SIGSEGV in `ldtilecfg`.
    """
    params: llama.llama_model_params = llama.llama_model_default_params()
    devices = device_pointers(offload.devices)
    params.devices = ctypes.cast(devices, ctypes.c_void_p)  # type: ignore[assignment]  # which keeps them alive
    params.n_gpu_layers = offload.n_gpu_layers
    params.split_mode = options.split_mode if len(offload.devices) > 1 else llama.LLAMA_SPLIT_MODE_LAYER
    params.load_mode = options.load_mode
    params.use_extra_bufts = _uses_extra_buffers(options)
    params.check_tensors = options.check_tensors
    return params


def _uses_extra_buffers(options: LlamaOptions) -> bool:
    return options.use_extra_bufts and b"AMX_INT8 = 1" not in llama.llama_print_system_info()


def context_params(
    *,
    n_cells: int,
    n_slots: int,
    n_threads: int,
    max_rows: int,
    options: LlamaOptions = DEFAULT_OPTIONS,
    offload: Offload = ON_CPU,
) -> llama.llama_context_params:
    """The context every peer computes in: `n_slots` sequences that share nothing, with `n_cells` positions each."""
    params: llama.llama_context_params = llama.llama_context_default_params()
    params.n_ctx = n_cells * n_slots
    params.n_seq_max = n_slots
    params.n_batch = params.n_ubatch = max_rows
    params.n_threads = n_threads
    params.n_threads_batch = options.n_threads_batch or n_threads
    params.flash_attn_type = int(options.has_flash_attention)  # never "auto": numclass could not say it
    params.type_k, params.type_v = options.type_k, options.type_v
    params.kv_unified = False
    is_offloaded = bool(offload.devices)
    params.offload_kqv = is_offloaded and options.offload_kqv is not False
    params.op_offload = is_offloaded and options.op_offload is not False
    params.no_perf = True
    return params


def numclass(options: LlamaOptions = DEFAULT_OPTIONS, offload: Offload = ON_CPU) -> str:
    """Names what decides the bits of a result on this machine, apart from the row counts: equal words, equal bits.

    It covers the llama.cpp build and the instruction sets it uses, the back-end and which layers it has, weight
    repacking, flash attention and the types of the KV cache. A back-end on which nothing was proved says so.
    """
    parts = (
        package.__version__,
        llama.llama_print_system_info().decode(),
        f"repack={_uses_extra_buffers(options)}",
        *options.numclass_words(),
        *(f"{device.description} of {offload.n_gpu_layers} layers" for device in offload.devices),
    )
    kind = offload.backend.lower() + ("" if offload.is_proved else "-unproved")
    return f"{kind}-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:12]}"


def foreseen_memory(
    path: Path, *, n_cells: int, n_slots: int, max_rows: int, options: LlamaOptions = DEFAULT_OPTIONS
) -> EngineMemory:
    """What a LlamaSpan made with the same arguments on the CPU would hold, without taking it: llama.cpp's own dry run,
    some milliseconds. Raises LlamaError when the slice does not load."""
    start_llama()
    params = model_params(options)
    is_mapped = options.load_mode in (LoadMode.MMAP, LoadMode.MMAP_MLOCK)
    params.no_alloc, params.load_mode = True, LoadMode.NONE
    with _listening() as lines:
        _last_words.clear()
        model = llama.llama_model_load_from_file(os.fsencode(path), params)
        if model is None:
            raise LlamaError(f"llama.cpp cannot load {path}: {_said()}")
        weights_bytes = int(llama.llama_model_size(model))
        context = llama.llama_init_from_model(
            model,
            context_params(n_cells=n_cells, n_slots=n_slots, n_threads=1, max_rows=max_rows, options=options),
        )
        if context is not None:
            llama.llama_free(context)
        llama.llama_model_free(model)
        if context is None:
            raise LlamaError(f"llama.cpp cannot make a context for {path}: {_said()}")
    memory = read_memory(lines)
    return replace(memory, weights_bytes=weights_bytes, mapped_bytes=weights_bytes if is_mapped else 0)


class LlamaSpan:
    """A loaded slice with its KV cache and the buffers of one batch.

    A batch is what stands in the first rows of these arrays, one row of the batch each: `tokens` int32, `positions`
    int32, `slots` int32, `wanted` int8 (1: keep this row in the last layer, and give its logits). Every array has
    `max_rows` rows. `memory` is what llama.cpp says it took. Raises LlamaError when the slice does not load.
    """

    def __init__(
        self,
        path: Path,
        *,
        n_cells: int,
        n_slots: int,
        n_threads: int,
        max_rows: int,
        native: bool | None = None,
        options: LlamaOptions = DEFAULT_OPTIONS,
        offload: Offload = ON_CPU,
    ) -> None:
        start_llama()
        if options.numa:
            llama.llama_numa_init(options.numa)
        with _listening() as lines:
            self._load(
                path,
                n_cells=n_cells,
                n_slots=n_slots,
                n_threads=n_threads,
                max_rows=max_rows,
                native=native,
                options=options,
                offload=offload,
            )
        self.memory = read_memory(lines)
        self._memory = llama.llama_get_memory(self._context)
        self._logits: NDArray[np.float32] | None = None
        self._logits_at = (0, 0)
        self._make_batch()

    def _load(
        self,
        path: Path,
        *,
        n_cells: int,
        n_slots: int,
        n_threads: int,
        max_rows: int,
        native: bool | None,
        options: LlamaOptions,
        offload: Offload,
    ) -> None:
        _last_words.clear()
        self._context: llama.llama_context_p | None = None
        self._model = llama.llama_model_load_from_file(os.fsencode(path), model_params(options, offload))
        if self._model is None:
            raise LlamaError(f"llama.cpp cannot load {path}: {_said()}")
        self.n_embd: int = llama.llama_model_n_embd(self._model)
        self.n_layers: int = llama.llama_model_n_layer(self._model)
        self.n_vocab: int = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self.architecture = self._metadata("general.architecture")
        self.has_state = bool(llama.llama_model_is_recurrent(self._model) or llama.llama_model_is_hybrid(self._model))
        self.max_rows = max_rows
        self.tap = Tap(self.n_embd, native=native)
        params = context_params(
            n_cells=n_cells,
            n_slots=n_slots,
            n_threads=n_threads,
            max_rows=max_rows,
            options=options,
            offload=offload,
        )
        self._n_threads_batch = options.n_threads_batch
        user_data = ctypes.c_void_p(self.tap.user_data)
        params.cb_eval, params.cb_eval_user_data = self.tap.callback, user_data
        params.abort_callback, params.abort_callback_data = self.tap.abort_callback, user_data
        self._context = llama.llama_init_from_model(self._model, params)
        if self._context is None:
            self.close()
            raise LlamaError(f"llama.cpp cannot make a context for {path}: {_said()}")

    def _make_batch(self) -> None:
        n = self.max_rows
        self.tokens = np.zeros(n, np.int32)
        self.positions = np.zeros(n, np.int32)
        self.slots = np.zeros(n, np.int32)
        self.wanted = np.zeros(n, np.int8)
        self._one_slot_each = np.ones(n, np.int32)
        self._slot_pointers = self.slots.ctypes.data + 4 * np.arange(n, dtype=np.uintp)
        self._batch = llama.llama_batch(
            n_tokens=0,
            token=_pointer(self.tokens, ctypes.POINTER(llama.llama_token)),
            pos=_pointer(self.positions, ctypes.POINTER(llama.llama_pos)),
            n_seq_id=_pointer(self._one_slot_each, ctypes.POINTER(ctypes.c_int32)),
            seq_id=_pointer(self._slot_pointers, ctypes.POINTER(ctypes.POINTER(llama.llama_seq_id))),
            logits=_pointer(self.wanted, ctypes.POINTER(ctypes.c_int8)),
        )

    def decode(self, n_rows: int) -> int:
        """Compute the first `n_rows` rows of the batch arrays. 0 is success; 2 was cancelled; others are failures.

        Rows of a slot are consecutive and rise by position, slots rise, and every slot has the same number of rows:
        then llama.cpp keeps the rows in this order.
        """
        self._batch.n_tokens = n_rows
        return int(llama.llama_decode(self._context, self._batch))

    def logits(self, n_rows: int) -> NDArray[np.float32]:
        """Logits of the rows wanted from the last `decode`: float32 [n_rows, n_vocab], valid until the next one."""
        address = _logits_address(self._context)
        if self._logits is None or (address, n_rows) != self._logits_at:
            memory: Any = (ctypes.c_float * (n_rows * self.n_vocab)).from_address(address)
            self._logits_at = address, n_rows
            self._logits = np.frombuffer(memory, np.float32).reshape(n_rows, self.n_vocab)
        return self._logits

    def set_threads(self, n_threads: int) -> None:
        """Compute with so many threads from now on, prompts too unless they have a number of their own."""
        llama.llama_set_n_threads(self._context, n_threads, self._n_threads_batch or n_threads)

    def remove(self, slot: int, start: int) -> bool:
        """Forget the positions of `slot` from `start` on. False: this family's memory cannot, and nothing changed."""
        return bool(llama.llama_memory_seq_rm(self._memory, slot, start, -1))

    def copy(self, source: int, target: int) -> None:
        """Let the empty slot `target` hold all that `source` holds."""
        llama.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def save_state(self, slot: int) -> NDArray[np.uint8]:
        """What the slot holds beside positions that `remove` can drop: the running state of recurrent layers."""
        n_bytes = int(llama.llama_state_seq_get_size_ext(self._context, slot, _PARTIAL))
        state = np.empty(n_bytes, np.uint8)
        n_saved = llama.llama_state_seq_get_data_ext(self._context, _bytes_of(state), n_bytes, slot, _PARTIAL)
        if n_saved != n_bytes:
            raise LlamaError(f"llama.cpp saved {n_saved} of {n_bytes} bytes of a sequence's state: {_said()}")
        return state

    def restore_state(self, slot: int, state: NDArray[np.uint8]) -> bool:
        """Give the slot the state that `save_state` returned for it. False: llama.cpp refused."""
        n_bytes = state.size
        return bool(llama.llama_state_seq_set_data_ext(self._context, _bytes_of(state), n_bytes, slot, _PARTIAL))

    def close(self) -> None:
        """Free context and model. Nothing may run or be called afterwards."""
        if self._context is not None:
            llama.llama_free(self._context)
            self._context = None
        if self._model is not None:
            llama.llama_model_free(self._model)
            self._model = None

    def _metadata(self, key: str) -> str:
        value = ctypes.create_string_buffer(256)
        llama.llama_model_meta_val_str(self._model, key.encode(), value, len(value))
        return value.value.decode(errors="replace")


def _bytes_of(array: NDArray[np.uint8]) -> Any:
    return _pointer(array, ctypes.POINTER(ctypes.c_uint8))


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, kind)


def _said() -> str:
    return "; ".join(_last_words) or "it gave no reason"
