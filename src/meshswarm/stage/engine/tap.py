"""The tap: where hidden states enter and leave llama.cpp's computation graph, through its per-node callback.

The rule this file keeps: nothing raises inside a callback, and nothing C holds a pointer to is freed while it may be
called. What went wrong is flagged in the shared struct and raised by `finish`, after the graph. The callback is native
(`tap.c`) where that extension was built, else the same logic in Python, which is slower: it takes the interpreter lock
about 31 times a layer.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llama_cpp import _ctypes_extensions, llama_cpp
from numpy.typing import NDArray

from meshswarm.errors import LocalError

try:
    from meshswarm.stage.engine import _tap as _native  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # installed without a C compiler
    _native = None

_NAME_BYTES = 64  # GGML_MAX_NAME
_UNFIT = "this build of llama.cpp does not fit the model family: "
_FAULTS = {
    1: _UNFIT + "a node of its graph does not hold float32 rows",
    2: _UNFIT + "the rows of a node of its graph have another width than the model's hidden states",
    3: _UNFIT + "its graph ran over more rows than it was given",
    4: "the model computed hidden states that are not numbers: its file may be damaged",
}
_NOT_F32, _WRONG_SHAPE, _TOO_MANY_ROWS, _NOT_FINITE = _FAULTS
_FUNCTIONS = {
    "get_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "nbytes": (ctypes.c_size_t, [ctypes.c_void_p]),
    "nelements": (ctypes.c_int64, [ctypes.c_void_p]),
    "nrows": (ctypes.c_int64, [ctypes.c_void_p]),
    "backend_tensor_get": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]),
    "backend_tensor_set": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]),
}


class TapError(LocalError):
    """What ran is not what the tap expects of a graph, or what it read are not numbers."""


class _Context(ctypes.Structure):
    """`struct tap` of tap.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _FUNCTIONS),
        ("inject_name", ctypes.c_char * _NAME_BYTES),
        ("capture_name", ctypes.c_char * _NAME_BYTES),
        ("inject", ctypes.c_void_p),
        ("capture", ctypes.c_void_p),
        ("n_rows", ctypes.c_int64),
        ("n_embd", ctypes.c_int64),
        ("injected", ctypes.c_int64),
        ("captured", ctypes.c_int64),
        ("error", ctypes.c_int32),
        ("cancelled", ctypes.c_int32),
    )


class Port:
    """A node of the graph by its name, and the rows to write into it or to read it into.

    `rows` is float32 [n, n_embd], C-contiguous. Made once and used for many runs where the rows' memory stays the same.
    """

    def __init__(self, node: str, rows: NDArray[np.float32]) -> None:
        self.node = node.encode()
        assert 0 < len(self.node) < _NAME_BYTES, node
        assert rows.dtype == np.float32 and rows.ndim == 2 and rows.flags.c_contiguous
        self.rows = rows
        self.address = rows.ctypes.data


def native_available() -> bool:
    """Whether the native tap was built with this installation (`doctor` warns when not)."""
    return _native is not None and ctypes.sizeof(_Context) == _native.TAP_BYTES


def is_within(rows: NDArray[np.float32], bound: float) -> bool:
    """Whether every number in `rows` is one, and of a magnitude of at most `bound`."""
    if _native is not None and rows.flags.c_contiguous:
        return bool(_native.is_within(rows, bound))
    return bool(rows.max() <= bound) and bool(rows.min() >= -bound)  # NaN wins every max, and compares false


class Tap:
    """Overwrites one node of the graph with given rows, and reads another one, which ends the graph.

    Between `start` and `finish` belongs exactly one `llama_decode` of a context made with `callback`, `abort_callback`
    and `user_data`. A Tap must outlive that context.
    """

    def __init__(self, n_embd: int, *, native: bool | None = None) -> None:
        """`n_embd` is the width of a row. `native` picks the implementation; None: the native one if it is there."""
        self.is_native = native_available() if native is None else native
        ggml = _ctypes_extensions.load_shared_library("ggml-base", llama_cpp._base_path)
        self._ggml: dict[str, Any] = {}
        self._context = _Context(n_embd=n_embd)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = self._ggml[name] = getattr(ggml, f"ggml_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self._context, name, ctypes.cast(function, ctypes.c_void_p).value)
        self._run: tuple[int, Port | None, Port | None] = 0, None, None
        self.user_data = ctypes.addressof(self._context)
        if self.is_native:
            self.callback = llama_cpp.ggml_backend_sched_eval_callback(_native.ON_NODE)
            self.abort_callback = llama_cpp.ggml_abort_callback(_native.IS_CANCELLED)
        else:
            self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
            # Null: in Python it would take the interpreter lock at every node, also of graphs nobody cancels.
            self.abort_callback = llama_cpp.ggml_abort_callback()

    def start(self, n_rows: int, *, inject: Port | None = None, capture: Port | None = None) -> None:
        """Prepare for one graph run of `n_rows` rows: those of `inject` are written, those of `capture` read.

        Both hold at least `n_rows` rows, and are in use until `finish`.
        """
        context = self._context
        context.n_rows = n_rows
        context.injected = context.captured = context.error = 0
        context.inject_name, context.inject = (b"", None) if inject is None else (inject.node, inject.address)
        context.capture_name, context.capture = (b"", None) if capture is None else (capture.node, capture.address)
        self._run = n_rows, inject, capture

    def finish(self) -> None:
        """Raises TapError unless every row was written and read. Call it after a `llama_decode` that succeeded."""
        context = self._context
        n_rows, inject, capture = self._run
        self._run = 0, None, None
        if context.error:
            raise TapError(_FAULTS[context.error])
        for port, n_done in ((inject, context.injected), (capture, context.captured)):
            if port is not None and n_done != n_rows:
                node = port.node.decode()
                raise TapError(f"{_UNFIT}its graph gave {n_done} of {n_rows} rows of its node {node!r}")

    def cancel(self) -> None:
        """Stop a running `llama_decode` at its next node, and every later one (native only). Any thread may call it."""
        self._context.cancelled = 1

    def _on_node(self, tensor: int, ask: bool, _user_data: int) -> bool:
        """tap.c's `on_node`, statement by statement."""
        try:
            context = self._context
            name = self._ggml["get_name"](tensor)
            injects = name == context.inject_name and name != b""
            captures = not injects and name == context.capture_name and name != b""
            if ask or context.error:
                return bool(ask and (injects or captures or context.error))
            if injects:
                n_rows = self._rows_of(tensor, context.injected)
                if n_rows < 0:
                    return False
                row_bytes = context.n_embd * 4
                source = context.inject + context.injected * row_bytes
                self._ggml["backend_tensor_set"](tensor, source, 0, n_rows * row_bytes)
                context.injected += n_rows
                return True
            if captures:
                n_rows = self._rows_of(tensor, context.captured)
                if n_rows < 0:
                    return False
                row_bytes = context.n_embd * 4
                target = context.capture + context.captured * row_bytes
                self._ggml["backend_tensor_get"](tensor, target, 0, n_rows * row_bytes)
                context.captured += n_rows
                rows = (ctypes.c_float * (n_rows * context.n_embd)).from_address(target)
                if not np.isfinite(np.frombuffer(rows, np.float32)).all():
                    context.error = _NOT_FINITE
                return False
            return True
        except BaseException:
            self._context.error = _WRONG_SHAPE
            return False

    def _rows_of(self, tensor: int, done: int) -> int:
        """Rows of the tensor, or -1 with the error set. `type` is the first field of the public struct ggml_tensor."""
        context = self._context
        n_elements = self._ggml["nelements"](tensor)
        n_rows = int(self._ggml["nrows"](tensor))
        is_f32 = ctypes.c_int32.from_address(tensor).value == llama_cpp.GGML_TYPE_F32
        if not is_f32 or self._ggml["nbytes"](tensor) != n_elements * 4:
            context.error = _NOT_F32
        elif n_elements != n_rows * context.n_embd:
            context.error = _WRONG_SHAPE
        elif n_rows > context.n_rows - done:
            context.error = _TOO_MANY_ROWS
        else:
            return n_rows
        return -1
