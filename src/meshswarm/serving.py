"""The layers this peer serves: chosen, loaded, announced, measured from time to time, and let go.

The rule this file keeps: what the swarm is told about this peer is made here alone, from what the engine says of
itself. A peer without layers has no `Serving`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshswarm.artifacts.card import ModelCard
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.store import Store
from meshswarm.config import Home
from meshswarm.dht.node import Dht
from meshswarm.dht.records import MAX_RTTS, RTT_PREFIX_BYTES, WHOLE_ONLY, CoverageRecord
from meshswarm.errors import MeshswarmError
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.routing.choice import Choice, Limits, choose
from meshswarm.span import Span
from meshswarm.stage.engine.devices import Device, list_devices, memory_beside
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS, LlamaOptions, LoadMode
from meshswarm.stage.engine.memory import room
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.loading import Wants, cpu_only_because, load_engine
from meshswarm.stage.owner_first import AT_EASE, Mode, OwnerFirst, Standing
from meshswarm.stage.owner_watch import LoadMeter
from meshswarm.stage.sessions.messages import MAX_ROWS_PER_STEP
from meshswarm.stage.sessions.server import SpanServer
from meshswarm.stage.sessions.terms import Served
from meshswarm.stage.sizes.memory import PROCESS_BYTES, Load, MemoryModel
from meshswarm.stage.slices.store import Slices
from meshswarm.tasks import Tasks

DEFAULT_N_CTX = 4095  # with the cell that the exact profile pads with, a whole number of llama.cpp's 256-cell steps
FIRST_SURVEY_S = 3.0
SURVEY_PERIOD_S = 120.0
LOAD_DELAY_S = 1.0  # what changes back within a second is not worth telling
OWNER_PERIOD_S = 1.0
WINDOW_ROWS = 4 * MAX_ROWS_PER_STEP

Report = Callable[[Mapping[str, Any]], None]
"""Takes what a person or a program should know: a mapping with "event" and that event's fields."""


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What a person chose to serve, and how. None means: the default, or whatever fits. `yields`: the machine's owner
    comes first."""

    model: str
    span: Span | None = None
    memory_bytes: int | None = None
    n_threads: int | None = None
    n_ctx: int | None = None
    n_sessions: int = 4
    llama_options: LlamaOptions = DEFAULT_OPTIONS
    yields: bool = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the peer that serving layers needs."""

    home: Home
    identity: Identity
    endpoint: Endpoint
    dht: Dht
    store: Store
    slices: Slices
    spans: SpanServer
    tasks: Tasks
    report: Report


class Serving:
    """One model's layers on one engine. `load` returns when sessions are accepted; `stop` frees the engine."""

    @classmethod
    async def load(cls, settings: ServingSettings, around: Surroundings) -> Serving:
        """Raises MeshswarmError when these layers cannot be served here."""
        info = await asyncio.to_thread(
            around.store.obtain,
            settings.model,
            say=lambda sentence: around.report({"event": "model", "message": sentence}),
        )
        held = [record.span for record in await around.dht.coverage(info.model_id, info.n_layers)]
        devices = await asyncio.to_thread(list_devices)
        choice = await asyncio.to_thread(_choose_layers, settings, around, info, devices, held)
        span = choice.span
        for because in (_cut_context(settings, info), choice.notice, cpu_only_because(span, info.n_layers, devices)):
            if because:
                around.report({"event": "notice", "message": because})
        around.report({"event": "loading", "model": info.name, "layers": str(span), "n_layers": info.n_layers})
        options = settings.llama_options
        slice_file = await asyncio.to_thread(around.slices.file, info.model_id, span, options)
        header, proofs = around.store.header(info.model_id), around.slices.proofs(info.model_id, options)
        cuts = legal_cuts(header, proofs)
        if proofs.is_refuted and cuts.refusal is not None:
            around.report({"event": "notice", "message": cuts.refusal})
        wants = Wants(choice.n_ctx, settings.n_sessions, settings.n_threads, settings.llama_options)
        engine = await asyncio.to_thread(
            load_engine, slice_file, span, header, wants, around.home.threads, proofs=proofs
        )
        engine.start(asyncio.get_running_loop())
        served = Served(
            info.model_id,
            info.n_layers,
            span,
            slice_file.root,
            engine,
            choice.n_ctx,
            WINDOW_ROWS,
            is_whole_only=not engine.offload.is_proved or cuts.is_whole_apart,
        )
        return cls(settings, around, info, served)

    def __init__(self, settings: ServingSettings, around: Surroundings, model: ModelInfo, served: Served) -> None:
        """Use `load`."""
        self.model = model
        self._settings = settings
        self._around = around
        self._engine = served.engine
        self._standing = AT_EASE
        self._announcing: asyncio.Task[None] | None = None
        self._record = CoverageRecord(
            peer=around.identity.peer_id,
            addresses=tuple(around.endpoint.addresses),
            model_id=model.model_id,
            span=served.span,
            loaded=True,
            numclass=served.engine.numclass,
            n_ctx=served.n_ctx,
            us_per_layer=served.engine.speed.us_per_layer,
            prefill_us_per_row_layer=served.engine.speed.prefill_us_per_row_layer,
            free_kv_tokens=served.n_ctx * settings.n_sessions,
            roles=("server", WHOLE_ONLY) if served.is_whole_only else ("server",),
            us_per_layer_4=served.engine.speed.us_per_layer_4,
            us_per_layer_16=served.engine.speed.us_per_layer_16,
        )
        around.spans.on_load = self._on_load
        around.spans.serve(served)

    async def announce(self) -> None:
        """Tell the swarm what is served here."""
        await self._around.dht.publish_card(ModelCard.of(self.model).sign(self._around.identity))
        await self._around.dht.publish_coverage(self._record)

    async def stop(self) -> None:
        await self._engine.stop()

    def duties(self) -> list[Coroutine[None, None, None]]:
        """What is to be done as long as the peer lives."""
        return [self._survey(), *([self._yield_to_owner()] if self._settings.yields else [])]

    async def _survey(self) -> None:
        """Measure round trips to the peers that serve the same model, so that heads elsewhere can price this peer's
        hops; a first time soon after the start, then now and then."""
        wait_s = FIRST_SURVEY_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = SURVEY_PERIOD_S
            with contextlib.suppress(MeshswarmError):
                rtts = await self._measure_rtts()
                if rtts != self._record.rtts:
                    self._record = replace(self._public_record(), rtts=rtts)
                    await self._around.dht.publish_coverage(self._record)

    async def _measure_rtts(self) -> tuple[tuple[bytes, int], ...]:
        records = await self._around.dht.coverage(self._record.model_id, self.model.n_layers)
        rtts = []
        for record in [record for record in records if record.peer != self._record.peer][:MAX_RTTS]:
            with contextlib.suppress(MeshswarmError):
                connection = await self._around.endpoint.dial(record.peer, record.addresses)
                rtt_s = await connection.measure_rtt()
                rtts.append((record.peer.key[:RTT_PREFIX_BYTES], int(rtt_s * 1e6)))
        return tuple(sorted(rtts))

    async def _yield_to_owner(self) -> None:
        """Make room for the programs of whoever owns the machine, and go on when they have gone."""
        meter = LoadMeter()
        owner = OwnerFirst(self._engine.n_threads / (os.cpu_count() or 1))
        while True:
            await asyncio.sleep(OWNER_PERIOD_S)
            reading = await asyncio.to_thread(meter.read)  # some machines take a while to tell of their battery
            self._stand(owner.observe(reading, time.monotonic()))

    def _stand(self, standing: Standing) -> None:
        before, self._standing = self._standing, standing
        if standing.mode is before.mode:
            return
        self._engine.set_share(standing.mode.value)
        if standing.mode is Mode.PAUSED:
            self._around.spans.rest(standing.reason)
        else:
            self._around.spans.resume()
        self._around.report({"event": "owner", "mode": standing.mode.name.lower(), "reason": standing.reason})
        self._on_load()

    # -- what others may know

    def record(self) -> CoverageRecord:
        """What is true at this moment for this peer's own head."""
        return replace(self._record, free_kv_tokens=self._around.spans.n_free_slots * self._record.n_ctx)

    def _public_record(self) -> CoverageRecord:
        """What is true at this moment for strangers."""
        record = self.record()
        return replace(record, free_kv_tokens=0) if self._standing.mode is Mode.PAUSED else record

    def facts(self) -> dict[str, Any]:
        """For "ready" and for the status."""
        record = self._record
        return {
            "model": self.model.name,
            "model_id": self.model.id_text,
            "layers": str(record.span),
            "n_layers": self.model.n_layers,
            "n_ctx": record.n_ctx,
            "numclass": record.numclass,
            "us_per_layer": record.us_per_layer,
            "threads": self._engine.n_threads_now,
            "back_end": self._engine.offload.backend,
            "memory": {**self._engine.memory.as_json(), "program_bytes": PROCESS_BYTES},
            "owner": {"mode": self._standing.mode.name.lower(), "reason": self._standing.reason},
        }

    def _on_load(self) -> None:
        """A session began or ended: others should know when that made this peer full, or gave it room again."""
        if self._announcing is None or self._announcing.done():
            self._announcing = self._around.tasks.create_task(self._announce_load())

    async def _announce_load(self) -> None:
        await asyncio.sleep(LOAD_DELAY_S)
        while not self._around.spans.draining:  # it may change again while it is being told
            current = self._public_record()
            if (current.free_kv_tokens == 0) == (self._record.free_kv_tokens == 0):
                return
            self._record = current
            await self._around.dht.publish_coverage(current)


def _cut_context(settings: ServingSettings, info: ModelInfo) -> str:
    """That sessions are shorter than was asked for, as a sentence; empty where they are not."""
    if settings.n_ctx is None or settings.n_ctx <= info.n_ctx_train:
        return ""
    return f"{info.name} was made for {info.n_ctx_train} positions: sessions have no more, instead of {settings.n_ctx}."


def _choose_layers(
    settings: ServingSettings, around: Surroundings, info: ModelInfo, devices: Sequence[Device], held: Sequence[Span]
) -> Choice:
    """Blocks. Raises OutOfMemoryError for layers that do not fit, and when none do."""
    options = settings.llama_options
    n_ctx = min(settings.n_ctx or DEFAULT_N_CTX, info.n_ctx_train)
    load = Load(n_ctx, settings.n_sessions, options.type_k, options.type_v)
    proofs = around.slices.proofs(info.model_id, options)
    model = MemoryModel(around.store.header(info.model_id), load, proofs=proofs)
    limits = Limits(
        room(),
        settings.memory_bytes,
        gpu_bytes=memory_beside(devices, options),
        is_mapped=options.load_mode in (LoadMode.MMAP, LoadMode.MMAP_MLOCK),
    )
    return choose(model, settings.span, limits, held, info.name)
