"""`meshswarm bench`: how fast this machine computes layers of a model, as a peer measures itself, but for longer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any

from meshswarm.artifacts.store.store import Store
from meshswarm.commands.control import find_running
from meshswarm.config import Home
from meshswarm.errors import ArtifactError
from meshswarm.routing.own_speeds import OwnSpeed, OwnSpeeds
from meshswarm.span import Span
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.engine.llama_options import LlamaOptions
from meshswarm.stage.loading import Wants, load_engine
from meshswarm.stage.sizes.memory import PROCESS_BYTES
from meshswarm.stage.slices.store import Slices

BUDGET_S = 1.0  # for each of the figures
N_CTX = 255
N_SESSIONS = 16


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is measured: the layers `span` of a model, all of them if None, with `n_threads`, the fastest if None."""

    ref: str
    span: Span | None
    n_threads: int | None
    options: LlamaOptions


def bench(home: Home, settings: BenchSettings) -> dict[str, Any]:
    """Load the layers and time them. Raises MeshswarmError when they cannot be loaded."""
    store = Store(home.create().root)
    info = store.obtain(settings.ref)
    span = settings.span or Span(0, info.n_layers)
    slices = Slices(store, home.root)
    slice_file = slices.file(info.model_id, span, settings.options)
    wants = Wants(N_CTX, N_SESSIONS, settings.n_threads, settings.options)
    header = store.header(info.model_id)
    proofs = slices.proofs(info.model_id, settings.options)
    engine = load_engine(slice_file, span, header, wants, home.threads, proofs=proofs, anew=True)
    try:
        figures = _figures(engine, len(span))
        _keep(home, info.id_text, span, figures)
        return {
            "model": info.name,
            "model_id": info.id_text,
            "layers": str(span),
            "n_layers": info.n_layers,
            "numclass": engine.numclass,
            "back_end": engine.offload.backend,
            "beside_a_running_peer": find_running(home) is not None,
            "memory": {
                "sessions": N_SESSIONS,
                "n_ctx": N_CTX,
                **engine.memory.as_json(),
                "program_bytes": PROCESS_BYTES,
            },
            **figures,
        }
    finally:
        asyncio.run(engine.stop())


def _keep(home: Home, model_id: str, span: Span, figures: dict[str, Any]) -> None:
    """For plans: whether this machine alone would be faster than a swarm."""
    lone = next((turn["us_per_layer"] for turn in figures["decode"] if turn["sessions"] == 1), None)
    if lone is not None:
        with contextlib.suppress(ArtifactError):  # then a plan says that nobody measured it
            OwnSpeeds(home.speeds).note(model_id, OwnSpeed(lone, str(span), time.time()))


def _figures(engine: SpanEngine, n_layers: int) -> dict[str, Any]:
    speed = engine.measure(BUDGET_S)
    turns = ((1, speed.us_per_layer), (4, speed.us_per_layer_4), (16, speed.us_per_layer_16))
    times = engine.thread_times
    return {
        "threads": engine.n_threads,
        "step_us_by_threads": {} if times is None else {n: round(step_s * 1e6) for n, step_s in times.step_s.items()},
        "decode": [
            {"sessions": n, "us_per_layer": us, "tokens_per_s": round(_per_second(us * n_layers / n), 1)}
            for n, us in turns
            if us
        ],
        "prefill_us_per_row_layer": speed.prefill_us_per_row_layer,
        "prefill_tokens_per_s": round(_per_second(speed.prefill_us_per_row_layer * n_layers), 1),
    }


def _per_second(us: float) -> float:
    return 1e6 / us
