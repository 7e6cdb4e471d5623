"""What llama.cpp itself says that a model takes, without loading its weights: its own dry run."""

from __future__ import annotations

from pathlib import Path

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.stage.engine.attention import with_attention
from meshswarm.stage.engine.devices import ON_CPU
from meshswarm.stage.engine.kv_layers import session_cells
from meshswarm.stage.engine.llama import foreseen_memory
from meshswarm.stage.engine.llama_options import LlamaOptions
from meshswarm.stage.engine.memory import EngineMemory
from meshswarm.stage.sessions.messages import MAX_ROWS_PER_STEP
from meshswarm.stage.sizes.memory import Load

PRECISION = 50_000
"""The log rounds each of a model's few buffers to 0.01 MiB."""


def reported_memory(path: Path, load: Load) -> EngineMemory:
    """What llama.cpp would reserve for a context on the file at `path`."""
    n_cells = session_cells(load.n_ctx)
    chosen = LlamaOptions(type_k=load.type_k, type_v=load.type_v)
    options = with_attention(chosen, read_header(path), n_rows=MAX_ROWS_PER_STEP, n_cells=n_cells, offload=ON_CPU)
    return foreseen_memory(path, n_cells=n_cells, n_slots=load.n_sessions, max_rows=MAX_ROWS_PER_STEP, options=options)
