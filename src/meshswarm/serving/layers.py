"""From a model to layers of it that are loaded: what fits, who else has some, what is told while they load.

The rule this file keeps: what a peer takes by itself it explains in one line, and tells the swarm before it loads it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import MeshswarmError
from meshswarm.fetching.library import Library, NobodyThereError
from meshswarm.routing.choice import Choice, Limits, choose
from meshswarm.routing.view import MOBILE, View
from meshswarm.serving.settings import DEFAULT_N_CTX, ServingSettings, Surroundings
from meshswarm.span import Span, missing_layers
from meshswarm.stage.engine.devices import Device, memory_beside
from meshswarm.stage.engine.llama_options import LoadMode
from meshswarm.stage.engine.memory import room
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.loading import Wants, load_engine
from meshswarm.stage.sessions.messages import MAX_ROWS_PER_STEP
from meshswarm.stage.sessions.terms import Served
from meshswarm.stage.sizes.memory import Load, MemoryModel
from meshswarm.stage.slices.store import SliceFile

WINDOW_ROWS = 4 * MAX_ROWS_PER_STEP
JOIN_JITTER_S = 1.0
COMPANY_S = 0.5
"""How often a peer that is alone looks whether somebody has come who may know its model."""
SERVER = "server"
"""The role of a peer that serves its layers."""


def cut_context(settings: ServingSettings, info: ModelInfo) -> str:
    """That sessions are shorter than was asked for, as a sentence; empty where they are not."""
    if settings.n_ctx is None or settings.n_ctx <= info.n_ctx_train:
        return ""
    return f"{info.name} was made for {info.n_ctx_train} positions: sessions have no more, instead of {settings.n_ctx}."


def memory_model(settings: ServingSettings, around: Surroundings, info: ModelInfo) -> MemoryModel:
    """What spans of the model take, under the load that was asked for. Blocks."""
    options = settings.llama_options
    n_ctx = min(settings.n_ctx or DEFAULT_N_CTX, info.n_ctx_train)
    load = Load(n_ctx, settings.n_sessions, options.type_k, options.type_v)
    return MemoryModel(around.store.header(info.model_id), load, proofs=around.slices.proofs(info.model_id, options))


def limits_of(settings: ServingSettings, devices: Sequence[Device]) -> Limits:
    """What this machine has room for now, and what a person allowed. Blocks."""
    options = settings.llama_options
    return Limits(
        room(),
        settings.memory_bytes,
        gpu_bytes=memory_beside(devices, options),
        is_mapped=options.load_mode in (LoadMode.MMAP, LoadMode.MMAP_MLOCK),
    )


async def others_of(settings: ServingSettings, around: Surroundings, info: ModelInfo) -> list[CoverageRecord]:
    """Who serves layers of the model. A peer that chooses by itself first waits a random moment where others are, since
    several may have come at once, and looks again."""
    records = await around.dht.coverage(info.model_id, info.n_layers)
    if settings.is_mobile and records:
        await asyncio.sleep(random.uniform(0, JOIN_JITTER_S))
        records = await around.dht.coverage(info.model_id, info.n_layers, fresh=True)
    return [record for record in records if record.peer != around.identity.peer_id]


def placed(because: str, info: ModelInfo, span: Span, others: Sequence[CoverageRecord]) -> dict[str, Any]:
    """What was chosen and why, in one line, and how many layers nobody serves even so."""
    gaps = missing_layers([span, *(record.span for record in others if record.loaded)], info.n_layers)
    n_unheld = sum(map(len, gaps))
    left = f"{n_unheld} of its {info.n_layers} layers have no holder yet" if n_unheld else "every layer has a holder"
    if len(span) == info.n_layers:
        layers = f"all layers of {info.name}"
    else:
        layers = f"the layers {span} of {info.name}, which need a holder most of those that fit"
    message = f"Taking {layers}: {because}. With them {left}."
    return {"event": "placed", "message": message, "model": info.name, "layers": str(span), "unheld": n_unheld}


def intent_of(around: Surroundings, info: ModelInfo, choice: Choice, us_per_layer: int) -> CoverageRecord:
    """What others should know while it loads: that these layers are taken care of. `us_per_layer`: a guess."""
    return CoverageRecord(
        peer=around.identity.peer_id,
        addresses=tuple(around.endpoint.addresses),
        model_id=info.model_id,
        span=choice.span,
        loaded=False,
        numclass="",
        n_ctx=choice.n_ctx,
        us_per_layer=us_per_layer,
        prefill_us_per_row_layer=0,
        free_kv_tokens=0,
        roles=(SERVER, MOBILE),
    )


def usual_speed(others: Sequence[CoverageRecord]) -> int:
    """µs a layer of the one in the middle of `others`, which are not none."""
    return sorted(record.us_per_layer for record in others)[len(others) // 2]


def choose_layers(
    settings: ServingSettings, model: MemoryModel, limits: Limits, others: Sequence[CoverageRecord], name: str
) -> Choice:
    """Which layers of `model` to serve beside those of `others`. Raises OutOfMemoryError. Blocks."""
    view, held = View.of(model.cuts, others), [record.span for record in others]
    return choose(model, settings.span, limits, held, name, view.levels if view.holders else None)


async def known_model(settings: ServingSettings, around: Surroundings) -> ModelInfo:
    """The model that was asked for, with its header; where nobody is who could know it, as soon as somebody is, if
    that is to be waited for. Raises MeshswarmError."""
    if around.library is not None:
        return await _known_in_time(around.library, settings, around)
    return await asyncio.to_thread(
        around.store.obtain,
        settings.model,
        say=lambda sentence: around.report({"event": "model", "message": sentence}),
    )


async def _known_in_time(library: Library, settings: ServingSettings, around: Surroundings) -> ModelInfo:
    is_told = False
    while True:
        try:
            return await library.known(settings.model)
        except NobodyThereError:
            if not settings.waits:
                raise
            if not is_told:
                sentence = f"Nobody is there yet who knows {settings.model[:80]}; looking on."
                around.report({"event": "model", "message": sentence})
                is_told = True
            await asyncio.sleep(COMPANY_S)


async def have_layers(settings: ServingSettings, around: Surroundings, info: ModelInfo, span: Span) -> None:
    """What is needed to load them is on this disk when this returns. Raises MeshswarmError."""
    if around.library is not None:
        await around.library.have_span(info, span, settings.llama_options)


async def load_slice(
    settings: ServingSettings, around: Surroundings, info: ModelInfo, span: Span, n_ctx: int
) -> Served:
    """An engine with these layers, running; what is missing of them is fetched first. Raises MeshswarmError."""
    options = settings.llama_options
    await have_layers(settings, around, info, span)
    slice_file = await asyncio.to_thread(around.slices.file, info.model_id, span, options)
    try:
        return await _load(settings, around, info, span, n_ctx, slice_file)
    except MeshswarmError:
        around.slices.let_go(info.model_id, span)
        raise


async def _load(
    settings: ServingSettings, around: Surroundings, info: ModelInfo, span: Span, n_ctx: int, slice_file: SliceFile
) -> Served:
    options = settings.llama_options
    if settings.slice_only and around.library is not None and len(span) < info.n_layers:
        await around.library.only_slices(info)
    header, proofs = around.store.header(info.model_id), around.slices.proofs(info.model_id, options)
    cuts = legal_cuts(header, proofs)
    if proofs.is_refuted and cuts.refusal is not None:
        around.report({"event": "notice", "message": cuts.refusal})
    wants = Wants(n_ctx, settings.n_sessions, settings.n_threads, options)
    engine = await asyncio.to_thread(load_engine, slice_file, span, header, wants, around.home.threads, proofs=proofs)
    engine.start(asyncio.get_running_loop())
    is_whole_only = not engine.offload.is_proved or cuts.is_whole_apart
    return Served(
        info.model_id, info.n_layers, span, slice_file.root, engine, n_ctx, WINDOW_ROWS, is_whole_only=is_whole_only
    )
