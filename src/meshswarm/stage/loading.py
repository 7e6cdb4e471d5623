"""From a slice on the disk to an engine that was measured: where its layers go, and with how many threads.

The rule this file keeps: what a person chose is done or refused, and what nobody chose is measured once and kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshswarm.artifacts.gguf.check import GgufHeader
from meshswarm.artifacts.gguf.probe import engine_build
from meshswarm.errors import ArtifactError
from meshswarm.span import Span
from meshswarm.stage.engine.devices import Device, Offload, gpus, list_devices, plan_offload
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.engine.kv_layers import session_cells
from meshswarm.stage.engine.llama import numclass
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS, LlamaOptions
from meshswarm.stage.engine.memory import room
from meshswarm.stage.engine.paging import paging_of
from meshswarm.stage.engine.threads import KeptThreads, ThreadTimes, candidate_counts, usable_cpus
from meshswarm.stage.families.proofs import Proofs
from meshswarm.stage.sessions.messages import MAX_ROWS_PER_STEP
from meshswarm.stage.sizes.memory import Load, MemoryModel
from meshswarm.stage.slices.store import SliceFile


@dataclass(frozen=True, slots=True)
class Wants:
    """How an engine is to be loaded. `n_threads` None: as many as are fastest."""

    n_ctx: int
    n_sessions: int
    n_threads: int | None = None
    options: LlamaOptions = DEFAULT_OPTIONS


def load_engine(
    slice_file: SliceFile,
    span: Span,
    header: GgufHeader,
    wants: Wants,
    folder: Path,
    *,
    proofs: Proofs | None = None,
    anew: bool = False,
) -> SpanEngine:
    """Load the slice of `span`, which was cut by these `proofs` (None: those of the installed build); `header` is the
    whole model's, and `folder` keeps what was measured, also where it is measured `anew`. Blocks.

    Raises ConfigError for what cannot be done here, and what `SpanEngine.load` raises.
    """
    load = Load(wants.n_ctx, wants.n_sessions, wants.options.type_k, wants.options.type_v)
    model = MemoryModel(header, load, proofs=proofs)
    offload = _offload(list_devices(), model, span, wants.options)
    n_cpus = usable_cpus()
    kept = KeptThreads(folder, f"{engine_build()} {numclass(wants.options, offload)}", n_cpus)
    n_threads, counts = _threads(wants, None if anew else kept.get(slice_file.root), n_cpus)
    free_bytes = room().free
    engine = SpanEngine.load(
        slice_file.path,
        span,
        model.n_layers,
        n_ctx=wants.n_ctx,
        n_slots=wants.n_sessions,
        n_threads=n_threads,
        max_rows=MAX_ROWS_PER_STEP,
        thread_counts=counts,
        llama_options=wants.options,
        offload=offload,
    )
    engine.paging = paging_of(slice_file.path, engine.memory, free_bytes)
    if engine.thread_times is not None:
        with contextlib.suppress(ArtifactError):  # then it is measured again at the next start
            kept.put(slice_file.root, engine.thread_times)
    return engine


def cpu_only_because(span: Span, n_layers: int, devices: Sequence[Device]) -> str:
    """Why these layers are computed on the CPU beside a GPU, as a sentence; empty where there is nothing to say."""
    chosen = gpus(devices)
    if not chosen or span == Span(0, n_layers) or all(device.is_proved for device in chosen):
        return ""
    return (
        f"The layers {span} are computed on the CPU: that a part of a model gives the same on {chosen[0].backend} as "
        "the whole was not proved yet. A whole model would be computed on the GPU."
    )


def _threads(wants: Wants, known: ThreadTimes | None, n_cpus: int) -> tuple[int, tuple[int, ...]]:
    """The count to load with, and those to be timed, none when it is known already."""
    if wants.n_threads is not None:
        return wants.n_threads, ()
    if known is not None:
        return known.best, ()
    counts = candidate_counts(n_cpus)
    return counts[0], counts if len(counts) > 1 else ()


def _offload(devices: Sequence[Device], model: MemoryModel, span: Span, options: LlamaOptions) -> Offload:
    is_whole = span == model.whole
    layer_bytes, output_bytes = _layer_bytes(model) if is_whole and gpus(devices) else ((), 0)
    return plan_offload(devices, options, is_whole=is_whole, layer_bytes=layer_bytes, output_bytes=output_bytes)


def _layer_bytes(model: MemoryModel) -> tuple[tuple[int, ...], int]:
    """Of each layer with its K and V, and of the output head."""
    load = model.load
    cells = session_cells(load.n_ctx)
    kv = [layer.cell_bytes(cells, load.type_k, load.type_v) + layer.state_bytes for layer in model.layers]
    layers = tuple(
        weights + load.n_sessions * of_session for weights, of_session in zip(model.layer_weights, kv, strict=True)
    )
    tensors = model.header.tensors
    head = tensors.get("output.weight") or tensors["token_embd.weight"]
    return layers, head.n_bytes
