"""What llama.cpp itself says that a model takes, without loading its weights: its own dry run, read from its log."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

from llama_cpp import llama_cpp as llama

from meshswarm.stage.kv_layers import session_cells
from meshswarm.stage.llama import context_params, model_params, start_llama
from meshswarm.stage.memory import Load

MIB = 1 << 20
PRECISION = 0.05 * MIB
"""The log rounds each of a model's few buffers to 0.01 MiB."""


@dataclass(frozen=True)
class Reported:
    """In bytes, within `PRECISION`."""

    kv: float
    work: float


def reported_memory(path: Path, load: Load, max_rows: int) -> Reported:
    """What llama.cpp reserves for a context on the file at `path`. Fails when llama.cpp does not take the file."""
    start_llama()
    lines: list[str] = []

    @llama.llama_log_callback
    def keep(_level: int, text: bytes, _user_data: int) -> None:
        lines.append(text.decode(errors="replace"))

    params = model_params()
    params.no_alloc = True
    params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    llama.llama_log_set(keep, ctypes.c_void_p())
    try:
        model = llama.llama_model_load_from_file(os.fsencode(path), params)
        assert model, "".join(lines[-6:])
        options = context_params(
            n_cells=session_cells(load.n_ctx), n_slots=load.n_sessions, n_threads=1, max_rows=max_rows
        )
        options.type_k, options.type_v = int(load.type_k), int(load.type_v)
        lines.clear()
        context = llama.llama_init_from_model(model, options)
        assert context, "".join(lines[-6:])
        llama.llama_free(context)
        llama.llama_model_free(model)
    finally:
        start_llama()
    log = "".join(lines)
    kv = re.findall(r"size = +([\d.]+) MiB \(", log) + re.findall(r"layers = \d+, size = +([\d.]+) MiB", log)
    (work,) = re.findall(r"compute buffer size = +([\d.]+) MiB", log)
    return Reported(MIB * sum(map(float, kv)), MIB * float(work))
